#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <string>

#include "bind_m2n/arguments.h"
#include "bind_m2n/bind_m2n.h"
#include "m2n/nontemporal_copy.h"
#include "m2n/transports.h"

namespace {

void nontemporal_copy(nanobind::handle target, nanobind::handle source) {
    const antiphon::bind::Buffer to(target, true), from(source);
    if (to.size() != from.size()) {
        throw antiphon::m2n::Error(antiphon::m2n::Code::invalid, "a target of " + std::to_string(to.size()) +
                                                                     " bytes for a source of " +
                                                                     std::to_string(from.size()));
    }
    const nanobind::gil_scoped_release release;
    antiphon::m2n::nontemporal_copy(to.data(), from.data(), to.size());
}

}  // namespace

NB_MODULE(_m2n, module) {
    module.doc() = "Messages from M senders to N receivers, counted, with credits. See docs/m2n.md.";
    // A worker may end while one of its threads still holds an object: that is no leak worth words on the terminal.
    nanobind::set_leak_warnings(false);
    antiphon::bind::bind_m2n_errors(module);
    antiphon::bind::bind_m2n_prepared_call(module);
    antiphon::bind::bind_m2n_inbox(module);
    antiphon::bind::bind_m2n_outbox(module);
    antiphon::bind::bind_m2n_fanout(module);
    antiphon::bind::bind_m2n_endpoint(module);
    antiphon::bind::bind_m2n_exchange(module);
    antiphon::bind::bind_m2n_libfabric(module);
    module.def("transports", &antiphon::m2n::transport_names);
    module.def("nontemporal_copy", &nontemporal_copy, nanobind::arg("target"), nanobind::arg("source"));
}

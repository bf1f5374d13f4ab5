#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include "bind_m2n/bind_m2n.h"
#include "m2n/transports.h"

NB_MODULE(_m2n, module) {
    module.doc() = "Messages from M senders to N receivers, counted, with credits. See docs/m2n.md.";
    // A worker may end while one of its threads still holds an object: that is no leak worth words on the terminal.
    nanobind::set_leak_warnings(false);
    antiphon::bind::bind_m2n_errors(module);
    antiphon::bind::bind_m2n_inbox(module);
    antiphon::bind::bind_m2n_outbox(module);
    antiphon::bind::bind_m2n_endpoint(module);
    antiphon::bind::bind_m2n_exchange(module);
    antiphon::bind::bind_m2n_rank_group(module);
    antiphon::bind::bind_m2n_expert_split(module);
    antiphon::bind::bind_m2n_libfabric(module);
    module.def("transports", &antiphon::m2n::transport_names);
}

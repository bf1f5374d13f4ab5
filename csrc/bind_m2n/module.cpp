#include "bind_m2n/bind_m2n.h"

#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <cstdlib>

#include "m2n/libfabric_info.h"
#include "m2n/transport.h"
#include "m2n/types.h"

namespace nb = nanobind;

namespace antiphon::bind {

namespace {

const char* name_of(m2n::Code code) {
    switch (code) {
        case m2n::Code::invalid: return "invalid";
        case m2n::Code::timeout: return "timeout";
        case m2n::Code::peer_lost: return "peer_lost";
        case m2n::Code::no_credit: return "no_credit";
        case m2n::Code::refused: return "refused";
        case m2n::Code::interrupted: return "interrupted";
        case m2n::Code::system: return "system";
    }
    return "system";
}

void translate(const std::exception_ptr& pending, void*) {
    try {
        std::rethrow_exception(pending);
    } catch (const m2n::Error& error) {
        nb::object exception = nb::module_::import_("antiphon.base.errors")
                                   .attr("native_error")(name_of(error.code), error.what(), error.peers, error.reason);
        PyErr_SetObject(reinterpret_cast<PyObject*>(Py_TYPE(exception.ptr())), exception.ptr());
    }
}

nb::dict provider_row(const m2n::LibfabricProviderInfo& provider) {
    nb::dict row;
    row["name"] = provider.name;
    row["fabric"] = provider.fabric;
    row["domain"] = provider.domain;
    row["waits_by_descriptor"] = provider.waits_by_descriptor;
    row["device_memory"] = provider.device_memory;
    row["posts_receives"] = provider.posts_receives;
    row["completion_data_bytes"] = provider.completion_data_bytes;
    row["largest_write_bytes"] = provider.largest_write_bytes;
    row["link_bits_per_s"] = provider.link_bits_per_s;
    row["note"] = provider.note;
    return row;
}

nb::dict info_row(const m2n::TransportOptions& options) {
    const m2n::LibfabricInfo info = m2n::libfabric_info(options);
    nb::list providers;
    for (const m2n::LibfabricProviderInfo& provider : info.providers) providers.append(provider_row(provider));
    nb::dict row;
    row["built"] = info.built;
    row["headers_version"] = info.headers_version;
    row["library"] = info.library;
    row["version"] = info.version;
    row["chosen"] = info.chosen;
    row["problem"] = info.problem;
    row["providers"] = providers;
    return row;
}

void bind_libfabric(nb::module_& module) {
    // The library that `make` fetched lies in the environment; the core, which knows no Python, looks where this says.
    const auto prefix = nb::cast<std::string>(nb::module_::import_("sys").attr("prefix"));
    setenv("ANTIPHON_LIBFABRIC_PACKAGED", (prefix + "/libfabric/lib").c_str(), 0);
    module.def("libfabric_info", &info_row, nb::arg("options") = m2n::TransportOptions{});
}

}  // namespace

}  // namespace antiphon::bind

NB_MODULE(_m2n, module) {
    module.doc() = "Messages from M senders to N receivers, counted, with credits. See docs/m2n.md.";
    // A worker may end while one of its threads still holds an object: that is no leak worth words on the terminal.
    nanobind::set_leak_warnings(false);
    nanobind::register_exception_translator(antiphon::bind::translate);
    antiphon::bind::bind_m2n_endpoint(module);
    antiphon::bind::bind_m2n_exchange(module);
    antiphon::bind::bind_m2n_rank_group(module);
    antiphon::bind::bind_m2n_streams(module);
    antiphon::bind::bind_libfabric(module);
    module.def("transports", &antiphon::m2n::transport_names);
}

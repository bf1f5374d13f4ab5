#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <cstdlib>

#include "bind_m2n/bind_m2n.h"
#include "m2n/libfabric_info.h"

namespace nb = nanobind;

namespace antiphon::bind {

namespace {

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

}  // namespace

void bind_m2n_libfabric(nb::module_& module) {
    // The library that `make` fetched lies in the environment; the core, which knows no Python, looks where this says.
    const auto prefix = nb::cast<std::string>(nb::module_::import_("sys").attr("prefix"));
    setenv("ANTIPHON_LIBFABRIC_PACKAGED", (prefix + "/libfabric/lib").c_str(), 0);
    module.def("libfabric_info", &info_row, nb::arg("options") = m2n::TransportOptions{});
}

}  // namespace antiphon::bind

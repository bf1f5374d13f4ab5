#include <nanobind/stl/optional.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <optional>

#include "bind_m2n/bind_m2n.h"
#include "m2n/endpoint.h"

namespace nb = nanobind;

namespace antiphon::bind {

namespace {

using m2n::Endpoint;

void look_for_signals() {
    nb::gil_scoped_acquire acquire;
    if (PyErr_CheckSignals() != 0) throw nb::python_error();
}

// As the rest of the program counts them: control groups may allow less than the affinity.
m2n::Cores allowed_cores() {
    const nb::object allowed = nb::module_::import_("antiphon.base.allowance").attr("allowance")();
    return {.count = nb::cast<uint32_t>(allowed.attr("num_cores")), .are_quota = !allowed.attr("quota").is_none()};
}

void construct(Endpoint* self, const std::string& name, const std::string& transport, const std::string& host,
               uint16_t port, nb::bytes secret, const std::string& waiting, uint32_t local_processes, double spin_s,
               double heartbeat_s, double dead_after_s, const std::optional<m2n::TransportOptions>& options) {
    m2n::EndpointOptions all;
    all.name = name;
    all.transport = transport;
    all.host = host;
    all.port = port;
    all.secret.assign(secret.c_str(), secret.size());
    all.waiting = waiting;
    all.local_processes = local_processes;
    all.cores = allowed_cores();
    all.spin_ns = static_cast<int64_t>(spin_s * 1e9);
    all.between_sleeps = &look_for_signals;
    all.heartbeat_ns = static_cast<int64_t>(heartbeat_s * 1e9);
    all.dead_after_ns = static_cast<int64_t>(dead_after_s * 1e9);
    if (options) all.transport_options = *options;
    new (self) Endpoint(std::move(all));
}

std::shared_ptr<m2n::Outbox> connect(Endpoint& endpoint, nb::handle ticket, int64_t source, double timeout_s) {
    const Buffer buffer(ticket);
    const m2n::Ticket decoded = m2n::Ticket::decode({buffer.data(), static_cast<size_t>(buffer.size())});
    if (source < 0 || source >= decoded.sources) {
        throw m2n::Error(m2n::Code::invalid, "source " + std::to_string(source) + ": the inbox of " + decoded.name +
                                                 " has " + std::to_string(decoded.sources));
    }
    return within(timeout_s, [&](m2n::Deadline deadline) {
        return endpoint.connect(decoded, static_cast<m2n::SourceId>(source), deadline);
    });
}

nb::dict control_counters(const Endpoint& endpoint) {
    nb::dict row;
    const m2n::ControlCounts counts = endpoint.control_counts();
    row["accepted"] = counts.accepted;
    row["rejected"] = counts.rejected;
    row["gone"] = counts.gone;
    return row;
}

}  // namespace

void bind_m2n_endpoint(nb::module_& module) {
    using Options = m2n::TransportOptions;
    nb::class_<Options>(module, "TransportOptions")
        .def(nb::init<>())
        .def_rw("data_priority", &Options::data_priority)
        .def_rw("data_type_of_service", &Options::data_type_of_service)
        .def_rw("credit_priority", &Options::credit_priority)
        .def_rw("credit_type_of_service", &Options::credit_type_of_service)
        .def_rw("congestion", &Options::congestion)
        .def_rw("library", &Options::library)
        .def_rw("provider", &Options::provider)
        .def_rw("data_traffic_class", &Options::data_traffic_class)
        .def_rw("credit_traffic_class", &Options::credit_traffic_class)
        .def_rw("shuffle_seed", &Options::shuffle_seed);

    nb::class_<Endpoint>(module, "Endpoint")
        .def("__init__", &construct, nb::arg("name"), nb::arg("transport") = "shm", nb::kw_only(),
             nb::arg("host") = "127.0.0.1", nb::arg("port") = 0, nb::arg("secret") = nb::bytes("", 0),
             nb::arg("waiting") = "auto", nb::arg("local_processes") = 0, nb::arg("spin_s") = 100e-6,
             nb::arg("heartbeat_s") = 0.2, nb::arg("dead_after_s") = 0.8, nb::arg("options") = nb::none())
        .def_prop_ro("name", &Endpoint::name)
        .def_prop_ro("transport", &Endpoint::transport_name)
        .def_prop_ro("waiting", [](const Endpoint& endpoint) { return m2n::name_of(endpoint.waiting()); })
        .def("inbox", &Endpoint::make_inbox, nb::arg("sources"), nb::arg("slots"), nb::arg("slot_bytes"),
             nb::arg("names") = std::vector<std::string>{}, nb::arg("device").none() = nb::none())
        .def("why_staged", &Endpoint::why_staged, nb::arg("device"))
        .def("ticket",
             [](const Endpoint& endpoint, const m2n::Inbox& inbox) {
                 const std::vector<std::byte> bytes = endpoint.ticket(inbox).encode();
                 return nb::bytes(reinterpret_cast<const char*>(bytes.data()), bytes.size());
             },
             nb::arg("inbox"))
        .def("connect", &connect, nb::arg("ticket"), nb::arg("source"), nb::arg("timeout_s"))
        .def("interrupt", &Endpoint::interrupt)
        .def("control_counters", &control_counters)
        .def("close", &Endpoint::close, nb::call_guard<nb::gil_scoped_release>());
}

}  // namespace antiphon::bind

// Endpoints, inboxes and outboxes.
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <optional>

#include "bind_m2n/bind_m2n.h"
#include "m2n/endpoint.h"

namespace nb = nanobind;

namespace antiphon::bind {

namespace {

using m2n::Endpoint;
using m2n::Inbox;
using m2n::Message;
using m2n::Outbox;

std::vector<uint64_t> counts_of(const m2n::Histogram& histogram) {
    return {histogram.counts().begin(), histogram.counts().end()};
}

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
    all.spin_ns = nanoseconds("spin_s", spin_s);
    all.between_sleeps = &look_for_signals;
    all.heartbeat_ns = nanoseconds("heartbeat_s", heartbeat_s);
    all.dead_after_ns = nanoseconds("dead_after_s", dead_after_s);
    if (options) all.transport_options = *options;
    new (self) Endpoint(std::move(all));
}

std::shared_ptr<Outbox> connect(Endpoint& endpoint, nb::handle ticket, int64_t source, double timeout_s) {
    const Buffer buffer(ticket);
    const m2n::Ticket decoded = m2n::Ticket::decode({buffer.data(), static_cast<size_t>(buffer.size())});
    if (source < 0 || source >= decoded.sources) {
        m2n::throw_invalid("source ", source, ": the inbox of ", decoded.name, " has ", decoded.sources);
    }
    return within(timeout_s, [&](m2n::Deadline deadline) {
        return endpoint.connect(decoded, static_cast<m2n::SourceId>(source), deadline);
    });
}

nb::dict control_counters(const Endpoint& endpoint) {
    nb::dict row;
    const m2n::ControlCounters& counters = endpoint.control_counters();
    row["accepted"] = counters.accepted.load();
    row["rejected"] = counters.rejected.load();
    row["gone"] = counters.gone.load();
    return row;
}

using Bytes = nb::ndarray<nb::numpy, const uint8_t, nb::ndim<1>>;

// The array keeps the slot's memory mapped, whatever becomes of the inbox.
Bytes payload_of(const Message& message) {
    const size_t shape[1] = {static_cast<size_t>(message.length)};
    return Bytes(message.payload, 1, shape, keeper_of(message.landing));
}

const char* name_of(m2n::SourceState state) {
    switch (state) {
        case m2n::SourceState::absent: return "absent";
        case m2n::SourceState::live: return "live";
        case m2n::SourceState::lost: return "lost";
    }
    return "absent";
}

nb::list counters_of(Inbox& inbox) {
    nb::list rows;
    for (const m2n::SourceCounters& source : inbox.counters()) {
        nb::dict row;
        row["name"] = source.name;
        row["state"] = name_of(source.state);
        row["incarnation"] = source.incarnation;
        row["messages"] = source.messages;
        row["bytes"] = source.bytes;
        row["stale"] = source.stale;
        row["rejected"] = source.rejected;
        row["lost"] = source.lost;
        row["reason"] = source.reason;
        rows.append(row);
    }
    return rows;
}

using SlotView = nb::ndarray<nb::numpy, uint8_t, nb::ndim<1>>;

// A payload that is still being sent is kept alive, whatever the caller does with his reference.
void keep_while_sending(Outbox& outbox, m2n::SlotId slot, nb::handle payload) {
    if (outbox.source_reusable(slot)) return;
    outbox.keep(slot, std::shared_ptr<Buffer>(new Buffer(payload), [](Buffer* buffer) {
        nb::gil_scoped_acquire acquire;
        delete buffer;
    }));
}

void send(Outbox& outbox, uint64_t step, nb::handle payload, const std::vector<uint32_t>& user, uint32_t participants,
          double timeout_s) {
    const Buffer buffer(payload);
    const m2n::MessageLabel label = make_label(step, user, participants);
    const m2n::SlotId slot = within(timeout_s, [&](m2n::Deadline deadline) {
        return outbox.send(label, buffer.data(), buffer.size(), deadline);
    });
    keep_while_sending(outbox, slot, payload);
}

// The array keeps the outbox, and with it the slot's memory.
SlotView slot(const std::shared_ptr<Outbox>& outbox, double timeout_s) {
    std::byte* payload = within(timeout_s, [&](m2n::Deadline deadline) { return outbox->slot(deadline); });
    const size_t shape[1] = {static_cast<size_t>(outbox->spec().slot_bytes)};
    return {payload, 1, shape, keeper_of(outbox)};
}

void wait_all_credits(const std::vector<Outbox*>& outboxes, double timeout_s) {
    if (std::ranges::count(outboxes, nullptr) > 0) throw nb::type_error("one of the outboxes is None");
    within(timeout_s, [&](m2n::Deadline deadline) { Outbox::wait_all_credits(outboxes, deadline); });
}

nb::dict counters_of(Outbox& outbox) {
    nb::dict row;
    row["peer"] = outbox.peer();
    row["messages"] = outbox.counters().messages;
    row["bytes"] = outbox.counters().bytes;
    row["credit_waits"] = outbox.counters().credit_waits;
    row["credits"] = outbox.credits();
    return row;
}

void bind_endpoint(nb::module_& module) {
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
             [](const Endpoint& endpoint, const Inbox& inbox) { return bytes_object(endpoint.ticket(inbox).encode()); },
             nb::arg("inbox"))
        .def("connect", &connect, nb::arg("ticket"), nb::arg("source"), nb::arg("timeout_s"))
        .def("interrupt", &Endpoint::interrupt)
        .def("control_counters", &control_counters)
        .def("close", &Endpoint::close, nb::call_guard<nb::gil_scoped_release>());
}

void bind_inbox(nb::module_& module) {
    nb::class_<Message>(module, "Message")
        .def_ro("source", &Message::source)
        .def_ro("step", &Message::step)
        .def_ro("participants", &Message::participants)
        .def_prop_ro("user", [](const Message& message) { return tuple_of(message.user); })
        .def_prop_ro("payload", &payload_of, nb::rv_policy::automatic);

    nb::class_<Inbox>(module, "Inbox")
        .def_prop_ro("sources", [](const Inbox& inbox) { return inbox.spec().sources; })
        .def_prop_ro("slots", [](const Inbox& inbox) { return inbox.spec().slots; })
        .def_prop_ro("slot_bytes", [](const Inbox& inbox) { return inbox.spec().slot_bytes; })
        .def("connected", &Inbox::connected)
        .def("wait_connected",
             [](Inbox& inbox, nb::handle sources, double timeout_s) {
                 const ExpectedSources expected(sources, inbox.spec().sources);
                 within(timeout_s, [&](m2n::Deadline deadline) { inbox.wait_connected(expected.get(), deadline); });
             },
             nb::arg("sources"), nb::arg("timeout_s"))
        .def("wait",
             [](Inbox& inbox, uint64_t step, nb::handle expect, double timeout_s) {
                 const ExpectedSources expected(expect, inbox.spec().sources);
                 within(timeout_s, [&](m2n::Deadline deadline) { inbox.wait(step, expected.get(), deadline); });
             },
             nb::arg("step"), nb::arg("expect"), nb::arg("timeout_s"))
        .def("wait_complete",
             [](Inbox& inbox, double timeout_s) {
                 return within(timeout_s, [&](m2n::Deadline deadline) { return inbox.wait_complete(deadline); });
             },
             nb::arg("timeout_s"))
        .def("partial",
             [](Inbox& inbox, uint64_t step) {
                 const Inbox::Partial partial = inbox.partial(step);
                 return nb::make_tuple(partial.arrived, partial.missing);
             },
             nb::arg("step"))
        .def("incomplete",
             [](Inbox& inbox) {
                 nb::list rows;
                 for (const Inbox::Incomplete& each : inbox.incomplete()) {
                     rows.append(nb::make_tuple(each.step, static_cast<double>(each.age_ns) * 1e-9));
                 }
                 return rows;
             })
        .def("messages", &Inbox::messages, nb::arg("step"))
        .def("release",
             [](Inbox& inbox, uint64_t step, int64_t source) {
                 if (source < 0) {
                     inbox.release(step);
                 } else {
                     inbox.release(step, source_of(source, inbox.spec().sources));
                 }
             },
             nb::arg("step"), nb::arg("source") = -1)
        .def("discard_below", &Inbox::discard_below, nb::arg("step"))
        .def("forget_losses", &Inbox::forget_losses)
        .def("drop",
             [](Inbox& inbox, int64_t source) { inbox.drop(source_of(source, inbox.spec().sources)); },
             nb::arg("source"))
        .def("counters", nb::overload_cast<Inbox&>(&counters_of))
        .def("wait_histogram", [](const Inbox& inbox) { return counts_of(inbox.wait_histogram()); });
}

void bind_outbox(nb::module_& module) {
    nb::class_<Outbox>(module, "Outbox")
        .def_prop_ro("peer", &Outbox::peer)
        .def_prop_ro("credits", &Outbox::credits)
        .def_prop_ro("lost", &Outbox::lost)
        .def_prop_ro("slots", [](const Outbox& outbox) { return outbox.spec().slots; })
        .def_prop_ro("slot_bytes", [](const Outbox& outbox) { return outbox.spec().slot_bytes; })
        .def("send", &send, nb::arg("step"), nb::arg("payload"), nb::arg("user") = std::vector<uint32_t>{},
             nb::arg("participants") = 0, nb::arg("timeout_s") = 0.0)
        .def("slot", &slot, nb::arg("timeout_s") = 0.0)
        .def("commit",
             [](Outbox& outbox, uint64_t step, uint64_t length, const std::vector<uint32_t>& user,
                uint32_t participants) {
                 const m2n::MessageLabel label = make_label(step, user, participants);
                 const nb::gil_scoped_release release;
                 outbox.commit(label, length);
             },
             nb::arg("step"), nb::arg("length"), nb::arg("user") = std::vector<uint32_t>{},
             nb::arg("participants") = 0)
        .def("wait_reusable",
             [](Outbox& outbox, double timeout_s) {
                 within(timeout_s, [&](m2n::Deadline deadline) { outbox.wait_reusable(deadline); });
             },
             nb::arg("timeout_s"))
        .def("wait_credits",
             [](Outbox& outbox, uint32_t num_credits, double timeout_s) {
                 within(timeout_s, [&](m2n::Deadline deadline) { outbox.wait_credits(num_credits, deadline); });
             },
             nb::arg("num_credits"), nb::arg("timeout_s"))
        .def("counters", nb::overload_cast<Outbox&>(&counters_of))
        .def("credit_histogram", [](const Outbox& outbox) { return counts_of(outbox.credit_histogram()); });
    module.def("wait_all_credits", &wait_all_credits, nb::arg("outboxes"), nb::arg("timeout_s"));
}

}  // namespace

void bind_m2n_endpoint(nb::module_& module) {
    bind_inbox(module);
    bind_outbox(module);
    bind_endpoint(module);
}

}  // namespace antiphon::bind

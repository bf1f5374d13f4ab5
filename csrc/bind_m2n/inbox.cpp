#include <nanobind/stl/optional.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include "bind_m2n/bind_m2n.h"

namespace nb = nanobind;

namespace antiphon::bind {

namespace {

using Bytes = nb::ndarray<nb::numpy, const uint8_t, nb::ndim<1>>;

// The array keeps the slot's memory mapped, whatever becomes of the inbox.
Bytes payload_of(const m2n::Message& message) {
    auto* owner = new std::shared_ptr<m2n::Landing>(message.landing);
    nb::capsule capsule(owner, [](void* held) noexcept { delete static_cast<std::shared_ptr<m2n::Landing>*>(held); });
    const size_t shape[1] = {static_cast<size_t>(message.length)};
    return Bytes(message.payload, 1, shape, capsule);
}

const char* name_of(m2n::SourceState state) {
    switch (state) {
        case m2n::SourceState::absent: return "absent";
        case m2n::SourceState::live: return "live";
        case m2n::SourceState::lost: return "lost";
    }
    return "absent";
}

nb::list counters_of(m2n::Inbox& inbox) {
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

}  // namespace

void bind_m2n_inbox(nb::module_& module) {
    using m2n::Inbox;
    using m2n::Message;

    nb::class_<Message>(module, "Message")
        .def_ro("source", &Message::source)
        .def_ro("step", &Message::step)
        .def_ro("participants", &Message::participants)
        .def_prop_ro("user", [](const Message& message) {
            nb::list words;
            for (const uint32_t word : message.user) words.append(word);
            return nb::tuple(words);
        })
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
                 } else if (source < inbox.spec().sources) {
                     inbox.release(step, static_cast<m2n::SourceId>(source));
                 } else {
                     throw m2n::Error(m2n::Code::invalid, "source " + std::to_string(source) + ": the inbox has " +
                                                              std::to_string(inbox.spec().sources));
                 }
             },
             nb::arg("step"), nb::arg("source") = -1)
        .def("discard_below", &Inbox::discard_below, nb::arg("step"))
        .def("forget_losses", &Inbox::forget_losses)
        .def("drop",
             [](Inbox& inbox, int64_t source) {
                 if (source < 0 || source >= inbox.spec().sources) {
                     throw m2n::Error(m2n::Code::invalid, "source " + std::to_string(source) + ": the inbox has " +
                                                              std::to_string(inbox.spec().sources));
                 }
                 inbox.drop(static_cast<m2n::SourceId>(source));
             },
             nb::arg("source"))
        .def("counters", &counters_of)
        .def("wait_histogram", [](const Inbox& inbox) {
            const auto& counts = inbox.wait_histogram().counts();
            return std::vector<uint64_t>(counts.begin(), counts.end());
        });
}

}  // namespace antiphon::bind

#include <nanobind/ndarray.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <algorithm>

#include "bind_m2n/bind_m2n.h"

namespace nb = nanobind;

namespace antiphon::bind {

namespace {

using m2n::Outbox;
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
    auto* owner = new std::shared_ptr<Outbox>(outbox);
    nb::capsule capsule(owner, [](void* held) noexcept { delete static_cast<std::shared_ptr<Outbox>*>(held); });
    const size_t shape[1] = {static_cast<size_t>(outbox->spec().slot_bytes)};
    return {payload, 1, shape, capsule};
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

}  // namespace

void bind_m2n_outbox(nb::module_& module) {
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
        .def("counters", &counters_of)
        .def("credit_histogram", [](const Outbox& outbox) {
            const auto& counts = outbox.credit_histogram().counts();
            return std::vector<uint64_t>(counts.begin(), counts.end());
        });
    module.def("wait_all_credits", &wait_all_credits, nb::arg("outboxes"), nb::arg("timeout_s"));
}

}  // namespace antiphon::bind

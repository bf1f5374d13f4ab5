#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include "bind_m2n/arguments.h"
#include "bind_m2n/bind_m2n.h"

namespace nb = nanobind;

namespace antiphon::bind {

namespace {

using m2n::Outbox;
using Outboxes = std::vector<std::shared_ptr<Outbox>>;

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

nb::ndarray<nb::numpy, uint8_t, nb::ndim<1>> slot(const std::shared_ptr<Outbox>& outbox, double timeout_s) {
    std::byte* payload = within(timeout_s, [&](m2n::Deadline deadline) { return outbox->slot(deadline); });
    auto* owner = new std::shared_ptr<Outbox>(outbox);
    nb::capsule capsule(owner, [](void* held) noexcept { delete static_cast<std::shared_ptr<Outbox>*>(held); });
    const size_t shape[1] = {static_cast<size_t>(outbox->spec().slot_bytes)};
    return {payload, 1, shape, capsule};
}

void check_all_there(const Outboxes& outboxes) {
    for (size_t i = 0; i < outboxes.size(); ++i) {
        if (outboxes[i] == nullptr) throw m2n::Error(m2n::Code::invalid, "outboxes[" + std::to_string(i) + "] is None");
    }
}

void send_all(const Outboxes& outboxes, uint64_t step, nb::handle payload, const std::vector<uint64_t>& offsets,
              const std::vector<uint64_t>& lengths, uint32_t participants, double timeout_s) {
    const Buffer buffer(payload);
    check_all_there(outboxes);
    if (offsets.size() != outboxes.size() || lengths.size() != outboxes.size()) {
        throw m2n::Error(m2n::Code::invalid, std::to_string(outboxes.size()) + " outboxes, " +
                                                 std::to_string(offsets.size()) + " offsets and " +
                                                 std::to_string(lengths.size()) + " lengths: give one of each");
    }
    for (size_t i = 0; i < outboxes.size(); ++i) {
        if (offsets[i] <= buffer.size() && lengths[i] <= buffer.size() - offsets[i]) continue;
        throw m2n::Error(m2n::Code::invalid, "bytes " + std::to_string(offsets[i]) + " to " +
                                                 std::to_string(offsets[i] + lengths[i]) + " of a payload of " +
                                                 std::to_string(buffer.size()));
    }
    const m2n::MessageLabel label = make_label(step, {}, participants);
    std::vector<m2n::SlotId> slots;
    slots.reserve(outboxes.size());
    const auto keep = [&] {
        for (size_t i = 0; i < slots.size(); ++i) keep_while_sending(*outboxes[i], slots[i], payload);
    };
    try {
        within(timeout_s, [&](m2n::Deadline deadline) {
            for (size_t i = 0; i < outboxes.size(); ++i) {
                slots.push_back(outboxes[i]->send(label, buffer.data() + offsets[i], lengths[i], deadline));
            }
        });
    } catch (...) {
        keep();  // some of it is on its way
        throw;
    }
    keep();
}

void commit_all(const Outboxes& outboxes, uint64_t step, const std::vector<uint64_t>& lengths, uint32_t participants) {
    check_all_there(outboxes);
    if (lengths.size() != outboxes.size()) {
        throw m2n::Error(m2n::Code::invalid, std::to_string(outboxes.size()) + " outboxes and " +
                                                 std::to_string(lengths.size()) + " lengths: give one of each");
    }
    for (size_t i = 0; i < outboxes.size(); ++i) outboxes[i]->check_commit(lengths[i]);
    const m2n::MessageLabel label = make_label(step, {}, participants);
    const nb::gil_scoped_release release;
    for (size_t i = 0; i < outboxes.size(); ++i) outboxes[i]->commit(label, lengths[i]);
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
    module.def("send_all", &send_all, nb::arg("outboxes"), nb::arg("step"), nb::arg("payload"), nb::arg("offsets"),
               nb::arg("lengths"), nb::arg("participants") = 0, nb::arg("timeout_s") = 0.0);
    module.def("commit_all", &commit_all, nb::arg("outboxes"), nb::arg("step"), nb::arg("lengths"),
               nb::arg("participants") = 0);
    module.def(
        "wait_all_credits",
        [](const Outboxes& outboxes, double timeout_s) {
            check_all_there(outboxes);
            std::vector<Outbox*> pointers;
            for (const auto& outbox : outboxes) pointers.push_back(outbox.get());
            within(timeout_s, [&](m2n::Deadline deadline) { Outbox::wait_all_credits(pointers, deadline); });
        },
        nb::arg("outboxes"), nb::arg("timeout_s"));
}

}  // namespace antiphon::bind

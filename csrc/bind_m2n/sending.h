// What the bindings of one outbox and of several share.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <memory>

#include "bind_m2n/arguments.h"

namespace antiphon::bind {

using SlotView = nanobind::ndarray<nanobind::numpy, uint8_t, nanobind::ndim<1>>;

// A payload that is still being sent is kept alive, whatever the caller does with his reference.
inline void keep_while_sending(m2n::Outbox& outbox, m2n::SlotId slot, nanobind::handle payload) {
    if (outbox.source_reusable(slot)) return;
    outbox.keep(slot, std::shared_ptr<Buffer>(new Buffer(payload), [](Buffer* buffer) {
        nanobind::gil_scoped_acquire acquire;
        delete buffer;
    }));
}

// The array keeps the outbox, and with it the slot's memory.
inline SlotView view_of_slot(const std::shared_ptr<m2n::Outbox>& outbox, std::byte* payload) {
    auto* owner = new std::shared_ptr<m2n::Outbox>(outbox);
    nanobind::capsule capsule(
        owner, [](void* held) noexcept { delete static_cast<std::shared_ptr<m2n::Outbox>*>(held); });
    const size_t shape[1] = {static_cast<size_t>(outbox->spec().slot_bytes)};
    return {payload, 1, shape, capsule};
}

}  // namespace antiphon::bind

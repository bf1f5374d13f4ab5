// A counter that one process waits on and others add to, woken by the last of the events it waits for.
//
// The waiter says how many more events it needs; who adds the event that completes them wakes it, the others make no
// system call. With more processes than cores this is worth a factor: a waiter woken by every event takes the core
// from the very peers whose events it still misses. Waiter: store `wake_at`, then `waiting`, then sleep if `count` is
// unchanged. Ringer: add to `count`, then read `waiting` and `wake_at`. Both orders are sequentially consistent, so
// either the ringer sees the waiter, or the kernel sees the changed count and does not sleep.
#pragma once

#include <atomic>
#include <cstdint>

#include "m2n/types.h"

namespace antiphon::m2n {

// Lies in memory that processes share; all zero is the initial state.
struct Bell {
    alignas(64) std::atomic<uint32_t> count;
    alignas(64) std::atomic<uint32_t> wake_at;
    std::atomic<uint32_t> waiting;
};
static_assert(sizeof(Bell) == 128 && std::atomic<uint32_t>::is_always_lock_free);

void ring(Bell& bell);         // one event happened
void ring_always(Bell& bell);  // wake the waiter whatever it waits for

// Returns once `needed` events happened after `count` was `prepared`, when `cancelled` is set, or at the deadline; may
// return early. Spins for `spin_ns` first.
void wait(Bell& bell, uint32_t prepared, uint32_t needed, const std::atomic<bool>& cancelled, Deadline deadline,
          int64_t spin_ns);

}  // namespace antiphon::m2n

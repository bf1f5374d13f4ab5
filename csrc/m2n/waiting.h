// How to wait for peers: the choice that decides more than any other on a shared machine.
//
// `WaitPolicy` chooses:
// poll:  spin until the deadline. Lowest latency, one core for each waiter: only where cores are to spare.
// spin:  look again for a while, offering the core between the looks, then sleep. An answer that is already under way
//        costs no wake-up, and a peer on the same core is not kept waiting.
// block: sleep at once, woken by the last expected event (over sockets: by one of the last). When processes outnumber
//        cores by more than two, the switches that spinning costs are more than it saves. Polling there loses a
//        scheduler's slice each time (measured: 14 to 170 times slower).
//
// `Spin` looks again before sleeping. To be woken costs 5 to 70 us (the latter on a virtual machine whose idle cores
// have halted), to look costs nothing while no other thread wants the core. So a spinning waiter offers the core
// between its looks (`sched_yield`). It learns, per thread, when that is the wrong thing to do:
// - A spin that ended without its event was in vain: the next waits sleep at once, twice as many each time, until one
//   of them turns out so short that spinning would have caught it. An idle server thus does not burn its cores.
// - A thread that kept the core for a whole time slice computes, and would do so again: many waits sleep at once.
//
// `Bell` is a counter that one process waits on and others add to, woken by the last of the events it waits for. The
// waiter says how many more events it needs; the peer that adds the last of them wakes it, the others make no system
// call. With more processes than cores this is worth a factor: a waiter woken by every event takes the core from the
// very peers whose events it still misses. Waiter: store `wake_at`, then `waiting`, then sleep if `count` is unchanged.
// Ringer: add to `count`, then read `waiting` and `wake_at`. Both orders are sequentially consistent, so either the
// ringer sees the waiter, or the kernel sees the changed count and does not sleep.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <limits>
#include <string>

#include "m2n/types.h"

namespace antiphon::m2n {

// What a thread has learnt.
struct SpinExperience {
    uint32_t num_to_skip = 0;      // waits that sleep at once
    uint32_t in_vain = 0;          // how many were skipped after the last spin in vain
    bool core_is_wanted = false;   // they are skipped for another thread's sake: short waits prove nothing

    static SpinExperience& of_this_thread();
};

// One wait: `while (spin.again()) look;`, then sleep. It goes out of scope when what was waited for is here.
class Spin {
  public:
    // INT64_MAX spins until the deadline and gives nothing away; 0 sleeps at once.
    Spin(int64_t spin_ns, Deadline deadline, SpinExperience& experience = SpinExperience::of_this_thread());
    ~Spin();
    Spin(const Spin&) = delete;
    Spin& operator=(const Spin&) = delete;

    // False: sleep now. A caller whose look is cheap makes some in a row.
    bool again();

  private:
    static constexpr int64_t endless_ns = std::numeric_limits<int64_t>::max();
    bool offer_core(int64_t now_ns);
    void end_in_vain();

    const int64_t spin_ns_;
    const Deadline deadline_;
    SpinExperience& experience_;
    const int64_t started_ns_;
    bool ended_ = false;
    bool skipped_ = false;
};

enum class Waiting { poll, spin, block };

struct WaitPolicy {
    Waiting waiting = Waiting::block;
    int64_t spin_ns = 0;  // what to hand to Transport::block
    void (*between_sleeps)() = nullptr;  // called now and then during long waits; may throw (a signal arrived)
};

struct Cores {
    uint32_t count = 1;
    bool are_quota = false;  // of processor time, on more cores than these
};

// One wait in progress: cuts it into sleeps, so that a long one still hears of signals.
class Patience {
  public:
    explicit Patience(const WaitPolicy& policy)
        : policy_(policy), started_ns_(monotonic_ns()), next_look_ns_(started_ns_ + longest_ns) {}

    int64_t waited_ns() const { return monotonic_ns() - started_ns_; }
    int64_t spin_ns() const {  // what is left of it: a wait of many sleeps spins once
        const bool endless = policy_.spin_ns == std::numeric_limits<int64_t>::max();
        return endless ? policy_.spin_ns : std::max(policy_.spin_ns - waited_ns(), int64_t{0});
    }
    // Whose news to be woken by, where `end` is one of several that must have some. Where cores are scarce, by that
    // one's alone: a wake-up for each of them costs more than to take in late, all at once, what the others had. With
    // cores to spare, by each one's: what has arrived is taken in while the rest is under way.
    EndId woken_by(EndId end) const { return policy_.waiting == Waiting::block ? end : any_end; }
    Deadline sleep_until(Deadline deadline) const {
        return Deadline::after_ns(std::min(deadline.left_ns(), longest_ns));
    }
    void slept() {
        if (policy_.between_sleeps == nullptr || monotonic_ns() < next_look_ns_) return;
        next_look_ns_ = monotonic_ns() + longest_ns;
        policy_.between_sleeps();
    }

  private:
    static constexpr int64_t longest_ns = 200'000'000;
    const WaitPolicy& policy_;
    int64_t started_ns_;
    int64_t next_look_ns_;
};

const char* name_of(Waiting waiting);

// `wish`: auto, poll, spin or block. auto: poll with two cores or more for each of `local_processes`, spin with at
// least half a one, else block; with an unknown number (0) of processes, spin from 4 cores on. Where `cores` is a quota
// of processor time, a spin is taken from those that compute: spin with a core for each, else block. Error(invalid) for
// other words.
WaitPolicy choose_waiting(const std::string& wish, uint32_t local_processes, Cores cores, int64_t spin_ns);

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

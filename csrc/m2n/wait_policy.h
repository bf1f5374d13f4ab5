// How to wait: the choice that decides more than any other on a shared machine.
//
// poll:  spin until the deadline. Lowest latency, one core for each waiter: only where cores are to spare.
// spin:  look again for a while, offering the core between the looks (m2n/spin.h), then sleep. An answer that is
//        already under way costs no wake-up, and a peer on the same core is not kept waiting.
// block: sleep at once, woken by the last expected event (over sockets: by one of the last). When processes outnumber
//        cores by more than two, the switches that spinning costs are more than it saves. Polling there loses a
//        scheduler's slice each time (measured: 14 to 170 times slower).
#pragma once

#include <algorithm>
#include <cstdint>
#include <limits>
#include <string>

#include "m2n/types.h"

namespace antiphon::m2n {

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

Cores usable_cores();  // of this process's affinity

}  // namespace antiphon::m2n

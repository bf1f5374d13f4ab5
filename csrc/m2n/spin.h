// Looking again before sleeping, without keeping the core from anybody who could use it.
//
// To be woken costs 5 to 70 us (the latter on a virtual machine whose idle cores have halted), to look costs nothing
// while nobody else wants the core. So a spinning waiter offers the core between its looks (`sched_yield`). It learns,
// per thread, when that is the wrong thing to do:
// - A spin that ended without its event was in vain: the next waits sleep at once, twice as many each time, until one
//   of them turns out so short that spinning would have caught it. An idle server thus does not burn its cores.
// - Somebody who kept the core for a whole time slice computes, and would do so again: many waits sleep at once.
#pragma once

#include <cstdint>
#include <limits>

#include "m2n/types.h"

namespace antiphon::m2n {

// What a thread has learnt.
struct SpinExperience {
    uint32_t num_to_skip = 0;      // waits that shall sleep at once
    uint32_t in_vain = 0;          // how many were skipped after the last spin in vain
    bool core_is_wanted = false;   // they are skipped for somebody else's sake: short waits prove nothing

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

}  // namespace antiphon::m2n

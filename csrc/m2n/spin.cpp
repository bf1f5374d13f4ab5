#include "m2n/spin.h"

#include <sched.h>

#include <algorithm>

namespace antiphon::m2n {

namespace {

constexpr uint32_t most_in_vain = 64;
constexpr uint32_t skipped_for_others = 256;
constexpr int64_t time_slice_ns = 1'000'000;  // of the peers we wait for none takes so long for what ends our wait

}  // namespace

SpinExperience& SpinExperience::of_this_thread() {
    static thread_local SpinExperience experience;
    return experience;
}

Spin::Spin(int64_t spin_ns, Deadline deadline, SpinExperience& experience)
    : spin_ns_(spin_ns), deadline_(deadline), experience_(experience), started_ns_(spin_ns > 0 ? monotonic_ns() : 0) {
    if (spin_ns_ <= 0) {
        ended_ = true;
    } else if (spin_ns_ != endless_ns && experience_.num_to_skip > 0) {
        --experience_.num_to_skip;
        ended_ = true;
        skipped_ = true;
    }
}

Spin::~Spin() {
    if (spin_ns_ <= 0 || spin_ns_ == endless_ns || deadline_.passed()) return;
    if (!ended_) {  // what was waited for came
        experience_.in_vain = 0;
        experience_.core_is_wanted = false;
    } else if (skipped_ && !experience_.core_is_wanted && monotonic_ns() - started_ns_ < spin_ns_) {
        experience_.num_to_skip = 0;
        experience_.in_vain = 0;
    }
}

bool Spin::again() {
    if (ended_) return false;
    cpu_relax();
    if (deadline_.passed()) {
        ended_ = true;
        return false;
    }
    if (spin_ns_ == endless_ns) return true;
    const int64_t now_ns = monotonic_ns();
    if (now_ns - started_ns_ >= spin_ns_) {
        end_in_vain();
        return false;
    }
    return offer_core(now_ns);
}

bool Spin::offer_core(int64_t now_ns) {
    sched_yield();
    if (monotonic_ns() - now_ns < time_slice_ns) return true;
    ended_ = true;
    experience_.core_is_wanted = true;
    experience_.num_to_skip = skipped_for_others;
    return false;
}

void Spin::end_in_vain() {
    ended_ = true;
    experience_.core_is_wanted = false;
    experience_.in_vain = std::min(std::max(2 * experience_.in_vain, 1u), most_in_vain);
    experience_.num_to_skip = experience_.in_vain;
}

}  // namespace antiphon::m2n

#include "m2n/waiting.h"

#include <linux/futex.h>
#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <climits>
#include <limits>

#include "m2n/types.h"

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

const char* name_of(Waiting waiting) {
    switch (waiting) {
        case Waiting::poll: return "poll";
        case Waiting::spin: return "spin";
        case Waiting::block: return "block";
    }
    return "block";
}

namespace {

Waiting waiting_named(const std::string& wish) {
    for (const Waiting each : {Waiting::poll, Waiting::spin, Waiting::block}) {
        if (wish == name_of(each)) return each;
    }
    throw_invalid("waiting is ", wish, ": it must be auto, poll, spin or block");
}

Waiting automatic(uint32_t local_processes, Cores cores) {
    if (local_processes == 0) return cores.count >= 4 ? Waiting::spin : Waiting::block;
    if (cores.are_quota) return cores.count >= local_processes ? Waiting::spin : Waiting::block;
    if (cores.count >= 2 * local_processes) return Waiting::poll;
    return 2 * cores.count >= local_processes ? Waiting::spin : Waiting::block;
}

}  // namespace

WaitPolicy choose_waiting(const std::string& wish, uint32_t local_processes, Cores cores, int64_t spin_ns) {
    const Waiting waiting = wish == "auto" ? automatic(local_processes, cores) : waiting_named(wish);
    switch (waiting) {
        case Waiting::poll: return {.waiting = waiting, .spin_ns = std::numeric_limits<int64_t>::max()};
        case Waiting::spin: return {.waiting = waiting, .spin_ns = spin_ns};
        case Waiting::block: return {.waiting = waiting};
    }
    return {};
}

namespace {

constexpr int64_t longest_sleep_ns = 1'000'000'000;  // then look again, whatever happened
constexpr int looks_in_a_row = 16;

void wake(Bell& bell) {
    syscall(SYS_futex, reinterpret_cast<uint32_t*>(&bell.count), FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
}

void sleep_while(Bell& bell, uint32_t count, int64_t sleep_ns) {
    const timespec limit = to_timespec(sleep_ns);
    syscall(SYS_futex, reinterpret_cast<uint32_t*>(&bell.count), FUTEX_WAIT, count, &limit, nullptr, 0);
}

bool reached(uint32_t count, uint32_t target) { return static_cast<int32_t>(count - target) >= 0; }

}  // namespace

void ring(Bell& bell) {
    const uint32_t count = bell.count.fetch_add(1) + 1;
    if (bell.waiting.load() != 0 && reached(count, bell.wake_at.load())) wake(bell);
}

void ring_always(Bell& bell) {
    bell.count.fetch_add(1);
    wake(bell);
}

void wait(Bell& bell, uint32_t prepared, uint32_t needed, const std::atomic<bool>& cancelled, Deadline deadline,
          int64_t spin_ns) {
    const uint32_t target = prepared + needed;
    const auto done = [&] { return reached(bell.count.load(), target) || cancelled.load(); };
    if (done()) return;
    Spin spin(spin_ns, deadline);
    while (spin.again()) {
        for (int look = 0; look < looks_in_a_row; ++look) {
            if (done()) return;
            cpu_relax();
        }
    }
    bell.wake_at.store(target);
    bell.waiting.store(1);
    for (;;) {
        const uint32_t count = bell.count.load();
        if (reached(count, target) || cancelled.load()) break;
        const int64_t left_ns = deadline.left_ns();
        if (left_ns == 0) break;
        sleep_while(bell, count, std::min(left_ns, longest_sleep_ns));
    }
    bell.waiting.store(0);
}

}  // namespace antiphon::m2n

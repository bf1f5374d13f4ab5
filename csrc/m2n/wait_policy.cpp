#include "m2n/wait_policy.h"

#include <sched.h>

#include <limits>

#include "m2n/error.h"

namespace antiphon::m2n {

const char* name_of(Waiting waiting) {
    switch (waiting) {
        case Waiting::poll: return "poll";
        case Waiting::spin: return "spin";
        case Waiting::block: return "block";
    }
    return "block";
}

namespace {

Waiting automatic(uint32_t local_processes, Cores cores) {
    if (local_processes == 0) return cores.count >= 4 ? Waiting::spin : Waiting::block;
    if (cores.are_quota) return cores.count >= local_processes ? Waiting::spin : Waiting::block;
    if (cores.count >= 2 * local_processes) return Waiting::poll;
    return 2 * cores.count >= local_processes ? Waiting::spin : Waiting::block;
}

}  // namespace

WaitPolicy choose_waiting(const std::string& wish, uint32_t local_processes, Cores cores, int64_t spin_ns) {
    Waiting waiting{};
    if (wish == "auto") {
        waiting = automatic(local_processes, cores);
    } else if (wish == "poll") {
        waiting = Waiting::poll;
    } else if (wish == "spin") {
        waiting = Waiting::spin;
    } else if (wish == "block") {
        waiting = Waiting::block;
    } else {
        throw Error(Code::invalid, "waiting is " + wish + ": it must be auto, poll, spin or block");
    }
    switch (waiting) {
        case Waiting::poll: return {.waiting = waiting, .spin_ns = std::numeric_limits<int64_t>::max()};
        case Waiting::spin: return {.waiting = waiting, .spin_ns = spin_ns};
        case Waiting::block: return {.waiting = waiting};
    }
    return {};
}

Cores usable_cores() {
    cpu_set_t set;
    CPU_ZERO(&set);
    if (sched_getaffinity(0, sizeof(set), &set) != 0) return {};
    const int count = CPU_COUNT(&set);
    return {.count = count > 0 ? static_cast<uint32_t>(count) : 1};
}

}  // namespace antiphon::m2n

#include "m2n/libfabric_keeper.h"

#if defined(ANTIPHON_HAVE_LIBFABRIC)

#include <pthread.h>
#include <signal.h>

#include <algorithm>
#include <chrono>
#include <utility>

namespace antiphon::m2n {

namespace {

constexpr int64_t shortest_tick_ns = 2'000'000;
constexpr int64_t longest_tick_ns = 16'000'000;
constexpr int64_t idle_before_parking_ns = 500'000'000;

}  // namespace

LibfabricKeeper::LibfabricKeeper(std::function<Found()> visit)
    : visit_(std::move(visit)), tick_ns_(shortest_tick_ns), thread_([this] { run(); }) {}

LibfabricKeeper::~LibfabricKeeper() {
    {
        const std::lock_guard lock(mutex_);
        stopping_ = true;
    }
    wake_.notify_all();
    thread_.join();
}

void LibfabricKeeper::wake() {
    {
        const std::lock_guard lock(mutex_);
        parked_.store(false);
    }
    wake_.notify_all();
}

bool LibfabricKeeper::wait_for_turn() {
    std::unique_lock lock(mutex_);
    if (idle_ns_ < idle_before_parking_ns) {
        wake_.wait_for(lock, std::chrono::nanoseconds(tick_ns_), [this] { return stopping_; });
    } else if (parked_.exchange(true)) {
        // Not at the first time: a write handed in before the flag could be seen is found by one more visit.
        wake_.wait(lock, [this] { return stopping_ || !parked_.load(); });
        tick_ns_ = shortest_tick_ns;
        idle_ns_ = 0;
    }
    return !stopping_;
}

void LibfabricKeeper::run() {
    sigset_t all;
    sigfillset(&all);
    pthread_sigmask(SIG_BLOCK, &all, nullptr);
    pthread_setname_np(pthread_self(), "m2n-keeper");
    while (wait_for_turn()) {
        const Found found = visit_();
        tick_ns_ = found.owner_looks ? std::min(2 * tick_ns_, longest_tick_ns) : shortest_tick_ns;
        idle_ns_ = found.active ? 0 : idle_ns_ + tick_ns_;
        if (found.active) parked_.store(false);
    }
}

}  // namespace antiphon::m2n

#endif

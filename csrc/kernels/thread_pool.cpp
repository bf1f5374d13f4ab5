#include "kernels/thread_pool.h"

#include <new>
#include <thread>

#if defined(__linux__)
#include <pthread.h>
#include <sched.h>
#endif

#include "base/wait_word.h"

namespace antiphon::kernels {

namespace {

thread_local bool works_alone = false;

constexpr uint32_t open_bit = 1u << 31;
constexpr int spins_before_yield = 512;

#if defined(__linux__)
int current_core() { return sched_getcpu(); }

cpu_set_t allowed_cores;  // of the thread that spawned the workers

void note_allowed_cores() {
    if (pthread_getaffinity_np(pthread_self(), sizeof(allowed_cores), &allowed_cores) != 0) CPU_ZERO(&allowed_cores);
}

// Leaves a worker every allowed core but one.
void avoid_core(std::thread::native_handle_type worker, int core) {
    cpu_set_t set = allowed_cores;
    CPU_CLR(core, &set);
    if (CPU_COUNT(&set) > 0) pthread_setaffinity_np(worker, sizeof(set), &set);
}
#else
int current_core() { return -1; }
void note_allowed_cores() {}
void avoid_core(std::thread::native_handle_type, int) {}
#endif

}  // namespace

void ThreadPool::work_alone() { works_alone = true; }

ThreadPool& ThreadPool::instance() {
    // Never destroyed: workers may still look at it while the process exits.
    static ThreadPool* pool = [] {
#if defined(__linux__)
        pthread_atfork(nullptr, nullptr, &ThreadPool::after_fork_in_child);
#endif
        return new ThreadPool();
    }();
    return *pool;
}

void ThreadPool::after_fork_in_child() {
    // Only the forking thread lives on; its workers are spawned anew when they are needed.
    ThreadPool& pool = instance();
    new (&pool.owner_) std::mutex();
    pool.spawned_ = 1;
    pool.workers_.clear();
    pool.gate_.store(0);
    pool.sleepers_.store(0);
}

void ThreadPool::set_num_threads(int num_threads) {
    const std::lock_guard<std::mutex> lock(owner_);
    wanted_ = num_threads < 1 ? 1 : num_threads > max_threads ? max_threads : num_threads;
    stop();
}

void ThreadPool::release_core() {
    if (!owner_.try_lock()) return;
    if (spawned_ > 1 && spin_ns_.load(std::memory_order_relaxed) > 0) {
        core_released_.store(true, std::memory_order_relaxed);
        __atomic_store_n(&epoch_, epoch_ + 1, __ATOMIC_SEQ_CST);  // its gate is shut: workers only look around
    }
    owner_.unlock();
}

void ThreadPool::stop() {
    generation_.fetch_add(1);
    spawned_ = 1;
    workers_.clear();
    store_wake_u32(&epoch_, epoch_ + 1);
}

void ThreadPool::spawn() {
    const uint32_t generation = generation_.load();
    note_allowed_cores();
    for (; spawned_ < wanted_; ++spawned_) {
        std::thread worker(&ThreadPool::worker, this, spawned_, generation, epoch_);
        workers_.push_back(worker.native_handle());
        worker.detach();
    }
    avoided_core_ = -1;
}

void ThreadPool::keep_off_callers_core() {
    const int core = current_core();
    if (core == avoided_core_) return;
    avoided_core_ = core;
    for (const auto worker : workers_) avoid_core(worker, core);
}

void ThreadPool::worker(int thread, uint32_t generation, uint32_t seen_epoch) {
    while (true) {
        const bool sleeps_now = thread == 1 && core_released_.load(std::memory_order_relaxed);
        const int64_t spin_ns = sleeps_now ? 0 : spin_ns_.load(std::memory_order_relaxed);
        if (!wait_u32(&epoch_, seen_epoch, spin_ns, spin_ns)) {
            sleepers_.fetch_add(1);
            wait_u32(&epoch_, seen_epoch, -1, 0);
            sleepers_.fetch_sub(1);
        }
        if (generation_.load() != generation) return;
        seen_epoch = load_u32(&epoch_);
        // Entering an open gate is seen by the owner when it closes it; finding it shut means we came too late.
        if (gate_.fetch_add(1) & open_bit) entry_(region_, thread, num_items_);
        gate_.fetch_sub(1);
    }
}

void ThreadPool::run(int64_t num_items, Order order, Entry entry, void* region) {
    if (num_items <= 0) return;
    if (wanted_ == 1 || num_items == 1 || works_alone || !owner_.try_lock()) return entry(region, -1, num_items);
    if (spawned_ < wanted_) spawn();
    keep_off_callers_core();
    entry_ = entry;
    region_ = region;
    num_items_ = num_items;
    if (order == Order::ranges) {
        split(num_items);
    } else {
        next_.store(0, std::memory_order_relaxed);
    }
    core_released_.store(false, std::memory_order_relaxed);
    gate_.fetch_or(open_bit);
    __atomic_store_n(&epoch_, epoch_ + 1, __ATOMIC_SEQ_CST);
    if (sleepers_.load() > 0) store_wake_u32(&epoch_, epoch_);
    entry(region, 0, num_items);
    gate_.fetch_and(~open_bit);
    for (int spins = 0; gate_.load() != 0; ++spins) {
        if (spins < spins_before_yield) {
            cpu_relax();
        } else {
            std::this_thread::yield();
        }
    }
    owner_.unlock();
}

void ThreadPool::split(int64_t num_items) {
    int64_t begin = 0;
    for (int thread = 0; thread < wanted_; ++thread) {
        const int64_t end = num_items * (thread + 1) / wanted_;
        ranges_[thread].bounds.store(static_cast<uint64_t>(begin) << 32 | static_cast<uint64_t>(end),
                                     std::memory_order_relaxed);
        begin = end;
    }
}

int64_t ThreadPool::take_own(int thread) {
    std::atomic<uint64_t>& bounds = ranges_[thread].bounds;
    uint64_t old = bounds.load(std::memory_order_relaxed);
    while ((old >> 32) < (old & 0xffffffffu)) {
        if (bounds.compare_exchange_weak(old, old + (uint64_t{1} << 32))) return static_cast<int64_t>(old >> 32);
    }
    return -1;
}

int64_t ThreadPool::steal(int thread) {
    for (int step = 1; step < wanted_; ++step) {
        std::atomic<uint64_t>& bounds = ranges_[(thread + step) % wanted_].bounds;
        uint64_t old = bounds.load(std::memory_order_relaxed);
        while ((old >> 32) < (old & 0xffffffffu)) {
            if (bounds.compare_exchange_weak(old, old - 1)) return static_cast<int64_t>((old & 0xffffffffu) - 1);
        }
    }
    return -1;
}

int64_t ThreadPool::take_next(int64_t num_items) {
    const int64_t item = next_.fetch_add(1);
    return item < num_items ? item : -1;
}

}  // namespace antiphon::kernels

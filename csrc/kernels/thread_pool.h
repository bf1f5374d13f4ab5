// The process's compute threads. The caller of a region works as thread 0; the others spin for a while after the last
// region and then sleep in the kernel. A worker that the system has not scheduled when the work is done is not waited for.
#pragma once

#include <atomic>
#include <cstdint>
#include <mutex>
#include <thread>
#include <vector>

namespace antiphon::kernels {

class ThreadPool {
  public:
    static constexpr int max_threads = 256;

    static ThreadPool& instance();

    // Regions of the calling thread run on it alone from now on: what it does in the background must not take the
    // threads from others.
    static void work_alone();

    int num_threads() const { return wanted_; }
    void set_num_threads(int num_threads);
    // How long idle workers spin before they sleep.
    void set_spin_ns(int64_t spin_ns) { spin_ns_.store(spin_ns, std::memory_order_relaxed); }
    // One worker that spins sleeps now, until the next region: a process that is woken finds an idle core, and does not
    // push the caller from its own.
    void release_core();

    // body(item) for every item in [0, num_items). Each thread owns a contiguous range and takes it from the front
    // (neighbouring items share prefetched memory); who runs dry takes from the back of another's range.
    template <class Body>
    void for_each(int64_t num_items, Body&& body) {
        Region<Body> region{&body, this};
        run(num_items, Order::ranges, &Region<Body>::by_ranges, &region);
    }

    // The same with one shared queue: items start in ascending order. For items of unequal cost, heaviest first.
    template <class Body>
    void for_each_in_order(int64_t num_items, Body&& body) {
        Region<Body> region{&body, this};
        run(num_items, Order::queue, &Region<Body>::by_queue, &region);
    }

  private:
    enum class Order { ranges, queue };
    using Entry = void (*)(void* region, int thread, int64_t num_items);

    template <class Body>
    struct Region {
        Body* body;
        ThreadPool* pool;

        static void by_ranges(void* self, int thread, int64_t num_items) {
            auto* region = static_cast<Region*>(self);
            if (thread < 0) return all(region, num_items);
            for (int64_t item = region->pool->take_own(thread); item >= 0; item = region->pool->take_own(thread)) {
                (*region->body)(item);
            }
            for (int64_t item = region->pool->steal(thread); item >= 0; item = region->pool->steal(thread)) {
                (*region->body)(item);
            }
        }
        static void by_queue(void* self, int thread, int64_t num_items) {
            auto* region = static_cast<Region*>(self);
            if (thread < 0) return all(region, num_items);
            for (int64_t item = region->pool->take_next(num_items); item >= 0;
                 item = region->pool->take_next(num_items)) {
                (*region->body)(item);
            }
        }
        static void all(Region* region, int64_t num_items) {
            for (int64_t item = 0; item < num_items; ++item) (*region->body)(item);
        }
    };

    // Items [begin, end) still to do, as begin << 32 | end.
    struct alignas(64) Range {
        std::atomic<uint64_t> bounds{0};
    };

    ThreadPool() = default;
    void run(int64_t num_items, Order order, Entry entry, void* region);
    void split(int64_t num_items);
    int64_t take_own(int thread);
    int64_t steal(int thread);
    int64_t take_next(int64_t num_items);
    void spawn();
    void stop();
    // A woken worker is often put on its waker's core, or the system moves the caller to a worker's: one would wait there
    // for a time slice of the other.
    void keep_off_callers_core();
    void worker(int thread, uint32_t generation, uint32_t seen_epoch);
    static void after_fork_in_child();

    int wanted_ = 1;
    int spawned_ = 1;
    std::vector<std::thread::native_handle_type> workers_;
    int avoided_core_ = -1;  // that of the last region's caller: workers stay off it
    std::mutex owner_;  // held by the thread that runs a region; a second caller works alone
    std::atomic<int64_t> spin_ns_{150'000};
    std::atomic<bool> core_released_{false};

    Entry entry_ = nullptr;
    void* region_ = nullptr;
    int64_t num_items_ = 0;
    Range ranges_[max_threads];
    alignas(64) std::atomic<int64_t> next_{0};
    alignas(64) uint32_t epoch_ = 0;                 // grows with every region; what idle workers watch
    alignas(64) std::atomic<uint32_t> gate_{0};      // open_bit | workers inside
    alignas(64) std::atomic<uint32_t> sleepers_{0};
    std::atomic<uint32_t> generation_{0};            // workers of an older generation end
};

}  // namespace antiphon::kernels

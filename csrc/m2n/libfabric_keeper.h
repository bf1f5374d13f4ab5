// The thread that looks after writes under way while the owner of a transport is busy with something else.
//
// It earns its place because libfabric moves bytes only while somebody looks: without it a credit or a message waits as
// long as its owner computes, and its peer with it.
//
// It comes every 2 ms while the owner does not look himself, less and less often while he does, and parks half a second
// after the last write if nothing is known to be under way: an idle process shall not wake up. Of writes without a
// completion, as credits are where the provider copies them at once, nothing is known: one that a provider still holds
// after that time leaves with the owner's next look.
#pragma once

#if defined(ANTIPHON_HAVE_LIBFABRIC)

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <mutex>
#include <thread>

namespace antiphon::m2n {

class LibfabricKeeper {
  public:
    struct Found {
        bool owner_looks = false;  // he did since the last visit, or is about to
        bool active = false;       // something is under way, or was handed in since the last visit
    };

    // `visit` looks, unless the owner does. Called from the thread, one at a time.
    explicit LibfabricKeeper(std::function<Found()> visit);
    ~LibfabricKeeper();  // waits for the visit under way

    // After a write was handed in. No system call, unless the thread has parked.
    void note_write() {
        if (parked_.load()) wake();
    }

  private:
    void run();
    bool wait_for_turn();  // false: stop
    void wake();

    const std::function<Found()> visit_;
    int64_t tick_ns_;
    int64_t idle_ns_ = 0;
    std::mutex mutex_;
    std::condition_variable wake_;
    std::atomic<bool> parked_{false};
    bool stopping_ = false;
    std::thread thread_;  // last: it uses all of the above
};

}  // namespace antiphon::m2n

#endif

#include "base/wait_word.h"

#include <atomic>
#include <chrono>
#include <climits>
#include <thread>

#if defined(__linux__)
#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace antiphon {

int64_t monotonic_ns() {
    using namespace std::chrono;
    return duration_cast<nanoseconds>(steady_clock::now().time_since_epoch()).count();
}

uint32_t load_u32(const uint32_t* word) { return __atomic_load_n(word, __ATOMIC_ACQUIRE); }

namespace {

// Sleeps until woken, until the value changes or for at most `sleep_ns`; may return early for no reason.
void sleep_on(const uint32_t* word, uint32_t old_value, int64_t sleep_ns) {
#if defined(__linux__)
    const timespec limit = to_timespec(sleep_ns);
    syscall(SYS_futex, word, FUTEX_WAIT, old_value, &limit, nullptr, 0);
#else
    (void)word;
    (void)old_value;
    std::this_thread::sleep_for(std::chrono::nanoseconds(sleep_ns < 50'000 ? sleep_ns : 50'000));
#endif
}

void wake_all(uint32_t* word) {
#if defined(__linux__)
    syscall(SYS_futex, word, FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
#else
    (void)word;
#endif
}

}  // namespace

bool wait_u32(const uint32_t* word, uint32_t old_value, int64_t timeout_ns, int64_t spin_ns) {
    if (load_u32(word) != old_value) return true;
    const int64_t start = monotonic_ns();
    const int64_t deadline = timeout_ns < 0 ? INT64_MAX : start + timeout_ns;
    const int64_t spin_end = spin_ns < deadline - start ? start + spin_ns : deadline;
    int64_t now = start;
    while (now < spin_end) {
        for (int i = 0; i < 16; ++i) {
            if (load_u32(word) != old_value) return true;
            cpu_relax();
        }
        now = monotonic_ns();
    }
    constexpr int64_t longest_sleep_ns = 1'000'000'000;
    while (now < deadline) {
        const int64_t left = deadline - now;
        sleep_on(word, old_value, left < longest_sleep_ns ? left : longest_sleep_ns);
        if (load_u32(word) != old_value) return true;
        now = monotonic_ns();
    }
    return load_u32(word) != old_value;
}

void store_wake_u32(uint32_t* word, uint32_t value) {
    __atomic_store_n(word, value, __ATOMIC_RELEASE);
    wake_all(word);
}

uint32_t fetch_add_wake_u32(uint32_t* word, uint32_t amount) {
    const uint32_t before = __atomic_fetch_add(word, amount, __ATOMIC_ACQ_REL);
    wake_all(word);
    return before;
}

}  // namespace antiphon

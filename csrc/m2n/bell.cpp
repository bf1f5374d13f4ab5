#include "m2n/bell.h"

#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <climits>
#include <ctime>

#include "m2n/spin.h"

namespace antiphon::m2n {

namespace {

constexpr int64_t longest_sleep_ns = 1'000'000'000;  // then look again, whatever happened
constexpr int looks_in_a_row = 16;

void wake(Bell& bell) {
    syscall(SYS_futex, reinterpret_cast<uint32_t*>(&bell.count), FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
}

void sleep_while(Bell& bell, uint32_t count, int64_t sleep_ns) {
    const timespec limit{static_cast<time_t>(sleep_ns / 1'000'000'000), static_cast<long>(sleep_ns % 1'000'000'000)};
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

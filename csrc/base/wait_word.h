// A 32-bit word in memory shared by processes, on which one side waits and the other announces.
// The waiter spins first (an answer within microseconds costs no system call), then sleeps in the kernel.
#pragma once

#include <cstdint>
#include <ctime>

namespace antiphon {

uint32_t load_u32(const uint32_t* word);  // acquire

// Returns true once *word differs from `old_value`; false after `timeout_ns`. A negative timeout waits without end.
bool wait_u32(const uint32_t* word, uint32_t old_value, int64_t timeout_ns, int64_t spin_ns);

// Release store, then wakes every waiter of every process.
void store_wake_u32(uint32_t* word, uint32_t value);

// Adds (acquire and release), wakes every waiter; returns the value before.
uint32_t fetch_add_wake_u32(uint32_t* word, uint32_t amount);

// One step of a polite busy wait.
inline void cpu_relax() {
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
}

int64_t monotonic_ns();

inline timespec to_timespec(int64_t ns) {
    return {static_cast<time_t>(ns / 1'000'000'000), static_cast<long>(ns % 1'000'000'000)};
}

}  // namespace antiphon

#include "allocations.h"

#include <cstdlib>
#include <new>

namespace antiphon::m2n::test {

namespace {
thread_local uint64_t allocations = 0;
}

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
bool counts_allocations() { return false; }
#else
bool counts_allocations() { return true; }
#endif
uint64_t num_allocations() { return allocations; }
void count_allocation() { ++allocations; }

}  // namespace antiphon::m2n::test

#if !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)
void* operator new(size_t num_bytes) {
    antiphon::m2n::test::count_allocation();
    if (void* memory = std::malloc(num_bytes)) return memory;
    throw std::bad_alloc();
}
void operator delete(void* memory) noexcept { std::free(memory); }
void operator delete(void* memory, size_t) noexcept { std::free(memory); }
#endif

// Counts what a thread allocates. Not under a sanitizer, which brings an allocator of its own.
#pragma once

#include <cstdint>

namespace antiphon::m2n::test {

bool counts_allocations();
uint64_t num_allocations();  // of the calling thread; 0 where they are not counted

}  // namespace antiphon::m2n::test

#include "base/huge_buffer.h"

#include <sys/mman.h>

#include <cstdint>
#include <new>

namespace antiphon {

namespace {
constexpr size_t page_bytes = 16384;  // a multiple of the page size on every system we build for
constexpr size_t huge_page_bytes = size_t{2} << 20;

size_t round_up(size_t value, size_t multiple) { return (value + multiple - 1) / multiple * multiple; }
}  // namespace

HugeBuffer::HugeBuffer(size_t num_bytes) {
    const size_t size = round_up(num_bytes, page_bytes);
    if (size == 0) return;
    const size_t alignment = size >= huge_page_bytes ? huge_page_bytes : page_bytes;
    const size_t reserved = size + alignment;
    int flags = MAP_PRIVATE | MAP_ANONYMOUS;
#if defined(MAP_NORESERVE)
    flags |= MAP_NORESERVE;
#endif
    void* mapping = mmap(nullptr, reserved, PROT_READ | PROT_WRITE, flags, -1, 0);
    if (mapping == MAP_FAILED) throw std::bad_alloc();
    // Give back what alignment does not need, so that the destructor unmaps exactly `size` bytes.
    const auto start = reinterpret_cast<uintptr_t>(mapping);
    const uintptr_t aligned = round_up(start, alignment);
    if (aligned > start) munmap(mapping, aligned - start);
    const uintptr_t end = aligned + size;
    if (start + reserved > end) munmap(reinterpret_cast<void*>(end), start + reserved - end);
    data_ = std::unique_ptr<char, Unmap>(reinterpret_cast<char*>(aligned), {size});
#if defined(MADV_HUGEPAGE)
    if (size >= huge_page_bytes) madvise(data_.get(), size, MADV_HUGEPAGE);
#endif
}

void Unmap::operator()(void* mapping) const { munmap(mapping, num_bytes); }

}  // namespace antiphon

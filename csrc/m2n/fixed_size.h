// First in, first out, of a size fixed once: what is on its way in a pair is bounded by its slots.
//
// Durations by powers of two: bucket i counts those of [2^i, 2^(i+1)) ns. Fixed size, no allocation, one writer.
#pragma once

#include <array>
#include <bit>
#include <cassert>
#include <cstddef>
#include <cstdint>
#include <vector>

namespace antiphon::m2n {

// A queue that never allocates after its construction.
template <class T>
class FixedQueue {
  public:
    explicit FixedQueue(size_t capacity) : items_(capacity) {}

    size_t size() const { return size_; }
    bool empty() const { return size_ == 0; }
    bool full() const { return size_ == items_.size(); }
    const T& operator[](size_t index) const { return items_[(first_ + index) % items_.size()]; }
    void push(const T& item) {
        assert(!full());
        items_[(first_ + size_) % items_.size()] = item;
        ++size_;
    }
    T pop() {
        assert(!empty());
        const T item = items_[first_];
        first_ = (first_ + 1) % items_.size();
        --size_;
        return item;
    }

  private:
    std::vector<T> items_;
    size_t first_ = 0;
    size_t size_ = 0;
};

class Histogram {
  public:
    static constexpr size_t num_buckets = 40;  // the last holds everything above nine minutes

    void add(int64_t duration_ns) {
        const auto value = static_cast<uint64_t>(duration_ns > 1 ? duration_ns : 1);
        const size_t bucket = static_cast<size_t>(std::bit_width(value)) - 1;
        ++counts_[bucket < num_buckets ? bucket : num_buckets - 1];
    }
    const std::array<uint64_t, num_buckets>& counts() const { return counts_; }

  private:
    std::array<uint64_t, num_buckets> counts_{};
};

}  // namespace antiphon::m2n

// Durations by powers of two: bucket i counts those of [2^i, 2^(i+1)) ns. Fixed size, no allocation, one writer.
#pragma once

#include <array>
#include <bit>
#include <cstddef>
#include <cstdint>

namespace antiphon::m2n {

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

// The number formats that rows are sent in: widened to float32 to be added, narrowed once.
//
// The sum of some arrays, in float32, in their order, rounded once.
#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>
#include <span>

namespace antiphon::m2n {

enum class RowType { bf16, fp16, fp32 };

inline size_t bytes_of(RowType type) { return type == RowType::fp32 ? 4 : 2; }

struct Bf16 {
    using Stored = uint16_t;
    static float widen(uint16_t value) { return std::bit_cast<float>(uint32_t{value} << 16); }
    static uint16_t narrow(float value) {  // to nearest, ties to even; NaN stays NaN
        const auto bits = std::bit_cast<uint32_t>(value);
        if ((bits & 0x7FFFFFFF) > 0x7F800000) return static_cast<uint16_t>(bits >> 16 | 0x40);
        return static_cast<uint16_t>((bits + 0x7FFF + (bits >> 16 & 1)) >> 16);
    }
};

struct Fp16 {
    using Stored = _Float16;
    static float widen(_Float16 value) { return static_cast<float>(value); }
    static _Float16 narrow(float value) { return static_cast<_Float16>(value); }
};

struct Fp32 {
    using Stored = float;
    static float widen(float value) { return value; }
    static float narrow(float value) { return value; }
};

// out[i] = addends[0][i] + addends[1][i] + ... for `count` elements; every one of `copies` gets the same. `out` may be
// one of the addends.
void sum_rows(RowType type, std::span<const std::byte* const> addends, uint64_t count, std::byte* out,
              std::span<std::byte* const> copies);

}  // namespace antiphon::m2n

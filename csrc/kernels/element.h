// The two element types kernels are built for, and the step in which a matrix is walked along its inner dimension:
// 4 bytes of every row, that is two bfloat16 values or one float.
#pragma once

#include <cstddef>
#include <cstdint>

#define ANTIPHON_INLINE inline __attribute__((always_inline))

namespace antiphon::kernels {

enum class ElementType { bf16, fp32 };

struct Bf16 {
    using Storage = uint16_t;
    static constexpr ElementType type = ElementType::bf16;
    static constexpr int per_step = 2;
    static constexpr int inner_multiple = 32;  // inner widths are padded to this: one AMX tile
};

struct Fp32 {
    using Storage = float;
    static constexpr ElementType type = ElementType::fp32;
    static constexpr int per_step = 1;
    static constexpr int inner_multiple = 1;
};

ANTIPHON_INLINE int64_t divide_up(int64_t value, int64_t by) { return (value + by - 1) / by; }
ANTIPHON_INLINE int64_t round_up(int64_t value, int64_t multiple) { return divide_up(value, multiple) * multiple; }
ANTIPHON_INLINE int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }
ANTIPHON_INLINE int64_t larger(int64_t a, int64_t b) { return a > b ? a : b; }

inline size_t element_bytes(ElementType type) { return type == ElementType::bf16 ? 2 : 4; }

// Inner width as stored: padded so that the innermost loops need no remainder.
inline int64_t padded_inner(ElementType type, int64_t width) {
    return round_up(width, type == ElementType::bf16 ? Bf16::inner_multiple : Fp32::inner_multiple);
}
inline int64_t inner_steps(ElementType type, int64_t width) {
    return padded_inner(type, width) / (type == ElementType::bf16 ? Bf16::per_step : Fp32::per_step);
}

// Four steps of a row, and a square of them turned round: rows[i][j] becomes rows[j][i]. Every machine has such vectors.
using Words = uint32_t __attribute__((vector_size(16)));

inline void transpose_words(Words (&rows)[4]) {
    const Words low = __builtin_shuffle(rows[0], rows[1], Words{0, 4, 1, 5});
    const Words low_next = __builtin_shuffle(rows[2], rows[3], Words{0, 4, 1, 5});
    const Words high = __builtin_shuffle(rows[0], rows[1], Words{2, 6, 3, 7});
    const Words high_next = __builtin_shuffle(rows[2], rows[3], Words{2, 6, 3, 7});
    rows[0] = __builtin_shuffle(low, low_next, Words{0, 1, 4, 5});
    rows[1] = __builtin_shuffle(low, low_next, Words{2, 3, 6, 7});
    rows[2] = __builtin_shuffle(high, high_next, Words{0, 1, 4, 5});
    rows[3] = __builtin_shuffle(high, high_next, Words{2, 3, 6, 7});
}

// Elements from row to row for copies of rows of `width`: an odd number of cache lines, so that rows read side by side
// do not fall into the same few sets of the first-level cache.
inline int64_t spread_stride(ElementType type, int64_t width) {
    const auto size = static_cast<int64_t>(element_bytes(type));
    const int64_t lines = divide_up(padded_inner(type, width) * size, 64) | 1;
    return lines * 64 / size;
}

}  // namespace antiphon::kernels

// Products of matrices for training, where neither factor is packed beforehand: rows times a weight, gradients
// times it, gradients of it. Several products of one kind (those of the experts) are one region of the thread pool.
//
// An item is 64 columns of one product and up to `rows_of_item` of its rows. It packs the second factor's columns, a
// stretch of the inner dimension at a time, into panels that stay in the cache while all rows pass over them in the
// register tile of all other products. A first factor whose inner dimension is not adjacent is transposed first.
// A step of the inner dimension is 4 bytes: a float, or two bfloat16 that are brought side by side.
// Each sum walks the inner dimension front to back, so a row's bits depend on nothing beside it.
// What is not a template over the vector set is static: each set has its own, of its own instructions.
#pragma once

#include <algorithm>

#include "kernels/block_product.h"
#include "kernels/training_calls.h"

namespace antiphon::kernels {

constexpr int64_t rows_of_item = 1024;
constexpr int64_t packed_steps = 256;  // 64 KiB of four panels

using FourFloats = float __attribute__((vector_size(16), aligned(4)));

// Four rows of four: to[c][r] = from[r][c].
ANTIPHON_INLINE void turn_four(const float* from, int64_t from_stride, float* to, int64_t to_stride) {
    FourFloats rows[4];
    for (int r = 0; r < 4; ++r) rows[r] = *reinterpret_cast<const FourFloats*>(from + r * from_stride);
    const FourFloats low01 = __builtin_shufflevector(rows[0], rows[1], 0, 4, 1, 5);
    const FourFloats high01 = __builtin_shufflevector(rows[0], rows[1], 2, 6, 3, 7);
    const FourFloats low23 = __builtin_shufflevector(rows[2], rows[3], 0, 4, 1, 5);
    const FourFloats high23 = __builtin_shufflevector(rows[2], rows[3], 2, 6, 3, 7);
    *reinterpret_cast<FourFloats*>(to) = __builtin_shufflevector(low01, low23, 0, 1, 4, 5);
    *reinterpret_cast<FourFloats*>(to + to_stride) = __builtin_shufflevector(low01, low23, 2, 3, 6, 7);
    *reinterpret_cast<FourFloats*>(to + 2 * to_stride) = __builtin_shufflevector(high01, high23, 0, 1, 4, 5);
    *reinterpret_cast<FourFloats*>(to + 3 * to_stride) = __builtin_shufflevector(high01, high23, 2, 3, 6, 7);
}

// to[c][r] = from[r][c] of `rows` x `columns`.
static void turn_matrix(const float* from, int64_t from_stride, int64_t rows, int64_t columns, float* to,
                        int64_t to_stride) {
    const int64_t whole_rows = rows / 4 * 4;
    const int64_t whole_columns = columns / 4 * 4;
    for (int64_t r = 0; r < whole_rows; r += 4) {
        for (int64_t c = 0; c < whole_columns; c += 4) {
            turn_four(from + r * from_stride + c, from_stride, to + c * to_stride + r, to_stride);
        }
    }
    for (int64_t r = 0; r < rows; ++r) {
        for (int64_t c = r < whole_rows ? whole_columns : 0; c < columns; ++c) {
            to[c * to_stride + r] = from[r * from_stride + c];
        }
    }
}

// Steps of an inner dimension that is not padded.
template <class E>
ANTIPHON_INLINE int64_t steps_of(int64_t inner) {
    return divide_up(inner, E::per_step);
}

// Words [count] of two bfloat16 each: the first of `low`, the second of `high`, or zero where that is null.
static void join_pairs(const uint16_t* low, const uint16_t* high, int64_t count, uint32_t* words) {
    if (high == nullptr) {
        for (int64_t i = 0; i < count; ++i) words[i] = low[i];
    } else {
        for (int64_t i = 0; i < count; ++i) words[i] = low[i] | static_cast<uint32_t>(high[i]) << 16;
    }
}

// Elements step * per_step .. of one row, as words; an odd last one beside a zero.
template <class T>
void copy_steps(const T* row, int64_t count, T* to) {
    std::memcpy(to, row, static_cast<size_t>(count) * sizeof(T));
    if constexpr (sizeof(T) == 2) {
        if (count % 2 != 0) to[count] = 0;
    }
}

// Columns [first, first + 16) and steps [step, step + steps) of the second factor as a panel [steps][16]; zeros where
// there is no column.
template <class V, class E>
void pack_columns(const ProductCall& call, int64_t first, int64_t step, int64_t steps, float* panel) {
    using T = typename E::Storage;
    const int64_t columns = smaller(panel_width, call.columns - first);
    const int64_t begin = step * E::per_step;
    const T* from = static_cast<const T*>(call.b) + begin * call.b_step + first * call.b_column;
    if (columns < panel_width) std::memset(panel, 0, static_cast<size_t>(steps * panel_bytes));
    if (call.b_column == 1) {
        for (int64_t s = 0; s < steps; ++s) {
            if constexpr (E::type == ElementType::fp32) {
                V::store(panel + s * panel_width, load_lanes<V>(from + s * call.b_step, static_cast<int>(columns)));
            } else {
                const T* low = from + 2 * s * call.b_step;
                const bool has_high = begin + 2 * s + 1 < call.inner;
                join_pairs(low, has_high ? low + call.b_step : nullptr, columns,
                           reinterpret_cast<uint32_t*>(panel) + s * panel_width);
            }
        }
        return;
    }
    if constexpr (E::type == ElementType::fp32) {
        turn_matrix(from, call.b_column, columns, steps, panel, panel_width);
    } else {
        const int64_t count = smaller(2 * steps, call.inner - begin);
        for (int64_t n = 0; n < columns; n += 4) {  // rows may begin between words, so they are copied first
            alignas(64) float rows[4][packed_steps];
            const int64_t some = smaller(4, columns - n);
            for (int64_t r = 0; r < some; ++r) {
                copy_steps(from + (n + r) * call.b_column, count, reinterpret_cast<T*>(rows[r]));
            }
            turn_matrix(rows[0], packed_steps, some, steps, panel + n, panel_width);
        }
    }
}

// Where rows of the first factor lie, inner dimension adjacent.
struct InnerRows {
    const char* data;
    int64_t row_bytes;
};

template <class Arch, class E>
void multiply_item(const ProductCall& call, const InnerRows& a, int64_t group, int64_t first_row, int64_t num_rows) {
    using V = typename Arch::Vector;
    using T = typename E::Storage;
    const int64_t first_column = group * group_width;
    const int64_t columns = smaller(group_width, call.columns - first_column);
    const int num_panels = static_cast<int>(divide_up(columns, panel_width));
    const int64_t all_steps = steps_of<E>(call.inner);
    const bool is_wide = call.out_fp32 || E::type == ElementType::fp32;
    const bool fits = is_wide && columns % panel_width == 0 && call.inner > 0;
    auto* wide = static_cast<float*>(call.out) + first_row * call.out_row + first_column;
    auto* narrow = static_cast<T*>(call.out) + first_row * call.out_row + first_column;
    float* sums = fits ? wide : Scratch::get<float>(ScratchUse::products, static_cast<size_t>(num_rows * group_width));
    const int64_t sums_stride = fits ? call.out_row : group_width;
    const auto move = [&](bool in) {
        for (int64_t row = 0; row < num_rows; ++row) {
            float* sum = sums + row * group_width;
            for_lanes(columns, [&](int64_t i, int lanes) {
                float* of_wide = wide + row * call.out_row + i;
                T* of_narrow = narrow + row * call.out_row + i;
                if (in) {
                    V::store(sum + i, is_wide ? load_lanes<V>(of_wide, lanes) : load_lanes<V>(of_narrow, lanes));
                } else if (is_wide) {
                    store_lanes<V>(of_wide, V::load(sum + i), lanes);
                } else {
                    store_lanes<V>(of_narrow, V::load(sum + i), lanes);
                }
            });
        }
    };
    if (!fits && call.adds) move(true);
    if (!fits && !call.adds && call.inner == 0) std::memset(sums, 0, static_cast<size_t>(num_rows * group_width) * 4);
    float* panels = Scratch::get<float>(ScratchUse::unpacked, packed_steps * group_width);
    for (int64_t step = 0; step < all_steps; step += packed_steps) {
        Segment segment;
        segment.steps = smaller(packed_steps, all_steps - step);
        for (int n = 0; n < num_panels; ++n) {
            float* panel = panels + n * packed_steps * panel_width;
            pack_columns<V, E>(call, first_column + n * panel_width, step, segment.steps, panel);
            segment.panel[n] = segment.prefetch[n] = reinterpret_cast<const char*>(panel);
        }
        multiply_block<Arch, E>({
            .rows = a.data + first_row * a.row_bytes + step * 4,
            .row_bytes = static_cast<size_t>(a.row_bytes),
            .num_rows = num_rows,
            .segments = &segment,
            .num_segments = 1,
            .num_panels = num_panels,
            .step_bytes = panel_bytes,
            .sums = sums,
            .sums_stride = static_cast<size_t>(sums_stride),
            .accumulate = call.adds || step > 0,
        });
    }
    if (!fits) move(false);
}

constexpr int64_t rows_turned_at_once = 64;

// Rows [first, first + count) of the first factor, inner dimension adjacent, `stride` words apart.
template <class E>
static void turn_rows(const ProductCall& call, int64_t first, int64_t count, float* to, int64_t stride) {
    using T = typename E::Storage;
    const T* from = static_cast<const T*>(call.a) + first * call.a_row;
    if (call.a_step == 1) {
        for (int64_t row = 0; row < count; ++row) {
            copy_steps(from + row * call.a_row, call.inner, reinterpret_cast<T*>(to + row * stride));
        }
    } else if constexpr (E::type == ElementType::fp32) {
        turn_matrix(from, call.a_step, call.inner, count, to, stride);
    } else {
        alignas(64) float words[4][rows_turned_at_once];
        const int64_t steps = steps_of<E>(call.inner);
        for (int64_t s = 0; s < steps; s += 4) {
            const int64_t some = smaller(4, steps - s);
            for (int64_t r = 0; r < some; ++r) {
                const T* low = from + 2 * (s + r) * call.a_step;
                const bool has_high = 2 * (s + r) + 1 < call.inner;
                join_pairs(low, has_high ? low + call.a_step : nullptr, count, reinterpret_cast<uint32_t*>(words[r]));
            }
            turn_matrix(words[0], rows_turned_at_once, some, count, to + s, stride);
        }
    }
}

// The first factors of all calls; those whose inner dimension is not adjacent, or not of whole steps, are copied into
// the caller's scratch.
template <class E>
static std::vector<InnerRows> inner_rows(const std::vector<ProductCall>& calls, ThreadPool& pool) {
    std::vector<InnerRows> found;
    int64_t size = 0;
    for (const ProductCall& call : calls) {
        const bool is_adjacent = call.a_step == 1 && call.inner % E::per_step == 0;
        const int64_t stride = spread_stride(ElementType::fp32, steps_of<E>(call.inner));
        const auto row_bytes = call.a_row * static_cast<int64_t>(sizeof(typename E::Storage));
        found.push_back({is_adjacent ? static_cast<const char*>(call.a) : nullptr, is_adjacent ? row_bytes : stride * 4});
        if (!is_adjacent) size += round_up(call.rows * stride, panel_width);
    }
    if (size == 0) return found;
    float* memory = Scratch::get<float>(ScratchUse::padded_rows, static_cast<size_t>(size));
    std::vector<int64_t> ends{0};
    for (size_t i = 0; i < calls.size(); ++i) {
        const bool is_copied = found[i].data == nullptr;
        ends.push_back(ends.back() + (is_copied ? divide_up(calls[i].rows, rows_turned_at_once) : 0));
        if (!is_copied) continue;
        found[i].data = reinterpret_cast<const char*>(memory);
        memory += round_up(calls[i].rows * found[i].row_bytes / 4, panel_width);
    }
    pool.for_each(ends.back(), [&](int64_t item) {
        const size_t i = static_cast<size_t>(std::upper_bound(ends.begin(), ends.end(), item) - ends.begin()) - 1;
        const int64_t first = (item - ends[i]) * rows_turned_at_once;
        auto* to = reinterpret_cast<float*>(const_cast<char*>(found[i].data) + first * found[i].row_bytes);
        turn_rows<E>(calls[i], first, smaller(rows_turned_at_once, calls[i].rows - first), to, found[i].row_bytes / 4);
    });
    return found;
}

template <class Arch, class E>
void products(const std::vector<ProductCall>& calls, ThreadPool& pool) {
    const std::vector<InnerRows> rows = inner_rows<E>(calls, pool);
    std::vector<int64_t> ends{0};
    for (const ProductCall& call : calls) {
        const int64_t chunks = divide_up(call.rows, rows_of_item);
        ends.push_back(ends.back() + chunks * divide_up(call.columns, group_width));
    }
    pool.for_each(ends.back(), [&](int64_t item) {
        const size_t i = static_cast<size_t>(std::upper_bound(ends.begin(), ends.end(), item) - ends.begin()) - 1;
        const ProductCall& call = calls[i];
        const int64_t chunks = divide_up(call.rows, rows_of_item);
        const int64_t chunk = (item - ends[i]) % chunks;
        const int64_t first = call.rows * chunk / chunks;
        multiply_item<Arch, E>(call, rows[i], (item - ends[i]) / chunks, first,
                               call.rows * (chunk + 1) / chunks - first);
    });
}

}  // namespace antiphon::kernels

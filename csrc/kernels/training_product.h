// Products of float32 matrices for training, of which neither factor is known before: rows times a weight, gradients
// times it, gradients of it. Several products of one kind (those of the experts) are one region of the thread pool.
//
// An item is 64 columns of one product and up to `rows_of_item` of its rows. It packs the second factor's columns, a
// stretch of the inner dimension at a time, into panels that stay in the cache while all rows pass over them in the
// register tile of all other products. A first factor whose inner dimension is not adjacent is turned before.
// Each sum walks the inner dimension front to back, so a row's bits depend on nothing beside it.
#pragma once

#include <algorithm>

#include "kernels/block_product.h"
#include "kernels/training_calls.h"

namespace antiphon::kernels {

constexpr int64_t rows_of_item = 1024;
constexpr int64_t packed_steps = 256;  // of the inner dimension: 64 KiB of four panels

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
inline void turn_matrix(const float* from, int64_t from_stride, int64_t rows, int64_t columns, float* to,
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

// Columns [first, first + 16) and steps [step, step + steps) of the second factor as a panel [steps][16]; zeros where
// there is no column.
template <class V>
void pack_columns(const ProductCall& call, int64_t first, int64_t step, int64_t steps, float* panel) {
    const int64_t columns = smaller(panel_width, call.columns - first);
    const float* from = call.b + step * call.b_step + first * call.b_column;
    if (call.b_column == 1) {
        for (int64_t s = 0; s < steps; ++s) {
            V::store(panel + s * panel_width, load_lanes<V>(from + s * call.b_step, static_cast<int>(columns)));
        }
        return;
    }
    if (columns < panel_width) std::memset(panel, 0, static_cast<size_t>(steps * panel_bytes));
    turn_matrix(from, call.b_column, columns, steps, panel, panel_width);
}

// Where rows of the first factor lie, inner dimension adjacent.
struct InnerRows {
    const float* data;
    int64_t stride;
};

template <class Arch>
void multiply_item(const ProductCall& call, const InnerRows& a, int64_t group, int64_t first_row, int64_t num_rows) {
    using V = typename Arch::Vector;
    const int64_t first_column = group * group_width;
    const int64_t columns = smaller(group_width, call.columns - first_column);
    const int num_panels = static_cast<int>(divide_up(columns, panel_width));
    float* panels = Scratch::get<float>(ScratchUse::unpacked, packed_steps * group_width);
    float* out = call.out + first_row * call.out_row + first_column;
    if (call.inner == 0 && !call.adds) {
        for (int64_t row = 0; row < num_rows; ++row) {
            std::memset(out + row * call.out_row, 0, static_cast<size_t>(columns) * 4);
        }
    }
    if (call.inner == 0) return;
    const bool fits = columns % panel_width == 0;
    float* sums = fits ? out : Scratch::get<float>(ScratchUse::products, static_cast<size_t>(num_rows * group_width));
    const int64_t sums_stride = fits ? call.out_row : group_width;
    if (!fits && call.adds) {
        for (int64_t row = 0; row < num_rows; ++row) {
            std::memcpy(sums + row * group_width, out + row * call.out_row, static_cast<size_t>(columns) * 4);
        }
    }
    for (int64_t step = 0; step < call.inner; step += packed_steps) {
        Segment segment;
        segment.steps = smaller(packed_steps, call.inner - step);
        for (int n = 0; n < num_panels; ++n) {
            float* panel = panels + n * packed_steps * panel_width;
            pack_columns<V>(call, first_column + n * panel_width, step, segment.steps, panel);
            segment.panel[n] = segment.prefetch[n] = reinterpret_cast<const char*>(panel);
        }
        multiply_block<Arch, Fp32>({
            .rows = reinterpret_cast<const char*>(a.data + first_row * a.stride + step),
            .row_bytes = static_cast<size_t>(a.stride) * 4,
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
    if (fits) return;
    for (int64_t row = 0; row < num_rows; ++row) {
        std::memcpy(out + row * call.out_row, sums + row * group_width, static_cast<size_t>(columns) * 4);
    }
}

constexpr int64_t rows_turned_at_once = 64;

// The first factors of all calls whose inner dimension is not adjacent, turned into the caller's scratch.
inline std::vector<InnerRows> turned_rows(const std::vector<ProductCall>& calls, ThreadPool& pool) {
    std::vector<InnerRows> found;
    int64_t size = 0;
    for (const ProductCall& call : calls) {
        const bool is_adjacent = call.a_step == 1;
        const int64_t stride = spread_stride(ElementType::fp32, call.inner);
        found.push_back({is_adjacent ? call.a : nullptr, is_adjacent ? call.a_row : stride});
        if (!is_adjacent) size += round_up(call.rows * stride, panel_width);
    }
    if (size == 0) return found;
    float* memory = Scratch::get<float>(ScratchUse::padded_rows, static_cast<size_t>(size));
    std::vector<int64_t> ends{0};
    for (size_t i = 0; i < calls.size(); ++i) {
        const bool is_turned = found[i].data == nullptr;
        ends.push_back(ends.back() + (is_turned ? divide_up(calls[i].rows, rows_turned_at_once) : 0));
        if (!is_turned) continue;
        found[i].data = memory;
        memory += round_up(calls[i].rows * found[i].stride, panel_width);
    }
    pool.for_each(ends.back(), [&](int64_t item) {
        const size_t i = static_cast<size_t>(std::upper_bound(ends.begin(), ends.end(), item) - ends.begin()) - 1;
        const ProductCall& call = calls[i];
        const int64_t first = (item - ends[i]) * rows_turned_at_once;
        turn_matrix(call.a + first, call.a_step, call.inner, smaller(rows_turned_at_once, call.rows - first),
                    const_cast<float*>(found[i].data) + first * found[i].stride, found[i].stride);
    });
    return found;
}

template <class Arch>
void products(const std::vector<ProductCall>& calls, ThreadPool& pool) {
    const std::vector<InnerRows> rows = turned_rows(calls, pool);
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
        multiply_item<Arch>(call, rows[i], (item - ends[i]) / chunks, first,
                            call.rows * (chunk + 1) / chunks - first);
    });
}

}  // namespace antiphon::kernels

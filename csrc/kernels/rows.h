// Rows of activations: reading them at the width a packed weight expects, and loads and stores by element type.
#pragma once

#include <cstring>

#include "kernels/packed_layout.h"
#include "kernels/scratch.h"
#include "kernels/thread_pool.h"

namespace antiphon::kernels {

// A matrix of activations: `stride` elements from row to row, consecutive elements within a row.
struct Rows {
    const void* data = nullptr;
    int64_t count = 0;
    int64_t stride = 0;
};

template <class E>
ANTIPHON_INLINE const typename E::Storage* row_at(const Rows& rows, int64_t index) {
    return static_cast<const typename E::Storage*>(rows.data) + index * rows.stride;
}

// Applies f(first lane's index, lanes) over [0, width) in vectors of 16; the last may be shorter.
template <class F>
ANTIPHON_INLINE void for_lanes(int64_t width, F&& f) {
    int64_t i = 0;
    for (; i + panel_width <= width; i += panel_width) f(i, panel_width);
    if (i < width) f(i, static_cast<int>(width - i));
}

template <class V, class T>
ANTIPHON_INLINE typename V::F load_lanes(const T* p, int lanes) {
    return lanes == panel_width ? V::load(p) : V::load_n(p, lanes);
}

template <class V, class T>
ANTIPHON_INLINE void store_lanes(T* p, typename V::F x, int lanes) {
    if (lanes == panel_width) {
        V::store(p, x);
    } else {
        V::store_n(p, x, lanes);
    }
}

constexpr int64_t rows_worth_a_thread = 32;

// A copy of one row in another float type, with zeros up to `padded`.
template <class V, class From, class To>
ANTIPHON_INLINE void copy_row(const From* from, int64_t width, int64_t padded, To* to) {
    if constexpr (sizeof(From) == sizeof(To)) {
        std::memcpy(to, from, static_cast<size_t>(width) * sizeof(To));
    } else {
        for_lanes(width, [&](int64_t i, int lanes) { store_lanes<V>(to + i, load_lanes<V>(from + i, lanes), lanes); });
    }
    std::memset(to + width, 0, static_cast<size_t>(padded - width) * sizeof(To));
}

// The same with column i of the copy from column order[i].
template <class V, class From, class To>
ANTIPHON_INLINE void copy_row_in_order(const From* from, const int32_t* order, int64_t width, int64_t padded, To* to) {
    if constexpr (sizeof(From) == sizeof(To)) {
        for (int64_t i = 0; i < width; ++i) to[i] = from[order[i]];
    } else {
        for_lanes(width, [&](int64_t i, int lanes) {
            From gathered[panel_width];
            for (int n = 0; n < lanes; ++n) gathered[n] = from[order[i + n]];
            store_lanes<V>(to + i, load_lanes<V>(gathered, lanes), lanes);
        });
    }
    std::memset(to + width, 0, static_cast<size_t>(padded - width) * sizeof(To));
}

// The rows themselves, or a copy in the caller's scratch where the kernels could not read them well: of another type than
// the weight's, of a width to be padded with zeros, or more rows than one narrow tile side by side at a stride that makes
// them collide in the cache.
template <class V, class E, class To>
Rows rows_for(const PackedMatrix& weight, const Rows& rows, ThreadPool& pool) {
    const int64_t width = weight.inner;
    const int64_t padded = weight.format.row_width(width);
    constexpr bool same = sizeof(To) == sizeof(typename E::Storage);
    const bool collides = rows.count > 6 && rows.count <= 32 && rows.stride * sizeof(To) % 512 == 0;
    if (same && padded == width && !collides) return rows;
    const int64_t stride = spread_stride(weight.format.type, padded);
    To* copy = Scratch::get<To>(ScratchUse::padded_rows, static_cast<size_t>(rows.count * stride));
    pool.for_each(divide_up(rows.count, rows_worth_a_thread), [&](int64_t item) {
        const int64_t end = smaller(rows.count, (item + 1) * rows_worth_a_thread);
        for (int64_t row = item * rows_worth_a_thread; row < end; ++row) {
            copy_row<V>(row_at<E>(rows, row), width, padded, copy + row * stride);
        }
    });
    return {copy, rows.count, stride};
}

}  // namespace antiphon::kernels

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

constexpr int64_t rows_worth_a_thread = 32;

// The rows themselves, or a copy in the caller's scratch where the kernels could not read them well: width to be padded
// with zeros, or more rows than one narrow tile side by side at a stride that makes them collide in the cache.
template <class E>
Rows padded_rows(const Rows& rows, int64_t width, ThreadPool& pool) {
    using T = typename E::Storage;
    const int64_t padded = padded_inner(E::type, width);
    const bool collides = rows.count > 6 && rows.count <= 32 && rows.stride * sizeof(T) % 512 == 0;
    if (padded == width && !collides) return rows;
    const int64_t stride = spread_stride(E::type, width);
    T* copy = Scratch::get<T>(ScratchUse::padded_rows, static_cast<size_t>(rows.count * stride));
    pool.for_each(divide_up(rows.count, rows_worth_a_thread), [&](int64_t item) {
        const int64_t end = smaller(rows.count, (item + 1) * rows_worth_a_thread);
        for (int64_t row = item * rows_worth_a_thread; row < end; ++row) {
            std::memcpy(copy + row * stride, row_at<E>(rows, row), static_cast<size_t>(width) * sizeof(T));
            std::memset(copy + row * stride + width, 0, static_cast<size_t>(padded - width) * sizeof(T));
        }
    });
    return {copy, rows.count, stride};
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

}  // namespace antiphon::kernels

// RMS norm of rows, optionally after adding a residual stream: x / sqrt(mean(x^2) + eps), rounded, times the weight. Or
// the sum alone, where no norm is wanted.
// The rounding before the weight is what Hugging Face's RMSNorm modules do.
#pragma once

#include <cmath>

#include "kernels/operations.h"
#include "kernels/rows.h"

namespace antiphon::kernels {

// Rounds 16 lanes to the element type and back.
template <class V, class E>
ANTIPHON_INLINE typename V::F rounded(typename V::F x) {
    if constexpr (E::type == ElementType::fp32) {
        return x;
    } else {
        typename E::Storage lanes[panel_width];
        V::store(lanes, x);
        return V::load(lanes);
    }
}

// out = norm(x) * weight over `width` elements; x and out may be the same.
template <class V, class E>
void rms_norm_row(const typename E::Storage* x, const typename E::Storage* weight, typename E::Storage* out,
                  int64_t width, float eps) {
    auto squares = V::zero();
    for_lanes(width, [&](int64_t i, int lanes) {
        const auto v = load_lanes<V>(x + i, lanes);
        squares = V::fma(v, v, squares);
    });
    const auto scale = V::set1(1.0f / std::sqrt(V::reduce_add(squares) / static_cast<float>(width) + eps));
    for_lanes(width, [&](int64_t i, int lanes) {
        const auto normed = rounded<V, E>(V::mul(load_lanes<V>(x + i, lanes), scale));
        store_lanes<V>(out + i, V::mul(normed, load_lanes<V>(weight + i, lanes)), lanes);
    });
}

constexpr int64_t elements_worth_a_thread = 32768;

template <class Arch, class E>
void rms_norm(const RmsNormCall& call, ThreadPool& pool) {
    using V = typename Arch::Vector;
    using T = typename E::Storage;
    const int64_t rows_per_item = larger(1, elements_worth_a_thread / larger(1, call.width));
    pool.for_each(divide_up(call.x.count, rows_per_item), [&](int64_t item) {
        const int64_t end = smaller(call.x.count, (item + 1) * rows_per_item);
        for (int64_t row = item * rows_per_item; row < end; ++row) {
            const T* x = row_at<E>(call.x, row);
            if (call.delta.data != nullptr) {
                const T* delta = row_at<E>(call.delta, row);
                T* sum = static_cast<T*>(call.sum) + row * call.width;
                for_lanes(call.width, [&](int64_t i, int lanes) {
                    store_lanes<V>(sum + i, V::add(load_lanes<V>(x + i, lanes), load_lanes<V>(delta + i, lanes)), lanes);
                });
                x = sum;
            }
            if (call.out == nullptr) continue;
            rms_norm_row<V, E>(x, static_cast<const T*>(call.weight), static_cast<T*>(call.out) + row * call.out_stride,
                               call.width, call.eps);
        }
    });
}

}  // namespace antiphon::kernels

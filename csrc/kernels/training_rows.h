// Rows between tokens and experts for training: weighted sums of each token's rows, and the gradients of that. Only
// gathers, so a row has the same bits whichever rows are beside it.
#pragma once

#include "kernels/training_calls.h"

namespace antiphon::kernels {

template <class V, class E>
ANTIPHON_INLINE float element(const void* data, int64_t index) {
    const auto* values = static_cast<const typename E::Storage*>(data);
    if constexpr (E::type == ElementType::fp32) {
        return values[index];
    } else {
        float lanes[panel_width];
        V::store(lanes, V::load_n(values + index, 1));
        return lanes[0];
    }
}

template <class Arch, class E>
void combine_gradient(const CombineGradientCall& call, ThreadPool& pool) {
    using V = typename Arch::Vector;
    using T = typename E::Storage;
    const int64_t width = call.width;
    for_rows(call.num_rows, width, pool, [&](int64_t row) {
        const int64_t choice = call.order[row];
        const T* grad = row_at<E>(call.grad, choice / call.top_k);
        const auto weight = V::set1(element<V, E>(call.weights, choice));
        T* out = static_cast<T*>(call.grad_y) + row * width;
        if (call.y == nullptr) {
            for_lanes(width, [&](int64_t i, int lanes) {
                store_lanes<V>(out + i, V::mul(load_lanes<V>(grad + i, lanes), weight), lanes);
            });
            return;
        }
        const T* y = static_cast<const T*>(call.y) + row * width;
        auto dots = V::zero();
        for_lanes(width, [&](int64_t i, int lanes) {
            const auto g = load_lanes<V>(grad + i, lanes);
            dots = V::fma(g, load_lanes<V>(y + i, lanes), dots);
            store_lanes<V>(out + i, V::mul(g, weight), lanes);
        });
        V::store_n(static_cast<T*>(call.grad_weights) + choice, V::set1(V::reduce_add(dots)), 1);
    });
}

template <class Arch, class E>
void sum_rows(const SumRowsCall& call, ThreadPool& pool) {
    using V = typename Arch::Vector;
    using T = typename E::Storage;
    const int64_t width = call.width;
    for_rows(call.num_tokens, call.top_k * width, pool, [&](int64_t token) {
        const int64_t first = token * call.top_k;
        T* out = static_cast<T*>(call.out) + token * width;
        float* weights = Scratch::get<float>(ScratchUse::products, static_cast<size_t>(call.top_k));
        for (int64_t k = 0; k < call.top_k; ++k) {
            weights[k] = call.weights == nullptr ? 1.0f : element<V, E>(call.weights, first + k);
        }
        for_lanes(width, [&](int64_t i, int lanes) {
            auto total = V::zero();
            for (int64_t k = 0; k < call.top_k; ++k) {
                const auto x = load_lanes<V>(row_at<E>(call.x, call.places[first + k]) + i, lanes);
                total = V::fma(x, V::set1(weights[k]), total);
            }
            store_lanes<V>(out + i, total, lanes);
        });
    });
}

}  // namespace antiphon::kernels

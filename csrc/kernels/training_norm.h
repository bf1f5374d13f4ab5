// Root-mean-square norm for training: x * factor * weight in float32, rounded once, and its gradients.
// With n = x * factor and g = grad * weight, that of x is factor * (g - n * mean(g * n)), that of the weight the sum of
// grad * n over rows.
#pragma once

#include <cmath>

#include "kernels/training_calls.h"

namespace antiphon::kernels {

// out = x * factor * weight; returns the factor 1 / sqrt(mean(x^2) + eps).
template <class V, class T, class Out>
float norm_row(const T* x, const T* weight, int64_t width, float eps, Out* out) {
    auto squares = V::zero();
    for_lanes(width, [&](int64_t i, int lanes) {
        const auto v = load_lanes<V>(x + i, lanes);
        squares = V::fma(v, v, squares);
    });
    const float factor = 1.0f / std::sqrt(V::reduce_add(squares) / static_cast<float>(width) + eps);
    const auto scale = V::set1(factor);
    for_lanes(width, [&](int64_t i, int lanes) {
        const auto normed = V::mul(load_lanes<V>(x + i, lanes), scale);
        store_lanes<V>(out + i, V::mul(normed, load_lanes<V>(weight + i, lanes)), lanes);
    });
    return factor;
}

template <class Arch, class E>
void norm(const NormCall& call, ThreadPool& pool) {
    using T = typename E::Storage;
    for_rows(call.x.count(), call.width, pool, [&](int64_t row) {
        call.factors[row] = norm_row<typename Arch::Vector>(
            GridPlace(call.x, row).in<E>(call.x), static_cast<const T*>(call.weight), call.width, call.eps,
            static_cast<T*>(call.out) + row * call.width);
    });
}

// `sums` [width]: the weight's gradient so far. `grad` may be of a wider type.
template <class V, class T, class Grad>
void norm_gradient_row(const Grad* grad, const T* x, const T* weight, float factor, int64_t width, T* grad_x,
                       float* sums) {
    const auto scale = V::set1(factor);
    auto dots = V::zero();
    for_lanes(width, [&](int64_t i, int lanes) {
        const auto product = V::mul(load_lanes<V>(grad + i, lanes), V::mul(load_lanes<V>(x + i, lanes), scale));
        store_lanes<V>(sums + i, V::add(load_lanes<V>(sums + i, lanes), product), lanes);
        dots = V::fma(product, load_lanes<V>(weight + i, lanes), dots);
    });
    const auto mean = V::set1(V::reduce_add(dots) / static_cast<float>(width));
    for_lanes(width, [&](int64_t i, int lanes) {
        const auto weighted = V::mul(load_lanes<V>(grad + i, lanes), load_lanes<V>(weight + i, lanes));
        const auto normed = V::mul(load_lanes<V>(x + i, lanes), scale);
        store_lanes<V>(grad_x + i, V::mul(scale, V::sub(weighted, V::mul(normed, mean))), lanes);
    });
}

// body(row, sums) for every row, in the items of `for_rows`, each of which adds to sums [width] of its own; their sum,
// in order, is `total`.
template <class V, class Body>
void for_rows_with_sums(int64_t num_rows, int64_t width, float* total, ThreadPool& pool, Body&& body) {
    const int64_t rows_per_item = larger(1, elements_an_item / larger(1, width));
    const int64_t num_items = divide_up(num_rows, rows_per_item);
    float* sums = Scratch::get<float>(ScratchUse::sums, static_cast<size_t>(num_items * width));
    std::memset(sums, 0, static_cast<size_t>(num_items * width) * sizeof(float));
    pool.for_each(num_items, [&](int64_t item) {
        const int64_t end = smaller(num_rows, (item + 1) * rows_per_item);
        for (int64_t row = item * rows_per_item; row < end; ++row) body(row, sums + item * width);
    });
    std::memset(total, 0, static_cast<size_t>(width) * sizeof(float));
    for (int64_t item = 0; item < num_items; ++item) {
        const float* of_item = sums + item * width;
        for_lanes(width, [&](int64_t i, int lanes) {
            store_lanes<V>(total + i, V::add(load_lanes<V>(total + i, lanes), load_lanes<V>(of_item + i, lanes)), lanes);
        });
    }
}

template <class Arch, class E>
void norm_gradient(const NormGradientCall& call, ThreadPool& pool) {
    using V = typename Arch::Vector;
    using T = typename E::Storage;
    const int64_t width = call.width;
    for_rows_with_sums<V>(call.x.count(), width, call.grad_weight, pool, [&](int64_t row, float* sums) {
        const GridPlace place(call.x, row);
        norm_gradient_row<V>(place.in<E>(call.grad), place.in<E>(call.x), static_cast<const T*>(call.weight),
                             call.factors[row], width, static_cast<T*>(call.grad_x) + row * width, sums);
    });
}

}  // namespace antiphon::kernels

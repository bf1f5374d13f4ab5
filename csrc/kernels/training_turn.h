// Heads of queries and keys for training: norm, if there is one, and rotary embedding (RoFormer, equation 34), neighbours
// or halves paired, in one pass; and the gradient, which is turned back. In float32, rounded once; what is beyond the
// pairs is not turned.
#pragma once

#include "kernels/training_norm.h"

namespace antiphon::kernels {

// out [width] = x turned by the angles that begin at `first`, or by the opposite ones. x and out do not overlap.
template <class V, class In, class Out>
void turn_row(const Angles& angles, int64_t first, bool back, const In* x, int64_t width, Out* out) {
    const float* cos = angles.cos + first;
    const float* sin = angles.sin + first;
    const int64_t half = angles.half;
    const float sign = back ? -1.0f : 1.0f;
    if (angles.interleaved) {
        float pairs[2 * panel_width];
        for_lanes(half, [&](int64_t i, int lanes) {
            for_lanes(2 * lanes, [&](int64_t j, int some) {
                store_lanes<V>(pairs + j, load_lanes<V>(x + 2 * i + j, some), some);
            });
            for (int j = 0; j < lanes; ++j) {
                const float a = pairs[2 * j];
                const float b = pairs[2 * j + 1];
                const float s = sign * sin[i + j];
                pairs[2 * j] = a * cos[i + j] - b * s;
                pairs[2 * j + 1] = b * cos[i + j] + a * s;
            }
            for_lanes(2 * lanes, [&](int64_t j, int some) {
                store_lanes<V>(out + 2 * i + j, load_lanes<V>(pairs + j, some), some);
            });
        });
    } else {
        for_lanes(half, [&](int64_t i, int lanes) {
            const auto a = load_lanes<V>(x + i, lanes);
            const auto b = load_lanes<V>(x + half + i, lanes);
            const auto c = load_lanes<V>(cos + i, lanes);
            const auto s = V::mul(V::set1(sign), load_lanes<V>(sin + i, lanes));
            store_lanes<V>(out + i, V::sub(V::mul(a, c), V::mul(b, s)), lanes);
            store_lanes<V>(out + half + i, V::add(V::mul(b, c), V::mul(a, s)), lanes);
        });
    }
    const int64_t turned = 2 * half;
    for_lanes(width - turned, [&](int64_t i, int lanes) {
        store_lanes<V>(out + turned + i, load_lanes<V>(x + turned + i, lanes), lanes);
    });
}

template <class Arch, class E>
void turn(const TurnCall& call, ThreadPool& pool) {
    using V = typename Arch::Vector;
    using T = typename E::Storage;
    const int64_t width = call.width;
    for_rows(call.x.count(), width, pool, [&](int64_t row) {
        const GridPlace place(call.x, row);
        const T* x = place.in<E>(call.x);
        const int64_t first = place.offset(call.angles.strides);
        T* out = static_cast<T*>(call.out) + row * width;
        if (call.weight == nullptr) {
            turn_row<V>(call.angles, first, false, x, width, out);
            return;
        }
        float* normed = Scratch::get<float>(ScratchUse::products, static_cast<size_t>(width));
        call.factors[row] = norm_row<V>(x, static_cast<const T*>(call.weight), width, call.eps, normed);
        turn_row<V>(call.angles, first, false, normed, width, out);
    });
}

template <class Arch, class E>
void turn_gradient(const TurnGradientCall& call, ThreadPool& pool) {
    using V = typename Arch::Vector;
    using T = typename E::Storage;
    const int64_t width = call.width;
    const auto place_out = [&](const GridPlace& place) { return const_cast<T*>(place.in<E>(call.out)); };
    if (call.weight == nullptr) {
        for_rows(call.grad.count(), width, pool, [&](int64_t row) {
            const GridPlace place(call.grad, row);
            turn_row<V>(call.angles, place.offset(call.angles.strides), true, place.in<E>(call.grad), width,
                        place_out(place));
        });
        return;
    }
    for_rows_with_sums<V>(call.grad.count(), width, call.grad_weight, pool, [&](int64_t row, float* sums) {
        const GridPlace place(call.grad, row);
        float* grad = Scratch::get<float>(ScratchUse::products, static_cast<size_t>(width));
        turn_row<V>(call.angles, place.offset(call.angles.strides), true, place.in<E>(call.grad), width, grad);
        norm_gradient_row<V>(grad, place.in<E>(call.x), static_cast<const T*>(call.weight), call.factors[row], width,
                             place_out(place), sums);
    });
}

}  // namespace antiphon::kernels

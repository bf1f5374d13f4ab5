// A step of AdamW over flat float32 parameters (Loshchilov and Hutter, arXiv 1711.05101, algorithm 2): one pass over
// parameters, gradients and both moments, which also scales the gradients.
#pragma once

#include <cmath>

#include "kernels/training_calls.h"

namespace antiphon::kernels {

template <class V>
ANTIPHON_INLINE typename V::F root(typename V::F x) {
    alignas(64) float lanes[panel_width];
    V::store(lanes, x);
    for (float& lane : lanes) lane = std::sqrt(lane);
    return V::load(lanes);
}

template <class Arch>
void adamw(const AdamwCall& call, ThreadPool& pool) {
    using V = typename Arch::Vector;
    const auto scale = V::set1(call.scale);
    const auto kept = V::set1(call.kept);
    const auto mean_share = V::set1(call.mean_share);
    const auto square_kept = V::set1(call.square_kept);
    const auto square_share = V::set1(call.square_share);
    const auto square_root = V::set1(call.square_root);
    const auto size = V::set1(-call.size);
    const auto eps = V::set1(call.eps);
    pool.for_each(divide_up(call.count, elements_an_item), [&](int64_t item) {
        const int64_t begin = item * elements_an_item;
        for_lanes(smaller(call.count - begin, elements_an_item), [&](int64_t lane, int lanes) {
            const int64_t i = begin + lane;
            const auto g = V::mul(load_lanes<V>(call.grad + i, lanes), scale);
            auto m = load_lanes<V>(call.mean + i, lanes);
            auto v = load_lanes<V>(call.square + i, lanes);
            auto p = V::mul(load_lanes<V>(call.values + i, lanes), kept);
            m = V::fma(mean_share, V::sub(g, m), m);
            v = V::fma(V::mul(square_share, g), g, V::mul(square_kept, v));
            const auto deviation = V::add(V::div(root<V>(v), square_root), eps);
            p = V::fma(size, V::div(m, deviation), p);
            store_lanes<V>(call.mean + i, m, lanes);
            store_lanes<V>(call.square + i, v, lanes);
            store_lanes<V>(call.values + i, p, lanes);
        });
    });
}

}  // namespace antiphon::kernels

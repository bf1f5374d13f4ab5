// Cross-entropy of rows of logits and its gradient in their place, a row at a time while caches hold it: once for the
// largest, once for exponentials and their sum, once for the gradient.
#pragma once

#include <cmath>
#include <limits>

#include "kernels/training_calls.h"

namespace antiphon::kernels {

// `wide` [width]: where numbers are kept in float32; the row itself where it is float32. Returns the row's loss.
template <class V, class E>
float cross_entropy_row(const CrossEntropyCall& call, typename E::Storage* logits, int64_t target, float* wide) {
    const int64_t width = call.width;
    const auto inverse = V::set1(1.0f / call.divisor);
    auto highest = V::set1(-std::numeric_limits<float>::infinity());
    for_lanes(width, [&](int64_t i, int lanes) {
        auto x = load_lanes<V>(logits + i, lanes);
        if (call.bias != nullptr) x = V::add(x, load_lanes<V>(call.bias + i, lanes));
        x = V::mul(x, inverse);
        store_lanes<V>(wide + i, x, lanes);
        highest = V::max(V::keep_lanes(x, 0, lanes, highest), highest);
    });
    const float largest = V::reduce_max(highest);
    const float of_target = wide[target] - largest;
    const auto shift = V::set1(largest);
    auto sums = V::zero();
    for_lanes(width, [&](int64_t i, int lanes) {
        const auto e = exp<V>(V::sub(load_lanes<V>(wide + i, lanes), shift));
        store_lanes<V>(wide + i, e, lanes);
        sums = V::add(sums, V::keep_lanes(e, 0, lanes, V::zero()));
    });
    const float total = V::reduce_add(sums);
    wide[target] -= total;  // the softmax less one, times the sum
    const auto factor = V::set1(1.0f / total);
    for_lanes(width, [&](int64_t i, int lanes) {
        store_lanes<V>(logits + i, V::mul(load_lanes<V>(wide + i, lanes), factor), lanes);
    });
    return std::log(total) - of_target;
}

template <class Arch, class E>
void cross_entropy(const CrossEntropyCall& call, ThreadPool& pool) {
    using V = typename Arch::Vector;
    using T = typename E::Storage;
    for_rows(call.num_rows, call.width, pool, [&](int64_t row) {
        T* logits = static_cast<T*>(call.logits) + row * call.width;
        if (call.targets[row] < 0) {
            std::memset(logits, 0, static_cast<size_t>(call.width) * sizeof(T));
            call.losses[row] = 0.0f;
            return;
        }
        float* wide;
        if constexpr (E::type == ElementType::fp32) {
            wide = logits;
        } else {
            wide = Scratch::get<float>(ScratchUse::products, static_cast<size_t>(call.width));
        }
        call.losses[row] = cross_entropy_row<V, E>(call, logits, call.targets[row], wide);
    });
}

}  // namespace antiphon::kernels

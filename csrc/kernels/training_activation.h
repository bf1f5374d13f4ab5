// act(gate) * up of rows [gate | up] for training, and the gradients of both halves. In float32, rounded once.
#pragma once

#include "kernels/training_calls.h"

namespace antiphon::kernels {

template <class V>
struct GateUpGradient {
    typename V::F gate;
    typename V::F up;
};

template <class V>
ANTIPHON_INLINE typename V::F sigmoid(typename V::F x) {
    const auto one = V::set1(1.0f);
    return V::div(one, V::add(one, exp<V>(V::sub(V::zero(), x))));
}

// 1 where x > 0, else 0: the arch has no comparisons, and no difference of two floats that matter is below 1e-30.
template <class V>
ANTIPHON_INLINE typename V::F is_positive(typename V::F x) {
    return V::min(V::set1(1.0f), V::max(V::zero(), V::mul(x, V::set1(1e30f))));
}

// d(g sigmoid(a g)) / dg with s = sigmoid(a g): s (1 + a g (1 - s)).
template <class V>
ANTIPHON_INLINE typename V::F swish_slope(typename V::F g, typename V::F s, typename V::F alpha) {
    const auto one = V::set1(1.0f);
    return V::mul(s, V::fma(V::mul(alpha, g), V::sub(one, s), one));
}

template <class V>
ANTIPHON_INLINE GateUpGradient<V> silu_gradient(typename V::F grad, typename V::F gate, typename V::F up) {
    const auto s = sigmoid<V>(gate);
    const auto slope = swish_slope<V>(gate, s, V::set1(1.0f));
    return {V::mul(V::mul(grad, up), slope), V::mul(grad, V::mul(gate, s))};
}

// d gelu(x) / dx = Phi(x) + x phi(x). Phi(x) = h - (2 h - 1) (1 - Phi(|x|)) with h = 1 for x > 0.
template <class V>
ANTIPHON_INLINE GateUpGradient<V> gelu_gradient(typename V::F grad, typename V::F gate, typename V::F up) {
    const auto size = V::abs(gate);
    const auto tail = V::sub(V::max(V::zero(), size), gelu<V>(size));  // |x| (1 - Phi(|x|))
    const auto least = V::set1(1e-20f);
    const auto above = V::div(V::add(tail, V::mul(V::set1(0.5f), least)), V::add(size, least));
    const auto h = is_positive<V>(gate);
    const auto below = V::sub(h, V::mul(V::sub(V::add(h, h), V::set1(1.0f)), above));
    const auto density =
        V::mul(V::set1(0.39894228040143268f), exp<V>(V::mul(V::set1(-0.5f), V::mul(gate, gate))));
    return {V::mul(V::mul(grad, up), V::fma(gate, density, below)), V::mul(grad, gelu<V>(gate))};
}

// Nothing passes a clamp beyond its limits.
template <class V>
ANTIPHON_INLINE GateUpGradient<V> swiglu_oai_gradient(typename V::F grad, typename V::F gate, typename V::F up,
                                                      float alpha, float limit) {
    const auto one = V::set1(1.0f);
    const auto highest = V::set1(limit);
    const auto a = V::set1(alpha);
    const auto g = V::min(highest, gate);
    const auto u = V::max(V::set1(-limit), V::min(highest, up));
    const auto s = sigmoid<V>(V::mul(a, g));
    const auto gate_passes = V::sub(one, is_positive<V>(V::sub(gate, highest)));
    const auto up_passes = V::sub(one, is_positive<V>(V::sub(V::abs(up), highest)));
    const auto of_gate = V::mul(V::mul(grad, V::add(u, one)), swish_slope<V>(g, s, a));
    return {V::mul(gate_passes, of_gate), V::mul(up_passes, V::mul(grad, V::mul(g, s)))};
}

template <class V>
ANTIPHON_INLINE typename V::F activated(const ActivationCall& call, typename V::F gate, typename V::F up) {
    switch (call.activation) {
        case Activation::silu: return V::mul(silu<V>(gate), up);
        case Activation::gelu: return V::mul(gelu<V>(gate), up);
        default: return swiglu_oai<V>(gate, up, call.alpha, call.limit);
    }
}

template <class V>
ANTIPHON_INLINE GateUpGradient<V> gate_up_gradient(const ActivationCall& call, typename V::F grad,
                                                   typename V::F gate, typename V::F up) {
    switch (call.activation) {
        case Activation::silu: return silu_gradient<V>(grad, gate, up);
        case Activation::gelu: return gelu_gradient<V>(grad, gate, up);
        default: return swiglu_oai_gradient<V>(grad, gate, up, call.alpha, call.limit);
    }
}

template <class Arch, class E>
void activate(const ActivationCall& call, ThreadPool& pool) {
    using V = typename Arch::Vector;
    using T = typename E::Storage;
    const int64_t width = call.width;
    for_rows(call.x.count, 2 * width, pool, [&](int64_t row) {
        const T* gate = row_at<E>(call.x, row);
        const T* up = gate + width;
        if (call.grad.data == nullptr) {
            T* out = static_cast<T*>(call.out) + row * width;
            for_lanes(width, [&](int64_t i, int lanes) {
                const auto g = load_lanes<V>(gate + i, lanes);
                store_lanes<V>(out + i, activated<V>(call, g, load_lanes<V>(up + i, lanes)), lanes);
            });
            return;
        }
        const T* grad = row_at<E>(call.grad, row);
        T* out = static_cast<T*>(call.out) + row * 2 * width;
        for_lanes(width, [&](int64_t i, int lanes) {
            const auto of = gate_up_gradient<V>(call, load_lanes<V>(grad + i, lanes), load_lanes<V>(gate + i, lanes),
                                                load_lanes<V>(up + i, lanes));
            store_lanes<V>(out + i, of.gate, lanes);
            store_lanes<V>(out + width + i, of.up, lanes);
        });
    });
}

}  // namespace antiphon::kernels

// Functions of 16 lanes that every arch computes by the same formula.
#pragma once

#include "kernels/element.h"

namespace antiphon::kernels {

enum class Activation { silu, gelu, swiglu_oai };

// e^x to about 1 unit in the last place; exactly 0 below -88, NaN stays NaN.
// x = n ln 2 + r with |r| <= ln(2)/2, e^r by its Taylor series to degree 6.
template <class V>
ANTIPHON_INLINE typename V::F exp(typename V::F x) {
    x = V::min(V::set1(88.0f), V::max(V::set1(-88.0f), x));
    const auto n = V::round(V::mul(x, V::set1(1.44269504088896341f)));
    auto r = V::fma(n, V::set1(-0.693145751953125f), x);
    r = V::fma(n, V::set1(-1.42860682030941723e-6f), r);
    auto p = V::set1(1.0f / 720.0f);
    p = V::fma(p, r, V::set1(1.0f / 120.0f));
    p = V::fma(p, r, V::set1(1.0f / 24.0f));
    p = V::fma(p, r, V::set1(1.0f / 6.0f));
    p = V::fma(p, r, V::set1(0.5f));
    p = V::fma(p, r, V::set1(1.0f));
    p = V::fma(p, r, V::set1(1.0f));
    return V::mul(p, V::pow2(n));
}

template <class V>
ANTIPHON_INLINE typename V::F silu(typename V::F x) {
    const auto one = V::set1(1.0f);
    return V::div(x, V::add(one, exp<V>(V::sub(V::zero(), x))));
}

// x * Phi(x), with erf by Abramowitz and Stegun 7.1.26 (absolute error below 1.5e-7).
template <class V>
ANTIPHON_INLINE typename V::F gelu(typename V::F x) {
    const auto one = V::set1(1.0f);
    const auto z = V::mul(V::abs(x), V::set1(0.70710678118654752f));
    const auto t = V::div(one, V::fma(z, V::set1(0.3275911f), one));
    auto p = V::set1(1.061405429f);
    p = V::fma(p, t, V::set1(-1.453152027f));
    p = V::fma(p, t, V::set1(1.421413741f));
    p = V::fma(p, t, V::set1(-0.284496736f));
    p = V::fma(p, t, V::set1(0.254829592f));
    const auto tail = V::mul(V::mul(p, t), exp<V>(V::sub(V::zero(), V::mul(z, z))));  // 1 - erf(z)
    // 0.5 x (1 + sign(x) (1 - tail)) = max(x, 0) - 0.5 |x| tail, without cancellation for negative x.
    return V::sub(V::max(V::zero(), x), V::mul(V::mul(V::set1(0.5f), V::abs(x)), tail));
}

// gpt-oss: (u + 1) g sigmoid(alpha g) with g = min(gate, limit), u = clamp(up, -limit, limit). NaN stays NaN.
template <class V>
ANTIPHON_INLINE typename V::F swiglu_oai(typename V::F gate, typename V::F up, float alpha, float limit) {
    const auto one = V::set1(1.0f);
    const auto highest = V::set1(limit);
    const auto g = V::min(highest, gate);
    const auto u = V::max(V::set1(-limit), V::min(highest, up));
    const auto swish = V::div(g, V::add(one, exp<V>(V::mul(V::set1(-alpha), g))));
    return V::mul(V::add(u, one), swish);
}

}  // namespace antiphon::kernels

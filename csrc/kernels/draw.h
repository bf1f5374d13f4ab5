// The next token of every row: its largest logit, or a draw from softmax(logits / temperature).
//
// The draw puts one uniform through the inverse of the running sum, in order of token id, as `draw_tokens` in
// antiphon/serve/worker/sampling.py does: sums of segments of 512 (float32, added up in float64), then one segment token by
// token in float64.
//   m = max x / t;  sums[c] = sum over segment c of exp(x / t - m);  the first id whose running sum exceeds u * total
// A token of probability zero is never drawn. A row without mass (NaN, or nothing but -inf) gets its largest logit.
#pragma once

#include <cmath>

#include "kernels/argmax.h"
#include "kernels/vector_math.h"

namespace antiphon::kernels {

constexpr int64_t draw_segment = 512;
static_assert(argmax_chunk % draw_segment == 0, "a segment lies in one chunk");

template <class V>
ANTIPHON_INLINE typename V::F draw_mass(const float* logits, int lanes, float temperature, float shift) {
    const auto x = V::sub(V::div(load_lanes<V>(logits, lanes), V::set1(temperature)), V::set1(shift));
    return V::keep_lanes(exp<V>(x), 0, lanes, V::zero());
}

// The sum of one segment's masses.
template <class V>
double segment_mass(const float* logits, int64_t width, float temperature, float shift) {
    auto sums = V::zero();
    for_lanes(width, [&](int64_t i, int lanes) {
        sums = V::add(sums, draw_mass<V>(logits + i, lanes, temperature, shift));
    });
    return static_cast<double>(V::reduce_add(sums));
}

// The place in a segment where the running sum of its masses exceeds `target`; at the latest where it is complete.
template <class V>
int64_t draw_in_segment(const float* logits, int64_t width, float temperature, float shift, double target) {
    float masses[draw_segment];
    for_lanes(width, [&](int64_t i, int lanes) {
        V::store_n(masses + i, draw_mass<V>(logits + i, lanes, temperature, shift), lanes);
    });
    double sum = 0.0;
    int64_t last = 0;
    for (int64_t i = 0; i < width; ++i) {
        if (!(masses[i] > 0.0f)) continue;
        last = i;
        sum += static_cast<double>(masses[i]);
        if (sum > target) break;
    }
    return last;
}

template <class Arch>
void choose(const ChooseCall& call, ThreadPool& pool) {
    using V = typename Arch::Vector;
    const int64_t num_chunks = divide_up(call.width, argmax_chunk);
    const int64_t num_segments = divide_up(call.width, draw_segment);
    argmax<Arch>({call.logits, call.num_rows, call.width, call.stride, call.ids}, pool);
    auto* sums = Scratch::get<double>(ScratchUse::sums, static_cast<size_t>(call.num_rows * num_segments));
    const auto shift_of = [&](int64_t row) {
        return call.logits[row * call.stride + call.ids[row]] / call.temperatures[row];
    };
    pool.for_each(call.num_rows * num_chunks, [&](int64_t item) {
        const int64_t row = item / num_chunks;
        if (call.temperatures[row] <= 0.0f) return;
        const int64_t first = item % num_chunks * argmax_chunk;
        const int64_t end = smaller(call.width, first + argmax_chunk);
        const float* logits = call.logits + row * call.stride;
        for (int64_t at = first; at < end; at += draw_segment) {
            sums[row * num_segments + at / draw_segment] = segment_mass<V>(
                logits + at, smaller(draw_segment, call.width - at), call.temperatures[row], shift_of(row));
        }
    });
    for (int64_t row = 0; row < call.num_rows; ++row) {
        if (call.temperatures[row] <= 0.0f) continue;
        const double* own = sums + row * num_segments;
        double total = 0.0;
        for (int64_t s = 0; s < num_segments; ++s) total += own[s];
        if (!(total > 0.0) || !std::isfinite(total)) continue;
        const double target = call.uniforms[row] * total;
        int64_t segment = 0;
        double before = 0.0;
        for (int64_t s = 0; s < num_segments; ++s) {
            if (!(own[s] > 0.0)) continue;
            segment = s;
            if (before + own[s] > target) break;
            before += own[s];
        }
        const int64_t at = segment * draw_segment;
        call.ids[row] = at + draw_in_segment<V>(call.logits + row * call.stride + at, smaller(draw_segment, call.width - at),
                                                call.temperatures[row], shift_of(row), target - before);
    }
}

}  // namespace antiphon::kernels

// The next token of every row: its largest logit, or a draw from what top-k, top-p and min-p leave of
// softmax(logits / temperature).
//
// 1. Penalties, on a copy of the row.
// 2. Weights: w = round(2^q exp(x / t - max x / t)), whole numbers with q = 53 - log2(width), the logarithm rounded up.
//    A sum of them is exact in float64, in any order.
// 3. Filters: the least weight that min-p, top-k and top-p keep, each of what those before it left. Ties are kept. The
//    weight with which a sum from the largest on is complete is found by halving the bits of floats.
// 4. One uniform through the inverse of the running sum of what is left, in order of token id.
//
// `choose_tokens` in antiphon/serve/worker/sampling.py is the reference. Its tokens are those of every instruction set:
// the exponential multiplies and adds in two steps. A row without mass (NaN, or nothing but -inf) gets its largest
// logit. Rejected: sorting; sums of buckets of exponents, whose additions wait for each other (twice as long,
// docs/log.md); float32 sums, whose order would decide which token is the last one kept.
#pragma once

#include <bit>
#include <cmath>
#include <cstring>

#include "kernels/argmax.h"
#include "kernels/vector_math.h"

namespace antiphon::kernels {

constexpr int64_t draw_segment = 512;
constexpr int mass_bits = 53;  // a sum of all weights at most
constexpr int turns_between_selections = 2;
constexpr int64_t few_candidates = 128;

// Functions without vectors are templates too: each instruction set compiles its own.

// The same vector with products that are rounded before they are added to.
template <class V>
struct Unfused : V {
    static ANTIPHON_INLINE typename V::F fma(typename V::F a, typename V::F b, typename V::F c) {
        return V::add(V::mul(a, b), c);
    }
};

template <class V>
const float* penalize(const float* logits, int64_t width, const RowChoice& row) {
    float* own = Scratch::get<float>(ScratchUse::logits, static_cast<size_t>(width));
    std::memcpy(own, logits, static_cast<size_t>(width) * sizeof(float));
    for (int64_t i = 0; i < row.num_counts; ++i) {
        const int64_t id = row.token_ids[i];
        if (id < 0 || id >= width) continue;
        const float value = own[id] > 0.0f ? own[id] / row.repetition : own[id] * row.repetition;
        own[id] = value - row.counts[i] * row.frequency - (row.counts[i] > 0.0f ? row.presence : 0.0f);
    }
    return own;
}

template <class V>
void weigh(const float* logits, int64_t width, float temperature, float largest, float scale, float* weights) {
    const auto shift = V::div(V::set1(largest), V::set1(temperature));
    for_lanes(width, [&](int64_t i, int lanes) {
        const auto x = V::sub(V::div(load_lanes<V>(logits + i, lanes), V::set1(temperature)), shift);
        store_lanes<V>(weights + i, V::round(V::mul(exp<Unfused<V>>(x), V::set1(scale))), lanes);
    });
}

// Eight weights, as numbers that add up exactly.
using Weights8 = float __attribute__((vector_size(32)));
using Masses8 = double __attribute__((vector_size(64)));

// The sum of all weights that are not below `low`, or how many they are. NaN if one is.
template <class V, bool counts = false>
double sum_from(const float* weights, int64_t width, float low) {
    Masses8 sums[2] = {};
    const auto add = [&](const float* from, Masses8& sum) {
        Weights8 eight;
        std::memcpy(&eight, from, sizeof(eight));
        const Weights8 worth = counts ? Weights8{} + 1.0f : eight;
        sum += __builtin_convertvector(eight < low ? Weights8{} : worth, Masses8);
    };
    int64_t i = 0;
    for (; i + 16 <= width; i += 16) {
        add(weights + i, sums[0]);
        add(weights + i + 8, sums[1]);
    }
    double sum = 0.0;
    for (; i < width; ++i) sum += weights[i] < low ? 0.0 : counts ? 1.0 : static_cast<double>(weights[i]);
    for (int lane = 0; lane < 8; ++lane) sum += sums[0][lane] + sums[1][lane];
    return sum;
}

// Copies the weights in [first, end), and returns how many. `to` may be `weights`, and has room for 16 more.
template <class V>
int64_t select(const float* weights, int64_t width, float first, float end, float* to) {
    int64_t kept = 0;
    for_lanes(width, [&](int64_t i, int lanes) {
        const auto x = V::keep_lanes(load_lanes<V>(weights + i, lanes), 0, lanes, V::set1(end));
        kept += V::store_between(to + kept, x, first, end);
    });
    return kept;
}

// `low`, or the weight with which those of at least `low`, from the largest on, are `wanted` in number, or `wanted` of
// their sum if not `counts`. `largest`: of all. Positive floats are ordered as their bits are, so these are halved;
// candidates become fewer meanwhile.
template <class V, bool counts>
float raise_threshold(const float* weights, int64_t width, float low, float largest, double wanted) {
    uint32_t first = std::bit_cast<uint32_t>(low > 1.0f ? low : 1.0f);  // smaller ones weigh nothing
    uint32_t end = std::bit_cast<uint32_t>(largest) + 1;
    const auto sum = [&](uint32_t from) { return sum_from<V, counts>(weights, width, std::bit_cast<float>(from)); };
    const double all = sum(first);
    if (!counts) wanted *= all;
    if (all < wanted) return low;
    float* candidates = Scratch::get<float>(ScratchUse::activations, static_cast<size_t>(width) + panel_width);
    double above = 0.0;  // of those that are no candidates any more
    for (int turn = 1; end - first > 1; ++turn) {
        const uint32_t middle = first + (end - first) / 2;
        (above + sum(middle) >= wanted ? first : end) = middle;
        if (turn % turns_between_selections == 0 && width > few_candidates) {
            above += sum(end);
            width = select<V>(weights, width, std::bit_cast<float>(first), std::bit_cast<float>(end), candidates);
            weights = candidates;
        }
    }
    return std::bit_cast<float>(first);
}

// The first token at which the running sum of weights that are not below `low` exceeds `target`, which is less than
// all of them.
template <class V>
int64_t draw_from(const float* weights, int64_t width, float low, double target) {
    double before = 0.0;
    int64_t segment = 0;
    for (; segment + draw_segment < width; segment += draw_segment) {
        const double sum = sum_from<V>(weights + segment, draw_segment, low);
        if (before + sum > target) break;
        before += sum;
    }
    int64_t last = segment;
    for (int64_t id = segment; id < smaller(width, segment + draw_segment); ++id) {
        if (weights[id] < low || weights[id] <= 0.0f) continue;
        last = id;
        before += static_cast<double>(weights[id]);
        if (before > target) break;
    }
    return last;
}

template <class V>
int64_t choose_token(const float* logits, int64_t width, const RowChoice& row) {
    if (row.num_counts > 0) logits = penalize<V>(logits, width, row);
    const BestIndex best = best_of_chunk<V>(logits, 0, width);
    if (row.temperature <= 0.0f) return best.index;
    const float scale = std::ldexp(1.0f, mass_bits - std::bit_width(static_cast<uint64_t>(width - 1)));
    float* weights = Scratch::get<float>(ScratchUse::products, static_cast<size_t>(width));
    weigh<V>(logits, width, row.temperature, logits[best.index], scale, weights);
    const double total = sum_from<V>(weights, width, 0.0f);
    if (!(total > 0.0)) return best.index;
    float low = scale * row.min_p;
    if (row.top_k > 0 && row.top_k < width) {
        low = raise_threshold<V, true>(weights, width, low, scale, static_cast<double>(row.top_k));
    }
    if (row.top_p < 1.0) low = raise_threshold<V, false>(weights, width, low, scale, row.top_p);
    const double left = low > 0.0f ? sum_from<V>(weights, width, low) : total;
    return draw_from<V>(weights, width, low, row.uniform * left);
}

template <class Arch>
void choose(const ChooseCall& call, ThreadPool& pool) {
    pool.for_each(call.num_rows, [&](int64_t row) {
        call.ids[row] =
            choose_token<typename Arch::Vector>(call.logits + row * call.stride, call.width, call.rows[row]);
    });
}

}  // namespace antiphon::kernels

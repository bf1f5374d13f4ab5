// The next token of every row: its largest logit, or a draw from what top-k, top-p and min-p leave of
// softmax(logits / temperature).
//
// 1. Penalties, on a copy of the row.
// 2. Weights: w = round(2^q exp(x / t - max x / t)), whole numbers with q = 53 - log2(width), the logarithm rounded up. A sum
//    of them is exact in float64, in any order.
// 3. Filters: the least weight that min-p, top-k and top-p keep, each of what those before it left. Ties are kept. The
//    weight with which a sum from the largest on is complete is found by radix: the bucket of a weight is its next bits.
// 4. One uniform through the inverse of the running sum of what is left, in order of token id.
//
// `choose_tokens` in antiphon/serve/worker/sampling.py is the reference. Its tokens are the same for every instruction set:
// the exponential multiplies and adds in two steps. A row without mass (NaN, or nothing but -inf) gets its largest logit.
// Rejected: sorting, whole or of candidates (32,768 weights that all stay take five times as long); float32 sums, whose order
// would decide which token is the last one kept.
#pragma once

#include <bit>
#include <cmath>
#include <cstring>

#include "kernels/argmax.h"
#include "kernels/vector_math.h"

namespace antiphon::kernels {

constexpr int64_t draw_segment = 512;
constexpr int mass_bits = 53;  // a sum of all weights at most
constexpr int radix_copies = 4;  // of a bucket: neighbouring weights often fall into the same one
constexpr int64_t most_radix_buckets = 1024;

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

// The sum of all weights that are not below `low`. NaN if one is.
template <class V>
double sum_from(const float* weights, int64_t width, float low) {
    constexpr int lanes = panel_width;
    double sums[lanes] = {};
    int64_t i = 0;
    for (; i + lanes <= width; i += lanes) {
        for (int n = 0; n < lanes; ++n) sums[n] += weights[i + n] < low ? 0.0 : static_cast<double>(weights[i + n]);
    }
    double sum = 0.0;
    for (; i < width; ++i) sum += weights[i] < low ? 0.0 : static_cast<double>(weights[i]);
    for (const double lane : sums) sum += lane;
    return sum;
}

// What is looked for among weights: `above` are as many, or as much, as those of higher buckets.
struct RadixSearch {
    float low;      // smaller ones do not count
    double wanted;  // how many, or how much, from the largest on
    double above = 0.0;
};

// Leaves in `members` those in whose bucket the search ends, and returns how many. Level 0 takes the exponent and 4 bits of
// the fraction, level 1 the next 10, level 2 the last 9: all weights of a bucket are equal. 0: not even all are enough.
template <class V, int level, bool counts>
int64_t search_buckets(RadixSearch& search, const float* from, int64_t count, float* members, double* sums) {
    constexpr int shift = level == 0 ? 19 : level == 1 ? 9 : 0;
    constexpr uint32_t below_one = (127 << 4) - 1;  // of level 0: bucket 1 begins with the weight 1
    constexpr int64_t num_buckets = level == 0 ? mass_bits * 16 + 2 : level == 1 ? 1024 : 512;
    static_assert(num_buckets <= most_radix_buckets, "sums have room for that many");
    const float low = search.low;
    const auto bucket_of = [low](float weight) -> int64_t {
        const uint32_t bits = std::bit_cast<uint32_t>(weight) >> shift;
        if constexpr (level == 0) return weight < low ? 0 : bits - below_one;
        return bits & (num_buckets - 1);
    };
    std::memset(sums, 0, static_cast<size_t>(num_buckets * radix_copies) * sizeof(double));
    for (int64_t i = 0; i < count; ++i) {
        sums[bucket_of(from[i]) * radix_copies + i % radix_copies] += counts ? 1.0 : static_cast<double>(from[i]);
    }
    const auto sum_of = [sums](int64_t bucket) {
        const double* copies = sums + bucket * radix_copies;
        return copies[0] + copies[1] + copies[2] + copies[3];
    };
    if constexpr (level == 0 && !counts) {
        double total = 0.0;
        for (int64_t bucket = 1; bucket < num_buckets; ++bucket) total += sum_of(bucket);
        search.wanted *= total;
    }
    int64_t bucket = num_buckets - 1;
    for (; bucket > 0; --bucket) {
        const double sum = sum_of(bucket);
        if (sum > 0.0 && search.above + sum >= search.wanted) break;
        search.above += sum;
    }
    if (level == 0 && bucket == 0) return 0;
    int64_t kept = 0;
    for (int64_t i = 0; i < count; ++i) {
        const float weight = from[i];
        members[kept] = weight;
        kept += bucket_of(weight) == bucket;
    }
    return kept;
}

// `low`, or the weight with which those of at least `low`, from the largest on, are `wanted` in number, or `wanted` of their
// sum if not `counts`.
template <class V, bool counts>
float raise_threshold(const float* weights, int64_t width, float low, double wanted) {
    float* members = Scratch::get<float>(ScratchUse::activations, static_cast<size_t>(width));
    double* sums = Scratch::get<double>(ScratchUse::sums, most_radix_buckets * radix_copies);
    RadixSearch search{low > 1.0f ? low : 1.0f, wanted};  // a weight of 0 is not worth a look
    int64_t count = search_buckets<V, 0, counts>(search, weights, width, members, sums);
    if (count == 0) return low;
    count = search_buckets<V, 1, counts>(search, members, count, members, sums);
    search_buckets<V, 2, counts>(search, members, count, members, sums);
    return members[0];
}

// The first token at which the running sum of weights that are not below `low` exceeds `target`, which is less than their sum.
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
        low = raise_threshold<V, true>(weights, width, low, static_cast<double>(row.top_k));
    }
    if (row.top_p < 1.0) low = raise_threshold<V, false>(weights, width, low, row.top_p);
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

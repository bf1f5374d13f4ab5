// Router: float32 logits, scores, the best experts of every row and their weights. On a GPU it is
// antiphon/kernels/triton/rows.py; training and "sparsemixer" have it in antiphon/kernels/ops/route.py.
#pragma once

#include <cmath>
#include <limits>

#include "kernels/linear.h"
#include "kernels/operations.h"
#include "kernels/vector_math.h"

namespace antiphon::kernels {

// scores = softmax or sigmoid of logits; both [width].
template <class V>
void score_row(Scoring scoring, const float* logits, float* scores, int64_t width) {
    const auto one = V::set1(1.0f);
    if (scoring == Scoring::sigmoid) {
        for_lanes(width, [&](int64_t i, int lanes) {
            const auto x = load_lanes<V>(logits + i, lanes);
            store_lanes<V>(scores + i, V::div(one, V::add(one, exp<V>(V::sub(V::zero(), x)))), lanes);
        });
        return;
    }
    auto highest = V::set1(-3.4e38f);
    for_lanes(width, [&](int64_t i, int lanes) {
        highest = V::max(highest, V::keep_lanes(load_lanes<V>(logits + i, lanes), 0, lanes, highest));
    });
    const auto shift = V::set1(V::reduce_max(highest));
    auto sums = V::zero();
    for_lanes(width, [&](int64_t i, int lanes) {
        const auto e = V::keep_lanes(exp<V>(V::sub(load_lanes<V>(logits + i, lanes), shift)), 0, lanes, V::zero());
        sums = V::add(sums, e);
        store_lanes<V>(scores + i, e, lanes);
    });
    const auto total = V::set1(V::reduce_add(sums));
    for_lanes(width, [&](int64_t i, int lanes) {
        store_lanes<V>(scores + i, V::div(load_lanes<V>(scores + i, lanes), total), lanes);
    });
}

// Index of the first largest value; NaN and -inf never win against a number. Removes it by setting -inf.
template <class V>
int64_t take_best(float* values, int64_t width) {
    auto highest = V::set1(-std::numeric_limits<float>::infinity());
    for_lanes(width, [&](int64_t i, int lanes) {
        highest = V::max(V::keep_lanes(load_lanes<V>(values + i, lanes), 0, lanes, highest), highest);
    });
    const float best = V::reduce_max(highest);
    for (int64_t i = 0; i < width; ++i) {
        if (values[i] == best && best > -std::numeric_limits<float>::infinity()) {
            values[i] = -std::numeric_limits<float>::infinity();
            return i;
        }
    }
    return -1;
}

// -inf for every expert outside the best groups (DeepSeek-V2 section 2.2.2, DeepSeek-V3 section 2.1.2).
template <class V>
void keep_best_groups(const GateCall& call, float* choice, int64_t width, float* group_scores) {
    const int64_t group_width = width / call.num_groups;
    for (int64_t g = 0; g < call.num_groups; ++g) {
        float first = -std::numeric_limits<float>::infinity();
        float second = first;
        for (int64_t i = g * group_width; i < (g + 1) * group_width; ++i) {
            if (choice[i] > first) {
                second = first;
                first = choice[i];
            } else if (choice[i] > second) {
                second = choice[i];
            }
        }
        group_scores[g] = call.group_score_top2 ? first + second : first;
    }
    float* kept = group_scores + call.num_groups;
    for (int64_t g = 0; g < call.num_groups; ++g) kept[g] = 0.0f;
    for (int64_t k = 0; k < call.top_k_groups; ++k) {
        const int64_t g = take_best<V>(group_scores, call.num_groups);
        if (g >= 0) kept[g] = 1.0f;
    }
    for (int64_t i = 0; i < width; ++i) {
        if (kept[i / group_width] == 0.0f) choice[i] = -std::numeric_limits<float>::infinity();
    }
}

// Weights of the chosen: their scores, or a softmax over their logits; then normalised and scaled.
inline void weigh_chosen(const GateCall& call, const float* logits, const float* scores, const int32_t* ids,
                         float* weights) {
    float sum = 0.0f;
    for (int64_t k = 0; k < call.top_k; ++k) {
        weights[k] = call.softmax_after_top_k ? std::exp(logits[ids[k]] - logits[ids[0]]) : scores[ids[k]];
        sum += weights[k];
    }
    if (call.softmax_after_top_k) {
        for (int64_t k = 0; k < call.top_k; ++k) weights[k] /= sum;
    } else if (call.normalize) {
        for (int64_t k = 0; k < call.top_k; ++k) weights[k] /= sum + 1e-20f;
    }
    for (int64_t k = 0; k < call.top_k; ++k) weights[k] *= call.scaling;
}

template <class V>
void choose_row(const GateCall& call, const float* logits, int64_t row, float* memory) {
    const int64_t width = call.logits.weight.outputs;
    float* scores = memory;
    float* choice = scores + width;
    score_row<V>(call.scoring, logits, scores, width);
    for (int64_t i = 0; i < width; ++i) choice[i] = scores[i] + (call.score_bias != nullptr ? call.score_bias[i] : 0.0f);
    if (call.num_groups > 1) keep_best_groups<V>(call, choice, width, choice + width);
    int32_t* ids = call.ids + row * call.top_k;
    for (int64_t k = 0; k < call.top_k; ++k) {
        int64_t best = take_best<V>(choice, width);
        // Fewer candidates than top_k (or NaN scores): the lowest index not chosen yet, so that ids stay distinct.
        for (int64_t i = 0; best < 0 && i < width; ++i) {
            bool is_taken = false;
            for (int64_t j = 0; j < k; ++j) is_taken |= ids[j] == i;
            if (!is_taken) best = i;
        }
        ids[k] = static_cast<int32_t>(best);
    }
    weigh_chosen(call, logits, scores, ids, call.weights + row * call.top_k);
}

constexpr int64_t gate_rows_per_item = 16;

template <class Arch, class E>
void gate(const GateCall& call, ThreadPool& pool) {
    const int64_t num_rows = call.logits.x.count;
    const int64_t width = call.logits.weight.outputs;
    float* logits = Scratch::get<float>(ScratchUse::logits, static_cast<size_t>(num_rows * width));
    LinearCall product = call.logits;
    product.out = logits;
    product.out_fp32 = true;
    linear<Arch, E>(product, pool);
    pool.for_each(divide_up(num_rows, gate_rows_per_item), [&](int64_t item) {
        float* memory = Scratch::get<float>(ScratchUse::products, static_cast<size_t>(2 * width + 2 * call.num_groups));
        const int64_t end = smaller(num_rows, (item + 1) * gate_rows_per_item);
        for (int64_t row = item * gate_rows_per_item; row < end; ++row) {
            choose_row<typename Arch::Vector>(call, logits + row * width, row, memory);
        }
    });
}

}  // namespace antiphon::kernels

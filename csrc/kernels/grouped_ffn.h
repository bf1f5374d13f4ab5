// The grouped feed-forward: y[t] = sum over chosen experts e of weight * down_e(act(gate_e(x[t])) * up_e(x[t])).
// Each of the three may have a bias, and gate and up may be joined by another formula (vector_math.h).
//
// 1. Sort the (row, expert) pairs by expert (counting sort, stable) and gather their rows.
// 2. One item per (touched expert, group of 32 intermediate columns): gate and up panels lie side by side in one stream.
// 3. One item per group of 64 output columns: over all touched experts in ascending order, weighted sums in float32.
// Each touched expert's weights are read once, no two threads write the same memory, and the order of every sum is fixed.
#pragma once

#include "kernels/operations.h"
#include "kernels/quantized_product.h"
#include "kernels/rows.h"
#include "kernels/vector_math.h"

namespace antiphon::kernels {

// Pairs sorted by expert: expert touched[i] owns pairs [starts[i], starts[i + 1]).
struct ExpertPairs {
    int64_t num_pairs;
    int64_t num_touched;
    const int32_t* touched;
    const int32_t* starts;
    const int32_t* tokens;  // row of each pair
    const float* weights;   // routing weight of each pair
};

inline ExpertPairs sort_pairs(const GroupedFfnCall& call) {
    const int64_t num_slots = call.x.count * call.top_k;
    const int64_t num_experts = call.experts.num_experts;
    int32_t* memory = Scratch::get<int32_t>(ScratchUse::row_lists, static_cast<size_t>(3 * num_experts + 2 + 2 * num_slots));
    int32_t* starts = memory;
    int32_t* touched = starts + num_experts + 1;
    int32_t* next = touched + num_experts;
    int32_t* tokens = next + num_experts + 1;
    float* weights = reinterpret_cast<float*>(tokens + num_slots);

    for (int64_t e = 0; e < num_experts; ++e) next[e] = 0;
    for (int64_t slot = 0; slot < num_slots; ++slot) {
        const int32_t id = call.ids[slot];
        if (id >= 0 && id < num_experts) ++next[id];
    }
    int32_t num_pairs = 0;
    int64_t num_touched = 0;
    for (int64_t e = 0; e < num_experts; ++e) {
        const int32_t count = next[e];
        next[e] = num_pairs;
        if (count == 0) continue;
        touched[num_touched] = static_cast<int32_t>(e);
        starts[num_touched++] = num_pairs;
        num_pairs += count;
    }
    starts[num_touched] = num_pairs;
    for (int64_t slot = 0; slot < num_slots; ++slot) {
        const int32_t id = call.ids[slot];
        if (id < 0 || id >= num_experts) continue;
        const int32_t pair = next[id]++;
        tokens[pair] = static_cast<int32_t>(slot / call.top_k);
        weights[pair] = call.weights[slot];
    }
    return {num_pairs, num_touched, touched, starts, tokens, weights};
}

// The rows of every pair, in the type that gate and up projections are multiplied in, and in the order of its expert.
template <class V, class E, class To>
Rows gather_pairs(const GroupedFfnCall& call, const ExpertPairs& pairs, ThreadPool& pool) {
    const PackedFormat& format = call.experts.gate_up_format;
    const int64_t width = call.experts.hidden;
    const int64_t padded = format.row_width(width);
    const int64_t stride = spread_stride(format.type, padded);
    To* gathered = Scratch::get<To>(ScratchUse::padded_rows, static_cast<size_t>(pairs.num_pairs * stride));
    pool.for_each(divide_up(pairs.num_pairs, rows_worth_a_thread), [&](int64_t item) {
        const int64_t end = smaller(pairs.num_pairs, (item + 1) * rows_worth_a_thread);
        int64_t index = 0;
        for (int64_t pair = item * rows_worth_a_thread; pair < end; ++pair) {
            const auto* row = row_at<E>(call.x, pairs.tokens[pair]);
            if (call.experts.order == nullptr) {
                copy_row<V>(row, width, padded, gathered + pair * stride);
                continue;
            }
            while (pairs.starts[index + 1] <= pair) ++index;
            const int32_t* order = call.experts.order + pairs.touched[index] * width;
            copy_row_in_order<V>(row, order, width, padded, gathered + pair * stride);
        }
    });
    return {gathered, pairs.num_pairs, stride};
}

template <class V>
ANTIPHON_INLINE typename V::F join(const ExpertWeights& experts, typename V::F gate, typename V::F up) {
    if (experts.activation == Activation::silu) return V::mul(silu<V>(gate), up);
    if (experts.activation == Activation::gelu) return V::mul(gelu<V>(gate), up);
    return swiglu_oai<V>(gate, up, experts.alpha, experts.limit);
}

// act(gate) * up for one group: sums hold [gate panels | up panels], out gets the group's intermediate columns.
template <class V, class To>
void activate_group(const ExpertWeights& experts, const float* bias, const float* sums, int64_t num_rows,
                    int gate_panels, To* out, int64_t out_stride) {
    for (int64_t m = 0; m < num_rows; ++m) {
        for (int panel = 0; panel < gate_panels; ++panel) {
            const int64_t at = panel * panel_width;
            const int64_t up_at = at + gate_panels * panel_width;
            auto gate = V::load(sums + m * group_width + at);
            auto up = V::load(sums + m * group_width + up_at);
            if (bias != nullptr) {
                gate = V::add(gate, V::load(bias + at));
                up = V::add(up, V::load(bias + up_at));
            }
            V::store(out + m * out_stride + at, join<V>(experts, gate, up));
        }
    }
}

// Phase 1: the activations of every pair, [pairs][padded intermediate], in the type that down projections take.
template <class Arch, class E, class To>
void gate_up_groups(const GroupedFfnCall& call, const ExpertPairs& pairs, const Rows& x, To* hidden,
                    ThreadPool& pool) {
    const ExpertWeights& experts = call.experts;
    const float* run_sums = sums_of_runs<Arch, E>(experts.gate_up(0), x, pool);
    const size_t row_bytes = static_cast<size_t>(x.stride) * element_bytes(experts.gate_up_format.type);
    const int64_t num_groups = experts.num_gate_up_groups();
    const int64_t hidden_stride = experts.hidden_stride();
    pool.for_each(pairs.num_touched * num_groups, [&](int64_t item) {
        const int64_t index = item / num_groups;
        const int64_t group = item % num_groups;
        const PackedMatrix weight = experts.gate_up(pairs.touched[index]);
        const char* next = nullptr;
        if (group + 1 < num_groups) {
            next = weight.group(group + 1);
        } else if (index + 1 < pairs.num_touched) {
            next = experts.gate_up(pairs.touched[index + 1]).data;
        }
        float* sums = Scratch::get<float>(ScratchUse::products, rows_per_chunk * group_width);
        const int num_panels = weight.group_size(group);
        for (int64_t row = pairs.starts[index]; row < pairs.starts[index + 1]; row += rows_per_chunk) {
            const int64_t num_rows = smaller(rows_per_chunk, pairs.starts[index + 1] - row);
            multiply_weight<Arch, E>({
                .weight = &weight,
                .rows = static_cast<const char*>(x.data) + static_cast<size_t>(row) * row_bytes,
                .row_bytes = row_bytes,
                .num_rows = num_rows,
                .group = weight.group(group),
                .num_panels = num_panels,
                .steps = weight.steps,
                .next = next,
                .run_sums = run_sums,
                .all_rows = pairs.num_pairs,
                .first_row = row,
                .sums = sums,
            });
            activate_group<typename Arch::Vector>(experts, experts.gate_up_bias(pairs.touched[index], group), sums,
                                                  num_rows, num_panels / 2,
                                                  hidden + row * hidden_stride + group * group_width / 2,
                                                  hidden_stride);
        }
    });
}

// acc[token] += weight * (product + bias) for the rows of one expert.
template <class V>
void add_weighted(const float* products, const float* bias, const ExpertPairs& pairs, int64_t first, int64_t num_rows,
                  float* sums) {
    for (int64_t m = 0; m < num_rows; ++m) {
        const auto weight = V::set1(pairs.weights[first + m]);
        float* sum = sums + static_cast<int64_t>(pairs.tokens[first + m]) * group_width;
        for (int i = 0; i < group_width; i += panel_width) {
            auto product = V::load(products + m * group_width + i);
            if (bias != nullptr) product = V::add(product, V::load(bias + i));
            V::store(sum + i, V::fma(weight, product, V::load(sum + i)));
        }
    }
}

// Phase 2 for one group of 64 output columns.
template <class Arch, class E>
void down_group(const GroupedFfnCall& call, const ExpertPairs& pairs, const Rows& hidden, const float* run_sums,
                int64_t group) {
    using V = typename Arch::Vector;
    using T = typename E::Storage;
    const ExpertWeights& experts = call.experts;
    const size_t row_bytes = static_cast<size_t>(hidden.stride) * element_bytes(experts.down_format.type);
    const int64_t num_tokens = call.x.count;
    float* products = Scratch::get<float>(ScratchUse::products, rows_per_chunk * group_width);
    float* sums = Scratch::get<float>(ScratchUse::sums, static_cast<size_t>(num_tokens * group_width));
    std::memset(sums, 0, static_cast<size_t>(num_tokens * group_width) * sizeof(float));
    for (int64_t index = 0; index < pairs.num_touched; ++index) {
        const PackedMatrix weight = experts.down(pairs.touched[index]);
        const bool last = index + 1 == pairs.num_touched;
        for (int64_t row = pairs.starts[index]; row < pairs.starts[index + 1]; row += rows_per_chunk) {
            const int64_t num_rows = smaller(rows_per_chunk, pairs.starts[index + 1] - row);
            multiply_weight<Arch, E>({
                .weight = &weight,
                .rows = static_cast<const char*>(hidden.data) + static_cast<size_t>(row) * row_bytes,
                .row_bytes = row_bytes,
                .num_rows = num_rows,
                .group = weight.group(group),
                .num_panels = weight.group_size(group),
                .steps = weight.steps,
                .next = last ? nullptr : experts.down(pairs.touched[index + 1]).group(group),
                .run_sums = run_sums,
                .all_rows = pairs.num_pairs,
                .first_row = row,
                .sums = products,
            });
            add_weighted<V>(products, experts.down_bias(pairs.touched[index], group), pairs, row, num_rows, sums);
        }
    }
    const int64_t first = group * group_width;
    const int64_t width = smaller(group_width, experts.hidden - first);
    for (int64_t t = 0; t < num_tokens; ++t) {
        T* out = static_cast<T*>(call.out) + t * experts.hidden + first;
        for_lanes(width, [&](int64_t i, int lanes) {
            store_lanes<V>(out + i, V::load(sums + t * group_width + i), lanes);
        });
    }
}

// Both phases; To: the type of the activations between them.
template <class Arch, class E, class To>
void run_experts(const GroupedFfnCall& call, const ExpertPairs& pairs, const Rows& x, ThreadPool& pool) {
    const ExpertWeights& experts = call.experts;
    const int64_t hidden_stride = experts.hidden_stride();
    To* hidden = Scratch::get<To>(ScratchUse::activations, static_cast<size_t>(pairs.num_pairs * hidden_stride));
    // Panels end at a multiple of 16, the inner dimension of the second half maybe later.
    const int64_t written = round_up(experts.intermediate, panel_width);
    const int64_t read = experts.down_format.row_width(experts.intermediate);
    for (int64_t pair = 0; written < read && pair < pairs.num_pairs; ++pair) {
        std::memset(hidden + pair * hidden_stride + written, 0, static_cast<size_t>(read - written) * sizeof(To));
    }
    gate_up_groups<Arch, E>(call, pairs, x, hidden, pool);
    const Rows activations{hidden, pairs.num_pairs, hidden_stride};
    const float* run_sums = sums_of_runs<Arch, E>(experts.down(0), activations, pool);
    const int64_t num_groups = divide_up(experts.hidden, group_width);
    pool.for_each(num_groups, [&](int64_t group) { down_group<Arch, E>(call, pairs, activations, run_sums, group); });
}

template <class Arch, class E>
void grouped_ffn(const GroupedFfnCall& wanted, ThreadPool& pool) {
    using V = typename Arch::Vector;
    using T = typename E::Storage;
    if (wanted.x.count == 0) return;
    GroupedFfnCall call = wanted;
    ExpertWeights& experts = call.experts;
    experts.gate_up_format.type = operand_type<Arch, E>(experts.gate_up_format, experts.hidden);
    experts.down_format.type = operand_type<Arch, E>(experts.down_format, experts.intermediate);
    const ExpertPairs pairs = sort_pairs(call);
    const bool widens = experts.gate_up_format.type != E::type;
    const Rows x = widens ? gather_pairs<V, E, float>(call, pairs, pool) : gather_pairs<V, E, T>(call, pairs, pool);
    if (experts.down_format.type != E::type) {
        run_experts<Arch, E, float>(call, pairs, x, pool);
    } else {
        run_experts<Arch, E, T>(call, pairs, x, pool);
    }
}

}  // namespace antiphon::kernels

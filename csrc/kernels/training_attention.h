// Causal attention over whole sequences for training, and its gradients: what a query sees is a run of keys that ends at
// its own position. Arithmetic is in float32, whatever the rows are.
//
// An item is one sequence and one head of keys, with all heads of queries that share it. Its keys and values are packed
// once, as panels of the register tile; then 64 queries at a time pass: their scores as a whole (so a softmax needs no
// second pass), products with values, and in backward the five products of FlashAttention-2 (arXiv 2307.08691, section
// 3.1.2), with the scores made again. Sums over queries go in order, so bits do not depend on threads.
#pragma once

#include <cmath>
#include <limits>

#include "kernels/training_product.h"

namespace antiphon::kernels {

constexpr int64_t queries_at_once = 64;

template <class V, class T>
void widen_row(const T* from, int64_t width, float factor, float* to) {
    const auto scale = V::set1(factor);
    for_lanes(width, [&](int64_t i, int lanes) {
        store_lanes<V>(to + i, V::mul(load_lanes<V>(from + i, lanes), scale), lanes);
    });
}

// Panels [columns / 16][steps][16] of a matrix [steps][columns] whose rows are adjacent to each other.
template <class V>
void pack_rows(const float* from, int64_t steps, int64_t columns, float* panels) {
    for (int64_t first = 0; first < columns; first += panel_width) {
        const int lanes = static_cast<int>(smaller(panel_width, columns - first));
        for (int64_t s = 0; s < steps; ++s, panels += panel_width) {
            V::store(panels, load_lanes<V>(from + s * columns + first, lanes));
        }
    }
}

// The same of the matrix turned: panels [rows / 16][columns][16]; rows are padded with zeros.
static void pack_turned(const float* from, int64_t rows, int64_t columns, float* panels) {
    for (int64_t first = 0; first < rows; first += panel_width, panels += columns * panel_width) {
        const int64_t some = smaller(panel_width, rows - first);
        if (some < panel_width) std::memset(panels, 0, static_cast<size_t>(columns * panel_bytes));
        turn_matrix(from + first * columns, columns, some, columns, panels, panel_width);
    }
}

// sums [num_rows][16 (end_panel - first_panel)] = rows times panels, over steps [first_step, end_step) of `all_steps`.
struct PanelProduct {
    const float* rows;  // at the first step
    int64_t row_stride;
    int64_t num_rows;
    const float* panels;
    int64_t all_steps;
    int64_t first_step;
    int64_t end_step;
    int64_t first_panel;
    int64_t end_panel;
    float* sums;  // of the first panel
    int64_t sums_stride;
    bool adds;
};

template <class Arch>
void multiply_panels(const PanelProduct& call) {
    for (int64_t panel = call.first_panel; panel < call.end_panel; panel += group_panels) {
        const int num_panels = static_cast<int>(smaller(group_panels, call.end_panel - panel));
        for (int64_t step = call.first_step; step < call.end_step; step += packed_steps) {
            Segment segment;
            segment.steps = smaller(packed_steps, call.end_step - step);
            for (int n = 0; n < num_panels; ++n) {
                const float* at = call.panels + ((panel + n) * call.all_steps + step) * panel_width;
                segment.panel[n] = segment.prefetch[n] = reinterpret_cast<const char*>(at);
            }
            multiply_block<Arch, Fp32>({
                .rows = reinterpret_cast<const char*>(call.rows + step - call.first_step),
                .row_bytes = static_cast<size_t>(call.row_stride) * 4,
                .num_rows = call.num_rows,
                .segments = &segment,
                .num_segments = 1,
                .num_panels = num_panels,
                .step_bytes = panel_bytes,
                .sums = call.sums + (panel - call.first_panel) * panel_width,
                .sums_stride = static_cast<size_t>(call.sums_stride),
                .accumulate = call.adds || step > call.first_step,
            });
        }
    }
}

// Working memory of one item, cut from one block.
class ItemMemory {
  public:
    explicit ItemMemory(int64_t floats)
        : next_(Scratch::get<float>(ScratchUse::attention, static_cast<size_t>(floats))) {}
    float* take(int64_t floats) {
        float* taken = next_;
        next_ += padded(floats);
        return taken;
    }
    static int64_t padded(int64_t floats) { return round_up(floats, panel_width); }

  private:
    float* next_;
};

// One sequence and one head of keys.
struct CausalItem {
    int64_t sequence;
    int64_t kv_head;
    int64_t length;
    int64_t padded_length;
    int64_t heads;  // of queries, for each head of keys

    CausalItem(const CausalCall& call, int64_t item)
        : sequence(item / call.k.sizes[2]), kv_head(item % call.k.sizes[2]), length(call.k.sizes[1]),
          padded_length(round_up(length, panel_width)), heads(call.q.sizes[2] / call.k.sizes[2]) {}

    template <class E>
    const typename E::Storage* row(const GridRows& rows, int64_t position, int64_t head) const {
        return static_cast<const typename E::Storage*>(rows.data) + sequence * rows.strides[0] +
               position * rows.strides[1] + head * rows.strides[2];
    }
    int64_t first_key(const CausalCall& call, int64_t position) const {
        return call.first_keys == nullptr ? 0 : call.first_keys[sequence * length + position];
    }
};

// Queries [first, end), the keys that any of them sees, from a whole panel on.
struct QueryBlock {
    int64_t first;
    int64_t end;
    int64_t first_key;
    int64_t count() const { return end - first; }
    int64_t first_panel() const { return first_key / panel_width; }
    int64_t end_panel() const { return divide_up(end, panel_width); }

    QueryBlock(const CausalCall& call, const CausalItem& item, int64_t begin)
        : first(begin), end(smaller(item.length, begin + queries_at_once)), first_key(begin) {
        for (int64_t i = first; i < end; ++i) first_key = smaller(first_key, item.first_key(call, i));
        first_key = first_key / panel_width * panel_width;
    }
};

// Scores of a block's queries as weights: row i at scores + i * stride, key j at column j - first_key. `lse` [length]:
// log of each query's sum of exponentials; made, or used where there is one. Keys that a query does not see count zero.
template <class V>
void weigh_scores(const CausalCall& call, const CausalItem& item, const QueryBlock& block, float* scores,
                  int64_t stride, float* lse, bool is_known) {
    const int64_t width = (block.end_panel() - block.first_panel()) * panel_width;
    for (int64_t i = block.first; i < block.end; ++i) {
        float* row = scores + (i - block.first) * stride;
        const int64_t begin = item.first_key(call, i) - block.first_key;
        const int64_t end = i + 1 - block.first_key;
        std::memset(row, 0, static_cast<size_t>(begin) * 4);
        std::memset(row + end, 0, static_cast<size_t>(width - end) * 4);
        float* seen = row + begin;
        if (!is_known) {
            auto highest = V::set1(-std::numeric_limits<float>::infinity());
            for_lanes(end - begin, [&](int64_t k, int lanes) {
                highest = V::max(V::keep_lanes(load_lanes<V>(seen + k, lanes), 0, lanes, highest), highest);
            });
            lse[i] = V::reduce_max(highest);
        }
        const auto shift = V::set1(lse[i]);
        auto sums = V::zero();
        for_lanes(end - begin, [&](int64_t k, int lanes) {
            const auto e = exp<V>(V::sub(load_lanes<V>(seen + k, lanes), shift));
            store_lanes<V>(seen + k, e, lanes);
            sums = V::add(sums, V::keep_lanes(e, 0, lanes, V::zero()));
        });
        if (is_known) continue;
        const float total = V::reduce_add(sums);
        const auto share = V::set1(1.0f / total);
        for_lanes(end - begin, [&](int64_t k, int lanes) {
            store_lanes<V>(seen + k, V::mul(load_lanes<V>(seen + k, lanes), share), lanes);
        });
        lse[i] += std::log(total);
    }
}

// Rows [first, first + count) of a head as floats [count][width], times `factor`.
template <class V, class E>
void widen_rows(const CausalItem& item, const GridRows& from, int64_t first, int64_t count, int64_t head, int64_t width,
                float factor, float* to) {
    for (int64_t i = 0; i < count; ++i) {
        widen_row<V>(item.row<E>(from, first + i, head), width, factor, to + i * width);
    }
}

// rows [count][width] of type T from sums of `stride`, times `factor`.
template <class V, class T>
void store_rows(const float* sums, int64_t stride, int64_t count, int64_t width, float factor, T* out,
                int64_t out_stride) {
    const auto scale = V::set1(factor);
    for (int64_t i = 0; i < count; ++i) {
        for_lanes(width, [&](int64_t k, int lanes) {
            const auto x = V::mul(load_lanes<V>(sums + i * stride + k, lanes), scale);
            store_lanes<V>(out + i * out_stride + k, x, lanes);
        });
    }
}

template <class Arch, class E>
void causal_attention_item(const CausalCall& call, int64_t index) {
    using V = typename Arch::Vector;
    using T = typename E::Storage;
    const CausalItem item(call, index);
    const int64_t length = item.length, padded = item.padded_length, dim = call.key_dim, value_dim = call.value_dim;
    const int64_t value_width = round_up(value_dim, panel_width);
    ItemMemory memory(padded * (dim + value_width + queries_at_once) + length * larger(dim, value_dim) +
                      queries_at_once * (dim + value_width) + 8 * panel_width);
    float* rows = memory.take(length * larger(dim, value_dim));
    float* keys = memory.take(padded * dim);
    float* values = memory.take(length * value_width);
    float* scores = memory.take(queries_at_once * padded);
    float* queries = memory.take(queries_at_once * dim);
    float* sums = memory.take(queries_at_once * value_width);
    widen_rows<V, E>(item, call.k, 0, length, item.kv_head, dim, 1.0f, rows);
    pack_turned(rows, length, dim, keys);
    widen_rows<V, E>(item, call.v, 0, length, item.kv_head, value_dim, 1.0f, rows);
    pack_rows<V>(rows, length, value_dim, values);
    for (int64_t head = item.kv_head * item.heads; head < (item.kv_head + 1) * item.heads; ++head) {
        float* lse = call.lse + (item.sequence * call.q.sizes[2] + head) * length;
        for (int64_t begin = 0; begin < length; begin += queries_at_once) {
            const QueryBlock block(call, item, begin);
            widen_rows<V, E>(item, call.q, block.first, block.count(), head, dim, call.scale, queries);
            multiply_panels<Arch>({queries, dim, block.count(), keys, dim, 0, dim, block.first_panel(),
                                   block.end_panel(), scores, padded, false});
            weigh_scores<V>(call, item, block, scores, padded, lse, false);
            multiply_panels<Arch>({scores, padded, block.count(), values, length, block.first_key, block.end, 0,
                                   value_width / panel_width, sums, value_width, false});
            T* out = static_cast<T*>(call.out) +
                     ((item.sequence * length + block.first) * call.q.sizes[2] + head) * value_dim;
            store_rows<V>(sums, value_width, block.count(), value_dim, 1.0f, out, call.q.sizes[2] * value_dim);
        }
    }
}

template <class Arch, class E>
void causal_attention(const CausalCall& call, ThreadPool& pool) {
    pool.for_each(call.k.sizes[0] * call.k.sizes[2],
                  [&](int64_t item) { causal_attention_item<Arch, E>(call, item); });
}

template <class Arch, class E>
void causal_gradient_item(const CausalGradientCall& gradient, int64_t index) {
    using V = typename Arch::Vector;
    using T = typename E::Storage;
    const CausalCall& call = gradient.forward;
    const CausalItem item(call, index);
    const int64_t length = item.length, padded = item.padded_length, dim = call.key_dim, value_dim = call.value_dim;
    const int64_t heads = call.q.sizes[2], kv_heads = call.k.sizes[2];
    const int64_t key_width = round_up(dim, panel_width), value_width = round_up(value_dim, panel_width);
    const int64_t most = larger(key_width, value_width), block_size = queries_at_once;
    ItemMemory memory(padded * (2 * dim + 2 * key_width + 2 * value_width + 3 * block_size + most) +
                      block_size * (6 * most) + 32 * panel_width);
    float* rows = memory.take(length * most);
    float* keys = memory.take(padded * dim);             // by key
    float* keys_by_dim = memory.take(padded * key_width);
    float* values = memory.take(padded * value_dim);     // by key
    float* grad_keys = memory.take(padded * key_width);
    float* grad_values = memory.take(padded * value_width);
    float* weights = memory.take(block_size * padded);
    float* grad_scores = memory.take(block_size * padded);
    float* turned = memory.take(padded * block_size);
    float* queries = memory.take(block_size * dim);
    float* grads = memory.take(block_size * value_dim);
    float* panels = memory.take(block_size * most);
    float* sums = memory.take(block_size * key_width);
    widen_rows<V, E>(item, call.k, 0, length, item.kv_head, dim, 1.0f, rows);
    pack_turned(rows, length, dim, keys);
    pack_rows<V>(rows, length, dim, keys_by_dim);
    widen_rows<V, E>(item, call.v, 0, length, item.kv_head, value_dim, 1.0f, rows);
    pack_turned(rows, length, value_dim, values);
    std::memset(grad_keys, 0, static_cast<size_t>(padded * key_width) * 4);
    std::memset(grad_values, 0, static_cast<size_t>(padded * value_width) * 4);
    for (int64_t head = item.kv_head * item.heads; head < (item.kv_head + 1) * item.heads; ++head) {
        float* lse = call.lse + (item.sequence * heads + head) * length;
        for (int64_t begin = 0; begin < length; begin += block_size) {
            const QueryBlock block(call, item, begin);
            const int64_t count = block.count(), first_panel = block.first_panel(), end_panel = block.end_panel();
            const int64_t span = (end_panel - first_panel) * panel_width;
            widen_rows<V, E>(item, call.q, block.first, count, head, dim, call.scale, queries);
            widen_rows<V, E>(item, gradient.grad, block.first, count, head, value_dim, 1.0f, grads);
            multiply_panels<Arch>(
                {queries, dim, count, keys, dim, 0, dim, first_panel, end_panel, weights, padded, false});
            weigh_scores<V>(call, item, block, weights, padded, lse, true);
            multiply_panels<Arch>({grads, value_dim, count, values, value_dim, 0, value_dim, first_panel, end_panel,
                                   grad_scores, padded, false});
            for (int64_t i = 0; i < count; ++i) {
                const T* out = static_cast<const T*>(call.out) +
                               ((item.sequence * length + block.first + i) * heads + head) * value_dim;
                auto dots = V::zero();
                for_lanes(value_dim, [&](int64_t k, int lanes) {
                    dots = V::fma(load_lanes<V>(grads + i * value_dim + k, lanes), load_lanes<V>(out + k, lanes), dots);
                });
                const auto mean = V::set1(V::reduce_add(dots));
                float* of_scores = grad_scores + i * padded;
                for_lanes(span, [&](int64_t k, int lanes) {
                    const auto less = V::sub(load_lanes<V>(of_scores + k, lanes), mean);
                    store_lanes<V>(of_scores + k, V::mul(load_lanes<V>(weights + i * padded + k, lanes), less), lanes);
                });
            }
            multiply_panels<Arch>({grad_scores, padded, count, keys_by_dim, length, block.first_key, block.end, 0,
                                   key_width / panel_width, sums, key_width, false});
            T* grad_q = static_cast<T*>(gradient.grad_q) +
                        ((item.sequence * length + block.first) * heads + head) * dim;
            store_rows<V>(sums, key_width, count, dim, call.scale, grad_q, heads * dim);
            turn_matrix(grad_scores, padded, count, span, turned, block_size);
            pack_rows<V>(queries, count, dim, panels);
            multiply_panels<Arch>({turned, block_size, span, panels, count, 0, count, 0, key_width / panel_width,
                                   grad_keys + block.first_key * key_width, key_width, true});
            turn_matrix(weights, padded, count, span, turned, block_size);
            pack_rows<V>(grads, count, value_dim, panels);
            multiply_panels<Arch>({turned, block_size, span, panels, count, 0, count, 0, value_width / panel_width,
                                   grad_values + block.first_key * value_width, value_width, true});
        }
    }
    const int64_t first = (item.sequence * length * kv_heads + item.kv_head);
    store_rows<V>(grad_keys, key_width, length, dim, 1.0f, static_cast<T*>(gradient.grad_k) + first * dim,
                  kv_heads * dim);
    store_rows<V>(grad_values, value_width, length, value_dim, 1.0f,
                  static_cast<T*>(gradient.grad_v) + first * value_dim, kv_heads * value_dim);
}

template <class Arch, class E>
void causal_gradient(const CausalGradientCall& call, ThreadPool& pool) {
    const GridRows& k = call.forward.k;
    pool.for_each(k.sizes[0] * k.sizes[2], [&](int64_t item) { causal_gradient_item<Arch, E>(call, item); });
}

}  // namespace antiphon::kernels

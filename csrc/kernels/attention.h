// Causal attention over paged keys and values, online softmax (FlashAttention, arXiv 2205.14135, algorithm 1).
//
// Keys are taken in tiles of 64 from position 0 on, whatever the rows: a tile in which a row sees nothing changes
// nothing, bit for bit, so a row's result depends neither on its neighbours nor on how its prompt was cut.
//   s = scale * q k^T;  m' = max(m, max s);  p = exp(s - m');  l = l exp(m - m') + sum p;  o = o exp(m - m') + p v
// A sink (gpt-oss) is a key of score `sink` without a value, taken before all others: m = sink, l = 1.
// All query heads of a group share one pass over keys and values, which are fetched one tile ahead.
//
// With AMX both products run in its tiles, for one row as for many, so that a row has the same bits in a prompt and in
// decoding. Rows are padded to 16. Keys lie in the cache as tiles. A tile of values is of 32 tokens, more than a block of
// 16 holds, so the values of 64 tokens are copied together first. Rejected: tiles of 16 tokens, which are half empty.
#pragma once

#include <limits>

#include "kernels/attention_plan.h"
#include "kernels/block_product.h"
#include "kernels/operations.h"
#include "kernels/quantized_cache.h"
#include "kernels/vector_math.h"

namespace antiphon::kernels {

constexpr int64_t tile_keys = group_width;
constexpr float lowest_score = -1e30f;  // finite, so that "nothing seen yet" never makes inf - inf

// Whether products of these operands run in AMX tiles.
template <class Arch, class E>
constexpr bool in_tiles = Arch::has_tiles && E::type == ElementType::bf16;

// Working memory of one item. `rows` of the arrays: as many as are multiplied, a multiple of 16 in AMX tiles.
template <class E>
struct AttentionState {
    typename E::Storage* q;        // [rows][padded key_dim]
    typename E::Storage* weights;  // [rows][tile_keys]
    float* scores;                 // [rows][tile_keys]
    float* out;                    // [rows][out_stride]
    float* max;                    // [rows]
    float* sums;                   // [rows][16], lane by lane
    char* copied;                  // values of the last, partly filled panel; in AMX tiles those of all 64 tokens
    int64_t num_rows, multiplied_rows, q_stride, out_stride;

    AttentionState(const KVLayout& cache, int64_t num_rows, int64_t rows, int64_t copied_tokens)
        : num_rows(num_rows), multiplied_rows(rows), q_stride(padded_inner(E::type, cache.key_dim)),
          out_stride(cache.value_panels() * panel_width) {
        const size_t element = sizeof(typename E::Storage);
        size_t end = 0;
        const auto reserve = [&](int64_t count, size_t size) {
            const size_t start = end;
            end = static_cast<size_t>(round_up(static_cast<int64_t>(end + static_cast<size_t>(count) * size), 64));
            return start;
        };
        const size_t at[] = {reserve(rows * q_stride, element), reserve(rows * tile_keys, element),
                             reserve(rows * tile_keys, 4),      reserve(rows * out_stride, 4),
                             reserve(rows, 4),                  reserve(rows * panel_width, 4),
                             reserve(cache.value_panels() * copied_tokens / E::per_step, panel_bytes)};
        char* memory = Scratch::get<char>(ScratchUse::attention, end);
        q = reinterpret_cast<typename E::Storage*>(memory + at[0]);
        weights = reinterpret_cast<typename E::Storage*>(memory + at[1]);
        scores = reinterpret_cast<float*>(memory + at[2]);
        out = reinterpret_cast<float*>(memory + at[3]);
        max = reinterpret_cast<float*>(memory + at[4]);
        sums = reinterpret_cast<float*>(memory + at[5]);
        copied = memory + at[6];
    }
};

// One sequence's cache as seen by one KV head: where each panel of 16 tokens lies. In 8 bits operands lie in scratch
// memory, for one tile at a time.
struct SequenceCache {
    const KVLayout& cache;
    const int32_t* table;
    const char* first_block;
    size_t block_bytes, key_panel_bytes, value_panel_bytes, value_offset;
    uint32_t panels_per_block;
    float* tile = nullptr;  // in 8 bits: operands of the tile's keys, then of its values

    SequenceCache(const AttentionCall& call, const AttentionItem& item)
        : cache(call.cache), table(call.batch.block_tables + item.sequence * call.batch.table_stride),
          first_block(cache.keys(call.layer, 0, item.kv_head)),
          block_bytes(static_cast<size_t>(cache.num_kv_heads) * cache.head_bytes()),
          key_panel_bytes(cache.key_panel_bytes()),
          value_panel_bytes(static_cast<size_t>(cache.panel_steps() * panel_bytes)), value_offset(cache.key_bytes()),
          panels_per_block(static_cast<uint32_t>(cache.block_size / panel_width)) {
        if (!cache.is_quantized()) return;
        value_panel_bytes = panel_width;
        tile = Scratch::get<float>(ScratchUse::cached,
                                   static_cast<size_t>(tile_keys * (cache.key_dim + cache.value_panels() * panel_width)));
    }

    // Operands of 16 tokens' keys and values; `number`: which panel of the tile. And from value panel to value panel.
    const char* key_operands(int64_t position, int number) const {
        return tile == nullptr ? keys(position)
                               : reinterpret_cast<const char*>(tile + number * panel_width * cache.key_dim);
    }
    const char* value_operands(int64_t position, int number) const {
        return tile == nullptr ? values(position) : reinterpret_cast<const char*>(tile_values(number));
    }
    int64_t value_stride() const { return (tile == nullptr ? cache.block_steps() : panel_width) * panel_bytes; }

    // Reads tokens [first, first + count).
    template <class V>
    void unpack_tile(int64_t first, int64_t count) const {
        for (int n = 0; n * panel_width < count; ++n) {
            const int64_t position = first + n * panel_width;
            const int64_t token = position % cache.block_size;
            unpack_keys<V>(cache, keys(position), tile + n * panel_width * cache.key_dim);
            const char* head = panel_at(position, 0) + value_offset;
            unpack_values<V>(cache, head, token, smaller(panel_width, count - n * panel_width), tile_values(n));
        }
    }

    const char* keys(int64_t position) const { return panel_at(position, key_panel_bytes); }
    const char* values(int64_t position) const { return panel_at(position, value_panel_bytes) + value_offset; }

  private:
    float* tile_values(int number) const {
        return tile + tile_keys * cache.key_dim + number * panel_width * cache.value_panels() * panel_width;
    }
    const char* panel_at(int64_t position, size_t bytes) const {
        const auto panel = static_cast<uint32_t>(position / panel_width);
        const uint32_t block = panels_per_block == 1 ? panel : panel / panels_per_block;
        return first_block + static_cast<size_t>(table[block]) * block_bytes + (panel - block * panels_per_block) * bytes;
    }
};

// Fetches an item's first tile all at once; later tiles are fetched while the one before is computed.
inline void prefetch_first_tile(const SequenceCache& sequence, int64_t first, int64_t num_keys) {
    const int64_t end = smaller(num_keys, first + tile_keys);
    for (int64_t position = first; position < end; position += panel_width) {
        const char* keys = sequence.keys(position);
        for (size_t i = 0; i < sequence.key_panel_bytes; i += 64) __builtin_prefetch(keys + i);
    }
    for (int64_t position = first; position < end; position += panel_width) {
        const char* values = sequence.values(position);
        const size_t stride = sequence.value_panel_bytes * sequence.panels_per_block;
        for (int64_t panel = 0; panel < sequence.cache.value_panels(); ++panel) {
            const char* from = values + static_cast<size_t>(panel) * stride;
            for (size_t i = 0; i < sequence.value_panel_bytes; i += 64) __builtin_prefetch(from + i);
        }
    }
}

template <class V, class E, class C>
void start_item(const AttentionCall& call, const AttentionItem& item, AttentionState<C>& state) {
    using T = typename E::Storage;
    const int64_t dim = call.cache.key_dim;
    const int64_t group = call.num_heads / call.cache.num_kv_heads;
    const int64_t first_row = call.batch.query_starts[item.sequence] + item.first_query;
    for (int64_t r = 0; r < state.num_rows; ++r) {
        const T* q = static_cast<const T*>(call.q) +
                     ((first_row + r / group) * call.num_heads + item.kv_head * group + r % group) * dim;
        copy_row<V>(q, dim, state.q_stride, state.q + r * state.q_stride);
        state.max[r] = lowest_score;
    }
    const int64_t padding = state.multiplied_rows - state.num_rows;
    constexpr size_t element = sizeof(typename C::Storage);
    std::memset(state.q + state.num_rows * state.q_stride, 0, static_cast<size_t>(padding * state.q_stride) * element);
    std::memset(state.weights + state.num_rows * tile_keys, 0, static_cast<size_t>(padding * tile_keys) * element);
    std::memset(state.out, 0, static_cast<size_t>(state.multiplied_rows * state.out_stride) * 4);
    std::memset(state.sums, 0, static_cast<size_t>(state.num_rows * panel_width) * 4);
    for (int64_t r = 0; call.sinks != nullptr && r < state.num_rows; ++r) {
        const float sink = call.sinks[item.kv_head * group + r % group];
        if (sink <= lowest_score) continue;
        state.max[r] = sink;
        state.sums[r * panel_width] = 1.0f;
    }
}

template <class Arch, class E>
void multiply_rows(const Block& block, int num_prefetch) {
    if constexpr (in_tiles<Arch, E>) {
        multiply_whole_tiles<typename Arch::Tiles>(block, num_prefetch);
    } else {
        multiply_block<typename Arch::Vector, E>(block);
    }
}

// scores = q k^T for keys [first, first + count).
template <class Arch, class E>
void score_tile(const SequenceCache& sequence, const AttentionState<E>& state, int64_t first, int64_t count,
                int64_t num_keys) {
    Segment segment;
    segment.steps = sequence.cache.key_steps();
    const int num_panels = static_cast<int>(divide_up(count, panel_width));
    for (int n = 0; n < num_panels; ++n) {
        const int64_t ahead = first + tile_keys + n * panel_width;
        segment.panel[n] = sequence.key_operands(first + n * panel_width, n);
        segment.prefetch[n] = ahead < num_keys ? sequence.key_operands(ahead, n) : segment.panel[n];
    }
    const Block block{
        .rows = reinterpret_cast<const char*>(state.q),
        .row_bytes = static_cast<size_t>(state.q_stride) * sizeof(typename E::Storage),
        .num_rows = state.multiplied_rows,
        .segments = &segment,
        .num_segments = 1,
        .num_panels = num_panels,
        .step_bytes = panel_bytes,
        .sums = state.scores,
        .sums_stride = tile_keys,
        .accumulate = false,
    };
    multiply_rows<Arch, E>(block, num_panels);
}

// One row's scores become weights; keys [visible, end_visible) of the tile count, the rest weighs exactly nothing.
template <class V, class E>
void weigh_row(AttentionState<E>& state, int64_t row, int num_panels, int64_t visible, int64_t end_visible, float scale) {
    typename V::F s[group_panels];
    const auto hidden = V::set1(-std::numeric_limits<float>::infinity());
    auto highest = V::set1(state.max[row]);
    for (int n = 0; n < num_panels; ++n) {
        s[n] = V::mul(V::load(state.scores + row * tile_keys + n * panel_width), V::set1(scale));
        const int64_t from = larger(0, smaller(panel_width, visible - n * panel_width));
        const int64_t to = larger(0, smaller(panel_width, end_visible - n * panel_width));
        if (from > 0 || to < panel_width) s[n] = V::keep_lanes(s[n], static_cast<int>(from), static_cast<int>(to), hidden);
        highest = V::max(highest, s[n]);
    }
    const float new_max = V::reduce_max(highest);
    const auto shift = V::set1(new_max);
    auto sums = V::load(state.sums + row * panel_width);
    if (new_max != state.max[row]) {
        const auto shrink = exp<V>(V::sub(V::set1(state.max[row]), shift));
        sums = V::mul(sums, shrink);
        float* out = state.out + row * state.out_stride;
        for (int64_t i = 0; i < state.out_stride; i += panel_width) V::store(out + i, V::mul(V::load(out + i), shrink));
        state.max[row] = new_max;
    }
    for (int n = 0; n < num_panels; ++n) {
        const auto weight = exp<V>(V::sub(s[n], shift));
        sums = V::add(sums, weight);
        V::store(state.weights + row * tile_keys + n * panel_width, weight);
    }
    for (int n = num_panels; n < group_panels; ++n) {
        V::store(state.weights + row * tile_keys + n * panel_width, V::zero());
    }
    V::store(state.sums + row * panel_width, sums);
}

// The values of a panel's first `valid` tokens, and zeros: stale ones could be infinite, and 0 * inf is not 0.
// `to_bytes`: from one panel of 16 dims to the next.
template <class E>
void copy_values(const KVLayout& cache, const char* values, int64_t valid, char* to, int64_t to_bytes) {
    const int64_t steps = cache.panel_steps();
    const int64_t whole = valid / E::per_step;
    for (int64_t panel = 0; panel < cache.value_panels(); ++panel, to += to_bytes) {
        const char* from = values + panel * cache.block_steps() * panel_bytes;
        std::memcpy(to, from, static_cast<size_t>(whole * panel_bytes));
        std::memset(to + whole * panel_bytes, 0, static_cast<size_t>((steps - whole) * panel_bytes));
        for (int n = 0; valid % E::per_step != 0 && n < panel_width; ++n) {
            std::memcpy(to + whole * panel_bytes + n * 4, from + whole * panel_bytes + n * 4, 2);
        }
    }
}

// out += weights v in AMX tiles, from a copy of the values of keys [first, first + count) and zeros up to 64.
template <class Arch, class E>
void add_values_in_tiles(const SequenceCache& sequence, const AttentionState<E>& state, int64_t first, int64_t count,
                         int64_t num_keys) {
    const KVLayout& cache = sequence.cache;
    const int64_t steps = tile_keys / E::per_step;
    for (int64_t token = 0; token < tile_keys; token += panel_width) {
        const int64_t valid = larger(0, smaller(panel_width, count - token));
        const char* values = sequence.values(valid > 0 ? first + token : first);
        const char* ahead = first + token + tile_keys < num_keys ? sequence.values(first + token + tile_keys) : nullptr;
        for (int64_t panel = 0; ahead != nullptr && panel < cache.value_panels(); ++panel) {
            const char* next = ahead + panel * cache.block_steps() * panel_bytes;
            for (int64_t step = 0; step < cache.panel_steps(); ++step) __builtin_prefetch(next + step * panel_bytes);
        }
        copy_values<E>(cache, values, valid, state.copied + token / E::per_step * panel_bytes, steps * panel_bytes);
    }
    for (int64_t dims = 0; dims < cache.value_panels(); dims += group_panels) {
        Segment segment;
        segment.steps = steps;
        const int num_panels = static_cast<int>(smaller(group_panels, cache.value_panels() - dims));
        for (int n = 0; n < num_panels; ++n) segment.panel[n] = state.copied + (dims + n) * steps * panel_bytes;
        const Block block{
            .rows = reinterpret_cast<const char*>(state.weights),
            .row_bytes = tile_keys * sizeof(typename E::Storage),
            .num_rows = state.multiplied_rows,
            .segments = &segment,
            .num_segments = 1,
            .num_panels = num_panels,
            .step_bytes = panel_bytes,
            .sums = state.out + dims * panel_width,
            .sums_stride = static_cast<size_t>(state.out_stride),
            .accumulate = true,
        };
        multiply_whole_tiles<typename Arch::Tiles>(block, 0);
    }
}

// out += weights v for keys [first, first + count); one segment a panel of tokens.
template <class V, class E>
void add_values(const SequenceCache& sequence, const AttentionState<E>& state, int64_t first, int64_t count,
                int64_t num_keys) {
    const KVLayout& cache = sequence.cache;
    const int num_token_panels = static_cast<int>(divide_up(count, panel_width));
    const int64_t stride = sequence.value_stride();
    if (const int64_t valid = count % panel_width; valid != 0 && !cache.is_quantized()) {
        const char* values = sequence.values(first + count - valid);
        copy_values<E>(cache, values, valid, state.copied, cache.panel_steps() * panel_bytes);
    }
    for (int64_t dims = 0; dims < cache.value_panels(); dims += group_panels) {
        const int num_panels = static_cast<int>(smaller(group_panels, cache.value_panels() - dims));
        Segment segments[group_panels];
        for (int t = 0; t < num_token_panels; ++t) {
            const int64_t position = first + t * panel_width;
            const bool is_tail = first + count - position < panel_width && !cache.is_quantized();
            const char* values = is_tail ? state.copied : sequence.value_operands(position, t);
            const int64_t panel_stride = is_tail ? cache.panel_steps() * panel_bytes : stride;
            const bool more = position + tile_keys < num_keys;
            const char* ahead = more ? sequence.value_operands(position + tile_keys, t) : nullptr;
            segments[t].steps = cache.panel_steps();
            for (int n = 0; n < num_panels; ++n) {
                segments[t].panel[n] = values + (dims + n) * panel_stride;
                segments[t].prefetch[n] = more ? ahead + (dims + n) * stride : segments[t].panel[n];
            }
        }
        multiply_block<V, E>({
            .rows = reinterpret_cast<const char*>(state.weights),
            .row_bytes = tile_keys * sizeof(typename E::Storage),
            .num_rows = state.num_rows,
            .segments = segments,
            .num_segments = num_token_panels,
            .num_panels = num_panels,
            .step_bytes = panel_bytes,
            .sums = state.out + dims * panel_width,
            .sums_stride = static_cast<size_t>(state.out_stride),
            .accumulate = true,
        });
    }
}

template <class V, class E, class C>
void finish_item(const AttentionCall& call, const AttentionItem& item, const AttentionState<C>& state) {
    using T = typename E::Storage;
    const int64_t dim = call.cache.value_dim;
    const int64_t group = call.num_heads / call.cache.num_kv_heads;
    const int64_t first_row = call.batch.query_starts[item.sequence] + item.first_query;
    for (int64_t r = 0; r < state.num_rows; ++r) {
        const auto inverse = V::set1(1.0f / V::reduce_add(V::load(state.sums + r * panel_width)));
        T* out = static_cast<T*>(call.out) +
                 ((first_row + r / group) * call.num_heads + item.kv_head * group + r % group) * dim;
        for_lanes(dim, [&](int64_t i, int lanes) {
            store_lanes<V>(out + i, V::mul(V::load(state.out + r * state.out_stride + i), inverse), lanes);
        });
    }
}

// E: rows in and out; C: operands.
template <class Arch, class E, class C>
void attend(const AttentionCall& call, const AttentionItem& item) {
    using V = typename Arch::Vector;
    constexpr bool tiles = in_tiles<Arch, C>;
    const int64_t group = call.num_heads / call.cache.num_kv_heads;
    const SequenceCache sequence(call, item);
    const int64_t first_position = item.num_keys - item.num_queries;
    const int64_t window = call.sliding_window > 0 ? call.sliding_window : item.num_keys;
    int64_t first = larger(0, first_position - window + 1) / tile_keys * tile_keys;
    prefetch_first_tile(sequence, first, item.num_keys);
    const int64_t num_rows = item.num_queries * group;
    AttentionState<C> state(call.cache, num_rows, tiles ? round_up(num_rows, tile_height) : num_rows,
                            tiles ? tile_keys : panel_width);
    start_item<V, E>(call, item, state);
    if constexpr (tiles) configure_tiles<typename Arch::Tiles>(tile_height, tile_height);
    for (; first < item.num_keys; first += tile_keys) {
        const int64_t count = smaller(tile_keys, item.num_keys - first);
        if (call.cache.is_quantized()) sequence.unpack_tile<V>(first, count);
        score_tile<Arch, C>(sequence, state, first, count, item.num_keys);
        const int num_panels = static_cast<int>(divide_up(count, panel_width));
        for (int64_t r = 0; r < state.num_rows; ++r) {
            const int64_t position = first_position + r / group;
            weigh_row<V, C>(state, r, num_panels, position - window + 1 - first, position + 1 - first, call.scale);
        }
        if constexpr (tiles) {
            add_values_in_tiles<Arch, C>(sequence, state, first, count, item.num_keys);
        } else {
            add_values<V, C>(sequence, state, first, count, item.num_keys);
        }
    }
    finish_item<V, E>(call, item, state);
}

template <class Arch, class E>
void paged_attention(const AttentionCall& call, ThreadPool& pool) {
    const AttentionPlan plan = plan_attention(call);
    pool.for_each_in_order(plan.num_items, [&](int64_t index) {
        if (call.cache.is_quantized()) {
            attend<Arch, E, Fp32>(call, plan.items[index]);
        } else {
            attend<Arch, E, E>(call, plan.items[index]);
        }
    });
}

}  // namespace antiphon::kernels

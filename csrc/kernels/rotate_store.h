// From the fused projection's rows [q | k | v]: per-head RMS norm, rotary embedding, keys and values into the cache.
#pragma once

#include "kernels/operations.h"
#include "kernels/rms_norm.h"

namespace antiphon::kernels {

// Where one row's head goes through: float copies around the rotation, then elements padded for the key layout.
template <class E>
struct HeadScratch {
    typename E::Storage* element;  // [padded key_dim], the tail stays zero
    float* wide;                   // [key_dim]
};

template <class E>
HeadScratch<E> head_scratch(int64_t key_dim) {
    const auto padded = static_cast<size_t>(padded_inner(E::type, key_dim));
    char* memory = Scratch::get<char>(ScratchUse::attention, padded * (4 + sizeof(typename E::Storage)) + 128);
    HeadScratch<E> scratch{reinterpret_cast<typename E::Storage*>(memory + round_up(padded * 4, 64)),
                           reinterpret_cast<float*>(memory)};
    std::memset(scratch.element, 0, padded * sizeof(typename E::Storage));
    return scratch;
}

// wide[0, 2 half) turned by the angles of one position (RoFormer, equation 34), neighbours or halves paired.
template <class V>
void rotate_head(const RotateCall& call, int64_t position, float* wide) {
    const int64_t half = call.rotary_half;
    const float* cos = call.cos + position * half;
    const float* sin = call.sin + position * half;
    if (call.interleaved) {
        for (int64_t i = 0; i < half; ++i) {
            const float a = wide[2 * i];
            const float b = wide[2 * i + 1];
            wide[2 * i] = a * cos[i] - b * sin[i];
            wide[2 * i + 1] = b * cos[i] + a * sin[i];
        }
        return;
    }
    for_lanes(half, [&](int64_t i, int lanes) {
        const auto a = load_lanes<V>(wide + i, lanes);
        const auto b = load_lanes<V>(wide + half + i, lanes);
        const auto c = load_lanes<V>(cos + i, lanes);
        const auto s = load_lanes<V>(sin + i, lanes);
        store_lanes<V>(wide + i, V::sub(V::mul(a, c), V::mul(b, s)), lanes);
        store_lanes<V>(wide + half + i, V::add(V::mul(b, c), V::mul(a, s)), lanes);
    });
}

// Norm (if any) and rotation of one head into `out` [key_dim].
template <class V, class E>
void prepare_head(const RotateCall& call, int64_t position, const typename E::Storage* head, const void* norm,
                  float* wide, typename E::Storage* out) {
    using T = typename E::Storage;
    const int64_t dim = call.cache.key_dim;
    if (norm != nullptr) {
        rms_norm_row<V, E>(head, static_cast<const T*>(norm), out, dim, call.eps);
        head = out;
    }
    for_lanes(dim, [&](int64_t i, int lanes) { store_lanes<V>(wide + i, load_lanes<V>(head + i, lanes), lanes); });
    rotate_head<V>(call, position, wide);
    for_lanes(dim, [&](int64_t i, int lanes) { store_lanes<V>(out + i, load_lanes<V>(wide + i, lanes), lanes); });
}

template <class E>
void store_key(const KVLayout& cache, char* keys, int64_t token, const typename E::Storage* padded_key) {
    const int64_t steps = cache.key_steps();
    char* lane = keys + token / panel_width * steps * panel_bytes + token % panel_width * 4;
    const char* from = reinterpret_cast<const char*>(padded_key);
    for (int64_t step = 0; step < steps; ++step) std::memcpy(lane + step * panel_bytes, from + step * 4, 4);
}

template <class E>
void store_value(const KVLayout& cache, char* values, int64_t token, const typename E::Storage* value) {
    constexpr int64_t per_step = E::per_step;
    char* first = values + token / per_step * panel_bytes + token % per_step * static_cast<int64_t>(sizeof(*value));
    const int64_t panel_stride = cache.block_steps() * panel_bytes;
    for (int64_t dim = 0; dim < cache.value_dim; ++dim) {
        std::memcpy(first + dim / panel_width * panel_stride + dim % panel_width * 4, value + dim, sizeof(*value));
    }
}

template <class Arch, class E>
void rotate_and_store(const RotateCall& call, ThreadPool& pool) {
    using V = typename Arch::Vector;
    using T = typename E::Storage;
    const KVLayout& cache = call.cache;
    const int64_t dim = cache.key_dim;
    const int64_t row_width = (call.num_heads + cache.num_kv_heads) * dim + cache.num_kv_heads * cache.value_dim;
    const int64_t rows_per_item = larger(1, elements_worth_a_thread / 4 / row_width);
    pool.for_each(divide_up(call.qkv.count, rows_per_item), [&](int64_t item) {
        const HeadScratch<E> scratch = head_scratch<E>(dim);
        const int64_t end = smaller(call.qkv.count, (item + 1) * rows_per_item);
        for (int64_t row = item * rows_per_item; row < end; ++row) {
            const T* q = row_at<E>(call.qkv, row);
            const T* k = q + call.num_heads * dim;
            const T* v = k + cache.num_kv_heads * dim;
            const int64_t position = call.batch.positions[row];
            const int64_t block = call.batch.slots[row] / cache.block_size;
            const int64_t token = call.batch.slots[row] % cache.block_size;
            T* out = static_cast<T*>(call.q) + row * call.num_heads * dim;
            for (int64_t head = 0; head < call.num_heads; ++head) {
                prepare_head<V, E>(call, position, q + head * dim, call.q_norm, scratch.wide, out + head * dim);
            }
            for (int64_t head = 0; head < cache.num_kv_heads; ++head) {
                prepare_head<V, E>(call, position, k + head * dim, call.k_norm, scratch.wide, scratch.element);
                char* keys = cache.keys(call.layer, block, head);
                char* values = cache.values(call.layer, block, head);
                if (cache.is_quantized()) {
                    store_quantized_key<V>(cache, keys, token, scratch.element);
                    store_quantized_value<V>(cache, values, token, v + head * cache.value_dim);
                } else {
                    store_key<E>(cache, keys, token, scratch.element);
                    store_value<E>(cache, values, token, v + head * cache.value_dim);
                }
            }
        }
    });
}

}  // namespace antiphon::kernels

// Keys and values in 8 bits: a code for each element and a scale for each token of a head (packed_layout.h).
//
// A row is stored as code = row / scale, the largest magnitude at the end of the code's range. Attention reads a tile of
// 64 tokens as float32 operands and then is that of a float32 cache; the error is that of the codes: at most 1/254 of a
// row's largest element (int8), or 1/16 of each element (fp8, E4M3).
// Rejected: products with the codes and scales behind them; values have their scales along the inner dimension.
#pragma once

#include <cmath>
#include <cstring>

#include "kernels/rows.h"

namespace antiphon::kernels {

// |x| <= 448 to E4M3, to nearest even: at a power of two lower by 120 the bits of a float hold those of the code.
inline uint8_t to_e4m3(float x) {
    const float small = x * 0x1p-120f;
    uint32_t bits;
    std::memcpy(&bits, &small, 4);
    const uint32_t magnitude = bits & 0x7fffffffu;
    return static_cast<uint8_t>(bits >> 31 << 7 | (magnitude + 0x7ffffu + (magnitude >> 20 & 1u)) >> 20);
}

// Codes of one row, `stride(i)` bytes behind the first; returns the scale.
template <class V, class T, class Place>
float store_codes(KVStorage storage, const T* row, int64_t width, const Place& place) {
    auto highest = V::zero();
    for_lanes(width, [&](int64_t i, int lanes) { highest = V::max(highest, V::abs(load_lanes<V>(row + i, lanes))); });
    const float limit = storage == KVStorage::int8 ? 127.0f : 448.0f;
    const float scale = V::reduce_max(highest) / limit;
    const auto inverse = V::set1(scale > 0.0f ? 1.0f / scale : 0.0f);
    for_lanes(width, [&](int64_t i, int lanes) {
        const auto limited = V::min(V::mul(load_lanes<V>(row + i, lanes), inverse), V::set1(limit));
        float units[panel_width];
        V::store(units, V::max(limited, V::set1(-limit)));
        for (int n = 0; n < lanes; ++n) {
            *place(i + n) = storage == KVStorage::int8 ? static_cast<char>(std::lrintf(units[n]))
                                                       : static_cast<char>(to_e4m3(units[n]));
        }
    });
    return scale;
}

template <class V, class T>
void store_quantized_key(const KVLayout& cache, char* keys, int64_t token, const T* key) {
    char* panel = keys + static_cast<size_t>(token / panel_width) * cache.key_panel_bytes();
    const int64_t lane = token % panel_width;
    const float scale = store_codes<V>(cache.storage, key, cache.key_dim, [&](int64_t dim) {
        return panel + panel_width * (4 + dim) + lane;
    });
    std::memcpy(panel + 4 * lane, &scale, 4);
}

template <class V, class T>
void store_quantized_value(const KVLayout& cache, char* values, int64_t token, const T* value) {
    char* codes = values + 4 * cache.block_size;
    const float scale = store_codes<V>(cache.storage, value, cache.value_dim, [&](int64_t dim) {
        return codes + (dim / panel_width * cache.block_size + token) * panel_width + dim % panel_width;
    });
    std::memcpy(values + 4 * token, &scale, 4);
}

template <class V>
ANTIPHON_INLINE typename V::F load_codes(KVStorage storage, const char* codes) {
    return storage == KVStorage::int8 ? V::load_int8(codes) : V::load_e4m3(codes);
}

// Keys of one panel of 16 tokens as operands, [key_dim][16 tokens].
template <class V>
void unpack_keys(const KVLayout& cache, const char* panel, float* to) {
    const auto scale = V::load(reinterpret_cast<const float*>(panel));
    const char* codes = panel + panel_width * 4;
    for (int64_t dim = 0; dim < cache.key_dim; ++dim) {
        V::store(to + dim * panel_width, V::mul(load_codes<V>(cache.storage, codes + dim * panel_width), scale));
    }
}

// Values of the first `valid` tokens from `token` on as operands, [value_panels][16 tokens][16 dims]; zero beyond them.
template <class V>
void unpack_values(const KVLayout& cache, const char* values, int64_t token, int64_t valid, float* to) {
    const float* scales = reinterpret_cast<const float*>(values) + token;
    const char* codes = values + 4 * cache.block_size + token * panel_width;
    for (int64_t panel = 0; panel < cache.value_panels(); ++panel) {
        const char* from = codes + panel * cache.block_size * panel_width;
        for (int64_t t = 0; t < panel_width; ++t, to += panel_width) {
            V::store(to, t < valid ? V::mul(load_codes<V>(cache.storage, from + t * panel_width), V::set1(scales[t]))
                                   : V::zero());
        }
    }
}

}  // namespace antiphon::kernels

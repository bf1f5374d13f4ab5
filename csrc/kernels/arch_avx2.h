// 16 float lanes as two AVX2 registers; bfloat16 is expanded to float before multiplying. Same interface as arch_plain.h.
#pragma once

#include <immintrin.h>

#include <cstring>

#include "kernels/element.h"

namespace antiphon::kernels {

struct Avx2 {
    static constexpr const char* name = "avx2";
    static constexpr bool has_tiles = false;
    using Vector = Avx2;
    template <class E>
    static constexpr int tile_sums = 4;
    static constexpr int tile_panels = 1;
    static constexpr int64_t rows_without_prefetch = 0;

    struct F {
        __m256 lo, hi;
    };
    struct B {
        __m256i lo, hi;
    };
    using A = __m256i;

    static ANTIPHON_INLINE F set1(float x) { return {_mm256_set1_ps(x), _mm256_set1_ps(x)}; }
    static ANTIPHON_INLINE F zero() { return {_mm256_setzero_ps(), _mm256_setzero_ps()}; }
    static ANTIPHON_INLINE F load(const float* p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
    static ANTIPHON_INLINE void store(float* p, F x) {
        _mm256_storeu_ps(p, x.lo);
        _mm256_storeu_ps(p + 8, x.hi);
    }
    static ANTIPHON_INLINE F load(const uint16_t* p) {
        return {widen(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))),
                widen(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p + 8)))};
    }
    static ANTIPHON_INLINE void store(uint16_t* p, F x) {
        _mm_storeu_si128(reinterpret_cast<__m128i*>(p), narrow(x.lo));
        _mm_storeu_si128(reinterpret_cast<__m128i*>(p + 8), narrow(x.hi));
    }
    template <class T>
    static ANTIPHON_INLINE F load_n(const T* p, int n) {
        T lanes[16] = {};
        std::memcpy(lanes, p, static_cast<size_t>(n) * sizeof(T));
        return load(lanes);
    }
    template <class T>
    static ANTIPHON_INLINE void store_n(T* p, F x, int n) {
        T lanes[16];
        store(lanes, x);
        std::memcpy(p, lanes, static_cast<size_t>(n) * sizeof(T));
    }
    static ANTIPHON_INLINE F add(F a, F b) { return {_mm256_add_ps(a.lo, b.lo), _mm256_add_ps(a.hi, b.hi)}; }
    static ANTIPHON_INLINE F sub(F a, F b) { return {_mm256_sub_ps(a.lo, b.lo), _mm256_sub_ps(a.hi, b.hi)}; }
    static ANTIPHON_INLINE F mul(F a, F b) { return {_mm256_mul_ps(a.lo, b.lo), _mm256_mul_ps(a.hi, b.hi)}; }
    static ANTIPHON_INLINE F div(F a, F b) { return {_mm256_div_ps(a.lo, b.lo), _mm256_div_ps(a.hi, b.hi)}; }
    static ANTIPHON_INLINE F fma(F a, F b, F c) {
        return {_mm256_fmadd_ps(a.lo, b.lo, c.lo), _mm256_fmadd_ps(a.hi, b.hi, c.hi)};
    }
    static ANTIPHON_INLINE F max(F a, F b) { return {_mm256_max_ps(a.lo, b.lo), _mm256_max_ps(a.hi, b.hi)}; }
    static ANTIPHON_INLINE F min(F a, F b) { return {_mm256_min_ps(a.lo, b.lo), _mm256_min_ps(a.hi, b.hi)}; }
    static ANTIPHON_INLINE F abs(F a) {
        const __m256 sign = _mm256_set1_ps(-0.0f);
        return {_mm256_andnot_ps(sign, a.lo), _mm256_andnot_ps(sign, a.hi)};
    }
    static ANTIPHON_INLINE F round(F a) {
        constexpr int nearest = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;
        return {_mm256_round_ps(a.lo, nearest), _mm256_round_ps(a.hi, nearest)};
    }
    static ANTIPHON_INLINE F pow2(F n) { return {pow2_half(n.lo), pow2_half(n.hi)}; }
    static ANTIPHON_INLINE F keep_lanes(F x, int first, int end, F other) {
        const __m256i lane = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
        return {keep_half(x.lo, lane, first, end, other.lo),
                keep_half(x.hi, _mm256_add_epi32(lane, _mm256_set1_epi32(8)), first, end, other.hi)};
    }
    static ANTIPHON_INLINE int store_between(float* p, F x, float first, float end) {
        float lanes[16];
        store(lanes, x);
        int stored = 0;
        for (const float lane : lanes) {
            p[stored] = lane;
            stored += lane >= first && lane < end;
        }
        return stored;
    }
    static ANTIPHON_INLINE float reduce_add(F a) {
        const __m256 eight = _mm256_add_ps(a.lo, a.hi);
        __m128 four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
        four = _mm_add_ps(four, _mm_movehl_ps(four, four));
        return _mm_cvtss_f32(_mm_add_ss(four, _mm_movehdup_ps(four)));
    }
    static ANTIPHON_INLINE float reduce_max(F a) {
        const __m256 eight = _mm256_max_ps(a.lo, a.hi);
        __m128 four = _mm_max_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
        four = _mm_max_ps(four, _mm_movehl_ps(four, four));
        return _mm_cvtss_f32(_mm_max_ss(four, _mm_movehdup_ps(four)));
    }
    static ANTIPHON_INLINE A broadcast(const char* p) {
        int bits;
        std::memcpy(&bits, p, 4);
        return _mm256_set1_epi32(bits);
    }
    static ANTIPHON_INLINE B load_operand(const char* p) {
        const auto* q = reinterpret_cast<const __m256i*>(p);
        return {_mm256_load_si256(q), _mm256_load_si256(q + 1)};
    }
    static constexpr bool has_bf16_dot = false;
    static ANTIPHON_INLINE F load_int8(const char* p) {
        return {_mm256_cvtepi32_ps(bytes(p)), _mm256_cvtepi32_ps(bytes(p + 8))};
    }
    static ANTIPHON_INLINE F load_e4m3(const char* p) {
        const __m256i sign_and_rest = _mm256_set1_epi32(static_cast<int>(0x87f00000u));
        const __m256 rebias = _mm256_set1_ps(0x1p120f);
        const __m256i lo = _mm256_and_si256(_mm256_slli_epi32(bytes(p), 20), sign_and_rest);
        const __m256i hi = _mm256_and_si256(_mm256_slli_epi32(bytes(p + 8), 20), sign_and_rest);
        return {_mm256_mul_ps(_mm256_castsi256_ps(lo), rebias), _mm256_mul_ps(_mm256_castsi256_ps(hi), rebias)};
    }
    static ANTIPHON_INLINE F load_fp16(const char* p) { return {half(p), half(p + 16)}; }
    static ANTIPHON_INLINE F load_e8m0(const char* p) {
        return {_mm256_castsi256_ps(_mm256_slli_epi32(bytes(p), 23)),
                _mm256_castsi256_ps(_mm256_slli_epi32(bytes(p + 8), 23))};
    }
    // A nibble times 2^(4 (k mod 4)): two operations, where moving it down first takes three.
    static constexpr int nibble_places = 4;
    template <int k>
    static ANTIPHON_INLINE F load_nibbles(const char* p) {
        const B words = load_unaligned(p);
        return {nibble<k>(words.lo), nibble<k>(words.hi)};
    }
    // Twice the value plus 12, a byte from a table, times 2^(8 (k / 2)). Even columns come from the low nibbles.
    static constexpr int e2m1_places = 8;
    static constexpr float e2m1_unit = 0.5f;
    static constexpr float e2m1_zero = 12.0f;
    template <int k>
    static ANTIPHON_INLINE F load_e2m1(const char* p) {
        const B words = load_unaligned(p);
        return {e2m1<k>(words.lo), e2m1<k>(words.hi)};
    }
    static ANTIPHON_INLINE F dot(Bf16, F acc, A a, const B& b) {
        const __m256i high = _mm256_set1_epi32(static_cast<int>(0xffff0000u));
        const __m256 even = _mm256_castsi256_ps(_mm256_slli_epi32(a, 16));
        const __m256 odd = _mm256_castsi256_ps(_mm256_and_si256(a, high));
        acc.lo = _mm256_fmadd_ps(even, _mm256_castsi256_ps(_mm256_slli_epi32(b.lo, 16)), acc.lo);
        acc.hi = _mm256_fmadd_ps(even, _mm256_castsi256_ps(_mm256_slli_epi32(b.hi, 16)), acc.hi);
        acc.lo = _mm256_fmadd_ps(odd, _mm256_castsi256_ps(_mm256_and_si256(b.lo, high)), acc.lo);
        acc.hi = _mm256_fmadd_ps(odd, _mm256_castsi256_ps(_mm256_and_si256(b.hi, high)), acc.hi);
        return acc;
    }
    static ANTIPHON_INLINE F dot(Fp32, F acc, A a, const B& b) {
        const __m256 x = _mm256_castsi256_ps(a);
        acc.lo = _mm256_fmadd_ps(x, _mm256_castsi256_ps(b.lo), acc.lo);
        acc.hi = _mm256_fmadd_ps(x, _mm256_castsi256_ps(b.hi), acc.hi);
        return acc;
    }

  private:
    static ANTIPHON_INLINE B load_unaligned(const char* p) {
        const auto* q = reinterpret_cast<const __m256i*>(p);
        return {_mm256_loadu_si256(q), _mm256_loadu_si256(q + 1)};
    }
    static ANTIPHON_INLINE __m256i bytes(const char* p) {
        return _mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p)));
    }
    template <int k>
    static ANTIPHON_INLINE __m256 nibble(__m256i words) {
        const __m256i half = k < 4 ? words : _mm256_srli_epi32(words, 16);
        return _mm256_cvtepi32_ps(_mm256_and_si256(half, _mm256_set1_epi32(15 << 4 * (k % 4))));
    }
    template <int k>
    static ANTIPHON_INLINE __m256 e2m1(__m256i words) {
        const __m256i doubled = _mm256_setr_epi8(12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0,  //
                                                 12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0);
        const __m256i codes = _mm256_and_si256(k % 2 == 0 ? words : _mm256_srli_epi32(words, 4), _mm256_set1_epi8(15));
        const __m256i bytes = _mm256_shuffle_epi8(doubled, codes);
        return _mm256_cvtepi32_ps(_mm256_and_si256(bytes, _mm256_set1_epi32(255 << 8 * (k / 2))));
    }
    static ANTIPHON_INLINE __m256 half(const char* p) {
        const __m256i bits = _mm256_cvtepi16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
        const __m256i rest = _mm256_and_si256(_mm256_slli_epi32(bits, 13), _mm256_set1_epi32(0x0fffe000));
        const __m256 magnitude = _mm256_mul_ps(_mm256_castsi256_ps(rest), _mm256_set1_ps(0x1p112f));
        return _mm256_or_ps(magnitude, _mm256_and_ps(_mm256_castsi256_ps(bits), _mm256_set1_ps(-0.0f)));
    }
    static ANTIPHON_INLINE __m256 widen(__m128i x) {
        return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(x), 16));
    }
    // Round to nearest even; every NaN becomes the quiet one.
    static ANTIPHON_INLINE __m128i narrow(__m256 x) {
        const __m256i bits = _mm256_castps_si256(x);
        const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
        __m256i rounded = _mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff)));
        rounded = _mm256_srli_epi32(rounded, 16);
        const __m256i is_nan = _mm256_castps_si256(_mm256_cmp_ps(x, x, _CMP_UNORD_Q));
        rounded = _mm256_blendv_epi8(rounded, _mm256_set1_epi32(0x7fc0), is_nan);
        return _mm_packus_epi32(_mm256_castsi256_si128(rounded), _mm256_extracti128_si256(rounded, 1));
    }
    static ANTIPHON_INLINE __m256 pow2_half(__m256 n) {
        const __m256i exponent = _mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127));
        return _mm256_castsi256_ps(_mm256_slli_epi32(exponent, 23));
    }
    static ANTIPHON_INLINE __m256 keep_half(__m256 x, __m256i lane, int first, int end, __m256 other) {
        const __m256i outside = _mm256_or_si256(_mm256_cmpgt_epi32(_mm256_set1_epi32(first), lane),
                                                _mm256_cmpgt_epi32(lane, _mm256_set1_epi32(end - 1)));
        return _mm256_blendv_ps(x, other, _mm256_castsi256_ps(outside));
    }
};

}  // namespace antiphon::kernels

// 16 float lanes in one AVX-512 register; bfloat16 is expanded to float before multiplying. Same interface as
// arch_plain.h.
#pragma once

#include <immintrin.h>

#include <cstring>

#include "kernels/element.h"

namespace antiphon::kernels {

// What AVX-512 with and without bfloat16 instructions share.
struct Avx512Base {
    static constexpr bool has_tiles = false;
    static constexpr int tile_panels = 4;
    static constexpr int64_t rows_without_prefetch = 0;

    using F = __m512;
    using B = __m512i;
    using A = __m512i;

    static ANTIPHON_INLINE __mmask16 lanes(int n) { return static_cast<__mmask16>((1u << n) - 1u); }

    static ANTIPHON_INLINE F set1(float x) { return _mm512_set1_ps(x); }
    static ANTIPHON_INLINE F zero() { return _mm512_setzero_ps(); }
    static ANTIPHON_INLINE F load(const float* p) { return _mm512_loadu_ps(p); }
    static ANTIPHON_INLINE void store(float* p, F x) { _mm512_storeu_ps(p, x); }
    static ANTIPHON_INLINE F load_n(const float* p, int n) { return _mm512_maskz_loadu_ps(lanes(n), p); }
    static ANTIPHON_INLINE void store_n(float* p, F x, int n) { _mm512_mask_storeu_ps(p, lanes(n), x); }
    static ANTIPHON_INLINE F load(const uint16_t* p) {
        return widen(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
    }
    static ANTIPHON_INLINE F load_n(const uint16_t* p, int n) {
        uint16_t x[16] = {};
        std::memcpy(x, p, static_cast<size_t>(n) * 2);
        return load(x);
    }
    static ANTIPHON_INLINE F add(F a, F b) { return _mm512_add_ps(a, b); }
    static ANTIPHON_INLINE F sub(F a, F b) { return _mm512_sub_ps(a, b); }
    static ANTIPHON_INLINE F mul(F a, F b) { return _mm512_mul_ps(a, b); }
    static ANTIPHON_INLINE F div(F a, F b) { return _mm512_div_ps(a, b); }
    static ANTIPHON_INLINE F fma(F a, F b, F c) { return _mm512_fmadd_ps(a, b, c); }
    static ANTIPHON_INLINE F max(F a, F b) { return _mm512_max_ps(a, b); }
    static ANTIPHON_INLINE F min(F a, F b) { return _mm512_min_ps(a, b); }
    static ANTIPHON_INLINE F abs(F a) { return _mm512_abs_ps(a); }
    static ANTIPHON_INLINE F round(F a) {
        return _mm512_roundscale_ps(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    }
    static ANTIPHON_INLINE F pow2(F n) {
        const __m512i exponent = _mm512_add_epi32(_mm512_cvtps_epi32(n), _mm512_set1_epi32(127));
        return _mm512_castsi512_ps(_mm512_slli_epi32(exponent, 23));
    }
    static ANTIPHON_INLINE F keep_lanes(F x, int first, int end, F other) {
        const __mmask16 keep = static_cast<__mmask16>(((1u << end) - 1u) & ~((1u << first) - 1u));
        return _mm512_mask_blend_ps(keep, other, x);
    }
    static ANTIPHON_INLINE int store_between(float* p, F x, float first, float end) {
        const __mmask16 from_first = _mm512_cmp_ps_mask(x, set1(first), _CMP_GE_OQ);
        const __mmask16 kept = _mm512_mask_cmp_ps_mask(from_first, x, set1(end), _CMP_LT_OQ);
        store(p, _mm512_maskz_compress_ps(kept, x));
        return __builtin_popcount(kept);
    }
    static ANTIPHON_INLINE float reduce_add(F a) {
        const __m256 eight = _mm256_add_ps(_mm512_castps512_ps256(a), high_half(a));
        __m128 four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
        four = _mm_add_ps(four, _mm_movehl_ps(four, four));
        return _mm_cvtss_f32(_mm_add_ss(four, _mm_movehdup_ps(four)));
    }
    static ANTIPHON_INLINE float reduce_max(F a) {
        const __m256 eight = _mm256_max_ps(_mm512_castps512_ps256(a), high_half(a));
        __m128 four = _mm_max_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
        four = _mm_max_ps(four, _mm_movehl_ps(four, four));
        return _mm_cvtss_f32(_mm_max_ss(four, _mm_movehdup_ps(four)));
    }
    static ANTIPHON_INLINE A broadcast(const char* p) {
        int bits;
        std::memcpy(&bits, p, 4);
        return _mm512_set1_epi32(bits);
    }
    static ANTIPHON_INLINE B load_operand(const char* p) { return _mm512_load_si512(p); }
    static ANTIPHON_INLINE void store_operand(char* p, B x) { _mm512_store_si512(p, x); }
    static constexpr bool has_bf16_dot = false;
    static ANTIPHON_INLINE B pair(F first, F second) {
        const __m512i low = _mm512_srli_epi32(_mm512_castps_si512(first), 16);
        return _mm512_mask_mov_epi16(low, 0xaaaaaaaau, _mm512_castps_si512(second));
    }
    // Kept in a register: compilers would load it again for each nibble, and half of all words lie across two cache lines.
    static ANTIPHON_INLINE B load_nibble_word(const char* p) {
        B word = _mm512_loadu_si512(p);
        asm("" : "+v"(word));
        return word;
    }
    // Bit 4 of a lane's index is of the next nibble: both halves of the table are alike.
    template <int k>
    static ANTIPHON_INLINE B look_up(B word, B table) {
        return _mm512_permutexvar_epi16(_mm512_srli_epi32(word, 4 * k), table);
    }
    static ANTIPHON_INLINE F load_int8(const char* p) { return _mm512_cvtepi32_ps(bytes(p)); }
    static ANTIPHON_INLINE F load_e4m3(const char* p) {
        const __m512i sign_and_rest = _mm512_set1_epi32(static_cast<int>(0x87f00000u));
        const __m512i bits = _mm512_and_si512(_mm512_slli_epi32(bytes(p), 20), sign_and_rest);
        return _mm512_mul_ps(_mm512_castsi512_ps(bits), _mm512_set1_ps(0x1p120f));
    }
    static ANTIPHON_INLINE F load_fp16(const char* p) {
        return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
    }
    static ANTIPHON_INLINE F load_e8m0(const char* p) { return _mm512_castsi512_ps(_mm512_slli_epi32(bytes(p), 23)); }
    static constexpr int nibble_places = 1;
    static constexpr int e2m1_places = 1;
    static constexpr float e2m1_unit = 1.0f;
    static constexpr float e2m1_zero = 0.0f;
    template <int k>
    static ANTIPHON_INLINE F load_nibbles(const char* p) {
        const __m512i codes = _mm512_srli_epi32(_mm512_loadu_si512(p), 4 * k);
        return _mm512_cvtepi32_ps(_mm512_and_si512(codes, _mm512_set1_epi32(15)));
    }
    // The permutation looks at the lowest 4 bits of a lane.
    template <int k>
    static ANTIPHON_INLINE F load_e2m1(const char* p) {
        const __m512 values = _mm512_setr_ps(0, 0.5f, 1, 1.5f, 2, 3, 4, 6, -0.0f, -0.5f, -1, -1.5f, -2, -3, -4, -6);
        return _mm512_permutexvar_ps(_mm512_srli_epi32(_mm512_loadu_si512(p), 4 * k), values);
    }
    static ANTIPHON_INLINE F dot(Fp32, F acc, A a, B b) {
        return _mm512_fmadd_ps(_mm512_castsi512_ps(a), _mm512_castsi512_ps(b), acc);
    }

  private:
    static ANTIPHON_INLINE __m512i bytes(const char* p) {
        return _mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
    }
    static ANTIPHON_INLINE __m256 high_half(F a) {
        return _mm256_castpd_ps(_mm512_extractf64x4_pd(_mm512_castps_pd(a), 1));
    }
    static ANTIPHON_INLINE F widen(__m256i x) {
        return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(x), 16));
    }
};

struct Avx512 : Avx512Base {
    static constexpr const char* name = "avx512";
    using Vector = Avx512;
    template <class E>
    static constexpr int tile_sums = E::per_step == 2 ? 16 : 24;

    using Avx512Base::dot;
    static ANTIPHON_INLINE F dot(Bf16, F acc, A a, B b) {
        const __m512i high = _mm512_set1_epi32(static_cast<int>(0xffff0000u));
        acc = _mm512_fmadd_ps(_mm512_castsi512_ps(_mm512_slli_epi32(a, 16)),
                              _mm512_castsi512_ps(_mm512_slli_epi32(b, 16)), acc);
        return _mm512_fmadd_ps(_mm512_castsi512_ps(_mm512_and_si512(a, high)),
                               _mm512_castsi512_ps(_mm512_and_si512(b, high)), acc);
    }

    using Avx512Base::store;
    using Avx512Base::store_n;
    static ANTIPHON_INLINE void store(uint16_t* p, F x) {
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), narrow(x));
    }
    static ANTIPHON_INLINE void store_n(uint16_t* p, F x, int n) {
        uint16_t lanes[16];
        store(lanes, x);
        std::memcpy(p, lanes, static_cast<size_t>(n) * 2);
    }

  private:
    // Round to nearest even; every NaN becomes the quiet one.
    static ANTIPHON_INLINE __m256i narrow(F x) {
        const __m512i bits = _mm512_castps_si512(x);
        const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
        const __m512i rounded = _mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff)));
        const __mmask16 is_nan = _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q);
        const __m512i high = _mm512_mask_mov_epi32(_mm512_srli_epi32(rounded, 16), is_nan, _mm512_set1_epi32(0x7fc0));
        return _mm512_cvtepi32_epi16(high);
    }
};

#if defined(__AVX512BF16__)
// With bfloat16 dot products: one instruction multiplies a step of 16 outputs.
struct Avx512Bf16 : Avx512Base {
    static constexpr const char* name = "avx512_bf16";
    static constexpr bool has_bf16_dot = true;
    static constexpr int64_t rows_without_prefetch = 2;  // instructions of more steps fit the window (Zen 5)
    using Vector = Avx512Bf16;
    // 24 sums, up to 4 operands and one broadcast fill 29 of 32 registers.
    template <class E>
    static constexpr int tile_sums = 24;

    using Avx512Base::dot;
    static ANTIPHON_INLINE F dot(Bf16, F acc, A a, B b) {
        return _mm512_dpbf16_ps(acc, (__m512bh)b, (__m512bh)a);
    }

    using Avx512Base::store;
    using Avx512Base::store_n;
    static ANTIPHON_INLINE void store(uint16_t* p, F x) {
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), (__m256i)_mm512_cvtneps_pbh(x));
    }
    static ANTIPHON_INLINE void store_n(uint16_t* p, F x, int n) {
        uint16_t lanes[16];
        store(lanes, x);
        std::memcpy(p, lanes, static_cast<size_t>(n) * 2);
    }
};
#endif

}  // namespace antiphon::kernels

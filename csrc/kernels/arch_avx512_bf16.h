// AVX-512 with bfloat16 dot products: one instruction multiplies a step of 16 outputs. Same interface as arch_plain.h.
#pragma once

#include "kernels/arch_avx512.h"

namespace antiphon::kernels {

struct Avx512Bf16 : Avx512Base {
    static constexpr const char* name = "avx512_bf16";
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

}  // namespace antiphon::kernels

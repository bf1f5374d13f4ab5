// 16 float lanes in portable C++: correct everywhere, vectorised as far as the compiler manages.
//
// Every arch_*.h offers the same static functions over a vector type F (16 floats), a weight operand B (64 bytes) and a
// broadcast row operand A (4 bytes). Kernels are templates over the arch; variant.cpp is compiled once for each.
#pragma once

#include <cmath>
#include <cstring>

#include "kernels/element.h"

namespace antiphon::kernels {

struct Plain {
    static constexpr const char* name = "plain";
    static constexpr bool has_tiles = false;
    using Vector = Plain;
    // Register tile of the matrix kernel: most sums (rows times panels), most panels.
    template <class E>
    static constexpr int tile_sums = 2;
    static constexpr int tile_panels = 1;
    static constexpr int64_t rows_without_prefetch = 0;

    struct F {
        float v[16];
    };
    struct B {
        uint32_t v[16];
    };
    using A = uint32_t;

#define ANTIPHON_LANES for (int i = 0; i < 16; ++i)
    static ANTIPHON_INLINE F set1(float x) {
        F r;
        ANTIPHON_LANES r.v[i] = x;
        return r;
    }
    static ANTIPHON_INLINE F zero() { return set1(0.0f); }
    static ANTIPHON_INLINE F load(const float* p) {
        F r;
        std::memcpy(&r, p, sizeof(F));
        return r;
    }
    static ANTIPHON_INLINE void store(float* p, F x) { std::memcpy(p, &x, sizeof(F)); }
    static ANTIPHON_INLINE F load_n(const float* p, int n) {
        F r = zero();
        for (int i = 0; i < n; ++i) r.v[i] = p[i];
        return r;
    }
    static ANTIPHON_INLINE void store_n(float* p, F x, int n) {
        for (int i = 0; i < n; ++i) p[i] = x.v[i];
    }
    static ANTIPHON_INLINE F load(const uint16_t* p) {
        F r;
        ANTIPHON_LANES r.v[i] = as_float(static_cast<uint32_t>(p[i]) << 16);
        return r;
    }
    static ANTIPHON_INLINE F load_n(const uint16_t* p, int n) {
        F r = zero();
        for (int i = 0; i < n; ++i) r.v[i] = as_float(static_cast<uint32_t>(p[i]) << 16);
        return r;
    }
    static ANTIPHON_INLINE void store(uint16_t* p, F x) {
        ANTIPHON_LANES p[i] = to_bf16(x.v[i]);
    }
    static ANTIPHON_INLINE void store_n(uint16_t* p, F x, int n) {
        for (int i = 0; i < n; ++i) p[i] = to_bf16(x.v[i]);
    }
    static ANTIPHON_INLINE F add(F a, F b) {
        ANTIPHON_LANES a.v[i] += b.v[i];
        return a;
    }
    static ANTIPHON_INLINE F sub(F a, F b) {
        ANTIPHON_LANES a.v[i] -= b.v[i];
        return a;
    }
    static ANTIPHON_INLINE F mul(F a, F b) {
        ANTIPHON_LANES a.v[i] *= b.v[i];
        return a;
    }
    static ANTIPHON_INLINE F div(F a, F b) {
        ANTIPHON_LANES a.v[i] /= b.v[i];
        return a;
    }
    // a * b + c; whether it is fused is the arch's business, but it is the same everywhere in one arch.
    static ANTIPHON_INLINE F fma(F a, F b, F c) {
        ANTIPHON_LANES c.v[i] += a.v[i] * b.v[i];
        return c;
    }
    // The second operand if either is NaN.
    static ANTIPHON_INLINE F max(F a, F b) {
        ANTIPHON_LANES b.v[i] = a.v[i] > b.v[i] ? a.v[i] : b.v[i];
        return b;
    }
    static ANTIPHON_INLINE F min(F a, F b) {
        ANTIPHON_LANES b.v[i] = a.v[i] < b.v[i] ? a.v[i] : b.v[i];
        return b;
    }
    static ANTIPHON_INLINE F abs(F a) {
        ANTIPHON_LANES a.v[i] = std::fabs(a.v[i]);
        return a;
    }
    static ANTIPHON_INLINE F round(F a) {
        ANTIPHON_LANES a.v[i] = std::nearbyint(a.v[i]);
        return a;
    }
    // 2^n for whole n in [-127, 127]; 2^-127 counts as zero.
    static ANTIPHON_INLINE F pow2(F n) {
        ANTIPHON_LANES n.v[i] = as_float(static_cast<uint32_t>(static_cast<int32_t>(n.v[i]) + 127) << 23);
        return n;
    }
    // Lanes from `first` up to, not including, `end` of x; `other` elsewhere.
    static ANTIPHON_INLINE F keep_lanes(F x, int first, int end, F other) {
        ANTIPHON_LANES other.v[i] = i >= first && i < end ? x.v[i] : other.v[i];
        return other;
    }
    // Stores the lanes in [first, end) one after the other, and returns how many; all 16 places may be written.
    static ANTIPHON_INLINE int store_between(float* p, F x, float first, float end) {
        int stored = 0;
        ANTIPHON_LANES {
            p[stored] = x.v[i];
            stored += x.v[i] >= first && x.v[i] < end;
        }
        return stored;
    }
    static ANTIPHON_INLINE float reduce_add(F a) {
        for (int width = 8; width > 0; width /= 2) {
            for (int i = 0; i < width; ++i) a.v[i] += a.v[i + width];
        }
        return a.v[0];
    }
    static ANTIPHON_INLINE float reduce_max(F a) {
        float m = a.v[0];
        ANTIPHON_LANES m = a.v[i] > m ? a.v[i] : m;
        return m;
    }
    static ANTIPHON_INLINE A broadcast(const char* p) {
        uint32_t bits;
        std::memcpy(&bits, p, 4);
        return bits;
    }
    static ANTIPHON_INLINE B load_operand(const char* p) {
        B b;
        std::memcpy(&b, p, sizeof(B));
        return b;
    }
    static ANTIPHON_INLINE void store_operand(char* p, const B& x) { std::memcpy(p, &x, sizeof(B)); }
    // Two columns that bfloat16 holds exactly, as one step.
    static constexpr bool has_bf16_dot = false;
    static ANTIPHON_INLINE B pair(const F& first, const F& second) {
        B b;
        ANTIPHON_LANES b.v[i] = as_bits(first.v[i]) >> 16 | (as_bits(second.v[i]) & 0xffff0000u);
        return b;
    }
    static ANTIPHON_INLINE B load_nibble_word(const char* p) { return load_operand(p); }
    // Nibble k of both halves of every lane, looked up in a table of 16-bit values.
    template <int k>
    static ANTIPHON_INLINE B look_up(const B& words, const B& table) {
        uint16_t values[32];
        std::memcpy(values, &table, sizeof(values));
        B b;
        ANTIPHON_LANES {
            const uint32_t both = words.v[i] >> 4 * k;
            b.v[i] = values[both & 15u] | static_cast<uint32_t>(values[both >> 16 & 15u]) << 16;
        }
        return b;
    }
    // 16 codes of one byte, as floats.
    static ANTIPHON_INLINE F load_int8(const char* p) {
        F r;
        ANTIPHON_LANES r.v[i] = static_cast<float>(static_cast<int8_t>(p[i]));
        return r;
    }
    static ANTIPHON_INLINE F load_e4m3(const char* p) {
        F r;
        ANTIPHON_LANES {
            const auto bits = static_cast<uint32_t>(static_cast<uint8_t>(p[i]));
            r.v[i] = as_float((bits & 0x80u) << 24 | (bits & 0x7fu) << 20) * 0x1p120f;
        }
        return r;
    }
    // 16 scales: float16, or the exponents of powers of two.
    static ANTIPHON_INLINE F load_fp16(const char* p) {
        F r;
        ANTIPHON_LANES {
            uint16_t bits;
            std::memcpy(&bits, p + 2 * i, 2);
            r.v[i] = as_float((bits & 0x8000u) << 16 | (bits & 0x7fffu) << 13) * 0x1p112f;
        }
        return r;
    }
    static ANTIPHON_INLINE F load_e8m0(const char* p) {
        F r;
        ANTIPHON_LANES r.v[i] = as_float(static_cast<uint32_t>(static_cast<uint8_t>(p[i])) << 23);
        return r;
    }
    // 4-bit code k of each of 16 words: its number, or its value in E2M1. See weight_reader.h for the constants.
    static constexpr int nibble_places = 1;
    static constexpr int e2m1_places = 1;
    static constexpr float e2m1_unit = 1.0f;
    static constexpr float e2m1_zero = 0.0f;
    template <int k>
    static ANTIPHON_INLINE F load_nibbles(const char* p) {
        const B words = load_operand(p);
        F r;
        ANTIPHON_LANES r.v[i] = static_cast<float>(words.v[i] >> 4 * k & 15u);
        return r;
    }
    template <int k>
    static ANTIPHON_INLINE F load_e2m1(const char* p) {
        static constexpr float values[16] = {0, 0.5f, 1, 1.5f, 2, 3, 4, 6, -0.0f, -0.5f, -1, -1.5f, -2, -3, -4, -6};
        const B words = load_operand(p);
        F r;
        ANTIPHON_LANES r.v[i] = values[words.v[i] >> 4 * k & 15u];
        return r;
    }
    // acc + the products of one step, ascending in the inner dimension.
    static ANTIPHON_INLINE F dot(Bf16, F acc, A a, const B& b) {
        const float low = as_float(a << 16);
        const float high = as_float(a & 0xffff0000u);
        ANTIPHON_LANES acc.v[i] += low * as_float(b.v[i] << 16);
        ANTIPHON_LANES acc.v[i] += high * as_float(b.v[i] & 0xffff0000u);
        return acc;
    }
    static ANTIPHON_INLINE F dot(Fp32, F acc, A a, const B& b) {
        const float x = as_float(a);
        ANTIPHON_LANES acc.v[i] += x * as_float(b.v[i]);
        return acc;
    }
#undef ANTIPHON_LANES

    static ANTIPHON_INLINE float as_float(uint32_t bits) {
        float x;
        std::memcpy(&x, &bits, 4);
        return x;
    }
    static ANTIPHON_INLINE uint32_t as_bits(float x) {
        uint32_t bits;
        std::memcpy(&bits, &x, 4);
        return bits;
    }
    static ANTIPHON_INLINE uint16_t to_bf16(float x) {
        uint32_t bits;
        std::memcpy(&bits, &x, 4);
        if (x != x) return 0x7fc0;
        return static_cast<uint16_t>((bits + 0x7fffu + (bits >> 16 & 1u)) >> 16);
    }
};

}  // namespace antiphon::kernels

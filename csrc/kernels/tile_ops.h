// The six AMX operations the tile product needs, on hardware and in software.
//
// Both classes have the same static functions, with the tile's number as a template argument as the instruction demands.
// `EmulatedTiles` does what the manual's pseudo code says, so that the indexing of the tile product is tested on
// machines without AMX.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#include "kernels/element.h"

#if defined(__AMX_TILE__) && defined(__AMX_BF16__)
#include <immintrin.h>
#endif

namespace antiphon::kernels {

// Rows and bytes a row of the eight tiles, in the layout of LDTILECFG (palette 1).
struct alignas(64) TileConfig {
    uint8_t palette = 1;
    uint8_t start_row = 0;
    uint8_t reserved[14] = {};
    uint16_t row_bytes[16] = {};
    uint8_t rows[16] = {};
};

struct EmulatedTiles {
    struct State {
        TileConfig config;
        uint8_t bytes[8][16][64];
    };
    static State& state() {
        thread_local State tiles;
        return tiles;
    }
    static void configure(const TileConfig& config) { state().config = config; }

    template <int tile>
    static void zero() {
        std::memset(state().bytes[tile], 0, sizeof(state().bytes[tile]));
    }
    template <int tile>
    static void load(const void* from, size_t stride) {
        State& s = state();
        zero<tile>();
        for (int row = 0; row < s.config.rows[tile]; ++row) {
            std::memcpy(s.bytes[tile][row], static_cast<const char*>(from) + row * stride, s.config.row_bytes[tile]);
        }
    }
    template <int tile>
    static void store(void* to, size_t stride) {
        const State& s = state();
        for (int row = 0; row < s.config.rows[tile]; ++row) {
            std::memcpy(static_cast<char*>(to) + row * stride, s.bytes[tile][row], s.config.row_bytes[tile]);
        }
    }
    // sums += rows x operand: even and odd products of the tile are summed apart, then together (Intel SDM, TDPBF16PS).
    template <int sums, int rows, int operand>
    static void multiply() {
        State& s = state();
        for (int m = 0; m < s.config.rows[sums]; ++m) {
            float even[16] = {};
            float odd[16] = {};
            for (int k = 0; k < s.config.row_bytes[rows] / 4; ++k) {
                for (int n = 0; n < 16; ++n) {
                    even[n] = std::fma(value(s.bytes[rows][m], 2 * k), value(s.bytes[operand][k], 2 * n), even[n]);
                    odd[n] = std::fma(value(s.bytes[rows][m], 2 * k + 1), value(s.bytes[operand][k], 2 * n + 1), odd[n]);
                }
            }
            float row[16];
            std::memcpy(row, s.bytes[sums][m], 64);
            for (int n = 0; n < 16; ++n) row[n] += even[n] + odd[n];
            std::memcpy(s.bytes[sums][m], row, 64);
        }
    }

  private:
    static float value(const uint8_t* row, int index) {
        uint16_t bits;
        std::memcpy(&bits, row + 2 * index, 2);
        const uint32_t wide = static_cast<uint32_t>(bits) << 16;
        float x;
        std::memcpy(&x, &wide, 4);
        return x;
    }
};

#if defined(__AMX_TILE__) && defined(__AMX_BF16__)
// The intrinsics paste the tile's number into the instruction: every case must be spelled as a literal.
#define ANTIPHON_EACH_TILE(operation) \
    if constexpr (tile == 0) operation(0); \
    if constexpr (tile == 1) operation(1); \
    if constexpr (tile == 2) operation(2); \
    if constexpr (tile == 3) operation(3); \
    if constexpr (tile == 4) operation(4); \
    if constexpr (tile == 5) operation(5); \
    if constexpr (tile == 6) operation(6); \
    if constexpr (tile == 7) operation(7)

struct HardwareTiles {
    static ANTIPHON_INLINE void configure(const TileConfig& config) { _tile_loadconfig(&config); }

    template <int tile>
    static ANTIPHON_INLINE void zero() {
#define ANTIPHON_ZERO(t) _tile_zero(t)
        ANTIPHON_EACH_TILE(ANTIPHON_ZERO);
#undef ANTIPHON_ZERO
    }
    template <int tile>
    static ANTIPHON_INLINE void load(const void* from, size_t stride) {
#define ANTIPHON_LOAD(t) _tile_loadd(t, from, static_cast<int64_t>(stride))
        ANTIPHON_EACH_TILE(ANTIPHON_LOAD);
#undef ANTIPHON_LOAD
    }
    template <int tile>
    static ANTIPHON_INLINE void store(void* to, size_t stride) {
#define ANTIPHON_STORE(t) _tile_stored(t, to, static_cast<int64_t>(stride))
        ANTIPHON_EACH_TILE(ANTIPHON_STORE);
#undef ANTIPHON_STORE
    }
    // Sums live in tiles 0-3, rows in 4 and 5, operands in 6 and 7.
    template <int sums, int rows, int operand>
    static ANTIPHON_INLINE void multiply() {
#define ANTIPHON_MULTIPLY(s, r, o) \
    if constexpr (sums == s && rows == r && operand == o) _tile_dpbf16ps(s, r, o)
#define ANTIPHON_MULTIPLY_SUMS(r, o) \
    ANTIPHON_MULTIPLY(0, r, o);      \
    ANTIPHON_MULTIPLY(1, r, o);      \
    ANTIPHON_MULTIPLY(2, r, o);      \
    ANTIPHON_MULTIPLY(3, r, o)
        ANTIPHON_MULTIPLY_SUMS(4, 6);
        ANTIPHON_MULTIPLY_SUMS(4, 7);
        ANTIPHON_MULTIPLY_SUMS(5, 6);
        ANTIPHON_MULTIPLY_SUMS(5, 7);
#undef ANTIPHON_MULTIPLY_SUMS
#undef ANTIPHON_MULTIPLY
    }
};
#undef ANTIPHON_EACH_TILE
#endif

// Matrix products of bfloat16 in AMX tiles; everything else as the vector arch beneath.
template <class VectorArch, class TileOps>
struct Amx : VectorArch {
    static constexpr bool has_tiles = true;
    using Vector = VectorArch;
    using Tiles = TileOps;
};

}  // namespace antiphon::kernels

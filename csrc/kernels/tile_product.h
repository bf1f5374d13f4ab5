// A block product in AMX tiles: 16 rows against 4 panels, or 32 rows against 2 panels at a time.
//
// Tiles 0-3 hold sums, 4 and 5 rows, 6 and 7 operands. One tile product covers 16 steps; the inner dimension is padded
// to that. Every sum sees the same products in the same order in both shapes, so shape does not change a row's bits.
#pragma once

#include "kernels/micro_kernel.h"
#include "kernels/tile_ops.h"

namespace antiphon::kernels {

constexpr int tile_height = 16;
constexpr int tile_steps = 16;
constexpr size_t tile_row_bytes = 64;

// Heights of the two row tiles. Not remembered between blocks: other libraries on this thread configure tiles too.
template <class Tiles>
void configure_tiles(int height0, int height1) {
    TileConfig config;
    const int heights[8] = {height0, height0, height1 > 0 ? height1 : height0, height1 > 0 ? height1 : height0,
                            height0, height1, tile_steps, tile_steps};
    for (int tile = 0; tile < 8; ++tile) {
        config.rows[tile] = static_cast<uint8_t>(heights[tile]);
        config.row_bytes[tile] = heights[tile] > 0 ? tile_row_bytes : 0;
    }
    Tiles::configure(config);
}

// Where one call works: the first of its rows and panels, and which panels it prefetches.
struct TileSpan {
    const char* rows;
    float* sums;
    int panel;
    int first_prefetch;
    int end_prefetch;
};

template <class Tiles, int tile>
ANTIPHON_INLINE void start_sums(const Block& block, float* sums) {
    if (block.accumulate) {
        Tiles::template load<tile>(sums, block.sums_stride * 4);
    } else {
        Tiles::template zero<tile>();
    }
}

ANTIPHON_INLINE void prefetch_tile(const Segment& segment, const TileSpan& span, size_t offset, size_t step_bytes) {
    for (int n = span.first_prefetch; n < span.end_prefetch; ++n) {
        for (int step = 0; step < tile_steps; ++step) {
            __builtin_prefetch(segment.prefetch[n] + offset + step * step_bytes);
        }
    }
}

// Up to 16 rows against num_panels panels.
template <class Tiles, int num_panels>
void multiply_one_high(const Block& block, const TileSpan& span) {
    const size_t step_bytes = block.step_bytes;
    float* sums = span.sums + span.panel * panel_width;
    start_sums<Tiles, 0>(block, sums);
    if constexpr (num_panels > 1) start_sums<Tiles, 1>(block, sums + 16);
    if constexpr (num_panels > 2) start_sums<Tiles, 2>(block, sums + 32);
    if constexpr (num_panels > 3) start_sums<Tiles, 3>(block, sums + 48);
    const char* row = span.rows;
    for (int s = 0; s < block.num_segments; ++s) {
        const Segment& segment = block.segments[s];
        const char* const* panel = segment.panel + span.panel;
        for (int64_t step = 0; step < segment.steps; step += tile_steps, row += tile_row_bytes) {
            const size_t offset = static_cast<size_t>(step) * step_bytes;
            prefetch_tile(segment, span, offset, step_bytes);
            Tiles::template load<4>(row, block.row_bytes);
            Tiles::template load<6>(panel[0] + offset, step_bytes);
            Tiles::template multiply<0, 4, 6>();
            if constexpr (num_panels > 1) {
                Tiles::template load<7>(panel[1] + offset, step_bytes);
                Tiles::template multiply<1, 4, 7>();
            }
            if constexpr (num_panels > 2) {
                Tiles::template load<6>(panel[2] + offset, step_bytes);
                Tiles::template multiply<2, 4, 6>();
            }
            if constexpr (num_panels > 3) {
                Tiles::template load<7>(panel[3] + offset, step_bytes);
                Tiles::template multiply<3, 4, 7>();
            }
        }
    }
    Tiles::template store<0>(sums, block.sums_stride * 4);
    if constexpr (num_panels > 1) Tiles::template store<1>(sums + 16, block.sums_stride * 4);
    if constexpr (num_panels > 2) Tiles::template store<2>(sums + 32, block.sums_stride * 4);
    if constexpr (num_panels > 3) Tiles::template store<3>(sums + 48, block.sums_stride * 4);
}

// 17 to 32 rows against one or two panels: an operand tile is loaded once for both halves.
template <class Tiles, int num_panels>
void multiply_two_high(const Block& block, const TileSpan& span) {
    const size_t step_bytes = block.step_bytes;
    float* upper = span.sums + span.panel * panel_width;
    float* lower = upper + tile_height * block.sums_stride;
    start_sums<Tiles, 0>(block, upper);
    start_sums<Tiles, 2>(block, lower);
    if constexpr (num_panels > 1) {
        start_sums<Tiles, 1>(block, upper + 16);
        start_sums<Tiles, 3>(block, lower + 16);
    }
    const char* row = span.rows;
    for (int s = 0; s < block.num_segments; ++s) {
        const Segment& segment = block.segments[s];
        const char* const* panel = segment.panel + span.panel;
        for (int64_t step = 0; step < segment.steps; step += tile_steps, row += tile_row_bytes) {
            const size_t offset = static_cast<size_t>(step) * step_bytes;
            prefetch_tile(segment, span, offset, step_bytes);
            Tiles::template load<6>(panel[0] + offset, step_bytes);
            Tiles::template load<4>(row, block.row_bytes);
            Tiles::template multiply<0, 4, 6>();
            Tiles::template load<5>(row + tile_height * block.row_bytes, block.row_bytes);
            Tiles::template multiply<2, 5, 6>();
            if constexpr (num_panels > 1) {
                Tiles::template load<7>(panel[1] + offset, step_bytes);
                Tiles::template multiply<1, 4, 7>();
                Tiles::template multiply<3, 5, 7>();
            }
        }
    }
    Tiles::template store<0>(upper, block.sums_stride * 4);
    Tiles::template store<2>(lower, block.sums_stride * 4);
    if constexpr (num_panels > 1) {
        Tiles::template store<1>(upper + 16, block.sums_stride * 4);
        Tiles::template store<3>(lower + 16, block.sums_stride * 4);
    }
}

// Rows [32 pass, 32 pass + 32) as far as there are any, in configured tiles, with its share of `num_prefetch` panels.
template <class Tiles>
void multiply_pass(const Block& block, int64_t pass, int64_t passes, int num_prefetch) {
    const int64_t first = pass * 2 * tile_height;
    TileSpan span{block.rows + first * block.row_bytes, block.sums + first * block.sums_stride, 0,
                  static_cast<int>(num_prefetch * pass / passes), static_cast<int>(num_prefetch * (pass + 1) / passes)};
    if (block.num_rows - first <= tile_height) {
        if (block.num_panels == 1) multiply_one_high<Tiles, 1>(block, span);
        if (block.num_panels == 2) multiply_one_high<Tiles, 2>(block, span);
        if (block.num_panels == 3) multiply_one_high<Tiles, 3>(block, span);
        if (block.num_panels == 4) multiply_one_high<Tiles, 4>(block, span);
        return;
    }
    const int end_prefetch = span.end_prefetch;
    for (; span.panel < block.num_panels; span.panel += 2) {
        // Each pair of panels fetches its own part of this pass's share.
        const int middle = static_cast<int>(smaller(end_prefetch, span.first_prefetch + 2));
        span.end_prefetch = span.panel + 2 < block.num_panels ? middle : end_prefetch;
        if (block.num_panels - span.panel > 1) {
            multiply_two_high<Tiles, 2>(block, span);
        } else {
            multiply_two_high<Tiles, 1>(block, span);
        }
        span.first_prefetch = span.end_prefetch;
    }
}

template <class Tiles>
void multiply_block_in_tiles(const Block& block) {
    const int64_t passes = divide_up(block.num_rows, 2 * tile_height);
    int configured = -1;
    for (int64_t pass = 0; pass < passes; ++pass) {
        const int height = static_cast<int>(smaller(2 * tile_height, block.num_rows - pass * 2 * tile_height));
        if (configured != height) {
            configure_tiles<Tiles>(static_cast<int>(smaller(height, tile_height)),
                                   static_cast<int>(larger(height - tile_height, 0)));
        }
        configured = height;
        multiply_pass<Tiles>(block, pass, passes, block.num_panels);
    }
}

// A multiple of 16 rows, after configure_tiles(16, 16): who multiplies many small blocks in a row configures once.
template <class Tiles>
void multiply_whole_tiles(const Block& block, int num_prefetch) {
    const int64_t passes = divide_up(block.num_rows, 2 * tile_height);
    for (int64_t pass = 0; pass < passes; ++pass) multiply_pass<Tiles>(block, pass, passes, num_prefetch);
}

}  // namespace antiphon::kernels

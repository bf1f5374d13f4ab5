// The register tile of every matrix product: up to tile_rows rows against up to 4 panels of 16 outputs.
//
// Each of the 16-lane sums walks the inner dimension once, front to back, in the same order whatever the tile's shape:
// a row's bits do not depend on which rows or panels share its tile.
#pragma once

#include "kernels/packed_layout.h"

namespace antiphon::kernels {

// A stretch of the inner dimension: `steps` consecutive steps, where each panel lies, and what to prefetch beside it.
struct Segment {
    const char* panel[group_panels];
    const char* prefetch[group_panels];
    int64_t steps;
};

struct TileCall {
    const char* rows;  // first row, at the first step
    size_t row_bytes;  // from row to row
    const Segment* segments;
    int num_segments;
    size_t step_bytes;  // from step to step inside a panel
    int num_prefetch;   // the first panels of `prefetch` are fetched, a line a step
    float* sums;        // [rows][sums_stride], panel n at column 16 n
    size_t sums_stride;
    bool accumulate;  // start from what `sums` holds instead of zero
};

// Rows of any number against up to 4 panels; fields as in TileCall.
struct Block {
    const char* rows;
    size_t row_bytes;
    int64_t num_rows;
    const Segment* segments;
    int num_segments;
    int num_panels;
    size_t step_bytes;
    float* sums;
    size_t sums_stride;
    bool accumulate;
};

template <class Arch, class E, int num_rows, int num_panels>
void multiply_tile(const TileCall& call) {
    typename Arch::F acc[num_rows][num_panels];
    for (int m = 0; m < num_rows; ++m) {
        for (int n = 0; n < num_panels; ++n) {
            acc[m][n] = call.accumulate ? Arch::load(call.sums + m * call.sums_stride + n * panel_width) : Arch::zero();
        }
    }
    const char* row[num_rows];
    for (int m = 0; m < num_rows; ++m) row[m] = call.rows + m * call.row_bytes;
    const size_t step_bytes = call.step_bytes;
    const int num_prefetch = call.num_prefetch;
    size_t inner = 0;  // bytes into each row
    for (int s = 0; s < call.num_segments; ++s) {
        const Segment& segment = call.segments[s];
        const size_t end = inner + static_cast<size_t>(segment.steps) * 4;
        for (size_t offset = 0; inner < end; inner += 4, offset += step_bytes) {
            typename Arch::B operand[num_panels];
            for (int n = 0; n < num_panels; ++n) operand[n] = Arch::load_operand(segment.panel[n] + offset);
            for (int n = 0; n < num_prefetch; ++n) __builtin_prefetch(segment.prefetch[n] + offset, 0, 2);
            for (int m = 0; m < num_rows; ++m) {
                const auto a = Arch::broadcast(row[m] + inner);
                for (int n = 0; n < num_panels; ++n) acc[m][n] = Arch::dot(E{}, acc[m][n], a, operand[n]);
            }
        }
    }
    for (int m = 0; m < num_rows; ++m) {
        for (int n = 0; n < num_panels; ++n) {
            Arch::store(call.sums + m * call.sums_stride + n * panel_width, acc[m][n]);
        }
    }
}

using TileFunction = void (*)(const TileCall&);

// The tile function for num_rows <= tile_rows and num_panels <= tile_panels.
template <class Arch, class E>
ANTIPHON_INLINE TileFunction tile_function(int num_rows, int num_panels) {
    constexpr int max_rows = Arch::template tile_rows<E>;
    constexpr int max_panels = Arch::tile_panels;
    static_assert(max_rows <= 6 && (max_panels == 1 || max_panels == 4));
#define ANTIPHON_TILE(m, n) \
    &multiply_tile<Arch, E, (m) <= max_rows ? (m) : max_rows, (n) <= max_panels ? (n) : max_panels>
#define ANTIPHON_TILES(n)                                                                       \
    {ANTIPHON_TILE(1, n), ANTIPHON_TILE(2, n), ANTIPHON_TILE(3, n), ANTIPHON_TILE(4, n), \
     ANTIPHON_TILE(5, n), ANTIPHON_TILE(6, n)}
    static constexpr TileFunction functions[group_panels][6] = {ANTIPHON_TILES(1), ANTIPHON_TILES(2),
                                                                ANTIPHON_TILES(3), ANTIPHON_TILES(4)};
#undef ANTIPHON_TILES
#undef ANTIPHON_TILE
    return functions[num_panels - 1][num_rows - 1];
}

}  // namespace antiphon::kernels

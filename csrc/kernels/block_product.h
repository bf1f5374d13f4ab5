// Any number of rows against up to 4 panels: cut into register tiles of nearly equal height, with the prefetch of what
// comes next spread over the passes, so that memory stays busy while a block already in the cache is used again.
#pragma once

#include "kernels/micro_kernel.h"
#include "kernels/tile_product.h"

namespace antiphon::kernels {

constexpr int max_segments = 8;

// One register tile of a block: rows [first_row, first_row + num_rows), panels [first_panel, first_panel + num_panels),
// prefetching the block's panels [first_prefetch, first_prefetch + num_prefetch).
struct TilePosition {
    int64_t first_row;
    int num_rows, first_panel, num_panels, first_prefetch, num_prefetch;
};

template <class Arch, class E>
void multiply_block_at(const Block& block, const TilePosition& at) {
    Segment segments[max_segments];
    for (int s = 0; s < block.num_segments; ++s) {
        const Segment& whole = block.segments[s];
        segments[s].steps = whole.steps;
        for (int n = 0; n < at.num_panels; ++n) segments[s].panel[n] = whole.panel[at.first_panel + n];
        for (int n = 0; n < at.num_prefetch; ++n) segments[s].prefetch[n] = whole.prefetch[at.first_prefetch + n];
    }
    tile_function<Arch, E>(at.num_rows, at.num_panels)({
        .rows = block.rows + at.first_row * block.row_bytes,
        .row_bytes = block.row_bytes,
        .segments = segments,
        .num_segments = block.num_segments,
        .step_bytes = block.step_bytes,
        .num_prefetch = at.num_prefetch,
        .sums = block.sums + at.first_row * block.sums_stride + at.first_panel * panel_width,
        .sums_stride = block.sums_stride,
        .accumulate = block.accumulate,
    });
}

template <class Arch, class E>
void multiply_block(const Block& block) {
    if constexpr (Arch::has_tiles && E::type == ElementType::bf16) {
        multiply_block_in_tiles<typename Arch::Tiles>(block);
    } else {
        constexpr int max_panels = Arch::tile_panels;
        const int64_t passes = divide_up(block.num_rows, Arch::template tile_rows<E>);
        for (int panel = 0; panel < block.num_panels; panel += max_panels) {
            const int num_panels = static_cast<int>(smaller(max_panels, block.num_panels - panel));
            for (int64_t pass = 0; pass < passes; ++pass) {
                const int64_t row = block.num_rows * pass / passes;
                const int64_t end_row = block.num_rows * (pass + 1) / passes;
                const int64_t fetch = num_panels * pass / passes;
                const int64_t end_fetch = num_panels * (pass + 1) / passes;
                multiply_block_at<Arch, E>(block, {row, static_cast<int>(end_row - row), panel, num_panels,
                                                   panel + static_cast<int>(fetch), static_cast<int>(end_fetch - fetch)});
            }
        }
    }
}

}  // namespace antiphon::kernels

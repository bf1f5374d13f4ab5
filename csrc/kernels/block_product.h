// Any number of rows against up to 4 panels, cut into register tiles.
//
// As long as one tile holds all rows, it takes 4 or 2 panels at a time and every operand is read once. More rows make
// several passes of nearly equal height over 4 panels, with the prefetch of what comes next spread over them.
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
    Segment shifted[max_segments];
    const bool is_shifted = at.first_panel != 0 || at.first_prefetch != 0;
    for (int s = 0; is_shifted && s < block.num_segments; ++s) {
        const Segment& whole = block.segments[s];
        shifted[s].steps = whole.steps;
        for (int n = 0; n < at.num_panels; ++n) shifted[s].panel[n] = whole.panel[at.first_panel + n];
        for (int n = 0; n < at.num_prefetch; ++n) shifted[s].prefetch[n] = whole.prefetch[at.first_prefetch + n];
    }
    tile_function<Arch, E>(at.num_rows, at.num_panels)({
        .rows = block.rows + at.first_row * block.row_bytes,
        .row_bytes = block.row_bytes,
        .segments = is_shifted ? shifted : block.segments,
        .num_segments = block.num_segments,
        .step_bytes = block.step_bytes,
        .num_prefetch = at.num_prefetch,
        .sums = block.sums + at.first_row * block.sums_stride + at.first_panel * panel_width,
        .sums_stride = block.sums_stride,
        .accumulate = block.accumulate,
    });
}

// Panels of a tile that holds num_rows rows; 0 if there are too many for one. With one panel of several, broadcasting
// rows would cost more than a second pass.
template <class Arch, class E>
constexpr int single_pass_panels(int64_t num_rows) {
    for (int panels = Arch::tile_panels; panels > 0; panels /= 2) {
        if (num_rows <= tile_rows<Arch, E>(panels) && (panels > 1 || Arch::tile_panels == 1)) return panels;
    }
    return 0;
}

template <class Arch, class E>
void multiply_block(const Block& block) {
    if constexpr (Arch::has_tiles && E::type == ElementType::bf16) {
        multiply_block_in_tiles<typename Arch::Tiles>(block);
    } else {
        const int single = single_pass_panels<Arch, E>(block.num_rows);
        const int max_panels = single > 0 ? single : Arch::tile_panels;
        for (int panel = 0; panel < block.num_panels; panel += max_panels) {
            const int num_panels = static_cast<int>(smaller(max_panels, block.num_panels - panel));
            const int64_t passes = divide_up(block.num_rows, tile_rows<Arch, E>(num_panels));
            for (int64_t pass = 0; pass < passes; ++pass) {
                const int64_t row = block.num_rows * pass / passes;
                const int64_t end_row = block.num_rows * (pass + 1) / passes;
                const int64_t fetch = num_panels * pass / passes;
                const int64_t end_fetch = block.prefetches ? num_panels * (pass + 1) / passes : fetch;
                multiply_block_at<Arch, E>(block, {row, static_cast<int>(end_row - row), panel, num_panels,
                                                   panel + static_cast<int>(fetch), static_cast<int>(end_fetch - fetch)});
            }
        }
    }
}

}  // namespace antiphon::kernels

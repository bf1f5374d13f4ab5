// Rows against one panel group of a packed weight, the whole inner dimension, sums in float32.
//
// Few rows wait for memory: one pass over the whole inner dimension, prefetching a little ahead in every panel and, at
// its end, the start of what comes next. With one or two rows a processor that executes far ahead needs no prefetch. More
// rows take the inner dimension in blocks (32 to 128 KiB) that stay in the cache while all rows pass over them, and
// prefetch the next block meanwhile. Up to twice the rows of a tile of two panels pass over two panels at a time: in two
// passes, each fetching one panel, where four panels would need three or four.
#pragma once

#include "kernels/block_product.h"

namespace antiphon::kernels {

constexpr int64_t block_steps = 512;       // with many rows, when arithmetic is the limit
constexpr int64_t short_block_steps = 128;  // with few, so that the prefetch pauses less
constexpr int64_t max_short_rows = 24;
constexpr int64_t lead_steps = 128;  // over all panels read side by side: 8 KiB
constexpr int64_t busy_rows = 10;    // with more, arithmetic takes as long as memory: twice the lead evens out the waits
constexpr int64_t rows_per_chunk = 256;  // rows whose sums one thread holds at a time

struct WeightProduct {
    const PackedMatrix* weight;
    const char* rows;  // of the weight's element type, width padded as its inner dimension is
    size_t row_bytes;
    int64_t num_rows;
    const char* group;
    int num_panels;
    int64_t steps;     // of the inner dimension; panels lie that far apart
    const char* next;  // the group this thread reads after this one, with panels as far apart; or null
    const float* run_sums;  // [runs][all_rows]: sums_of_runs (coded_product.h), or null
    int64_t all_rows;
    int64_t first_row;  // of this product among all
    float* sums;        // [num_rows][group_width]
};

// Steps [first, first + steps) of every panel; ahead of step s, `lead` steps on, is prefetched.
ANTIPHON_INLINE Segment segment_of(const WeightProduct& product, int64_t first, int64_t steps, const char* ahead) {
    Segment segment;
    segment.steps = steps;
    for (int n = 0; n < product.num_panels; ++n) {
        const int64_t panel = n * product.steps * panel_bytes;
        segment.panel[n] = product.group + panel + first * panel_bytes;
        segment.prefetch[n] = ahead + panel;
    }
    return segment;
}

template <class Arch, class E>
void multiply_steps(const WeightProduct& product, int64_t first, const Segment* segments, int num_segments,
                    bool prefetches = true) {
    multiply_block<Arch, E>({
        .rows = product.rows + first * 4,
        .row_bytes = product.row_bytes,
        .num_rows = product.num_rows,
        .segments = segments,
        .num_segments = num_segments,
        .num_panels = product.num_panels,
        .step_bytes = panel_bytes,
        .sums = product.sums,
        .sums_stride = group_width,
        .accumulate = first > 0,
        .prefetches = prefetches,
    });
}

template <class Arch, class E>
void multiply_in_blocks(const WeightProduct& product, int64_t block, const char* next) {
    for (int64_t first = 0; first < product.steps; first += block) {
        const int64_t steps = smaller(block, product.steps - first);
        const char* ahead = first + steps < product.steps ? product.group + (first + steps) * panel_bytes : next;
        const Segment segment = segment_of(product, first, steps, ahead);
        multiply_steps<Arch, E>(product, first, &segment, 1);
    }
}

template <class Arch, class E>
void multiply_in_pairs(const WeightProduct& product, const char* next) {
    WeightProduct pair = product;
    for (int panel = 0; panel < product.num_panels; panel += 2) {
        pair.num_panels = static_cast<int>(smaller(2, product.num_panels - panel));
        pair.group = product.group + panel * product.steps * panel_bytes;
        pair.sums = product.sums + panel * panel_width;
        const bool last = panel + 2 >= product.num_panels;
        multiply_in_blocks<Arch, E>(pair, block_steps, last ? next : pair.group + 2 * product.steps * panel_bytes);
    }
}

template <class Arch, class E>
void multiply_group(const WeightProduct& product) {
    const char* next = product.next != nullptr ? product.next : product.group;
    const bool tiles = Arch::has_tiles && E::type == ElementType::bf16;
    const int panels = tiles ? group_panels : single_pass_panels<Arch, E>(product.num_rows);
    if (tiles ? product.num_rows <= 2 * tile_height : panels > 0) {
        const int64_t wanted = !tiles && product.num_rows > busy_rows ? 2 * lead_steps : lead_steps;
        const int64_t lead = smaller(wanted / panels, product.steps);
        const int64_t body = product.steps - lead;
        const Segment segments[2] = {segment_of(product, 0, body, product.group + lead * panel_bytes),
                                     segment_of(product, body, lead, next)};
        return multiply_steps<Arch, E>(product, 0, segments, 2, product.num_rows > Arch::rows_without_prefetch);
    }
    if constexpr (!Arch::has_tiles && Arch::tile_panels == group_panels && tile_rows<Arch, E>(2) == most_tile_rows) {
        if (product.num_rows <= 2 * most_tile_rows) return multiply_in_pairs<Arch, E>(product, next);
    }
    multiply_in_blocks<Arch, E>(product, product.num_rows <= max_short_rows ? short_block_steps : block_steps, next);
}

}  // namespace antiphon::kernels

// Rows against one panel group of a packed weight, the whole inner dimension, sums in float32.
//
// The group is walked in blocks of 128 KiB that stay in the second-level cache while all rows pass over them. With few
// rows the kernel waits for memory: what comes next is prefetched all the time, a little ahead when there is a single
// pass, a whole block ahead when the block is used several times.
#pragma once

#include "kernels/block_product.h"

namespace antiphon::kernels {

constexpr int64_t block_steps = 512;
constexpr int64_t lead_steps = 32;      // 8 KiB of a full group
constexpr int64_t rows_per_chunk = 256;  // rows whose sums one thread holds at a time

struct WeightProduct {
    const char* rows;  // width padded as the weight's inner dimension is
    size_t row_bytes;
    int64_t num_rows;
    const char* group;
    int num_panels;
    int64_t steps;
    const char* next;  // what this thread will read after this group, or null
    float* sums;       // [num_rows][group_width]
};

template <class Arch, class E>
void multiply_group(const WeightProduct& product) {
    const size_t step_bytes = static_cast<size_t>(product.num_panels) * panel_bytes;
    const bool single_pass = product.num_rows <= (Arch::has_tiles ? 2 * tile_height : Arch::template tile_rows<E>);
    for (int64_t first = 0; first < product.steps; first += block_steps) {
        const int64_t steps = smaller(block_steps, product.steps - first);
        const char* start = product.group + static_cast<size_t>(first) * step_bytes;
        const char* following = first + steps < product.steps ? start + static_cast<size_t>(steps) * step_bytes
                                                              : product.next;
        if (following == nullptr) following = start;
        const int64_t tail = single_pass ? smaller(lead_steps, steps) : steps;
        const char* tail_start = start + static_cast<size_t>(steps - tail) * step_bytes;
        Segment segments[2];
        for (int n = 0; n < product.num_panels; ++n) {
            segments[0].panel[n] = start + n * panel_bytes;
            segments[0].prefetch[n] = start + n * panel_bytes + static_cast<size_t>(tail) * step_bytes;
            segments[1].panel[n] = tail_start + n * panel_bytes;
            segments[1].prefetch[n] = following + n * panel_bytes;
        }
        segments[0].steps = steps - tail;
        segments[1].steps = tail;
        multiply_block<Arch, E>({
            .rows = product.rows + first * 4,
            .row_bytes = product.row_bytes,
            .num_rows = product.num_rows,
            .segments = segments,
            .num_segments = 2,
            .num_panels = product.num_panels,
            .step_bytes = step_bytes,
            .sums = product.sums,
            .sums_stride = group_width,
            .accumulate = first > 0,
        });
    }
}

}  // namespace antiphon::kernels

// y = x @ weight.T + bias + residual: one panel group of outputs (and one chunk of rows) is one work item.
#pragma once

#include "kernels/operations.h"
#include "kernels/quantized_product.h"
#include "kernels/rows.h"

namespace antiphon::kernels {

template <class V, class E, class Out>
void finish_linear(const LinearCall& call, const float* sums, int64_t first_row, int64_t num_rows, int64_t group) {
    const int64_t first = group * group_width;
    const int64_t width = smaller(group_width, call.weight.outputs - first);
    for (int64_t m = 0; m < num_rows; ++m) {
        const int64_t row = first_row + m;
        Out* out = static_cast<Out*>(call.out) + row * call.weight.outputs + first;
        for_lanes(width, [&](int64_t i, int lanes) {
            auto y = V::load(sums + m * group_width + i);
            if (call.bias != nullptr) y = V::add(y, load_lanes<V>(call.bias + first + i, lanes));
            if (call.residual.data != nullptr) {
                y = V::add(y, load_lanes<V>(row_at<E>(call.residual, row) + first + i, lanes));
            }
            store_lanes<V>(out + i, y, lanes);
        });
    }
}

template <class Arch, class E>
void linear(const LinearCall& call, ThreadPool& pool) {
    using V = typename Arch::Vector;
    if (call.x.count == 0) return;
    PackedMatrix weight = call.weight;
    weight.format.type = operand_type<Arch, E>(weight.format, weight.inner);
    const bool widens = weight.format.type != E::type;
    const Rows x = widens ? rows_for<V, E, float>(weight, call.x, pool)
                          : rows_for<V, E, typename E::Storage>(weight, call.x, pool);
    const float* run_sums = sums_of_runs<Arch, E>(weight, x, pool);
    const size_t row_bytes = static_cast<size_t>(x.stride) * element_bytes(weight.format.type);
    const int64_t num_chunks = divide_up(x.count, rows_per_chunk);
    const int64_t num_items = weight.num_groups() * num_chunks;
    pool.for_each(num_items, [&](int64_t item) {
        const int64_t group = item / num_chunks;
        const int64_t chunk = item % num_chunks;
        const int64_t first_row = x.count * chunk / num_chunks;
        const int64_t num_rows = x.count * (chunk + 1) / num_chunks - first_row;
        float* sums = Scratch::get<float>(ScratchUse::products, rows_per_chunk * group_width);
        const bool more = chunk + 1 == num_chunks && group + 1 < weight.num_groups();
        multiply_weight<Arch, E>({
            .weight = &weight,
            .rows = static_cast<const char*>(x.data) + static_cast<size_t>(first_row) * row_bytes,
            .row_bytes = row_bytes,
            .num_rows = num_rows,
            .group = weight.group(group),
            .num_panels = weight.group_size(group),
            .steps = weight.steps,
            .next = more ? weight.group(group + 1) : nullptr,
            .run_sums = run_sums,
            .all_rows = x.count,
            .first_row = first_row,
            .sums = sums,
        });
        if (call.out_fp32) {
            finish_linear<V, E, float>(call, sums, first_row, num_rows, group);
        } else {
            finish_linear<V, E, typename E::Storage>(call, sums, first_row, num_rows, group);
        }
    });
}

}  // namespace antiphon::kernels

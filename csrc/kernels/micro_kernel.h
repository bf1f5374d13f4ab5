// The register tile of every matrix product: few rows against 4 panels of 16 outputs, more rows against 2.
//
// Each of the 16-lane sums walks the inner dimension once, front to back, in the same order whatever the tile's shape:
// a row's bits do not depend on which rows or panels share its tile.
#pragma once

#include <array>
#include <type_traits>
#include <utility>

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
    bool prefetches = true;  // else what `segments` name to prefetch is not
};

// body(0), body(1), ... with constants, before the compiler decides what lives in registers: a loop over sums that are
// pairs of registers would write them all to the stack at every step.
template <int count, class Body>
ANTIPHON_INLINE void unrolled(const Body& body) {
    [&]<int... index>(std::integer_sequence<int, index...>) __attribute__((always_inline)) {
        (body(std::integral_constant<int, index>()), ...);
    }(std::make_integer_sequence<int, count>());
}

template <class Arch, class E, int num_rows, int num_panels>
void multiply_tile(const TileCall& call) {
    typename Arch::F acc[num_rows][num_panels];
    unrolled<num_rows>([&](auto m) __attribute__((always_inline)) {
        unrolled<num_panels>([&](auto n) __attribute__((always_inline)) {
            acc[m][n] = call.accumulate ? Arch::load(call.sums + m * call.sums_stride + n * panel_width) : Arch::zero();
        });
    });
    // Rows are addressed as one of two bases plus a multiple of the stride, which keeps them all in registers.
    const size_t row_bytes = call.row_bytes;
    const char* base[2] = {call.rows, call.rows + 8 * row_bytes};
    const size_t step_bytes = call.step_bytes;
    const int num_prefetch = call.num_prefetch;
    const bool prefetch_all = num_prefetch == num_panels;
    for (int s = 0; s < call.num_segments; ++s) {
        const Segment& segment = call.segments[s];
        const size_t end = static_cast<size_t>(segment.steps) * step_bytes;
        for (size_t offset = 0; offset < end; offset += step_bytes) {
            typename Arch::B operand[num_panels];
            unrolled<num_panels>([&](auto n) __attribute__((always_inline)) {
                operand[n] = Arch::load_operand(segment.panel[n] + offset);
            });
            if (prefetch_all) {
                for (int n = 0; n < num_panels; ++n) __builtin_prefetch(segment.prefetch[n] + offset);
            } else {
                for (int n = 0; n < num_prefetch; ++n) __builtin_prefetch(segment.prefetch[n] + offset);
            }
            unrolled<num_rows>([&](auto m) __attribute__((always_inline)) {
                const auto a = Arch::broadcast(base[m / 8] + (m % 8) * row_bytes);
                unrolled<num_panels>([&](auto n) __attribute__((always_inline)) {
                    acc[m][n] = Arch::dot(E{}, acc[m][n], a, operand[n]);
                });
            });
            for (int i = 0; i < 2; ++i) base[i] += 4;
        }
    }
    unrolled<num_rows>([&](auto m) __attribute__((always_inline)) {
        unrolled<num_panels>([&](auto n) __attribute__((always_inline)) {
            Arch::store(call.sums + m * call.sums_stride + n * panel_width, acc[m][n]);
        });
    });
}

using TileFunction = void (*)(const TileCall&);

constexpr int most_tile_rows = 12;

template <class Arch, class E>
constexpr int tile_rows(int num_panels) {
    constexpr int sums = Arch::template tile_sums<E>;
    return sums / num_panels < most_tile_rows ? sums / num_panels : most_tile_rows;
}

// Tile functions of 1, 2, ... rows for a given number of panels; null where the sums do not fit the registers.
template <class Arch, class E, int num_panels, int... index>
constexpr std::array<TileFunction, most_tile_rows> tile_functions(std::integer_sequence<int, index...>) {
    constexpr int rows = num_panels <= Arch::tile_panels ? tile_rows<Arch, E>(num_panels) : 0;
    return {(index < rows ? &multiply_tile<Arch, E, index < rows ? index + 1 : 1, rows != 0 ? num_panels : 1> : nullptr)...};
}

template <class Arch, class E>
ANTIPHON_INLINE TileFunction tile_function(int num_rows, int num_panels) {
    constexpr auto all = std::make_integer_sequence<int, most_tile_rows>();
    static constexpr std::array<TileFunction, most_tile_rows> functions[group_panels] = {
        tile_functions<Arch, E, 1>(all), tile_functions<Arch, E, 2>(all), tile_functions<Arch, E, 3>(all),
        tile_functions<Arch, E, 4>(all)};
    return functions[num_panels - 1][num_rows - 1];
}

}  // namespace antiphon::kernels

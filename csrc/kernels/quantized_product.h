// Rows of floats against one panel group of a quantized weight.
//
// Few rows wait for memory: codes become weights in registers and are multiplied at once. More rows than a register tile
// holds would repeat that work: a block of columns is turned into a float32 panel in the cache, and the product of
// ordinary panels passes over it. Both add the same products in the same order, so a row's bits do not depend on how
// many rows there are. Rejected: bfloat16 panels for many rows, which round scale * code.
#pragma once

#include "kernels/block_product.h"
#include "kernels/coded_product.h"
#include "kernels/scratch.h"
#include "kernels/weight_product.h"
#include "kernels/weight_reader.h"

namespace antiphon::kernels {

constexpr int64_t quantized_lead_bytes = 8192;  // prefetched ahead, over all panels read side by side

// Panels [0, num_panels) at `panel`, columns [first, end); what lies `lead` bytes ahead is prefetched, beyond a panel's
// end that of the panel at `next`.
struct PanelWalk {
    const PackedMatrix& weight;
    const char* panel;
    const char* next;
    int64_t first;
    int64_t end;
};

// One word of codes of every panel, or the first `count` columns of it.
template <class V, class Reader, int num_panels, int count, class Body>
ANTIPHON_INLINE void walk_word(const char* const* codes, const GroupScales<V, Reader>* groups, int64_t column,
                               const Body& body) {
    unrolled<count>([&](auto k) __attribute__((always_inline)) {
        typename V::F weights[num_panels];
        unrolled<num_panels>([&](auto n) __attribute__((always_inline)) {
            constexpr int place = Reader::position(k) % Reader::template places<V>;
            weights[n] = V::fma(Reader::template column<V, k>(codes[n]), groups[n].scale[place], groups[n].offset);
        });
        body(column + k, weights);
    });
}

// body(column, weights of every panel) for every column in order.
template <class V, class Reader, int num_panels, class Body>
ANTIPHON_INLINE void walk_panels(const PanelWalk& walk, const Body& body) {
    const PackedFormat& format = walk.weight.format;
    const int64_t stride = walk.weight.panel_stride;
    const int64_t step_bytes = format.step_bytes();
    const int64_t header_bytes = format.scale_bytes() + format.offset_bytes();
    const int64_t lead = smaller(quantized_lead_bytes / num_panels, stride);
    const int64_t first_header = format.units_bytes(walk.weight.inner);
    for (int64_t column = walk.first; column < walk.end;) {
        const int64_t group = column / format.group;
        const int64_t group_end = smaller(walk.end, (group + 1) * format.group);
        const int64_t header = first_header + group * format.group_bytes();
        const int64_t units = column / unit_columns * format.unit_bytes();
        GroupScales<V, Reader> groups[num_panels];
        unrolled<num_panels>([&](auto n) __attribute__((always_inline)) {
            const char* panel = walk.panel + n * stride;
            groups[n] = load_group<V, Reader>(format, panel + header, panel + units);
        });
        int64_t at = header + header_bytes + (column - group * format.group) * step_bytes;
        for (; column + Reader::columns <= group_end; column += Reader::columns, at += panel_bytes) {
            const char* ahead = at + lead < stride ? walk.panel + at + lead : walk.next + (at + lead - stride);
            const char* codes[num_panels];
            unrolled<num_panels>([&](auto n) __attribute__((always_inline)) {
                codes[n] = walk.panel + n * stride + at;
                __builtin_prefetch(ahead + n * stride);
            });
            walk_word<V, Reader, num_panels, Reader::columns>(codes, groups, column, body);
        }
        for (; column < group_end; ++column, at += step_bytes) {
            const char* codes[num_panels];
            for (int n = 0; n < num_panels; ++n) codes[n] = walk.panel + n * stride + at;
            walk_word<V, Reader, num_panels, 1>(codes, groups, column, body);
        }
    }
}

// Up to a register tile of rows against num_panels panels, all columns.
template <class V, class Reader, int num_rows, int num_panels>
void multiply_in_registers(const WeightProduct& product, int first_panel, const char* next) {
    const int64_t stride = product.weight->panel_stride;
    typename V::F acc[num_rows][num_panels];
    unrolled<num_rows>([&](auto m) __attribute__((always_inline)) {
        unrolled<num_panels>([&](auto n) __attribute__((always_inline)) { acc[m][n] = V::zero(); });
    });
    const float* rows = reinterpret_cast<const float*>(product.rows);
    const size_t row_stride = product.row_bytes / sizeof(float);
    walk_panels<V, Reader, num_panels>(
        {*product.weight, product.group + first_panel * stride, next, 0, product.weight->steps},
        [&](int64_t column, const typename V::F* weights) __attribute__((always_inline)) {
            unrolled<num_rows>([&](auto m) __attribute__((always_inline)) {
                const auto x = V::set1(rows[m * row_stride + column]);
                unrolled<num_panels>([&](auto n) __attribute__((always_inline)) {
                    acc[m][n] = V::fma(x, weights[n], acc[m][n]);
                });
            });
        });
    float* sums = product.sums + first_panel * panel_width;
    unrolled<num_rows>([&](auto m) __attribute__((always_inline)) {
        unrolled<num_panels>([&](auto n) __attribute__((always_inline)) {
            V::store(sums + m * group_width + n * panel_width, acc[m][n]);
        });
    });
}

constexpr int most_register_rows = 6;  // with more, unpacking once costs less than holding scales in memory

template <class V>
constexpr int register_rows(int num_panels) {
    const int rows = V::template tile_sums<Fp32> / num_panels;
    return rows < most_register_rows ? rows : most_register_rows;
}

// Most panels that one register tile of `num_rows` takes: 4, 2 or 1; 0 if the rows alone are too many. With few vector
// registers more than 2 panels would push sums to the stack.
template <class V>
constexpr int register_panels(int64_t num_rows) {
    for (int panels = smaller(V::tile_panels * 2, group_panels); panels > 0; panels /= 2) {
        if (num_rows <= register_rows<V>(panels)) return panels;
    }
    return 0;
}

using RegisterProduct = void (*)(const WeightProduct&, int first_panel, const char* next);

template <class V, class Reader, int num_panels, int... index>
constexpr auto register_products(std::integer_sequence<int, index...>) {
    constexpr int rows = register_rows<V>(num_panels);
    return std::array<RegisterProduct, sizeof...(index)>{
        (index < rows ? &multiply_in_registers<V, Reader, index < rows ? index + 1 : 1, rows != 0 ? num_panels : 1>
                      : nullptr)...};
}

template <class V, class Reader>
ANTIPHON_INLINE RegisterProduct register_product(int64_t num_rows, int num_panels) {
    constexpr auto all = std::make_integer_sequence<int, most_register_rows>();
    static constexpr std::array<RegisterProduct, most_register_rows> functions[3] = {
        register_products<V, Reader, 1>(all), register_products<V, Reader, 2>(all),
        register_products<V, Reader, 4>(all)};
    return functions[num_panels / 2][static_cast<size_t>(num_rows - 1)];
}

// Columns [first, first + steps) of the group's panels as float32 panels, `steps` apart.
template <class V, class Reader>
void unpack_block(const WeightProduct& product, int64_t first, int64_t steps, float* to) {
    const int64_t stride = product.weight->panel_stride;
    const char* next = product.next != nullptr ? product.next : product.group;
    for (int n = 0; n < product.num_panels; ++n) {
        float* panel = to + n * steps * panel_width;
        walk_panels<V, Reader, 1>(
            {*product.weight, product.group + n * stride, next + n * stride, first, first + steps},
            [&](int64_t column, const typename V::F* weights) __attribute__((always_inline)) {
                V::store(panel + (column - first) * panel_width, weights[0]);
            });
    }
}

template <class Arch, class Reader>
void multiply_quantized(const WeightProduct& product) {
    using V = typename Arch::Vector;
    const int panels = register_panels<V>(product.num_rows);
    if (panels > 0) {
        for (int panel = 0; panel < product.num_panels;) {
            int count = panels;
            while (count > product.num_panels - panel) count /= 2;
            const int after = panel + count;
            const char* next = after < product.num_panels ? product.group + after * product.weight->panel_stride
                                                          : product.next;
            register_product<V, Reader>(product.num_rows, count)(product, panel, next != nullptr ? next : product.group);
            panel = after;
        }
        return;
    }
    float* block = Scratch::get<float>(ScratchUse::unpacked, block_steps * group_width);
    for (int64_t first = 0; first < product.steps; first += block_steps) {
        const int64_t steps = smaller(block_steps, product.steps - first);
        unpack_block<V, Reader>(product, first, steps, block);
        Segment segment;
        segment.steps = steps;
        for (int n = 0; n < product.num_panels; ++n) {
            // What comes next was prefetched while this block was unpacked.
            segment.prefetch[n] = segment.panel[n] = reinterpret_cast<const char*>(block + n * steps * panel_width);
        }
        multiply_steps<Arch, Fp32>(product, first, &segment, 1);
    }
}

// Codes with rows of the type that the weight's format names.
template <class Arch, class E, class Reader>
void multiply_either_way(const WeightProduct& product) {
    if constexpr (multiplies_codes<Arch, E>) {
        if (product.weight->format.type == ElementType::bf16) return multiply_codes<Arch, Reader>(product);
    }
    multiply_quantized<Arch, Reader>(product);
}

// The product of rows with a weight of this format.
template <class Arch, class E>
void multiply_weight(const WeightProduct& product) {
    switch (product.weight->format.codes) {
        case CodeKind::floats: return multiply_group<Arch, E>(product);
        case CodeKind::int8: return multiply_either_way<Arch, E, Int8Reader>(product);
        case CodeKind::int4: return multiply_either_way<Arch, E, Int4Reader>(product);
        case CodeKind::mxfp4: return multiply_either_way<Arch, E, Mxfp4Reader>(product);
        case CodeKind::fp8: return multiply_either_way<Arch, E, Fp8Reader>(product);
    }
}

}  // namespace antiphon::kernels

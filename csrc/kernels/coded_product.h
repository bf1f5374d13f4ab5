// Rows of bfloat16 against one panel group of codes, where the processor multiplies pairs of bfloat16.
//
// Every code of every format is exact in bfloat16. The codes of a run of columns (a group of the format, at most 512) are
// multiplied as they are; the sum is scaled once, in float32:
//     y = sum over runs: scale * sum(code * x) + offset * sum(x)
// Few rows multiply what a register holds. More rows turn a block of columns into a panel of bfloat16 codes in the cache
// first, and processors with tiles always do. All add the same numbers in the same order, so a row's bits do not depend
// on how many rows there are. Rejected: panels of scale * code, which round every weight.
#pragma once

#include "kernels/block_product.h"
#include "kernels/rows.h"
#include "kernels/weight_product.h"
#include "kernels/weight_reader.h"

namespace antiphon::kernels {

constexpr int64_t longest_run = 512;
constexpr int64_t coded_lead_bytes = 8192;  // prefetched ahead, over all panels read side by side
constexpr int most_tile_sums = 24;     // rows times panels
constexpr int vector_registers = 32;   // of processors that multiply pairs of bfloat16
constexpr int64_t most_coded_rows = 24;  // that multiply codes in registers: above, turning codes into operands once pays

// Whether rows of element type E are multiplied with codes as bfloat16; else codes become float32.
template <class Arch, class E>
constexpr bool multiplies_codes = E::type == ElementType::bf16 && (Arch::has_tiles || Arch::Vector::has_bf16_dot);

// Runs of a whole number of steps of this many columns need no remainder.
inline bool has_runs_of(const PackedFormat& format, int64_t columns, int64_t inner) {
    return format.group % columns == 0 || format.group >= inner;
}

// The type of rows that a weight is multiplied with. Tiles take 32 columns of a run at a time, vectors 16.
template <class Arch, class E>
ElementType operand_type(const PackedFormat& format, int64_t inner) {
    if (!format.is_quantized()) return E::type;
    constexpr int64_t columns = Arch::Vector::has_bf16_dot ? panel_width : Bf16::inner_multiple;
    return multiplies_codes<Arch, E> && has_runs_of(format, columns, inner) ? ElementType::bf16 : ElementType::fp32;
}

// Columns [first, end) of one scale, and where a panel keeps them: bytes from its start.
struct Run {
    int64_t index;   // among the runs of a row
    int64_t first;
    int64_t end;
    int64_t units;   // of its scales and offsets, where these are whole numbers
    int64_t header;  // scales, then zero points or offsets
    int64_t codes;   // of column `first`
};

// The runs of a panel from column `first` on, one after another, without a division for each: a run may be as short as 4
// words of codes.
class Runs {
  public:
    Runs(const PackedMatrix& weight, int64_t first)
        : inner_(weight.inner),
          group_(weight.format.group),
          header_bytes_(weight.format.scale_bytes() + weight.format.offset_bytes()),
          group_bytes_(weight.format.group_bytes()),
          step_bytes_(weight.format.step_bytes()),
          unit_bytes_(weight.format.unit_bytes()) {
        const int64_t group = first / group_;
        group_end_ = (group + 1) * group_;
        run_.index = group * divide_up(group_, longest_run) + (first - group * group_) / longest_run;
        run_.header = weight.format.units_bytes(inner_) + group * group_bytes_;
        begin(first, run_.header + header_bytes_ + (first - group * group_) * step_bytes_);
    }
    const Run& run() const { return run_; }
    ANTIPHON_INLINE void advance() {
        ++run_.index;
        if (run_.end < group_end_) return begin(run_.end, run_.codes + (run_.end - run_.first) * step_bytes_);
        group_end_ += group_;
        run_.header += group_bytes_;
        begin(run_.end, run_.header + header_bytes_);
    }

    // Of a whole row.
    static int64_t count(const PackedMatrix& weight) {
        const int64_t group = weight.format.group;
        return weight.inner / group * divide_up(group, longest_run) + divide_up(weight.inner % group, longest_run);
    }

  private:
    ANTIPHON_INLINE void begin(int64_t first, int64_t codes) {
        run_.first = first;
        run_.units = first / unit_columns * unit_bytes_;
        run_.codes = codes;
        run_.end = smaller(first + longest_run, smaller(group_end_, inner_));
    }

    int64_t inner_;
    int64_t group_;
    int64_t header_bytes_;
    int64_t group_bytes_;
    int64_t step_bytes_;
    int64_t unit_bytes_;
    int64_t group_end_;
    Run run_;
};

// Codes as they lie in a packed panel.
template <class CodeReader>
struct StoredCodes {
    using Reader = CodeReader;
    static constexpr int columns = Reader::columns;  // of one word of 64 bytes
    int64_t panel_stride;
    const char* panel;
    const char* next;  // what is read after this panel's end

    int64_t stride() const { return panel_stride; }
    const char* word(const Run& run) const { return panel + run.codes; }
    ANTIPHON_INLINE void prefetch(const char* at, int64_t lead, int num_panels) const {
        const int64_t place = at - panel + lead;
        const char* ahead = place < stride() ? panel + place : next + (place - stride());
        for (int n = 0; n < num_panels; ++n) __builtin_prefetch(ahead + n * stride());
    }
};

// What codes in the cache are read with: they are operands already.
struct Bf16Codes {
    static constexpr bool has_table = false;
};

// Codes that were turned into bfloat16, from column `first` on: a word is one step.
struct CachedCodes {
    using Reader = Bf16Codes;
    static constexpr int columns = Bf16::per_step;
    const char* panel;
    int64_t first;
    int64_t panel_bytes_apart;

    int64_t stride() const { return panel_bytes_apart; }
    const char* word(const Run& run) const { return panel + (run.first - first) / Bf16::per_step * panel_bytes; }
    ANTIPHON_INLINE void prefetch(const char*, int64_t, int) const {}
};

// The table that a format's codes are looked up in, if it has one.
template <class V, class Reader>
ANTIPHON_INLINE typename V::B table_of(const PackedFormat& format) {
    if constexpr (Reader::has_table) {
        return V::load_operand(reinterpret_cast<const char*>(Reader::table(format.offset != OffsetKind::none)));
    } else {
        return typename V::B{};
    }
}

// What the operands of a word are made of: the word itself where they are looked up, else where it lies.
template <class V, class Codes>
ANTIPHON_INLINE auto loaded_word(const char* word) {
    if constexpr (Codes::Reader::has_table) {
        return V::load_nibble_word(word);
    } else {
        return word;
    }
}

// Step k of a word as an operand: the codes of two columns for 16 outputs.
template <class V, class Codes, int k, class Word>
ANTIPHON_INLINE typename V::B operand_of(const Word& word, const typename V::B& table) {
    using Reader = typename Codes::Reader;
    if constexpr (std::is_same_v<Reader, Bf16Codes>) {
        return V::load_operand(word);
    } else if constexpr (Reader::has_table) {
        return V::template look_up<k>(word, table);
    } else {
        return V::pair(Reader::template column<V, 2 * k>(word), Reader::template column<V, 2 * k + 1>(word));
    }
}

// The last columns of a row of 8-bit codes, fewer than a word of them.
template <class V, class Codes>
ANTIPHON_INLINE typename V::B last_operand(const char* word, int64_t columns) {
    using Reader = typename Codes::Reader;
    const auto second = columns > 1 ? Reader::template column<V, 0>(word + panel_width) : V::zero();
    return V::pair(Reader::template column<V, 0>(word), second);
}

// body(operands of every panel) for every step of two columns of the run.
template <class V, class Codes, int num_panels, class Body>
ANTIPHON_INLINE void walk_run(const Codes& codes, const typename V::B& table, const Run& run, const Body& body) {
    const int64_t stride = codes.stride();
    const int64_t lead = smaller(coded_lead_bytes / num_panels, stride);
    const char* word = codes.word(run);
    int64_t column = run.first;
    constexpr bool whole_words = Codes::columns != 4;  // what lies behind the last column is read, and meets zeros in the row
    for (const int64_t last = whole_words ? run.end : run.end - Codes::columns + 1; column < last;
         column += Codes::columns, word += panel_bytes) {
        codes.prefetch(word, lead, num_panels);
        decltype(loaded_word<V, Codes>(word)) words[num_panels];
        unrolled<num_panels>([&](auto n) __attribute__((always_inline)) {
            words[n] = loaded_word<V, Codes>(word + n * stride);
        });
        unrolled<Codes::columns / Bf16::per_step>([&](auto k) __attribute__((always_inline)) {
            typename V::B operands[num_panels];
            unrolled<num_panels>([&](auto n) __attribute__((always_inline)) {
                operands[n] = operand_of<V, Codes, k>(words[n], table);
            });
            body(operands);
        });
    }
    if constexpr (!whole_words) {
        for (; column < run.end; column += Bf16::per_step, word += Bf16::per_step * panel_width) {
            typename V::B operands[num_panels];
            for (int n = 0; n < num_panels; ++n) {
                operands[n] = last_operand<V, Codes>(word + n * stride, run.end - column);
            }
            body(operands);
        }
    }
}

template <class V, class T>
ANTIPHON_INLINE float sum_of_row(const T* values, int64_t num_columns) {
    auto sum = V::zero();
    for (int64_t i = 0; i < num_columns; i += panel_width) sum = V::add(sum, V::load(values + i));
    return V::reduce_add(sum);
}

// The sums of the rows over each run's columns, [runs][rows] in the caller's scratch, where `weight` has offsets and is
// multiplied as codes; else null. They are made once for all outputs.
template <class Arch, class E>
const float* sums_of_runs(const PackedMatrix& weight, const Rows& rows, ThreadPool& pool) {
    if (!multiplies_codes<Arch, E> || weight.format.type != E::type) return nullptr;
    if (weight.format.offset == OffsetKind::none) return nullptr;
    float* sums = Scratch::get<float>(ScratchUse::run_sums, static_cast<size_t>(Runs::count(weight) * rows.count));
    pool.for_each(divide_up(rows.count, rows_worth_a_thread), [&](int64_t item) {
        const int64_t end = smaller(rows.count, (item + 1) * rows_worth_a_thread);
        for (int64_t row = item * rows_worth_a_thread; row < end; ++row) {
            const auto* values = row_at<E>(rows, row);
            for (Runs runs(weight, 0); runs.run().first < weight.inner; runs.advance()) {
                const Run& run = runs.run();
                sums[run.index * rows.count + row] =
                    sum_of_row<typename Arch::Vector>(values + run.first, run.end - run.first);
            }
        }
    });
    return sums;
}

// Adds what a run gave to the sums of rows and panels: products(m, n) are the unscaled sums of row m and panel n, and
// add(m, n, factor, value, begun) adds their product to a sum, which is 0 so far unless it has begun. Rows count from
// `first_row`.
template <class V, int num_panels, class EachRow, class Products, class Add>
ANTIPHON_INLINE void add_run(const WeightProduct& product, int64_t first_row, int first_panel, const Run& run,
                             const EachRow& each_row, const Products& products, const Add& add) {
    const PackedFormat& format = product.weight->format;
    const int64_t stride = product.weight->panel_stride;
    const char* units = product.group + first_panel * stride + run.units;
    const char* header = product.group + first_panel * stride + run.header;
    typename V::F scale[num_panels];
    for (int n = 0; n < num_panels; ++n) {
        scale[n] = load_scales<V>(format.scales, header + n * stride, units + n * stride);
    }
    each_row([&](auto m) __attribute__((always_inline)) {
        unrolled<num_panels>([&](auto n) __attribute__((always_inline)) {
            add(m, n, scale[n], products(m, n), run.first > 0);
        });
    });
    if (format.offset == OffsetKind::none) return;
    for (int n = 0; n < num_panels; ++n) {
        scale[n] = load_offsets<V>(format, header + n * stride, units + n * stride, scale[n]);
    }
    const float* row_sums = product.run_sums + run.index * product.all_rows + product.first_row + first_row;
    each_row([&](auto m) __attribute__((always_inline)) {
        const auto sum = V::set1(row_sums[m]);
        unrolled<num_panels>([&](auto n) __attribute__((always_inline)) { add(m, n, scale[n], sum, true); });
    });
}

// Which columns of which rows and panels one register tile multiplies.
struct CodedTile {
    int64_t first_row = 0;
    int first_panel = 0;
    int64_t first;
    int64_t end;
};

// A register tile against codes: columns [first, end), run by run. Where registers suffice, the sums of all runs stay in
// them: stored after each run, they delayed the next one by a tenth (Zen 5, runs of 32).
template <class V, class Codes, int num_rows, int num_panels>
void multiply_coded_tile(const WeightProduct& product, const Codes& codes, const CodedTile& at) {
    constexpr bool keeps_sums = 2 * num_rows * num_panels + 2 * num_panels + 3 <= vector_registers;
    const size_t row_bytes = product.row_bytes;
    const auto table = table_of<V, typename Codes::Reader>(product.weight->format);
    const char* rows = product.rows + static_cast<size_t>(at.first_row) * row_bytes;
    float* stored = product.sums + at.first_row * group_width + at.first_panel * panel_width;
    const auto place_of = [&](int64_t m, int n) __attribute__((always_inline)) {
        return stored + m * group_width + n * panel_width;
    };
    const auto sum_at = [&](int64_t m, int n, bool begun) __attribute__((always_inline)) {
        return begun ? V::load(place_of(m, n)) : V::zero();
    };
    const auto each_row = [](const auto& body) __attribute__((always_inline)) { unrolled<num_rows>(body); };
    const auto each_sum = [&](const auto& body) __attribute__((always_inline)) {
        each_row([&](auto m) __attribute__((always_inline)) {
            unrolled<num_panels>([&](auto n) __attribute__((always_inline)) { body(m, n); });
        });
    };
    typename V::F sums[keeps_sums ? num_rows : 1][num_panels];
    if constexpr (keeps_sums) {
        each_sum([&](auto m, auto n) __attribute__((always_inline)) { sums[m][n] = sum_at(m, n, at.first > 0); });
    }
    for (Runs runs(*product.weight, at.first); runs.run().first < at.end; runs.advance()) {
        const Run& run = runs.run();
        typename V::F acc[num_rows][num_panels];
        each_sum([&](auto m, auto n) __attribute__((always_inline)) { acc[m][n] = V::zero(); });
        const char* row = rows + run.first * 2;
        const char* base[2] = {row, row + 8 * row_bytes};
        walk_run<V, Codes, num_panels>(codes, table, run, [&](const typename V::B* operands)
                                                              __attribute__((always_inline)) {
            each_row([&](auto m) __attribute__((always_inline)) {
                const auto x = V::broadcast(base[m / 8] + (m % 8) * row_bytes);
                unrolled<num_panels>([&](auto n) __attribute__((always_inline)) {
                    acc[m][n] = V::dot(Bf16{}, acc[m][n], x, operands[n]);
                });
            });
            for (int i = 0; i < 2; ++i) base[i] += 4;
        });
        const auto products = [&](auto m, auto n) __attribute__((always_inline)) { return acc[m][n]; };
        const auto add = [&](auto m, auto n, typename V::F factor, typename V::F value, bool begun)
                             __attribute__((always_inline)) {
            if constexpr (keeps_sums) {
                sums[m][n] = V::fma(factor, value, sums[m][n]);
            } else {
                V::store(place_of(m, n), V::fma(factor, value, sum_at(m, n, begun)));
            }
        };
        add_run<V, num_panels>(product, at.first_row, at.first_panel, run, each_row, products, add);
    }
    if constexpr (keeps_sums) {
        each_sum([&](auto m, auto n) __attribute__((always_inline)) { V::store(place_of(m, n), sums[m][n]); });
    }
}

template <class Codes>
using CodedTileFunction = void (*)(const WeightProduct&, const Codes&, const CodedTile&);

template <class V, class Codes, int num_panels, int... index>
constexpr auto coded_tiles(std::integer_sequence<int, index...>) {
    return std::array<CodedTileFunction<Codes>, sizeof...(index)>{
        &multiply_coded_tile<V, Codes, index + 1, num_panels>...};
}

template <class V, class Codes, int num_panels>
ANTIPHON_INLINE CodedTileFunction<Codes> coded_tile(int64_t num_rows) {
    constexpr int fitting = most_tile_sums / num_panels;
    constexpr int most_rows = fitting < most_tile_rows ? fitting : most_tile_rows;
    static constexpr auto functions = coded_tiles<V, Codes, num_panels>(std::make_integer_sequence<int, most_rows>());
    return functions[static_cast<size_t>(num_rows - 1)];
}

// All rows against all panels, `widest` of them side by side, in register tiles of nearly equal height: the columns and
// sums of `tile`. codes_of(panel) are those from one panel on.
template <class V, class CodesOf>
void multiply_coded_rows(const WeightProduct& product, CodedTile tile, int widest, const CodesOf& codes_of) {
    using Codes = decltype(codes_of(0, 0));
    const int64_t passes = divide_up(product.num_rows, most_tile_rows);
    for (int panel = 0; panel < product.num_panels;) {
        int count = widest;
        while (count > product.num_panels - panel) count /= 2;
        const Codes codes = codes_of(panel, panel + count);
        for (int64_t pass = 0; pass < passes; ++pass) {
            const int64_t row = product.num_rows * pass / passes;
            const int64_t num_rows = product.num_rows * (pass + 1) / passes - row;
            const auto function = count == 4   ? coded_tile<V, Codes, 4>(num_rows)
                                  : count == 2 ? coded_tile<V, Codes, 2>(num_rows)
                                               : coded_tile<V, Codes, 1>(num_rows);
            tile.first_row = row;
            tile.first_panel = panel;
            function(product, codes, tile);
        }
        panel += count;
    }
}

// Columns [first, end) of `num_panels` panels as steps of bfloat16 codes, `stride` bytes from panel to panel, zeros up to
// a whole tile.
template <class V, class Reader>
void unpack_codes(const WeightProduct& product, int64_t first, int64_t end, char* to, int64_t stride) {
    const char* next = product.next != nullptr ? product.next : product.group;
    const auto table = table_of<V, Reader>(product.weight->format);
    for (int n = 0; n < product.num_panels; ++n) {
        const int64_t at = n * product.weight->panel_stride;
        const StoredCodes<Reader> codes{product.weight->panel_stride, product.group + at, next + at};
        char* step = to + n * stride;
        for (Runs runs(*product.weight, first); runs.run().first < end; runs.advance()) {
            walk_run<V, StoredCodes<Reader>, 1>(codes, table, runs.run(), [&](const typename V::B* operands)
                                                                              __attribute__((always_inline)) {
                V::store_operand(step, operands[0]);
                step += panel_bytes;
            });
        }
        const int64_t written = step - (to + n * stride);
        std::memset(step, 0, static_cast<size_t>(stride - written));
    }
}

// Rows in tiles over one run of codes in the cache; sums of a tile are scaled when the run ends.
template <class Arch>
void multiply_in_tiles(const WeightProduct& product, const char* codes, int64_t stride, const Run& run) {
    using V = typename Arch::Vector;
    constexpr int64_t rows_at_once = 2 * tile_height;
    alignas(64) float products[rows_at_once * group_width];
    Segment segment;
    segment.steps = divide_up(run.end - run.first, Bf16::inner_multiple) * tile_steps;
    for (int n = 0; n < product.num_panels; ++n) segment.prefetch[n] = segment.panel[n] = codes + n * stride;
    for (int64_t row = 0; row < product.num_rows; row += rows_at_once) {
        const int64_t num_rows = smaller(rows_at_once, product.num_rows - row);
        multiply_block_in_tiles<typename Arch::Tiles>({
            .rows = product.rows + static_cast<size_t>(row) * product.row_bytes + run.first * 2,
            .row_bytes = product.row_bytes,
            .num_rows = num_rows,
            .segments = &segment,
            .num_segments = 1,
            .num_panels = product.num_panels,
            .step_bytes = panel_bytes,
            .sums = products,
            .sums_stride = group_width,
            .accumulate = false,
        });
        for (int n = 0; n < product.num_panels; ++n) {
            const auto each_row = [&](const auto& body) {
                for (int64_t m = 0; m < num_rows; ++m) body(m);
            };
            const auto product_at = [&](int64_t m, int) { return V::load(products + m * group_width + n * panel_width); };
            add_run<V, 1>(product, row, n, run, each_row, product_at,
                          [&](int64_t m, int, typename V::F factor, typename V::F value, bool begun) {
                float* sum = product.sums + (row + m) * group_width + n * panel_width;
                V::store(sum, V::fma(factor, value, begun ? V::load(sum) : V::zero()));
            });
        }
    }
}

template <class Arch, class Reader>
void multiply_codes(const WeightProduct& product) {
    using V = typename Arch::Vector;
    const PackedMatrix& weight = *product.weight;
    const bool in_tiles = Arch::has_tiles && has_runs_of(weight.format, Bf16::inner_multiple, weight.inner);
    if constexpr (V::has_bf16_dot) {
        if (!in_tiles && product.num_rows <= most_coded_rows) {
            const char* after = product.next != nullptr ? product.next : product.group;
            const int widest = product.num_rows <= most_tile_sums / group_panels ? group_panels : group_panels / 2;
            return multiply_coded_rows<V>(product, {.first = 0, .end = weight.inner}, widest, [&](int panel, int end_panel) {
                const char* next = end_panel < product.num_panels ? product.group + end_panel * weight.panel_stride : after;
                return StoredCodes<Reader>{weight.panel_stride, product.group + panel * weight.panel_stride, next};
            });
        }
    }
    constexpr int64_t most_bytes = longest_run / Bf16::per_step * panel_bytes;
    char* block = Scratch::get<char>(ScratchUse::unpacked, group_panels * most_bytes);
    for (Runs runs(weight, 0); runs.run().first < weight.inner;) {
        const Run run = runs.run();
        int64_t end = run.end;
        for (runs.advance(); !in_tiles && end < weight.inner && runs.run().end - run.first <= longest_run; runs.advance()) {
            end = runs.run().end;
        }
        const int64_t stride = round_up(end - run.first, Bf16::inner_multiple) / Bf16::per_step * panel_bytes;
        unpack_codes<V, Reader>(product, run.first, end, block, stride);
        if constexpr (Arch::has_tiles) {
            if (in_tiles) multiply_in_tiles<Arch>(product, block, stride, run);
        }
        if constexpr (V::has_bf16_dot) {
            if (in_tiles) continue;
            const int widest = end > run.end ? 1 : group_panels / 2;  // of several runs, sums stay in registers
            multiply_coded_rows<V>(product, {.first = run.first, .end = end}, widest, [&](int panel, int) {
                return CachedCodes{block + panel * stride, run.first, stride};
            });
        }
    }
}

}  // namespace antiphon::kernels

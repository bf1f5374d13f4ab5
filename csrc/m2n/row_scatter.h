// Which rows go where, and their way there and back: the part of dispatch and combine that touches every row.
//
// One pass over the gate's choices lists, for each destination, the rows that have at least one expert there. Writing
// a destination's message then reads each of its rows once and writes it once, into the slot itself. The way back adds
// the partial sums of a row in float32, in the order of destinations, and rounds once.
//
// Experts may have copies on several workers. How many rows each copy gets is decided anew for every micro-batch
// (`expert_split.h`). A row prefers the copy on a worker that it visits anyway.
//
// Number formats of rows are widened to float32 to be added, and narrowed once.
#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "m2n/expert_split.h"

namespace antiphon::m2n {

enum class RowType { bf16, fp16, fp32 };

inline size_t bytes_of(RowType type) { return type == RowType::fp32 ? 4 : 2; }

struct Bf16 {
    using Stored = uint16_t;
    static float widen(uint16_t value) { return std::bit_cast<float>(uint32_t{value} << 16); }
    static uint16_t narrow(float value) {  // to nearest, ties to even; NaN stays NaN
        const auto bits = std::bit_cast<uint32_t>(value);
        if ((bits & 0x7FFFFFFF) > 0x7F800000) return static_cast<uint16_t>(bits >> 16 | 0x40);
        return static_cast<uint16_t>((bits + 0x7FFF + (bits >> 16 & 1)) >> 16);
    }
};

struct Fp16 {
    using Stored = _Float16;
    static float widen(_Float16 value) { return static_cast<float>(value); }
    static _Float16 narrow(float value) { return static_cast<_Float16>(value); }
};

struct Fp32 {
    using Stored = float;
    static float widen(float value) { return value; }
    static float narrow(float value) { return value; }
};

// out[i] = addends[0][i] + addends[1][i] + ... for `count` elements; every one of `copies` gets the same. `out` may be
// one of the addends.
void sum_rows(RowType type, std::span<const std::byte* const> addends, uint64_t count, std::byte* out,
              std::span<std::byte* const> copies);

struct RowShape {
    uint32_t hidden = 0;
    uint32_t top_k = 0;
    uint32_t max_rows = 0;
    RowType type = RowType::bf16;

    uint64_t row_bytes() const { return hidden * bytes_of(type); }
    // A dispatch message of `rows` rows: expert ids, weights, rows; each part begins at a multiple of 64 bytes.
    uint64_t weights_offset(uint32_t rows) const { return round_up(uint64_t{rows} * top_k * 4); }
    uint64_t rows_offset(uint32_t rows) const { return 2 * weights_offset(rows); }
    uint64_t dispatch_bytes(uint32_t rows) const { return rows_offset(rows) + rows * row_bytes(); }
    uint64_t combine_bytes(uint32_t rows) const { return rows * row_bytes(); }

  private:
    static uint64_t round_up(uint64_t value) { return (value + 63) / 64 * 64; }
};

// A micro-batch as the gate leaves it: `ids` and `weights` are [count, top_k], contiguous.
struct GatedRows {
    const std::byte* rows = nullptr;
    uint64_t stride_bytes = 0;
    const int32_t* ids = nullptr;
    const float* weights = nullptr;
    uint32_t count = 0;
};

class RowScatter {
  public:
    RowScatter(const RowShape& shape, uint32_t num_workers);

    // Rows of `layer` go by this split from now on. Error(invalid): it is for another number of workers.
    void place(uint32_t layer, ExpertSplit split);

    // The placement of a layer. Error(invalid): it was not placed.
    ExpertSplit& split_of(uint32_t layer);

    // Decides where every choice goes and lists the rows of each worker. Error(invalid): a layer that was not placed,
    // an id that is no expert.
    void plan(uint32_t layer, const int32_t* ids, uint32_t count, std::vector<std::vector<uint32_t>>& rows_of);

    // Writes one worker's message of the micro-batch that was planned last into `payload`
    // (shape.dispatch_bytes(rows.size()) bytes). Ids of experts that live elsewhere become -1.
    void write(const GatedRows& gated, uint32_t worker, std::span<const uint32_t> rows, std::byte* payload) const;

    // Rows of each expert since the last call, one placed layer after the other.
    std::vector<uint32_t> take_counts();

    uint32_t num_workers() const { return num_workers_; }
    const RowShape& shape() const { return shape_; }

  private:
    void count(uint32_t layer, const int32_t* ids, uint32_t count);
    void choose_copies(const ExpertSplit& split, std::span<uint32_t> left, const int32_t* ids, uint32_t row);

    RowShape shape_;
    uint32_t num_workers_;
    std::vector<std::optional<ExpertSplit>> splits_;  // by layer
    std::vector<uint32_t> counts_;                    // rows of each expert in the micro-batch
    std::vector<std::vector<uint32_t>> totals_;       // by layer: of each expert since `take_counts`
    std::vector<uint32_t> left_;                      // rows that each copy still takes
    std::vector<int32_t> worker_of_;                  // [count, top_k]
};

// out[row] = sum over workers of partials[w][position of row in rows_of[w]], for all `count` rows. Every list of
// `rows_of` is ascending; a row that no list names becomes zero.
void add_partials(const RowShape& shape, const std::vector<std::vector<uint32_t>>& rows_of,
                  std::span<const std::byte* const> partials, uint32_t count, std::byte* out);

}  // namespace antiphon::m2n

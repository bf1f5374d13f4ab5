// Rows of ggml's blocks as codes and scales, in the plain order of `QuantizedWeight` (antiphon/kernels/quantized.py).
#pragma once

#include <cstdint>

#include "kernels/thread_pool.h"

namespace antiphon::kernels {

struct GgmlBlockType;

// The type by ggml's name; null where it is unknown here.
const GgmlBlockType* ggml_block_type(const char* name);

struct GgmlRows {
    const uint8_t* blocks;  // [num_rows][bytes of a row]
    int64_t row_bytes;      // from row to row
    int64_t num_rows;
    int64_t num_blocks;  // of a row
};

// What the rows become, consecutive: codes of one byte, or two 4-bit ones in a byte with the even column low; a scale for
// each group of columns, a float16, exponent or whole number (one byte); an offset for each, float or whole number, or null
// for types without; the float16 units of a block's whole numbers, scales' and offsets', or null.
struct GgmlParts {
    uint8_t* codes;
    uint8_t* scales;
    uint8_t* offsets;
    uint8_t* units;
};

void read_ggml_rows(const GgmlBlockType& type, const GgmlRows& rows, const GgmlParts& parts, ThreadPool& pool);

}  // namespace antiphon::kernels

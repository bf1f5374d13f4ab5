// One function a type reads a block; layouts are those of ggml-common.h. Loops run over whole 16-bit lanes or bytes of
// fixed count, which compilers turn into vectors of any machine. A type stands in three tables: `types` here, `_FORMATS`
// of antiphon/models/gguf/checkpoint.py and `TYPES` of container.py beside it.
// Rejected: reading blocks as panels are packed, which would need every slice of a matrix a second time.
#include "kernels/ggml_blocks.h"

#include <bit>
#include <cstring>

#include "kernels/element.h"

namespace antiphon::kernels {

namespace {

constexpr int half_block = 16;

float half_at(const uint8_t* place) {
    uint16_t half;
    std::memcpy(&half, place, 2);
    const uint32_t sign = static_cast<uint32_t>(half & 0x8000u) << 16;
    const uint32_t exponent = half >> 10 & 31u;
    const uint32_t fraction = half & 0x3ffu;
    if (exponent == 31) return std::bit_cast<float>(sign | 0x7f800000u | fraction << 13);
    if (exponent != 0) return std::bit_cast<float>(sign | (exponent + 112) << 23 | fraction << 13);
    const float small = static_cast<float>(fraction) * 0x1p-24f;
    return sign != 0 ? -small : small;
}

// `count` bytes with number j low and number j + count high become `count` bytes of neighbours.
template <int count>
void neighbours(const uint8_t* packed, uint8_t* codes) {
    uint16_t pairs[count / 2];
    std::memcpy(pairs, packed, count);
    for (int i = 0; i < count / 2; ++i) {
        const unsigned low = pairs[i] & 0x0f0fu;
        codes[i] = static_cast<uint8_t>(low | low >> 4);
    }
    for (int i = 0; i < count / 2; ++i) {
        const unsigned high = pairs[i] >> 4 & 0x0f0fu;
        codes[count / 2 + i] = static_cast<uint8_t>(high | high >> 4);
    }
}

// Of a block: its codes, and scales and offsets of every group.
using ReadBlock = void (*)(const uint8_t* block, const GgmlParts& to);

void store_half_as_float(const uint8_t* half, uint8_t* to) {
    const float value = half_at(half);
    std::memcpy(to, &value, 4);
}

void q8_0(const uint8_t* block, const GgmlParts& to) {
    std::memcpy(to.scales, block, 2);
    std::memcpy(to.codes, block + 2, 2 * half_block);
}

void q4_0(const uint8_t* block, const GgmlParts& to) {
    std::memcpy(to.scales, block, 2);
    neighbours<half_block>(block + 2, to.codes);
}

void q4_1(const uint8_t* block, const GgmlParts& to) {
    std::memcpy(to.scales, block, 2);
    store_half_as_float(block + 2, to.offsets);
    neighbours<half_block>(block + 4, to.codes);
}

void mxfp4(const uint8_t* block, const GgmlParts& to) {
    *to.scales = *block;
    neighbours<half_block>(block + 1, to.codes);
}

// Nibbles of 16 bytes, low ones first, with a fifth bit each, less `shift`.
void five_bits(const uint8_t* fifth, const uint8_t* packed, unsigned shift, uint8_t* codes) {
    uint32_t bits;
    std::memcpy(&bits, fifth, 4);
    for (unsigned i = 0; i < half_block; ++i) {
        codes[i] = static_cast<uint8_t>(((packed[i] & 15u) | (bits >> i & 1u) << 4) - shift);
        codes[half_block + i] = static_cast<uint8_t>((packed[i] >> 4 | (bits >> (half_block + i) & 1u) << 4) - shift);
    }
}

void q5_0(const uint8_t* block, const GgmlParts& to) {
    std::memcpy(to.scales, block, 2);
    five_bits(block + 2, block + 6, 16, to.codes);
}

void q5_1(const uint8_t* block, const GgmlParts& to) {
    std::memcpy(to.scales, block, 2);
    store_half_as_float(block + 2, to.offsets);
    five_bits(block + 4, block + 8, 0, to.codes);
}

// Scales and minimums of Q4_K and Q5_K: six bits each, in 12 bytes behind two float16. A minimum is subtracted, so the
// unit of offsets is its own with the sign turned.
void k_scales(const uint8_t* block, const GgmlParts& to) {
    const uint8_t* first = block + 4;
    const uint8_t* second = block + 8;
    const uint8_t* high = block + 12;
    std::memcpy(to.units, block, 4);
    to.units[3] ^= 0x80u;
    for (int i = 0; i < 4; ++i) {
        to.scales[i] = first[i] & 63u;
        to.scales[4 + i] = static_cast<uint8_t>((high[i] & 15u) | first[i] >> 6 << 4);
        to.offsets[i] = second[i] & 63u;
        to.offsets[4 + i] = static_cast<uint8_t>(high[i] >> 4 | second[i] >> 6 << 4);
    }
}

void q4_k(const uint8_t* block, const GgmlParts& to) {
    k_scales(block, to);
    for (int chunk = 0; chunk < 4; ++chunk) neighbours<32>(block + 16 + 32 * chunk, to.codes + 32 * chunk);
}

void q5_k(const uint8_t* block, const GgmlParts& to) {
    k_scales(block, to);
    const uint8_t* fifth = block + 16;
    for (int chunk = 0; chunk < 4; ++chunk) {
        const uint8_t* packed = block + 48 + 32 * chunk;
        uint8_t* codes = to.codes + 64 * chunk;
        for (int i = 0; i < 32; ++i) {
            codes[i] = static_cast<uint8_t>((packed[i] & 15) | (fifth[i] >> 2 * chunk & 1) << 4);
            codes[32 + i] = static_cast<uint8_t>(packed[i] >> 4 | (fifth[i] >> (2 * chunk + 1) & 1) << 4);
        }
    }
}

// Of each half of a block: 64 bytes of low nibbles, 32 of two high bits for four numbers.
void q6_k(const uint8_t* block, const GgmlParts& to) {
    std::memcpy(to.units, block + 208, 2);
    std::memcpy(to.scales, block + 192, 16);
    for (int half = 0; half < 2; ++half) {
        const uint8_t* low = block + 64 * half;
        const uint8_t* high = block + 128 + 32 * half;
        uint8_t* codes = to.codes + 128 * half;
        for (int i = 0; i < 32; ++i) {
            codes[i] = static_cast<uint8_t>(((low[i] & 15) | (high[i] & 3) << 4) - 32);
            codes[32 + i] = static_cast<uint8_t>(((low[32 + i] & 15) | (high[i] >> 2 & 3) << 4) - 32);
            codes[64 + i] = static_cast<uint8_t>((low[i] >> 4 | (high[i] >> 4 & 3) << 4) - 32);
            codes[96 + i] = static_cast<uint8_t>((low[32 + i] >> 4 | (high[i] >> 6) << 4) - 32);
        }
    }
}

}  // namespace

struct GgmlBlockType {
    const char* name;
    int64_t block_bytes;
    int64_t code_bytes;
    int64_t num_groups;
    int64_t scale_bytes;   // of one group
    int64_t offset_bytes;  // likewise
    int64_t unit_bytes;    // of a block
    ReadBlock read;
};

const GgmlBlockType* ggml_block_type(const char* name) {
    static constexpr GgmlBlockType types[] = {
        {"Q4_0", 18, 16, 1, 2, 0, 0, &q4_0},   {"Q4_1", 20, 16, 1, 2, 4, 0, &q4_1},   {"Q5_0", 22, 32, 1, 2, 0, 0, &q5_0},
        {"Q5_1", 24, 32, 1, 2, 4, 0, &q5_1},   {"Q8_0", 34, 32, 1, 2, 0, 0, &q8_0},   {"MXFP4", 17, 16, 1, 1, 0, 0, &mxfp4},
        {"Q4_K", 144, 128, 8, 1, 1, 4, &q4_k}, {"Q5_K", 176, 256, 8, 1, 1, 4, &q5_k}, {"Q6_K", 210, 256, 16, 1, 0, 2, &q6_k},
    };
    for (const GgmlBlockType& type : types) {
        if (std::strcmp(type.name, name) == 0) return &type;
    }
    return nullptr;
}

void read_ggml_rows(const GgmlBlockType& type, const GgmlRows& rows, const GgmlParts& parts, ThreadPool& pool) {
    constexpr int64_t rows_at_once = 16;
    const int64_t num_items = divide_up(rows.num_rows, rows_at_once);
    pool.for_each(num_items, [&](int64_t item) {
        const int64_t end = smaller(rows.num_rows, (item + 1) * rows_at_once);
        for (int64_t row = item * rows_at_once; row < end; ++row) {
            const uint8_t* block = rows.blocks + row * rows.row_bytes;
            const int64_t first = row * rows.num_blocks;
            for (int64_t each = first; each < first + rows.num_blocks; ++each, block += type.block_bytes) {
                type.read(block, {parts.codes + each * type.code_bytes,
                                  parts.scales + each * type.num_groups * type.scale_bytes,
                                  parts.offsets + each * type.num_groups * type.offset_bytes,
                                  parts.units + each * type.unit_bytes});
            }
        }
    });
}

}  // namespace antiphon::kernels

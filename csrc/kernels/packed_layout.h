// Where a packed weight lies in memory.
//
// Outputs are cut into panels of 16, each one contiguous stream
//     [step][16 outputs][4 bytes]
// The 4 bytes are two consecutive inner bfloat16 values or one float: 64 bytes are one vector operand, and 16 steps of a
// panel are one AMX tile. Work is shared out in groups of up to 4 panels. Padding is zero.
// Rejected: interleaving a group's panels step by step. It is one stream for up to 6 rows, but more rows then pass over
// memory twice, while here they take 2 panels or 1 at a time and still read every byte once.
//
// Where keys and values of a paged cache lie: both as operands of the same register tile that multiplies weights.
//
// Per (layer, block, head), with P tokens a block and "4 bytes" as above:
//   keys    [P / 16][inner steps of key_dim][16 tokens][4 bytes]     scores = q @ keys:   outputs are tokens
//   values  [value_dim / 16][inner steps of P][16 dims][4 bytes]     out = scores @ values: outputs are dims
// In 8 bits, with a float32 scale for each token's key and value; attention turns a tile of tokens into float32 operands:
//   keys    [P / 16] ([16 scales], [key_dim][16 tokens])             values  [P scales], [value_dim / 16][P][16 dims]
#pragma once

#include "kernels/element.h"

namespace antiphon::kernels {

constexpr int panel_width = 16;
constexpr int panel_bytes = 64;  // one step of one panel
constexpr int group_panels = 4;
constexpr int group_width = panel_width * group_panels;

// How a weight is kept: as floats of the element type, or as codes with scales (antiphon/kernels/quantized.py).
enum class CodeKind : uint8_t { floats, int8, int4, mxfp4, fp8 };
enum class ScaleKind : uint8_t { fp32, bf16, fp16, e8m0, whole };
enum class OffsetKind : uint8_t { none, zeros, offsets };

// A quantized panel is one stream too. Its step is one column:
//     for each group of columns: [16 scales] [16 zero points (int8) or offsets (float)] [the group's codes]
// Scales that are whole numbers (int8, and so are offsets) have units, float16, in front of all groups:
//     for each 256 columns: [16 units of scales] [16 units of offsets, where there are]
// 8-bit codes lie [step][16 outputs], 4-bit codes [8 steps][16 outputs][4 bytes]: even steps in the low half of the 4 bytes,
// odd ones in the high half, the first in the lowest bits, so that one lookup of 16-bit lanes gives two steps of bfloat16.
constexpr int64_t unit_columns = 256;

struct PackedFormat {
    CodeKind codes = CodeKind::floats;
    ScaleKind scales = ScaleKind::fp32;
    OffsetKind offset = OffsetKind::none;
    ElementType type = ElementType::bf16;  // of the rows it is multiplied with; kernels choose it where there are codes
    int64_t group = 0;  // columns of a scale: a multiple of 8 with 4-bit codes; the last group may be shorter

    bool is_quantized() const { return codes != CodeKind::floats; }
    bool has_nibbles() const { return codes == CodeKind::int4 || codes == CodeKind::mxfp4; }
    int64_t steps(int64_t inner) const {
        return has_nibbles() ? round_up(inner, 8) : is_quantized() ? inner : inner_steps(type, inner);
    }
    // Elements of a row as the kernels read it.
    int64_t row_width(int64_t inner) const {
        return has_nibbles() ? round_up(padded_inner(type, inner), 8) : padded_inner(type, inner);
    }
    int64_t step_bytes() const {
        return !is_quantized() ? panel_bytes : has_nibbles() ? panel_width / 2 : panel_width;
    }
    int64_t scale_bytes() const {
        return panel_width * (scales == ScaleKind::fp32 ? 4 : scales == ScaleKind::e8m0 || has_units() ? 1 : 2);
    }
    int64_t offset_bytes() const {
        return panel_width * (offset == OffsetKind::none ? 0 : offset == OffsetKind::zeros || has_units() ? 1 : 4);
    }
    bool has_units() const { return scales == ScaleKind::whole; }
    int64_t units_a_row() const { return !has_units() ? 0 : offset == OffsetKind::none ? 1 : 2; }
    int64_t unit_bytes() const { return panel_width * 2 * units_a_row(); }
    int64_t units_bytes(int64_t inner) const { return divide_up(inner, unit_columns) * unit_bytes(); }
    int64_t group_bytes() const { return scale_bytes() + offset_bytes() + group * step_bytes(); }
    int64_t panel_stride(int64_t inner) const {
        if (!is_quantized()) return steps(inner) * panel_bytes;
        const int64_t headers = divide_up(inner, group) * (scale_bytes() + offset_bytes());
        return round_up(units_bytes(inner) + headers + steps(inner) * step_bytes(), panel_bytes);
    }
    size_t num_bytes(int64_t outputs, int64_t inner) const {
        return static_cast<size_t>(divide_up(outputs, panel_width) * panel_stride(inner));
    }
};

struct PackedMatrix {
    PackedFormat format;
    const char* data = nullptr;
    int64_t outputs = 0;
    int64_t inner = 0;
    int64_t steps = 0;
    int64_t panel_stride = 0;

    int64_t num_panels() const { return divide_up(outputs, panel_width); }
    int64_t num_groups() const { return divide_up(num_panels(), group_panels); }
    int group_size(int64_t group) const {
        return static_cast<int>(smaller(group_panels, num_panels() - group * group_panels));
    }
    const char* group(int64_t index) const { return data + index * group_panels * panel_stride; }
};

inline PackedMatrix packed_matrix(const PackedFormat& format, const char* data, int64_t outputs, int64_t inner) {
    return {format, data, outputs, inner, format.steps(inner), format.panel_stride(inner)};
}

enum class KVStorage : uint8_t { floats, int8, fp8 };

struct KVLayout {
    KVStorage storage;
    ElementType type;  // of operands: fp32 in 8 bits
    char* data;
    int64_t num_layers;
    int64_t num_blocks;
    int64_t block_size;  // multiple of 16
    int64_t num_kv_heads;
    int64_t key_dim;
    int64_t value_dim;

    int64_t key_steps() const { return inner_steps(type, key_dim); }
    // Steps of the 16 tokens of one panel, and of a whole block; not padded: a block is a multiple of 16 tokens.
    int64_t panel_steps() const { return type == ElementType::bf16 ? panel_width / 2 : panel_width; }
    int64_t block_steps() const { return block_size / panel_width * panel_steps(); }
    int64_t value_panels() const { return divide_up(value_dim, panel_width); }
    bool is_quantized() const { return storage != KVStorage::floats; }
    // Bytes of one stored element, and of the scale that a key and a value have in 8 bits.
    int64_t stored_bytes() const { return is_quantized() ? 1 : static_cast<int64_t>(element_bytes(type)); }
    int64_t scale_bytes() const { return is_quantized() ? 4 : 0; }
    // Bytes of the keys of 16 tokens.
    size_t key_panel_bytes() const {
        return static_cast<size_t>(is_quantized() ? panel_width * (4 + key_dim) : key_steps() * panel_bytes);
    }
    size_t key_bytes() const { return static_cast<size_t>(block_size / panel_width) * key_panel_bytes(); }
    size_t value_bytes() const {
        return static_cast<size_t>(is_quantized() ? block_size * (4 + value_panels() * panel_width)
                                                  : value_panels() * block_steps() * panel_bytes);
    }
    size_t head_bytes() const { return key_bytes() + value_bytes(); }
    size_t num_bytes() const {
        return static_cast<size_t>(num_layers * num_blocks * num_kv_heads) * head_bytes();
    }

    char* keys(int64_t layer, int64_t block, int64_t head) const {
        return data + static_cast<size_t>((layer * num_blocks + block) * num_kv_heads + head) * head_bytes();
    }
    char* values(int64_t layer, int64_t block, int64_t head) const { return keys(layer, block, head) + key_bytes(); }
};

}  // namespace antiphon::kernels

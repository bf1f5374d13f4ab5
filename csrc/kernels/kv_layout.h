// Where keys and values of a paged cache lie: both as operands of the same register tile that multiplies weights.
//
// Per (layer, block, head), with P tokens a block and "4 bytes" as in packed_layout.h:
//   keys    [P / 16][inner steps of key_dim][16 tokens][4 bytes]     scores = q @ keys:   outputs are tokens
//   values  [value_dim / 16][inner steps of P][16 dims][4 bytes]     out = scores @ values: outputs are dims
#pragma once

#include "kernels/packed_layout.h"

namespace antiphon::kernels {

struct KVLayout {
    ElementType type;
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
    size_t key_bytes() const {
        return static_cast<size_t>(block_size / panel_width * key_steps() * panel_bytes);
    }
    size_t value_bytes() const { return static_cast<size_t>(value_panels() * block_steps() * panel_bytes); }
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

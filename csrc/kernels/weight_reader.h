// Readers of quantized weights: how 64 bytes of a panel's codes become columns of 16 floats.
//
// A format is one struct here: columns in a word of 64 bytes, and column k of the word as floats without their scale. The
// rest (scales, prefetch, register tiles, many rows) is written once, in quantized_product.h. Every code of every format
// is exact in float32, and a weight is code * scale + offset in one fused operation, so the product is that of a float32
// panel with the same values, bit for bit.
#pragma once

#include "kernels/packed_layout.h"

namespace antiphon::kernels {

struct Int8Reader {
    static constexpr int columns = 4;
    template <class V>
    static constexpr int places = 1;
    template <class V>
    static constexpr float unit(int) {
        return 1.0f;
    }
    template <class V>
    static constexpr float zero = 0.0f;
    static constexpr int position(int k) { return k; }
    static constexpr bool has_table = false;
    template <class V, int k>
    static ANTIPHON_INLINE typename V::F column(const char* word) {
        return V::load_int8(word + k * panel_width);
    }
};

struct Fp8Reader {
    static constexpr int columns = 4;
    template <class V>
    static constexpr int places = 1;
    template <class V>
    static constexpr float unit(int) {
        return 1.0f;
    }
    template <class V>
    static constexpr float zero = 0.0f;
    static constexpr int position(int k) { return k; }
    static constexpr bool has_table = false;
    template <class V, int k>
    static ANTIPHON_INLINE typename V::F column(const char* word) {
        return V::load_e4m3(word + k * panel_width);
    }
};

// Which of its lane's eight nibbles column k of a word is.
constexpr int nibble_position(int k) { return k / 2 + k % 2 * 4; }

// An arch may leave a 4-bit code where it stands in its word, as a number times a power of two that repeats every
// `places` nibbles, and may count from another zero; scale and offset then make up for it, exactly.
struct Int4Reader {
    static constexpr int columns = 8;
    static constexpr int position(int k) { return nibble_position(k); }
    static constexpr bool has_table = true;
    // Codes as bfloat16: what is stored, less 8 where the format has no offset of its own.
    static const uint16_t* table(bool has_offset) {
        alignas(64) static constexpr uint16_t stored[32] = {
            0x0000, 0x3f80, 0x4000, 0x4040, 0x4080, 0x40a0, 0x40c0, 0x40e0,
            0x4100, 0x4110, 0x4120, 0x4130, 0x4140, 0x4150, 0x4160, 0x4170,
            0x0000, 0x3f80, 0x4000, 0x4040, 0x4080, 0x40a0, 0x40c0, 0x40e0,
            0x4100, 0x4110, 0x4120, 0x4130, 0x4140, 0x4150, 0x4160, 0x4170};
        alignas(64) static constexpr uint16_t less_eight[32] = {
            0xc100, 0xc0e0, 0xc0c0, 0xc0a0, 0xc080, 0xc040, 0xc000, 0xbf80,
            0x0000, 0x3f80, 0x4000, 0x4040, 0x4080, 0x40a0, 0x40c0, 0x40e0,
            0xc100, 0xc0e0, 0xc0c0, 0xc0a0, 0xc080, 0xc040, 0xc000, 0xbf80,
            0x0000, 0x3f80, 0x4000, 0x4040, 0x4080, 0x40a0, 0x40c0, 0x40e0};
        return has_offset ? stored : less_eight;
    }
    template <class V>
    static constexpr int places = V::nibble_places;
    template <class V>
    static constexpr float unit(int place) {
        return 1.0f / static_cast<float>(1 << 4 * place);
    }
    template <class V>
    static constexpr float zero = 8.0f;
    template <class V, int k>
    static ANTIPHON_INLINE typename V::F column(const char* word) {
        return V::template load_nibbles<nibble_position(k)>(word);
    }
};

struct Mxfp4Reader {
    static constexpr int columns = 8;
    static constexpr int position(int k) { return nibble_position(k); }
    static constexpr bool has_table = true;
    static const uint16_t* table(bool) {
        alignas(64) static constexpr uint16_t values[32] = {
            0x0000, 0x3f00, 0x3f80, 0x3fc0, 0x4000, 0x4040, 0x4080, 0x40c0,
            0x8000, 0xbf00, 0xbf80, 0xbfc0, 0xc000, 0xc040, 0xc080, 0xc0c0,
            0x0000, 0x3f00, 0x3f80, 0x3fc0, 0x4000, 0x4040, 0x4080, 0x40c0,
            0x8000, 0xbf00, 0xbf80, 0xbfc0, 0xc000, 0xc040, 0xc080, 0xc0c0};
        return values;
    }
    template <class V>
    static constexpr int places = V::e2m1_places;
    template <class V>
    static constexpr float unit(int place) {
        return V::e2m1_unit / static_cast<float>(1 << 8 * (place / 2));
    }
    template <class V>
    static constexpr float zero = V::e2m1_zero;
    template <class V, int k>
    static ANTIPHON_INLINE typename V::F column(const char* word) {
        return V::template load_e2m1<nibble_position(k)>(word);
    }
};

// Of a group's 16 outputs: weight = column * scale[place of the column] + offset.
template <class V, class Reader>
struct GroupScales {
    typename V::F scale[Reader::template places<V>];
    typename V::F offset;
};

template <class V>
ANTIPHON_INLINE typename V::F load_whole(const char* numbers, const char* units) {
    return V::mul(V::load_int8(numbers), V::load_fp16(units));
}

// Of a group with this header and, where scales are whole numbers, these units.
template <class V>
ANTIPHON_INLINE typename V::F load_scales(ScaleKind kind, const char* header, const char* units) {
    switch (kind) {
        case ScaleKind::bf16: return V::load(reinterpret_cast<const uint16_t*>(header));
        case ScaleKind::fp16: return V::load_fp16(header);
        case ScaleKind::e8m0: return V::load_e8m0(header);
        case ScaleKind::whole: return load_whole<V>(header, units);
        default: return V::load(reinterpret_cast<const float*>(header));
    }
}

// What the codes are multiplied with is `scale`; this is added to each product.
template <class V>
ANTIPHON_INLINE typename V::F load_offsets(const PackedFormat& format, const char* header, const char* units,
                                           typename V::F scale) {
    const char* offsets = header + format.scale_bytes();
    if (format.offset == OffsetKind::zeros) return V::mul(V::sub(V::zero(), scale), V::load_int8(offsets));
    if (format.has_units()) return load_whole<V>(offsets, units + 2 * panel_width);
    return V::load(reinterpret_cast<const float*>(offsets));
}

template <class V, class Reader>
ANTIPHON_INLINE GroupScales<V, Reader> load_group(const PackedFormat& format, const char* header, const char* units) {
    GroupScales<V, Reader> group;
    const auto scale = load_scales<V>(format.scales, header, units);
    for (int place = 0; place < Reader::template places<V>; ++place) {
        group.scale[place] = V::mul(scale, V::set1(Reader::template unit<V>(place)));
    }
    if (format.offset != OffsetKind::none) {
        group.offset = load_offsets<V>(format, header, units, scale);
    } else {
        group.offset = V::mul(group.scale[0], V::set1(-Reader::template zero<V>));
    }
    return group;
}

}  // namespace antiphon::kernels

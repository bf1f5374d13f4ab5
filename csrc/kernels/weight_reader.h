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
    template <class V, int k>
    static ANTIPHON_INLINE typename V::F column(const char* word) {
        return V::load_e4m3(word + k * panel_width);
    }
};

// An arch may leave a 4-bit code where it stands in its word, as a number times a power of two that repeats every
// `places` columns, and may count from another zero; scale and offset then make up for it, exactly.
struct Int4Reader {
    static constexpr int columns = 8;
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
        return V::template load_nibbles<k>(word);
    }
};

struct Mxfp4Reader {
    static constexpr int columns = 8;
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
        return V::template load_e2m1<k>(word);
    }
};

// Of a group's 16 outputs: weight = column * scale[place of the column] + offset.
template <class V, class Reader>
struct GroupScales {
    typename V::F scale[Reader::template places<V>];
    typename V::F offset;
};

template <class V>
ANTIPHON_INLINE typename V::F load_scales(ScaleKind kind, const char* header) {
    switch (kind) {
        case ScaleKind::bf16: return V::load(reinterpret_cast<const uint16_t*>(header));
        case ScaleKind::fp16: return V::load_fp16(header);
        case ScaleKind::e8m0: return V::load_e8m0(header);
        default: return V::load(reinterpret_cast<const float*>(header));
    }
}

template <class V, class Reader>
ANTIPHON_INLINE GroupScales<V, Reader> load_group(const PackedFormat& format, const char* header) {
    GroupScales<V, Reader> group;
    const auto scale = load_scales<V>(format.scales, header);
    const char* offsets = header + format.scale_bytes();
    for (int place = 0; place < Reader::template places<V>; ++place) {
        group.scale[place] = V::mul(scale, V::set1(Reader::template unit<V>(place)));
    }
    if (format.offset == OffsetKind::offsets) {
        group.offset = V::load(reinterpret_cast<const float*>(offsets));
    } else if (format.offset == OffsetKind::zeros) {
        group.offset = V::mul(V::sub(V::zero(), scale), V::load_int8(offsets));
    } else {
        group.offset = V::mul(group.scale[0], V::set1(-Reader::template zero<V>));
    }
    return group;
}

}  // namespace antiphon::kernels

#include "kernels/operations.h"

#include <cstring>

namespace antiphon::kernels {

namespace {

constexpr int64_t steps_at_a_time = 32;  // of one panel: what is scattered to stays in the first-level cache
constexpr int64_t columns_at_a_time = 128;  // of codes, likewise; a multiple of 8

// Steps [first, end) of one output row into its 4-byte lane; beyond the row's `row_bytes` zero.
void pack_lane(const char* row, int64_t row_bytes, int64_t first, int64_t end, char* lane) {
    const int64_t whole_end = smaller(end, row_bytes / 4);
    int64_t step = first;
    for (; step < whole_end; ++step) std::memcpy(lane + step * panel_bytes, row + 4 * step, 4);
    for (; step < end; ++step) {
        uint32_t last = 0;
        if (4 * step < row_bytes) std::memcpy(&last, row + 4 * step, static_cast<size_t>(row_bytes - 4 * step));
        std::memcpy(lane + step * panel_bytes, &last, 4);
    }
}

// Floats of panel `panel`. Missing outputs become zero.
void pack_floats(const PackedFormat& format, const SourceMatrix& source, int64_t inner, int64_t panel, char* to) {
    const int64_t row_bytes = inner * static_cast<int64_t>(element_bytes(format.type));
    const int64_t steps = format.steps(inner);
    const int64_t outputs = smaller(panel_width, source.rows - panel * panel_width);
    for (int64_t first = 0; first < steps; first += steps_at_a_time) {
        const int64_t end = smaller(steps, first + steps_at_a_time);
        for (int64_t n = 0; n < panel_width; ++n) {
            const char* row = source.data + (panel * panel_width + n) * source.row_bytes;
            pack_lane(row, n < outputs ? row_bytes : 0, first, end, to + 4 * n);
        }
    }
}

// One value of each output of the panel, or zero.
void pack_lanes(const char* column, int64_t stride, int64_t outputs, int64_t value_bytes, char* to) {
    for (int64_t n = 0; n < outputs; ++n) {
        std::memcpy(to + n * value_bytes, column + n * stride * value_bytes, static_cast<size_t>(value_bytes));
    }
}

// Eight 4-bit codes in every word, the first in the lowest bits: even ones into the low half, odd ones into the high half.
Words apart(Words codes) {
    Words even = codes & 0x0f0f0f0fu;
    Words odd = codes >> 4 & 0x0f0f0f0fu;
    even = (even | even >> 4) & 0x00ff00ffu;
    odd = (odd | odd >> 4) & 0x00ff00ffu;
    even = (even | even >> 8) & 0x0000ffffu;
    odd = (odd | odd >> 8) & 0x0000ffffu;
    return even | odd << 16;
}

// Up to 4 words of codes (8 columns each) from `column` on, of outputs that lie `row_bytes` apart: to[word][output].
void pack_nibbles(const char* rows, int64_t row_bytes, int64_t outputs, int64_t inner, int64_t column, int64_t end,
                  char* to) {
    const int64_t num_words = smaller(4, divide_up(end - column, 8));
    const auto count = static_cast<size_t>(smaller(4 * num_words, divide_up(inner - column, 2)));
    for (int64_t n = 0; n < outputs; n += 4) {
        Words words[4] = {};
        for (int64_t i = 0; i < smaller(4, outputs - n); ++i) {
            const char* row = rows + (n + i) * row_bytes + column / 2;
            if (count == sizeof(Words)) {
                std::memcpy(&words[i], row, sizeof(Words));
            } else {
                std::memcpy(&words[i], row, count);
            }
            words[i] = apart(words[i]);
        }
        transpose_words(words);
        for (int64_t word = 0; word < num_words; ++word) {
            std::memcpy(to + word * panel_bytes + 4 * n, &words[word], sizeof(Words));
        }
    }
}

using Bytes = uint8_t __attribute__((vector_size(panel_width)));

Bytes low_interleaved(Bytes a, Bytes b) {
    return __builtin_shuffle(a, b, Bytes{0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23});
}

Bytes high_interleaved(Bytes a, Bytes b) {
    return __builtin_shuffle(a, b, Bytes{8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31});
}

// 16 columns of 16 outputs, transposed: interleaving rows n and n + 8 four times takes each byte to its place.
void pack_square(const char* rows, int64_t row_bytes, char* to) {
    Bytes square[panel_width];
    Bytes mixed[panel_width];
    for (int n = 0; n < panel_width; ++n) std::memcpy(&square[n], rows + n * row_bytes, sizeof(Bytes));
    for (int stage = 0; stage < 4; ++stage) {
        for (int n = 0; n < panel_width / 2; ++n) {
            mixed[2 * n] = low_interleaved(square[n], square[n + panel_width / 2]);
            mixed[2 * n + 1] = high_interleaved(square[n], square[n + panel_width / 2]);
        }
        std::memcpy(square, mixed, sizeof(square));
    }
    std::memcpy(to, square, sizeof(square));
}

// 8-bit codes of columns [first, end) of `outputs` outputs.
void pack_bytes(const char* rows, int64_t row_bytes, int64_t outputs, int64_t first, int64_t end, char* to) {
    int64_t column = first;
    for (; outputs == panel_width && column + panel_width <= end; column += panel_width, to += panel_width * panel_width) {
        pack_square(rows + column, row_bytes, to);
    }
    for (; column < end; ++column, to += panel_width) {
        for (int64_t n = 0; n < outputs; ++n) to[n] = rows[n * row_bytes + column];
    }
}

// Units, scales and codes of panel `panel`, into memory that is zero.
void pack_quantized(const PackedFormat& format, const SourceMatrix& source, int64_t inner, int64_t panel, char* to) {
    const int64_t first_output = panel * panel_width;
    const int64_t outputs = smaller(panel_width, source.rows - first_output);
    const int64_t scale_size = format.scale_bytes() / panel_width;
    const int64_t offset_size = format.offset_bytes() / panel_width;
    const int64_t num_units = divide_up(inner, unit_columns) * format.units_a_row();
    for (int64_t unit = 0; unit < num_units; ++unit, to += 2 * panel_width) {
        pack_lanes(source.units + 2 * (first_output * num_units + unit), num_units, outputs, 2, to);
    }
    for (int64_t group = 0; group * format.group < inner; ++group, to += format.group_bytes()) {
        const int64_t value = first_output * source.scale_stride + group;
        pack_lanes(source.scales + value * scale_size, source.scale_stride, outputs, scale_size, to);
        char* offsets = to + format.scale_bytes();
        if (offset_size > 0) {
            pack_lanes(source.offsets + value * offset_size, source.scale_stride, outputs, offset_size, offsets);
        }
        const int64_t first = group * format.group;
        const int64_t end = smaller(inner, first + format.group);
        char* codes = offsets + format.offset_bytes();
        for (int64_t column = first; column < end; column += columns_at_a_time) {
            const int64_t until = smaller(end, column + columns_at_a_time);
            const char* rows = source.data + first_output * source.row_bytes;
            char* part = codes + (column - first) * format.step_bytes();
            if (!format.has_nibbles()) {
                pack_bytes(rows, source.row_bytes, outputs, column, until, part);
                continue;
            }
            for (int64_t word = column; word < until; word += 32, part += 4 * panel_bytes) {
                pack_nibbles(rows, source.row_bytes, outputs, inner, word, until, part);
            }
        }
    }
}

void pack_panel(const PackedFormat& format, const SourceMatrix& source, int64_t inner, int64_t panel, char* to) {
    if (format.is_quantized()) {
        std::memset(to, 0, static_cast<size_t>(format.panel_stride(inner)));
        if (panel * panel_width < source.rows) pack_quantized(format, source, inner, panel, to);
    } else {
        pack_floats(format, source, inner, panel, to);
    }
}

}  // namespace

void pack_matrix(const PackedFormat& format, const SourceMatrix& source, int64_t inner, char* packed,
                 ThreadPool& pool) {
    const PackedMatrix matrix = packed_matrix(format, packed, source.rows, inner);
    pool.for_each(matrix.num_panels(), [&](int64_t panel) {
        pack_panel(format, source, inner, panel, packed + panel * matrix.panel_stride);
    });
}

void pack_expert(const ExpertWeights& experts, int64_t index, const SourceMatrix& gate, const SourceMatrix& up,
                 const SourceMatrix& down, ThreadPool& pool) {
    const PackedMatrix gate_up = experts.gate_up(index);
    char* to = const_cast<char*>(gate_up.data);
    const int64_t stride = gate_up.panel_stride;
    pool.for_each(gate_up.num_panels() / 2, [&](int64_t panel) {
        const int64_t group = panel / 2;
        char* gate_to = to + (group * group_panels + panel % 2) * stride;
        pack_panel(gate_up.format, gate, experts.hidden, panel, gate_to);
        pack_panel(gate_up.format, up, experts.hidden, panel, gate_to + gate_up.group_size(group) / 2 * stride);
    });
    const PackedMatrix whole = experts.down(index);
    pack_matrix(whole.format, down, experts.intermediate, const_cast<char*>(whole.data), pool);
}

void pack_gate_up_bias(const ExpertWeights& experts, const float* gate, const float* up, float* packed) {
    const PackedMatrix gate_up = experts.gate_up(0);
    for (int64_t i = 0; i < experts.intermediate; ++i) {
        const int64_t panel = i / panel_width;
        const int64_t group = panel / 2;
        float* to = packed + group * group_width + panel % 2 * panel_width + i % panel_width;
        to[0] = gate[i];
        to[gate_up.group_size(group) / 2 * panel_width] = up[i];
    }
}

}  // namespace antiphon::kernels

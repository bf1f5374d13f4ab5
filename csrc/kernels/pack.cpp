#include "kernels/operations.h"

#include <cstring>

namespace antiphon::kernels {

namespace {

constexpr int64_t steps_at_a_time = 32;  // of one panel: what is scattered to stays in the first-level cache

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

// Panel `panel` of `source`. Missing outputs become zero.
void pack_panel(ElementType type, const Rows& source, int64_t inner, int64_t panel, char* to) {
    const int64_t row_bytes = inner * static_cast<int64_t>(element_bytes(type));
    const int64_t steps = inner_steps(type, inner);
    const int64_t outputs = smaller(panel_width, source.count - panel * panel_width);
    for (int64_t first = 0; first < steps; first += steps_at_a_time) {
        const int64_t end = smaller(steps, first + steps_at_a_time);
        for (int64_t n = 0; n < panel_width; ++n) {
            const int64_t output = panel * panel_width + n;
            const char* row = static_cast<const char*>(source.data) +
                              static_cast<size_t>(output * source.stride) * element_bytes(type);
            pack_lane(row, n < outputs ? row_bytes : 0, first, end, to + 4 * n);
        }
    }
}

}  // namespace

void pack_matrix(ElementType type, const Rows& source, int64_t inner, char* packed, ThreadPool& pool) {
    const PackedMatrix matrix = packed_matrix(type, packed, source.count, inner);
    pool.for_each(matrix.num_panels(), [&](int64_t panel) {
        pack_panel(type, source, inner, panel, packed + panel * matrix.panel_stride());
    });
}

void pack_expert(const ExpertWeights& experts, int64_t index, const Rows& gate, const Rows& up, const Rows& down,
                 ThreadPool& pool) {
    const PackedMatrix gate_up = experts.gate_up(index);
    char* to = const_cast<char*>(gate_up.data);
    const int64_t stride = gate_up.panel_stride();
    pool.for_each(gate_up.num_panels() / 2, [&](int64_t panel) {
        const int64_t group = panel / 2;
        char* gate_to = to + (group * group_panels + panel % 2) * stride;
        pack_panel(experts.type, gate, experts.hidden, panel, gate_to);
        pack_panel(experts.type, up, experts.hidden, panel, gate_to + gate_up.group_size(group) / 2 * stride);
    });
    pack_matrix(experts.type, down, experts.intermediate, const_cast<char*>(experts.down(index).data), pool);
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

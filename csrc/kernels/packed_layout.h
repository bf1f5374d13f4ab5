// Where a packed weight lies in memory.
//
// Outputs are cut into panels of 16, panels into groups of up to 4. A group is one contiguous stream
//     [step][panel in group][16 outputs][4 bytes]
// so that few rows read memory front to back, 256 bytes a step. The 4 bytes are two consecutive inner bfloat16 values
// or one float: 64 bytes are one vector operand, and 16 steps of one panel are one AMX tile (row stride 256 bytes).
// The last group of a matrix holds only the panels that exist. Padding is zero.
#pragma once

#include "kernels/element.h"

namespace antiphon::kernels {

constexpr int panel_width = 16;
constexpr int panel_bytes = 64;  // one step of one panel
constexpr int group_panels = 4;
constexpr int group_width = panel_width * group_panels;

struct PackedMatrix {
    const char* data = nullptr;
    int64_t outputs = 0;
    int64_t inner = 0;
    int64_t steps = 0;

    int64_t num_panels() const { return divide_up(outputs, panel_width); }
    int64_t num_groups() const { return divide_up(num_panels(), group_panels); }
    int group_size(int64_t group) const {
        return static_cast<int>(smaller(group_panels, num_panels() - group * group_panels));
    }
    const char* group(int64_t index) const { return data + index * group_panels * steps * panel_bytes; }
};

inline PackedMatrix packed_matrix(ElementType type, const char* data, int64_t outputs, int64_t inner) {
    return {data, outputs, inner, inner_steps(type, inner)};
}

inline size_t packed_bytes(ElementType type, int64_t outputs, int64_t inner) {
    return static_cast<size_t>(divide_up(outputs, panel_width) * inner_steps(type, inner) * panel_bytes);
}

}  // namespace antiphon::kernels

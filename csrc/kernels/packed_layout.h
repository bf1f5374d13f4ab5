// Where a packed weight lies in memory.
//
// Outputs are cut into panels of 16, each one contiguous stream
//     [step][16 outputs][4 bytes]
// The 4 bytes are two consecutive inner bfloat16 values or one float: 64 bytes are one vector operand, and 16 steps of a
// panel are one AMX tile. Work is shared out in groups of up to 4 panels. Padding is zero.
// Rejected: interleaving a group's panels step by step. It is one stream for up to 6 rows, but more rows then pass over
// memory twice, while here they take 2 panels or 1 at a time and still read every byte once.
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
    const char* group(int64_t index) const { return data + index * group_panels * panel_stride(); }
    int64_t panel_stride() const { return steps * panel_bytes; }
};

inline PackedMatrix packed_matrix(ElementType type, const char* data, int64_t outputs, int64_t inner) {
    return {data, outputs, inner, inner_steps(type, inner)};
}

inline size_t packed_bytes(ElementType type, int64_t outputs, int64_t inner) {
    return static_cast<size_t>(divide_up(outputs, panel_width) * inner_steps(type, inner) * panel_bytes);
}

}  // namespace antiphon::kernels

// The sum of some arrays, in float32, in their order, rounded once.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "m2n/row_types.h"

namespace antiphon::m2n {

// out[i] = addends[0][i] + addends[1][i] + ... for `count` elements; every one of `copies` gets the same. `out` may be
// one of the addends.
void sum_rows(RowType type, std::span<const std::byte* const> addends, uint64_t count, std::byte* out,
              std::span<std::byte* const> copies);

}  // namespace antiphon::m2n

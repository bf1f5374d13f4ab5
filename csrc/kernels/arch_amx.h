// Matrix products of bfloat16 in AMX tiles; everything else as the vector arch beneath.
#pragma once

#include "kernels/tile_ops.h"

namespace antiphon::kernels {

template <class VectorArch, class TileOps>
struct Amx : VectorArch {
    static constexpr bool has_tiles = true;
    using Vector = VectorArch;
    using Tiles = TileOps;
};

}  // namespace antiphon::kernels

// Every kernel for one instruction set. CMake compiles this file once for each, with the compiler's options for it, and
// names the set in ANTIPHON_VARIANT_*.
#include "kernels/isa.h"
#include "kernels/kernel_table.h"
#include "kernels/tile_ops.h"

#if defined(ANTIPHON_VARIANT_plain) || defined(ANTIPHON_VARIANT_amx_emulated)
#include "kernels/arch_plain.h"
#elif defined(ANTIPHON_VARIANT_avx2)
#include "kernels/arch_avx2.h"
#else
#include "kernels/arch_avx512.h"
#endif

namespace antiphon::kernels {

#if defined(ANTIPHON_VARIANT_plain)
using ChosenArch = Plain;
#elif defined(ANTIPHON_VARIANT_amx_emulated)
using ChosenArch = Amx<Plain, EmulatedTiles>;
#elif defined(ANTIPHON_VARIANT_avx2)
using ChosenArch = Avx2;
#elif defined(ANTIPHON_VARIANT_avx512)
using ChosenArch = Avx512;
#elif defined(ANTIPHON_VARIANT_avx512_bf16)
using ChosenArch = Avx512Bf16;
#elif defined(ANTIPHON_VARIANT_amx)
using ChosenArch = Amx<Avx512Bf16, HardwareTiles>;
#endif

const KernelTable* ANTIPHON_VARIANT_TABLE() {
    static constexpr KernelTable table = kernel_table<ChosenArch>(ANTIPHON_VARIANT_NAME);
    return &table;
}

}  // namespace antiphon::kernels

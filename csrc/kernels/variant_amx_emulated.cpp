#include "kernels/arch_amx.h"
#include "kernels/arch_plain.h"
#include "kernels/kernel_table.h"
#include "kernels/variants.h"

namespace antiphon::kernels {

const KernelTable* amx_emulated_kernels() {
    static constexpr KernelTable table = kernel_table<Amx<Plain, EmulatedTiles>>("amx_emulated");
    return &table;
}

}  // namespace antiphon::kernels

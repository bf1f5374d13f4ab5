#include "kernels/variants.h"

#if defined(__AVX512BF16__) && defined(__AMX_TILE__) && defined(__AMX_BF16__)
#include "kernels/arch_amx.h"
#include "kernels/arch_avx512_bf16.h"
#include "kernels/kernel_table.h"

namespace antiphon::kernels {

const KernelTable* amx_kernels() {
    static constexpr KernelTable table = kernel_table<Amx<Avx512Bf16, HardwareTiles>>("amx");
    return &table;
}

}  // namespace antiphon::kernels
#else
namespace antiphon::kernels {

const KernelTable* amx_kernels() { return nullptr; }

}  // namespace antiphon::kernels
#endif

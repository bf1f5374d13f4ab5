#include "kernels/variants.h"

#if defined(__AVX512BF16__)
#include "kernels/arch_avx512_bf16.h"
#include "kernels/kernel_table.h"

namespace antiphon::kernels {

const KernelTable* avx512_bf16_kernels() {
    static constexpr KernelTable table = kernel_table<Avx512Bf16>("avx512_bf16");
    return &table;
}

}  // namespace antiphon::kernels
#else
namespace antiphon::kernels {

const KernelTable* avx512_bf16_kernels() { return nullptr; }

}  // namespace antiphon::kernels
#endif

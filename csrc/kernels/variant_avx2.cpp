#include "kernels/variants.h"

#if defined(__AVX2__) && defined(__FMA__)
#include "kernels/arch_avx2.h"
#include "kernels/kernel_table.h"

namespace antiphon::kernels {

const KernelTable* avx2_kernels() {
    static constexpr KernelTable table = kernel_table<Avx2>("avx2");
    return &table;
}

}  // namespace antiphon::kernels
#else
namespace antiphon::kernels {

const KernelTable* avx2_kernels() { return nullptr; }

}  // namespace antiphon::kernels
#endif

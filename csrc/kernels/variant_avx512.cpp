#include "kernels/variants.h"

#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512VL__) && defined(__AVX512DQ__)
#include "kernels/arch_avx512.h"
#include "kernels/kernel_table.h"

namespace antiphon::kernels {

const KernelTable* avx512_kernels() {
    static constexpr KernelTable table = kernel_table<Avx512>("avx512");
    return &table;
}

}  // namespace antiphon::kernels
#else
namespace antiphon::kernels {

const KernelTable* avx512_kernels() { return nullptr; }

}  // namespace antiphon::kernels
#endif

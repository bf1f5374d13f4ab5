#include "kernels/arch_plain.h"
#include "kernels/kernel_table.h"
#include "kernels/variants.h"

namespace antiphon::kernels {

const KernelTable* plain_kernels() {
    static constexpr KernelTable table = kernel_table<Plain>("plain");
    return &table;
}

}  // namespace antiphon::kernels

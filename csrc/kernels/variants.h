// The compiled variants. One that this build's target cannot have is null.
#pragma once

#include "kernels/operations.h"

namespace antiphon::kernels {

const KernelTable* plain_kernels();
const KernelTable* avx2_kernels();
const KernelTable* avx512_kernels();
const KernelTable* avx512_bf16_kernels();
const KernelTable* amx_kernels();
const KernelTable* amx_emulated_kernels();  // AMX indexing with software tiles: for tests

}  // namespace antiphon::kernels

// Which compiled variant this machine runs, chosen once: the environment's ANTIPHON_ISA, else the best it can.
#pragma once

#include <string>
#include <vector>

#include "kernels/operations.h"

namespace antiphon::kernels {

// Names of the variants this machine can run, best first; "amx_emulated" last.
std::vector<std::string> available_isas();

// The kernels in use. Throws std::invalid_argument if ANTIPHON_ISA names what is not available.
const KernelTable& kernels();

// For tests: packed data stays valid, its layout is the same for all. Not while a kernel runs.
void set_isa(const std::string& name);

// The compiled variants (variant.cpp); but for plain and amx_emulated, only where the target is x86-64.
const KernelTable* plain_kernels();
const KernelTable* avx2_kernels();
const KernelTable* avx512_kernels();
const KernelTable* avx512_bf16_kernels();
const KernelTable* amx_kernels();
const KernelTable* amx_emulated_kernels();  // AMX indexing with software tiles: for tests

}  // namespace antiphon::kernels

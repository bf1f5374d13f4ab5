// Fills a KernelTable with one arch's instances of every kernel. Included by the variant files only.
#pragma once

#include "kernels/argmax.h"
#include "kernels/attention.h"
#include "kernels/draw.h"
#include "kernels/gate.h"
#include "kernels/grouped_ffn.h"
#include "kernels/linear.h"
#include "kernels/rms_norm.h"
#include "kernels/rotate_store.h"

namespace antiphon::kernels {

template <class Arch, class E>
constexpr ElementKernels element_kernels() {
    return {&linear<Arch, E>,           &rms_norm<Arch, E>,        &grouped_ffn<Arch, E>,
            &rotate_and_store<Arch, E>, &paged_attention<Arch, E>, &gate<Arch, E>};
}

template <class Arch>
constexpr KernelTable kernel_table(const char* name) {
    return {name, element_kernels<Arch, Bf16>(), element_kernels<Arch, Fp32>(), &argmax<Arch>, &choose<Arch>};
}

}  // namespace antiphon::kernels

// Every kernel for training for one instruction set, compiled once for each as variant.cpp is. Apart from that file, so
// that a change of either leaves the other, which takes minutes, as it is.
#include "kernels/training_activation.h"
#include "kernels/training_adamw.h"
#include "kernels/training_attention.h"
#include "kernels/training_cross_entropy.h"
#include "kernels/training_norm.h"
#include "kernels/training_product.h"
#include "kernels/training_rows.h"
#include "kernels/training_turn.h"

#if defined(ANTIPHON_VARIANT_plain)
#include "kernels/arch_plain.h"
#elif defined(ANTIPHON_VARIANT_avx2)
#include "kernels/arch_avx2.h"
#else
#include "kernels/arch_avx512.h"
#endif

namespace antiphon::kernels {

#if defined(ANTIPHON_VARIANT_plain)
using TrainingArch = Plain;
#elif defined(ANTIPHON_VARIANT_avx2)
using TrainingArch = Avx2;
#elif defined(ANTIPHON_VARIANT_avx512)
using TrainingArch = Avx512;
#else
using TrainingArch = Avx512Bf16;
#endif

template <class Arch, class E>
constexpr TrainingKernels training_kernels() {
    return {&norm<Arch, E>,     &norm_gradient<Arch, E>, &turn<Arch, E>,             &turn_gradient<Arch, E>,
            &activate<Arch, E>, &cross_entropy<Arch, E>, &combine_gradient<Arch, E>, &sum_rows<Arch, E>,
            &causal_attention<Arch, E>, &causal_gradient<Arch, E>, &products<Arch, E>};
}

const TrainingTable* ANTIPHON_TRAINING_TABLE() {
    static constexpr TrainingTable table = {training_kernels<TrainingArch, Bf16>(),
                                            training_kernels<TrainingArch, Fp32>(), &adamw<TrainingArch>};
    return &table;
}

}  // namespace antiphon::kernels

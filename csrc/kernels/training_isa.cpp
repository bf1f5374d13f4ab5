#include <string_view>

#include "kernels/isa.h"
#include "kernels/training_calls.h"

namespace antiphon::kernels {

const TrainingTable& training_table() {
    [[maybe_unused]] const std::string_view name = kernels().name;
#if defined(__x86_64__)
    if (name == "avx2") return *avx2_training();
    if (name == "avx512") return *avx512_training();
    if (name == "avx512_bf16" || name == "amx") return *avx512_bf16_training();
#endif
    return *plain_training();
}

}  // namespace antiphon::kernels

#include "kernels/isa.h"

#include <atomic>
#include <cstdlib>
#include <stdexcept>
#include <string_view>

#include "kernels/training_calls.h"

#if defined(__linux__) && defined(__x86_64__)
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace antiphon::kernels {

namespace {

#if defined(__x86_64__)
bool has_avx2() { return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma"); }
bool has_avx512() {
    return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
}
bool has_avx512_bf16() { return has_avx512() && __builtin_cpu_supports("avx512bf16"); }

// AMX must be announced by the processor (leaf 7: EDX bits 22 and 24) and its state permitted by the kernel.
bool has_amx() {
#if defined(__linux__)
    unsigned eax = 0, ebx = 0, ecx = 0, edx = 0;
    if (!has_avx512_bf16() || !__get_cpuid_count(7, 0, &eax, &ebx, &ecx, &edx)) return false;
    const bool announced = (edx >> 22 & 1u) != 0 && (edx >> 24 & 1u) != 0;
    constexpr long arch_req_xcomp_perm = 0x1023;
    constexpr long xfeature_xtiledata = 18;
    return announced && syscall(SYS_arch_prctl, arch_req_xcomp_perm, xfeature_xtiledata) == 0;
#else
    return false;
#endif
}
#endif

std::vector<const KernelTable*> available() {
    std::vector<const KernelTable*> tables;
#if defined(__x86_64__)
    if (has_amx()) tables.push_back(amx_kernels());
    if (has_avx512_bf16()) tables.push_back(avx512_bf16_kernels());
    if (has_avx512()) tables.push_back(avx512_kernels());
    if (has_avx2()) tables.push_back(avx2_kernels());
#endif
    tables.push_back(plain_kernels());
    tables.push_back(amx_emulated_kernels());
    return tables;
}

const KernelTable* find(const std::string& name) {
    std::string known;
    for (const KernelTable* table : available()) {
        if (name == table->name) return table;
        known += known.empty() ? "" : ", ";
        known += table->name;
    }
    throw std::invalid_argument("instruction set \"" + name + "\" is not available here; choose one of: " + known);
}

const KernelTable* choose() {
    const char* wanted = std::getenv("ANTIPHON_ISA");
    return wanted != nullptr && *wanted != '\0' ? find(wanted) : available().front();
}

std::atomic<const KernelTable*> chosen{nullptr};

}  // namespace

std::vector<std::string> available_isas() {
    std::vector<std::string> names;
    for (const KernelTable* table : available()) names.emplace_back(table->name);
    return names;
}

const KernelTable& kernels() {
    const KernelTable* table = chosen.load(std::memory_order_acquire);
    if (table == nullptr) {
        table = choose();
        chosen.store(table, std::memory_order_release);
    }
    return *table;
}

const TrainingTable& training_table() {
    [[maybe_unused]] const std::string_view name = kernels().name;
#if defined(__x86_64__)
    if (name == "avx2") return *avx2_training();
    if (name == "avx512") return *avx512_training();
    if (name == "avx512_bf16" || name == "amx") return *avx512_bf16_training();
#endif
    return *plain_training();
}

void set_isa(const std::string& name) { chosen.store(find(name), std::memory_order_release); }

}  // namespace antiphon::kernels

// Glue between Python and the native kernels: raw addresses arrive as integers, the GIL is released around the work.
#pragma once

#include <nanobind/nanobind.h>

#include <cstdint>

#include "kernels/operations.h"

namespace antiphon::bind {

template <class T = void>
T* pointer(uintptr_t address) {
    return reinterpret_cast<T*>(address);
}

inline kernels::ElementType element_type(bool is_bf16) {
    return is_bf16 ? kernels::ElementType::bf16 : kernels::ElementType::fp32;
}

inline kernels::Rows rows(uintptr_t address, int64_t count, int64_t stride) {
    return {pointer<const void>(address), count, stride};
}

void bind_wait_word(nanobind::module_& module);
void bind_runtime(nanobind::module_& module);
void bind_linear(nanobind::module_& module);  // PackedLinear and the gate that uses it
void bind_experts(nanobind::module_& module);
void bind_kv_cache(nanobind::module_& module);
void bind_rows(nanobind::module_& module);  // norms and argmax

}  // namespace antiphon::bind

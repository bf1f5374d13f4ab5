// Glue between Python and the native kernels: raw addresses arrive as integers, the GIL is released around the work.
#pragma once

#include <nanobind/nanobind.h>

#include <cstdint>
#include <stdexcept>
#include <string>

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

// Python hands a matrix over without the number of its rows.
inline kernels::SourceMatrix with_rows(kernels::SourceMatrix source, int64_t num_rows) {
    source.rows = num_rows;
    return source;
}

inline kernels::Activation activation_named(const std::string& name) {
    if (name == "silu") return kernels::Activation::silu;
    if (name == "gelu") return kernels::Activation::gelu;
    if (name == "swiglu_oai") return kernels::Activation::swiglu_oai;
    throw std::invalid_argument("activation '" + name +
                                "' is not known to the cpu back-end: use silu, gelu or swiglu_oai");
}

void bind_formats(nanobind::module_& module);
void bind_linear(nanobind::module_& module);  // PackedLinear and the gate that uses it
void bind_experts(nanobind::module_& module);
void bind_kv_cache(nanobind::module_& module);
void bind_rows(nanobind::module_& module);  // norms, sums and argmax
void bind_calls(nanobind::module_& module);
void bind_training(nanobind::module_& module);  // row operators with their gradients

}  // namespace antiphon::bind

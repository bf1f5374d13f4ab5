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

// A matrix to be packed, as Python hands it over.
struct SourceAddresses {
    const char* data;
    int64_t row_bytes;
    const char* scales;
    const char* offsets;
    int64_t scale_stride;

    SourceAddresses(uintptr_t data_address, int64_t bytes, uintptr_t scales_address, uintptr_t offsets_address,
                    int64_t stride)
        : data(pointer<const char>(data_address)), row_bytes(bytes), scales(pointer<const char>(scales_address)),
          offsets(pointer<const char>(offsets_address)), scale_stride(stride) {}

    kernels::SourceMatrix matrix(int64_t num_rows) const {
        return {data, num_rows, row_bytes, scales, offsets, scale_stride};
    }
};

void bind_formats(nanobind::module_& module);
void bind_linear(nanobind::module_& module);  // PackedLinear and the gate that uses it
void bind_experts(nanobind::module_& module);
void bind_kv_cache(nanobind::module_& module);
void bind_rows(nanobind::module_& module);  // norms, sums and argmax
void bind_calls(nanobind::module_& module);
void bind_training(nanobind::module_& module);  // row operators with their gradients

}  // namespace antiphon::bind

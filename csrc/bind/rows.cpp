#include "bind/bind.h"
#include "kernels/isa.h"

namespace nb = nanobind;

namespace antiphon::bind {

namespace {

using kernels::RmsNormCall;
using kernels::ThreadPool;

void rms_norm(bool is_bf16, uintptr_t x, int64_t num_rows, int64_t stride, int64_t width, uintptr_t weight, float eps,
              uintptr_t out) {
    const nb::gil_scoped_release released;
    const RmsNormCall call{rows(x, num_rows, stride), {},    pointer<const void>(weight), nullptr,
                           pointer<void>(out),        width, eps};
    kernels::kernels().of(element_type(is_bf16)).rms_norm(call, ThreadPool::instance());
}

// x, delta, sum and out are contiguous.
void add_rms_norm(bool is_bf16, uintptr_t x, uintptr_t delta, int64_t num_rows, int64_t width, uintptr_t weight,
                  float eps, uintptr_t sum, uintptr_t out) {
    const nb::gil_scoped_release released;
    const RmsNormCall call{rows(x, num_rows, width), rows(delta, num_rows, width), pointer<const void>(weight),
                           pointer<void>(sum),       pointer<void>(out),           width,
                           eps};
    kernels::kernels().of(element_type(is_bf16)).rms_norm(call, ThreadPool::instance());
}

void argmax_rows(uintptr_t logits, int64_t num_rows, int64_t width, int64_t stride, uintptr_t ids) {
    const nb::gil_scoped_release released;
    kernels::kernels().argmax({pointer<const float>(logits), num_rows, width, stride, pointer<int64_t>(ids)},
                              ThreadPool::instance());
}

}  // namespace

void bind_rows(nb::module_& module) {
    module.def("rms_norm", &rms_norm, nb::arg("is_bf16"), nb::arg("x_address"), nb::arg("num_rows"), nb::arg("stride"),
               nb::arg("width"), nb::arg("weight_address"), nb::arg("eps"), nb::arg("out_address"));
    module.def("add_rms_norm", &add_rms_norm, nb::arg("is_bf16"), nb::arg("x_address"), nb::arg("delta_address"),
               nb::arg("num_rows"), nb::arg("width"), nb::arg("weight_address"), nb::arg("eps"),
               nb::arg("sum_address"), nb::arg("out_address"));
    module.def("argmax_rows", &argmax_rows, nb::arg("logits_address"), nb::arg("num_rows"), nb::arg("width"),
               nb::arg("stride"), nb::arg("ids_address"));
}

}  // namespace antiphon::bind

#include "base/huge_buffer.h"
#include "bind/bind.h"
#include "kernels/isa.h"
#include "kernels/pack.h"

namespace nb = nanobind;

namespace antiphon::bind {

namespace {

using kernels::ThreadPool;

class PackedExperts {
  public:
    PackedExperts(bool is_bf16, int64_t num_experts, int64_t hidden, int64_t intermediate, bool gelu)
        : weights_{element_type(is_bf16), gelu ? kernels::Activation::gelu : kernels::Activation::silu,
                   num_experts, hidden, intermediate, nullptr},
          buffer_(weights_.num_bytes()) {
        weights_.data = buffer_.data();
    }

    size_t num_bytes() const { return buffer_.size(); }

    // gate and up are [intermediate][hidden], down is [hidden][intermediate], all of the element type.
    void set_expert(int64_t index, uintptr_t gate, int64_t gate_stride, uintptr_t up, int64_t up_stride, uintptr_t down,
                    int64_t down_stride) {
        const nb::gil_scoped_release released;
        kernels::pack_expert(weights_, index, rows(gate, weights_.intermediate, gate_stride),
                             rows(up, weights_.intermediate, up_stride), rows(down, weights_.hidden, down_stride),
                             ThreadPool::instance());
    }

    void grouped_ffn(uintptr_t x, int64_t num_rows, int64_t x_stride, uintptr_t ids, uintptr_t weights, int64_t top_k,
                     uintptr_t out) const {
        const nb::gil_scoped_release released;
        const kernels::GroupedFfnCall call{weights_,
                                           rows(x, num_rows, x_stride),
                                           pointer<const int32_t>(ids),
                                           pointer<const float>(weights),
                                           top_k,
                                           pointer<void>(out)};
        kernels::kernels().of(weights_.type).grouped_ffn(call, ThreadPool::instance());
    }

  private:
    kernels::ExpertWeights weights_;
    HugeBuffer buffer_;
};

}  // namespace

void bind_experts(nb::module_& module) {
    nb::class_<PackedExperts>(module, "PackedExperts")
        .def(nb::init<bool, int64_t, int64_t, int64_t, bool>(), nb::arg("is_bf16"), nb::arg("num_experts"),
             nb::arg("hidden"), nb::arg("intermediate"), nb::arg("gelu"))
        .def_prop_ro("num_bytes", &PackedExperts::num_bytes)
        .def("set_expert", &PackedExperts::set_expert, nb::arg("index"), nb::arg("gate_address"),
             nb::arg("gate_stride"), nb::arg("up_address"), nb::arg("up_stride"), nb::arg("down_address"),
             nb::arg("down_stride"))
        .def("grouped_ffn", &PackedExperts::grouped_ffn, nb::arg("x_address"), nb::arg("num_rows"),
             nb::arg("x_stride"), nb::arg("ids_address"), nb::arg("weights_address"), nb::arg("top_k"),
             nb::arg("out_address"));
}

}  // namespace antiphon::bind

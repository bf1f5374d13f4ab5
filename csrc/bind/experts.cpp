#include "base/huge_buffer.h"
#include "bind/bind.h"
#include "kernels/calls.h"
#include "kernels/operations.h"

#include <nanobind/stl/string.h>

#include <algorithm>
#include <stdexcept>
#include <string>
#include <vector>

namespace nb = nanobind;

namespace antiphon::bind {

namespace {

using kernels::SourceMatrix;
using kernels::ThreadPool;

class PackedExperts {
  public:
    PackedExperts(bool is_bf16, const kernels::PackedFormat& gate_up, const kernels::PackedFormat& down,
                  int64_t num_experts, int64_t hidden, int64_t intermediate,
                  const std::string& activation, float alpha, float limit, bool has_bias, bool ordered)
        : weights_{.type = element_type(is_bf16),
                   .gate_up_format = gate_up,
                   .down_format = down,
                   .activation = activation_named(activation),
                   .alpha = alpha,
                   .limit = limit,
                   .num_experts = num_experts,
                   .hidden = hidden,
                   .intermediate = intermediate,
                   .data = nullptr,
                   .bias = nullptr,
                   .order = nullptr},
          buffer_(weights_.num_bytes()),
          bias_(has_bias ? static_cast<size_t>(num_experts * weights_.bias_width()) : 0),
          order_(ordered ? static_cast<size_t>(num_experts * hidden) : 0) {
        weights_.data = buffer_.data();
        if (has_bias) weights_.bias = bias_.data();
        if (ordered) weights_.order = order_.data();
    }
    // weights_ points into bias_ and order_.
    PackedExperts(const PackedExperts&) = delete;
    PackedExperts& operator=(const PackedExperts&) = delete;

    size_t num_bytes() const {
        return buffer_.size() + bias_.size() * sizeof(float) + order_.size() * sizeof(int32_t);
    }

    // gate and up are [intermediate][hidden], down is [hidden][intermediate], in the formats of these experts.
    void set_expert(int64_t index, const SourceMatrix& gate, const SourceMatrix& up, const SourceMatrix& down) {
        const nb::gil_scoped_release released;
        kernels::pack_expert(weights_, index, with_rows(gate, weights_.intermediate),
                             with_rows(up, weights_.intermediate), with_rows(down, weights_.hidden),
                             ThreadPool::instance());
    }

    // gate and up are float32 [intermediate], down is float32 [hidden].
    void set_bias(int64_t index, uintptr_t gate, uintptr_t up, uintptr_t down) {
        if (bias_.empty()) throw std::invalid_argument("these experts were made without room for biases");
        float* to = bias_.data() + index * weights_.bias_width();
        kernels::pack_gate_up_bias(weights_, pointer<const float>(gate), pointer<const float>(up), to);
        std::copy_n(pointer<const float>(down), weights_.hidden, to + weights_.gate_up_bias_width());
    }

    // int32 [hidden]: which element of a row each column of the expert's gate and up is multiplied with.
    void set_order(int64_t index, uintptr_t order) {
        if (order_.empty()) throw std::invalid_argument("these experts were made without an order of columns");
        const auto* from = pointer<const int32_t>(order);
        if (std::any_of(from, from + weights_.hidden, [&](int32_t i) { return i < 0 || i >= weights_.hidden; })) {
            throw std::invalid_argument("an order of columns names one that is not there");
        }
        std::copy_n(from, weights_.hidden, order_.data() + index * weights_.hidden);
    }

    void grouped_ffn(uintptr_t x, int64_t num_rows, int64_t x_stride, uintptr_t ids, uintptr_t weights, int64_t top_k,
                     uintptr_t out) const {
        const nb::gil_scoped_release released;
        if (!kernels::is_noting()) check_ids(pointer<const int32_t>(ids), num_rows, top_k);
        const kernels::GroupedFfnCall call{weights_,
                                           rows(x, num_rows, x_stride),
                                           pointer<const int32_t>(ids),
                                           pointer<const float>(weights),
                                           top_k,
                                           pointer<void>(out)};
        kernels::perform(weights_.type, call);
    }

  private:
    void check_ids(const int32_t* ids, int64_t num_rows, int64_t top_k) const {
        for (int64_t i = 0; i < num_rows * top_k; ++i) {
            if (ids[i] >= -1 && ids[i] < weights_.num_experts) continue;
            throw std::invalid_argument("row " + std::to_string(i / top_k) + " chose expert " + std::to_string(ids[i]) +
                                        " of " + std::to_string(weights_.num_experts) + "; -1 is one that is not here");
        }
    }

    kernels::ExpertWeights weights_;
    HugeBuffer buffer_;
    std::vector<float> bias_;
    std::vector<int32_t> order_;
};

}  // namespace

void bind_experts(nb::module_& module) {
    nb::class_<PackedExperts>(module, "PackedExperts")
        .def(nb::init<bool, const kernels::PackedFormat&, const kernels::PackedFormat&, int64_t, int64_t, int64_t,
                      const std::string&, float, float, bool, bool>(),
             nb::arg("is_bf16"), nb::arg("gate_up"), nb::arg("down"), nb::arg("num_experts"), nb::arg("hidden"),
             nb::arg("intermediate"), nb::arg("activation"), nb::arg("alpha"), nb::arg("limit"), nb::arg("has_bias"),
             nb::arg("ordered") = false)
        .def_prop_ro("num_bytes", &PackedExperts::num_bytes)
        .def("set_expert", &PackedExperts::set_expert, nb::arg("index"), nb::arg("gate"), nb::arg("up"),
             nb::arg("down"))
        .def("set_bias", &PackedExperts::set_bias, nb::arg("index"), nb::arg("gate_address"), nb::arg("up_address"),
             nb::arg("down_address"))
        .def("set_order", &PackedExperts::set_order, nb::arg("index"), nb::arg("order_address"))
        .def("grouped_ffn", &PackedExperts::grouped_ffn, nb::arg("x_address"), nb::arg("num_rows"),
             nb::arg("x_stride"), nb::arg("ids_address"), nb::arg("weights_address"), nb::arg("top_k"),
             nb::arg("out_address"));
}

}  // namespace antiphon::bind

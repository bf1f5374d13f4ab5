#include "bind/bind.h"

#include <cstring>
#include <stdexcept>
#include <string>
#include <vector>

#include "base/huge_buffer.h"
#include "kernels/calls.h"
#include "kernels/operations.h"

namespace nb = nanobind;

namespace antiphon::bind {

namespace {

using kernels::ElementType;
using kernels::LinearCall;
using kernels::ThreadPool;

class PackedLinear {
  public:
    // `weight` is [outputs][inner] in `format`, `bias` float32 [outputs] or null; both are copied. Rows in and out are
    // bfloat16 or float32.
    PackedLinear(bool is_bf16, const kernels::PackedFormat& format, int64_t outputs, int64_t inner,
                 const kernels::SourceMatrix& weight, uintptr_t bias)
        : type_(element_type(is_bf16)), buffer_(format.num_bytes(outputs, inner)),
          weight_(kernels::packed_matrix(format, buffer_.data(), outputs, inner)) {
        const nb::gil_scoped_release released;
        kernels::pack_matrix(format, with_rows(weight, outputs), inner, buffer_.data(), ThreadPool::instance());
        if (bias != 0) bias_.assign(pointer<const float>(bias), pointer<const float>(bias) + outputs);
    }

    size_t num_bytes() const { return buffer_.size() + bias_.size() * sizeof(float); }

    void linear(uintptr_t x, int64_t num_rows, int64_t x_stride, uintptr_t residual, int64_t residual_stride,
                uintptr_t out, bool out_fp32) const {
        const nb::gil_scoped_release released;
        LinearCall call = product(x, num_rows, x_stride);
        call.residual = rows(residual, num_rows, residual_stride);
        call.out = pointer<void>(out);
        call.out_fp32 = out_fp32;
        kernels::perform(type_, call);
    }

    // Rows of a weight that is kept as floats, as they were before it was packed: `ids` int64 [num_rows], out
    // [num_rows][inner] of its element type.
    void take_rows(uintptr_t ids, int64_t num_rows, uintptr_t out) const {
        const nb::gil_scoped_release released;
        const auto* wanted = pointer<const int64_t>(ids);
        constexpr int64_t step_bytes = kernels::panel_bytes / kernels::panel_width;  // of one row
        const int64_t row_bytes = weight_.inner * static_cast<int64_t>(kernels::element_bytes(type_));
        ThreadPool::instance().for_each(num_rows, [&](int64_t i) {
            const int64_t id = wanted[i];
            const char* from = weight_.data + id / kernels::panel_width * weight_.panel_stride +
                               id % kernels::panel_width * step_bytes;
            char* to = pointer<char>(out) + i * row_bytes;
            int64_t left = row_bytes;
            for (; left >= step_bytes; left -= step_bytes, from += kernels::panel_bytes) {
                std::memcpy(to, from, step_bytes);
                to += step_bytes;
            }
            std::memcpy(to, from, static_cast<size_t>(left));
        });
    }

    // Product without residual and output.
    LinearCall product(uintptr_t x, int64_t num_rows, int64_t x_stride) const {
        return {weight_, bias_.empty() ? nullptr : bias_.data(), rows(x, num_rows, x_stride), {}, nullptr, false};
    }

    ElementType type() const { return type_; }

  private:
    ElementType type_;
    HugeBuffer buffer_;
    kernels::PackedMatrix weight_;
    std::vector<float> bias_;
};

// What a router does after its logits; see RouterSpec in antiphon/specs/model.py.
struct GateOptions {
    bool sigmoid = false;
    int64_t top_k = 1;
    int64_t num_groups = 1;
    int64_t top_k_groups = 1;
    bool group_score_top2 = false;
    bool normalize = true;
    bool softmax_after_top_k = false;
    float scaling = 1.0f;
};

void gate(const PackedLinear& weight, const GateOptions& options, uintptr_t x, int64_t num_rows, int64_t x_stride,
          uintptr_t score_bias, uintptr_t ids, uintptr_t weights) {
    const nb::gil_scoped_release released;
    const kernels::GateCall call{
        .logits = weight.product(x, num_rows, x_stride),
        .scoring = options.sigmoid ? kernels::Scoring::sigmoid : kernels::Scoring::softmax,
        .score_bias = pointer<const float>(score_bias),
        .top_k = options.top_k,
        .num_groups = options.num_groups,
        .top_k_groups = options.top_k_groups,
        .group_score_top2 = options.group_score_top2,
        .normalize = options.normalize,
        .softmax_after_top_k = options.softmax_after_top_k,
        .scaling = options.scaling,
        .ids = pointer<int32_t>(ids),
        .weights = pointer<float>(weights),
    };
    kernels::perform(weight.type(), call);
}

}  // namespace

void bind_linear(nb::module_& module) {
    nb::class_<PackedLinear>(module, "PackedLinear")
        .def(nb::init<bool, const kernels::PackedFormat&, int64_t, int64_t, const kernels::SourceMatrix&, uintptr_t>(),
             nb::arg("is_bf16"), nb::arg("format"), nb::arg("outputs"), nb::arg("inner"), nb::arg("weight"),
             nb::arg("bias_address"))
        .def_prop_ro("num_bytes", &PackedLinear::num_bytes)
        .def("linear", &PackedLinear::linear, nb::arg("x_address"), nb::arg("num_rows"), nb::arg("x_stride"),
             nb::arg("residual_address"), nb::arg("residual_stride"), nb::arg("out_address"), nb::arg("out_fp32"))
        .def("take_rows", &PackedLinear::take_rows, nb::arg("ids_address"), nb::arg("num_rows"),
             nb::arg("out_address"));
    nb::class_<GateOptions>(module, "GateOptions")
        .def(nb::init<>())
        .def_rw("sigmoid", &GateOptions::sigmoid)
        .def_rw("top_k", &GateOptions::top_k)
        .def_rw("num_groups", &GateOptions::num_groups)
        .def_rw("top_k_groups", &GateOptions::top_k_groups)
        .def_rw("group_score_top2", &GateOptions::group_score_top2)
        .def_rw("normalize", &GateOptions::normalize)
        .def_rw("softmax_after_top_k", &GateOptions::softmax_after_top_k)
        .def_rw("scaling", &GateOptions::scaling);
    module.def("gate", &gate, nb::arg("weight"), nb::arg("options"), nb::arg("x_address"), nb::arg("num_rows"),
               nb::arg("x_stride"), nb::arg("score_bias_address"), nb::arg("ids_address"), nb::arg("weights_address"));
}

namespace {

using kernels::RmsNormCall;

// x and out may be the same.
void rms_norm(bool is_bf16, uintptr_t x, int64_t num_rows, int64_t stride, int64_t width, uintptr_t weight, float eps,
              uintptr_t out, int64_t out_stride) {
    const nb::gil_scoped_release released;
    const RmsNormCall call{rows(x, num_rows, stride), {},    pointer<const void>(weight), nullptr,
                           pointer<void>(out),        width, eps,                         out_stride};
    kernels::perform(element_type(is_bf16), call);
}

// x, delta, sum and out are contiguous; out 0: only the sum is wanted.
void add_rms_norm(bool is_bf16, uintptr_t x, uintptr_t delta, int64_t num_rows, int64_t width, uintptr_t weight,
                  float eps, uintptr_t sum, uintptr_t out) {
    const nb::gil_scoped_release released;
    const RmsNormCall call{rows(x, num_rows, width), rows(delta, num_rows, width), pointer<const void>(weight),
                           pointer<void>(sum),       pointer<void>(out),           width,
                           eps,                      width};
    kernels::perform(element_type(is_bf16), call);
}

void argmax_rows(uintptr_t logits, int64_t num_rows, int64_t width, int64_t stride, uintptr_t ids) {
    const nb::gil_scoped_release released;
    kernels::perform(ElementType::fp32, kernels::ArgmaxCall{pointer<const float>(logits), num_rows, width, stride,
                                                            pointer<int64_t>(ids)});
}

nb::list choose_rows(uintptr_t logits, int64_t num_rows, int64_t width, int64_t stride, const nb::bytes& choices) {
    if (choices.size() != static_cast<size_t>(num_rows) * sizeof(kernels::RowChoice)) {
        throw std::invalid_argument("choices must be " + std::to_string(sizeof(kernels::RowChoice)) + " bytes a row");
    }
    std::vector<int64_t> ids(static_cast<size_t>(num_rows));
    const auto* rows = static_cast<const kernels::RowChoice*>(choices.data());
    {
        const nb::gil_scoped_release released;
        kernels::perform(ElementType::fp32, kernels::ChooseCall{pointer<const float>(logits), num_rows, width, stride,
                                                                rows, ids.data()});
    }
    nb::list chosen;
    for (const int64_t id : ids) chosen.append(id);
    return chosen;
}

}  // namespace

void bind_rows(nb::module_& module) {
    module.def("rms_norm", &rms_norm, nb::arg("is_bf16"), nb::arg("x_address"), nb::arg("num_rows"), nb::arg("stride"),
               nb::arg("width"), nb::arg("weight_address"), nb::arg("eps"), nb::arg("out_address"),
               nb::arg("out_stride"));
    module.def("add_rms_norm", &add_rms_norm, nb::arg("is_bf16"), nb::arg("x_address"), nb::arg("delta_address"),
               nb::arg("num_rows"), nb::arg("width"), nb::arg("weight_address"), nb::arg("eps"),
               nb::arg("sum_address"), nb::arg("out_address"));
    module.def("argmax_rows", &argmax_rows, nb::arg("logits_address"), nb::arg("num_rows"), nb::arg("width"),
               nb::arg("stride"), nb::arg("ids_address"));
    module.def("choose_rows", &choose_rows, nb::arg("logits_address"), nb::arg("num_rows"), nb::arg("width"),
               nb::arg("stride"), nb::arg("choices"));
}

}  // namespace antiphon::bind

#include "bind/bind.h"

#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <cmath>
#include <stdexcept>
#include <string>

#include "kernels/training_calls.h"

namespace nb = nanobind;

namespace antiphon::bind {

namespace {

using kernels::GridRows;
using kernels::ThreadPool;

const kernels::TrainingKernels& training(bool is_bf16) {
    return kernels::training_table().of(element_type(is_bf16));
}

void norm(bool is_bf16, const GridRows& x, int64_t width, uintptr_t weight, float eps, uintptr_t out,
          uintptr_t factors) {
    const nb::gil_scoped_release released;
    training(is_bf16).norm({x, pointer<const void>(weight), pointer<void>(out), pointer<float>(factors), width, eps},
                           ThreadPool::instance());
}

void norm_gradient(bool is_bf16, const GridRows& x, const GridRows& grad, int64_t width, uintptr_t weight,
                   uintptr_t factors, uintptr_t grad_x, uintptr_t grad_weight) {
    const nb::gil_scoped_release released;
    training(is_bf16).norm_gradient({x, grad, pointer<const void>(weight), pointer<const float>(factors),
                                     pointer<void>(grad_x), pointer<float>(grad_weight), width},
                                    ThreadPool::instance());
}

void turn(bool is_bf16, const GridRows& x, int64_t width, const kernels::Angles& angles, uintptr_t weight, float eps,
          uintptr_t factors, uintptr_t out) {
    const nb::gil_scoped_release released;
    training(is_bf16).turn(
        {x, angles, pointer<const void>(weight), eps, pointer<float>(factors), pointer<void>(out), width},
        ThreadPool::instance());
}

void turn_gradient(bool is_bf16, const GridRows& grad, int64_t width, const kernels::Angles& angles, const GridRows& x,
                   uintptr_t weight, uintptr_t factors, const GridRows& out, uintptr_t grad_weight) {
    const nb::gil_scoped_release released;
    training(is_bf16).turn_gradient({grad, angles, x, pointer<const void>(weight), pointer<const float>(factors), out,
                                     pointer<float>(grad_weight), width},
                                    ThreadPool::instance());
}

void activate(bool is_bf16, uintptr_t x, int64_t x_stride, uintptr_t grad, int64_t grad_stride, int64_t num_rows,
              int64_t width, const std::string& activation, float alpha, float limit, uintptr_t out) {
    const nb::gil_scoped_release released;
    training(is_bf16).activate({rows(x, num_rows, x_stride), rows(grad, num_rows, grad_stride), pointer<void>(out),
                                activation_named(activation), width, alpha, limit},
                               ThreadPool::instance());
}

void cross_entropy(bool is_bf16, uintptr_t logits, int64_t num_rows, int64_t width, uintptr_t bias, uintptr_t targets,
                   float divisor, uintptr_t losses) {
    const nb::gil_scoped_release released;
    training(is_bf16).cross_entropy({pointer<void>(logits), num_rows, width, pointer<const float>(bias),
                                     pointer<const int64_t>(targets), divisor, pointer<float>(losses)},
                                    ThreadPool::instance());
}

void combine_gradient(bool is_bf16, uintptr_t grad, int64_t grad_stride, uintptr_t y, uintptr_t weights,
                      uintptr_t order, int64_t num_rows, int64_t top_k, int64_t width, uintptr_t grad_y,
                      uintptr_t grad_weights) {
    const nb::gil_scoped_release released;
    training(is_bf16).combine_gradient({rows(grad, num_rows, grad_stride), pointer<const void>(y),
                                        pointer<const void>(weights), pointer<const int64_t>(order), num_rows, top_k,
                                        width, pointer<void>(grad_y), pointer<void>(grad_weights)},
                                       ThreadPool::instance());
}

void sum_rows(bool is_bf16, uintptr_t x, int64_t x_stride, uintptr_t places, uintptr_t weights, int64_t num_tokens,
              int64_t top_k, int64_t width, uintptr_t out) {
    const nb::gil_scoped_release released;
    training(is_bf16).sum_rows({rows(x, num_tokens, x_stride), pointer<const int64_t>(places),
                                pointer<const void>(weights), num_tokens, top_k, width, pointer<void>(out)},
                               ThreadPool::instance());
}

kernels::CausalCall causal_call(const GridRows& q, const GridRows& k, const GridRows& v, uintptr_t first_keys,
                                float scale, int64_t key_dim, int64_t value_dim, uintptr_t out, uintptr_t lse) {
    return {q, k, v, pointer<const int64_t>(first_keys), scale, key_dim, value_dim, pointer<void>(out),
            pointer<float>(lse)};
}

void causal_attention(bool is_bf16, const GridRows& q, const GridRows& k, const GridRows& v, uintptr_t first_keys,
                      float scale, int64_t key_dim, int64_t value_dim, uintptr_t out, uintptr_t lse) {
    const nb::gil_scoped_release released;
    training(is_bf16).causal_attention(causal_call(q, k, v, first_keys, scale, key_dim, value_dim, out, lse),
                                       ThreadPool::instance());
}

void causal_gradient(bool is_bf16, const GridRows& q, const GridRows& k, const GridRows& v, uintptr_t first_keys,
                     float scale, int64_t key_dim, int64_t value_dim, uintptr_t out, uintptr_t lse,
                     const GridRows& grad, uintptr_t grad_q, uintptr_t grad_k, uintptr_t grad_v) {
    const nb::gil_scoped_release released;
    training(is_bf16).causal_gradient({causal_call(q, k, v, first_keys, scale, key_dim, value_dim, out, lse), grad,
                                       pointer<void>(grad_q), pointer<void>(grad_k), pointer<void>(grad_v)},
                                      ThreadPool::instance());
}

void product(bool is_bf16, uintptr_t a, int64_t a_row, int64_t a_step, uintptr_t b, int64_t b_step, int64_t b_column,
             uintptr_t out, int64_t out_row, int64_t num_rows, int64_t inner, int64_t columns, bool adds,
             bool out_fp32) {
    const nb::gil_scoped_release released;
    training(is_bf16).products({{pointer<const void>(a), a_row, a_step, pointer<const void>(b), b_step, b_column,
                                 pointer<void>(out), out_row, num_rows, inner, columns, adds, out_fp32}},
                               ThreadPool::instance());
}

// What the matrices of experts [experts][outputs][inputs] are multiplied with, or what becomes of them.
enum class GroupedProduct { forward, input_gradient, weight_gradient };

// `x` [rows][inputs] and `y` [rows][outputs] are rows in order of expert; one of the three is made.
void grouped_product(bool is_bf16, GroupedProduct kind, uintptr_t x, uintptr_t y, uintptr_t weight,
                     const std::vector<int64_t>& counts, int64_t inputs, int64_t outputs) {
    const nb::gil_scoped_release released;
    std::vector<kernels::ProductCall> calls;
    const auto size = static_cast<int64_t>(kernels::element_bytes(element_type(is_bf16)));
    char* x_rows = pointer<char>(x);
    char* y_rows = pointer<char>(y);
    char* matrix = pointer<char>(weight);
    for (const int64_t rows : counts) {
        if (kind == GroupedProduct::weight_gradient) {
            calls.push_back({y_rows, 1, outputs, x_rows, inputs, 1, matrix, inputs, outputs, rows, inputs, false,
                             false});
        } else if (rows > 0 && kind == GroupedProduct::forward) {
            calls.push_back({x_rows, inputs, 1, matrix, 1, inputs, y_rows, outputs, rows, inputs, outputs, false,
                             false});
        } else if (rows > 0) {
            calls.push_back({y_rows, outputs, 1, matrix, inputs, 1, x_rows, inputs, rows, outputs, inputs, false,
                             false});
        }
        x_rows += rows * inputs * size;
        y_rows += rows * outputs * size;
        matrix += inputs * outputs * size;
    }
    training(is_bf16).products(calls, ThreadPool::instance());
}

void adamw(uintptr_t values, uintptr_t grad, uintptr_t mean, uintptr_t square, int64_t count, int64_t step, float scale,
           double rate, double beta1, double beta2, double eps, double weight_decay) {
    const nb::gil_scoped_release released;
    const auto steps = static_cast<double>(step);
    kernels::training_table().adamw({.values = pointer<float>(values),
                              .grad = pointer<const float>(grad),
                              .mean = pointer<float>(mean),
                              .square = pointer<float>(square),
                              .count = count,
                              .scale = scale,
                              .kept = static_cast<float>(1.0 - rate * weight_decay),
                              .mean_share = static_cast<float>(1.0 - beta1),
                              .square_kept = static_cast<float>(beta2),
                              .square_share = static_cast<float>(1.0 - beta2),
                              .square_root = static_cast<float>(std::sqrt(1.0 - std::pow(beta2, steps))),
                              .size = static_cast<float>(rate / (1.0 - std::pow(beta1, steps))),
                              .eps = static_cast<float>(eps)},
                             ThreadPool::instance());
}

}  // namespace

void bind_training(nb::module_& module) {
    nb::class_<GridRows>(module, "GridRows")
        .def(
            "__init__",
            [](GridRows* self, uintptr_t address, int64_t first, int64_t second, int64_t third, int64_t first_stride,
               int64_t second_stride, int64_t third_stride) {
                new (self) GridRows{pointer<const void>(address),
                                    {first, second, third},
                                    {first_stride, second_stride, third_stride}};
            },
            nb::arg("address"), nb::arg("first"), nb::arg("second"), nb::arg("third"), nb::arg("first_stride"),
            nb::arg("second_stride"), nb::arg("third_stride"));
    module.def("training_norm", &norm, nb::arg("is_bf16"), nb::arg("x"), nb::arg("width"), nb::arg("weight_address"),
               nb::arg("eps"), nb::arg("out_address"), nb::arg("factors_address"));
    module.def("training_norm_gradient", &norm_gradient, nb::arg("is_bf16"), nb::arg("x"), nb::arg("grad"),
               nb::arg("width"), nb::arg("weight_address"), nb::arg("factors_address"), nb::arg("grad_x_address"),
               nb::arg("grad_weight_address"));
    nb::class_<kernels::Angles>(module, "Angles")
        .def(
            "__init__",
            [](kernels::Angles* self, uintptr_t cos, uintptr_t sin, int64_t first_stride, int64_t second_stride,
               int64_t half, bool interleaved) {
                new (self) kernels::Angles{
                    pointer<const float>(cos), pointer<const float>(sin), {first_stride, second_stride, 0}, half,
                    interleaved};
            },
            nb::arg("cos_address"), nb::arg("sin_address"), nb::arg("first_stride"), nb::arg("second_stride"),
            nb::arg("half"), nb::arg("interleaved"));
    module.def("training_turn", &turn, nb::arg("is_bf16"), nb::arg("x"), nb::arg("width"), nb::arg("angles"),
               nb::arg("weight_address"), nb::arg("eps"), nb::arg("factors_address"), nb::arg("out_address"));
    module.def("training_turn_gradient", &turn_gradient, nb::arg("is_bf16"), nb::arg("grad"), nb::arg("width"),
               nb::arg("angles"), nb::arg("x"), nb::arg("weight_address"), nb::arg("factors_address"), nb::arg("out"),
               nb::arg("grad_weight_address"));
    module.def("training_activate", &activate, nb::arg("is_bf16"), nb::arg("x_address"), nb::arg("x_stride"),
               nb::arg("grad_address"), nb::arg("grad_stride"), nb::arg("num_rows"), nb::arg("width"),
               nb::arg("activation"), nb::arg("alpha"), nb::arg("limit"), nb::arg("out_address"));
    module.def("training_cross_entropy", &cross_entropy, nb::arg("is_bf16"), nb::arg("logits_address"),
               nb::arg("num_rows"), nb::arg("width"), nb::arg("bias_address"), nb::arg("targets_address"),
               nb::arg("divisor"), nb::arg("losses_address"));
    module.def("training_combine_gradient", &combine_gradient, nb::arg("is_bf16"), nb::arg("grad_address"),
               nb::arg("grad_stride"), nb::arg("y_address"), nb::arg("weights_address"), nb::arg("order_address"),
               nb::arg("num_rows"), nb::arg("top_k"), nb::arg("width"), nb::arg("grad_y_address"),
               nb::arg("grad_weights_address"));
    module.def("causal_attention", &causal_attention, nb::arg("is_bf16"), nb::arg("q"), nb::arg("k"), nb::arg("v"),
               nb::arg("first_keys_address"), nb::arg("scale"), nb::arg("key_dim"), nb::arg("value_dim"),
               nb::arg("out_address"), nb::arg("lse_address"));
    module.def("causal_gradient", &causal_gradient, nb::arg("is_bf16"), nb::arg("q"), nb::arg("k"), nb::arg("v"),
               nb::arg("first_keys_address"), nb::arg("scale"), nb::arg("key_dim"), nb::arg("value_dim"),
               nb::arg("out_address"), nb::arg("lse_address"), nb::arg("grad"), nb::arg("grad_q_address"),
               nb::arg("grad_k_address"), nb::arg("grad_v_address"));
    nb::enum_<GroupedProduct>(module, "GroupedProduct")
        .value("FORWARD", GroupedProduct::forward)
        .value("INPUT_GRADIENT", GroupedProduct::input_gradient)
        .value("WEIGHT_GRADIENT", GroupedProduct::weight_gradient);
    module.def("product", &product, nb::arg("is_bf16"), nb::arg("a_address"), nb::arg("a_row"), nb::arg("a_step"),
               nb::arg("b_address"), nb::arg("b_step"), nb::arg("b_column"), nb::arg("out_address"), nb::arg("out_row"),
               nb::arg("num_rows"), nb::arg("inner"), nb::arg("columns"), nb::arg("adds"), nb::arg("out_fp32"));
    module.def("grouped_product", &grouped_product, nb::arg("is_bf16"), nb::arg("kind"), nb::arg("x_address"),
               nb::arg("y_address"), nb::arg("weight_address"), nb::arg("counts"), nb::arg("inputs"),
               nb::arg("outputs"));
    module.def("adamw", &adamw, nb::arg("values_address"), nb::arg("grad_address"), nb::arg("mean_address"),
               nb::arg("square_address"), nb::arg("count"), nb::arg("step"), nb::arg("scale"), nb::arg("rate"),
               nb::arg("beta1"), nb::arg("beta2"), nb::arg("eps"), nb::arg("weight_decay"));
    module.def("training_sum_rows", &sum_rows, nb::arg("is_bf16"), nb::arg("x_address"), nb::arg("x_stride"),
               nb::arg("places_address"), nb::arg("weights_address"), nb::arg("num_tokens"), nb::arg("top_k"),
               nb::arg("width"), nb::arg("out_address"));
}

}  // namespace antiphon::bind

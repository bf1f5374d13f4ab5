// What the kernels of training's row operators are called with, and the table of them for one instruction set and type.
#pragma once

#include <vector>

#include "kernels/rows.h"
#include "kernels/thread_pool.h"
#include "kernels/vector_math.h"

namespace antiphon::kernels {

// Rows numbered over three axes, the last one fastest: a tensor [sizes..., width] whose rows may lie anywhere.
struct GridRows {
    const void* data = nullptr;
    int64_t sizes[3] = {1, 1, 1};
    int64_t strides[3] = {0, 0, 0};  // elements

    int64_t count() const { return sizes[0] * sizes[1] * sizes[2]; }
};

// The place of one row in a grid.
class GridPlace {
  public:
    GridPlace(const GridRows& grid, int64_t row)
        : at_{row / (grid.sizes[1] * grid.sizes[2]), row / grid.sizes[2] % grid.sizes[1], row % grid.sizes[2]} {}

    // Elements from the first row of a grid with these strides.
    int64_t offset(const int64_t* strides) const {
        return at_[0] * strides[0] + at_[1] * strides[1] + at_[2] * strides[2];
    }

    template <class E>
    const typename E::Storage* in(const GridRows& rows) const {
        return static_cast<const typename E::Storage*>(rows.data) + offset(rows.strides);
    }

  private:
    int64_t at_[3];
};

// Results of all calls lie side by side, row after row.
struct NormCall {
    GridRows x;
    const void* weight;  // [width]
    void* out;
    float* factors;  // [rows], 1 / sqrt(mean(x^2) + eps)
    int64_t width;
    float eps;
};

struct NormGradientCall {
    GridRows x;
    GridRows grad;       // as many rows as x
    const void* weight;  // [width]
    const float* factors;
    void* grad_x;
    float* grad_weight;  // [width]
    int64_t width;
};

// Cosines and sines are [..., half] over the first two axes of a grid of heads, with these elements from row to row.
struct Angles {
    const float* cos;
    const float* sin;
    int64_t strides[3];  // the last one is 0
    int64_t half;
    bool interleaved;
};

// Rows [width] are normed, if there is a norm, and turned.
struct TurnCall {
    GridRows x;
    Angles angles;
    const void* weight;  // of the norm, [width], or null
    float eps;
    float* factors;  // [rows], of the norm
    void* out;
    int64_t width;
};

struct TurnGradientCall {
    GridRows grad;  // as many rows as x
    Angles angles;
    GridRows x;          // with a norm: what was normed
    const void* weight;  // [width] or null
    const float* factors;
    GridRows out;        // where the gradients of x go
    float* grad_weight;  // [width], with a norm
    int64_t width;
};

// Rows of x are [gate | up], each of `width`; see FeedForwardSpec for the formulas.
struct ActivationCall {
    Rows x;
    Rows grad;  // [rows][width]; data null: forward
    void* out;  // [rows][width], of gradients [rows][2 width]
    Activation activation;
    int64_t width;
    float alpha;
    float limit;
};

// In the place of logits come the gradients of each row's loss, times `divisor`.
struct CrossEntropyCall {
    void* logits;  // [rows][width]
    int64_t num_rows;
    int64_t width;
    const float* bias;       // [width] or null
    const int64_t* targets;  // [rows]; below 0: the row counts for nothing
    float divisor;           // of logits
    float* losses;           // [rows]
};

struct CombineGradientCall {
    Rows grad;             // [tokens][width]
    const void* y;         // [rows][width] in order of expert; null: no gradient of weights
    const void* weights;   // [tokens * top_k]
    const int64_t* order;  // [rows]: token * top_k + choice
    int64_t num_rows;
    int64_t top_k;
    int64_t width;
    void* grad_y;        // [rows][width]
    void* grad_weights;  // [tokens * top_k], zeros; or null
};

struct SumRowsCall {
    Rows x;                 // `width` elements each
    const int64_t* places;  // [tokens][top_k]
    const void* weights;    // [tokens][top_k] or null
    int64_t num_tokens;
    int64_t top_k;
    int64_t width;
    void* out;  // [tokens][width]
};

// Moves `values` [count] by a step; `mean` and `square` are the moments of gradients, which are scaled first.
struct AdamwCall {
    float* values;
    const float* grad;
    float* mean;
    float* square;
    int64_t count;
    float scale;
    float kept;          // 1 - rate * weight decay
    float mean_share;    // 1 - beta1
    float square_kept;   // beta2
    float square_share;  // 1 - beta2
    float square_root;   // sqrt(1 - beta2^step)
    float size;          // rate / (1 - beta1^step)
    float eps;
};

// out = a b, or added to it: [rows][inner] times [inner][columns]. Strides count elements; in each factor one of the
// two is 1, in `out` columns are adjacent. Factors are of the element type, `out` is float32 if out_fp32.
struct ProductCall {
    const void* a;
    int64_t a_row;
    int64_t a_step;
    const void* b;
    int64_t b_step;
    int64_t b_column;
    void* out;
    int64_t out_row;
    int64_t rows;
    int64_t inner;
    int64_t columns;
    bool adds;
    bool out_fp32;
};

// Rows of heads: sizes are sequences, positions, heads; k and v have as many heads, q a multiple of them.
struct CausalCall {
    GridRows q;
    GridRows k;
    GridRows v;
    const int64_t* first_keys;  // [sequences][positions] or null: what a query sees begins there, and ends with itself
    float scale;
    int64_t key_dim;
    int64_t value_dim;
    void* out;   // [sequences][positions][heads of q][value_dim]
    float* lse;  // [sequences][heads of q][positions], log of the sum of exponentials of scores
};

struct CausalGradientCall {
    CausalCall forward;  // with what it made
    GridRows grad;       // of out
    void* grad_q;        // all three as out lies
    void* grad_k;
    void* grad_v;
};

struct TrainingKernels {
    void (*norm)(const NormCall&, ThreadPool&);
    void (*norm_gradient)(const NormGradientCall&, ThreadPool&);
    void (*turn)(const TurnCall&, ThreadPool&);
    void (*turn_gradient)(const TurnGradientCall&, ThreadPool&);
    void (*activate)(const ActivationCall&, ThreadPool&);
    void (*cross_entropy)(const CrossEntropyCall&, ThreadPool&);
    void (*combine_gradient)(const CombineGradientCall&, ThreadPool&);
    void (*sum_rows)(const SumRowsCall&, ThreadPool&);
    void (*causal_attention)(const CausalCall&, ThreadPool&);
    void (*causal_gradient)(const CausalGradientCall&, ThreadPool&);
    void (*products)(const std::vector<ProductCall>&, ThreadPool&);
};

// One instruction set's kernels for training.
struct TrainingTable {
    TrainingKernels bf16;
    TrainingKernels fp32;
    void (*adamw)(const AdamwCall&, ThreadPool&);

    const TrainingKernels& of(ElementType type) const { return type == ElementType::bf16 ? bf16 : fp32; }
};

// Those of the instruction set in use (isa.h). The variants with tiles have none of their own.
const TrainingTable& training_table();

const TrainingTable* plain_training();
const TrainingTable* avx2_training();
const TrainingTable* avx512_training();
const TrainingTable* avx512_bf16_training();

// Elements of one work item: few enough to share rows out, enough to pay for a thread. It depends on nothing else, so
// sums over rows, which go item by item, have the same bits on any number of threads.
constexpr int64_t elements_an_item = 16384;

// body(row) for every row, in items of whole rows.
template <class Body>
void for_rows(int64_t num_rows, int64_t width, ThreadPool& pool, Body&& body) {
    const int64_t rows_per_item = larger(1, elements_an_item / larger(1, width));
    pool.for_each(divide_up(num_rows, rows_per_item), [&](int64_t item) {
        const int64_t end = smaller(num_rows, (item + 1) * rows_per_item);
        for (int64_t row = item * rows_per_item; row < end; ++row) body(row);
    });
}

}  // namespace antiphon::kernels

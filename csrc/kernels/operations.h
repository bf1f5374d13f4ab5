// What every kernel is called with, and the table of kernels one instruction set provides.
//
// Copies weights and biases into the packed layout.
#pragma once

#include "kernels/packed_layout.h"
#include "kernels/rows.h"
#include "kernels/thread_pool.h"
#include "kernels/vector_math.h"

namespace antiphon::kernels {

struct LinearCall {
    PackedMatrix weight;
    const float* bias;  // [outputs] or null
    Rows x;
    Rows residual;  // of the element type; data null if there is none
    void* out;      // [rows][outputs], float32 if out_fp32, else the element type
    bool out_fp32;
};

struct RmsNormCall {
    Rows x;
    Rows delta;  // added to x first; data null if there is none
    const void* weight;
    void* sum;  // [rows][width], x + delta rounded; only with delta
    void* out;  // [rows][out_stride]; null: only the sum is wanted
    int64_t width;
    float eps;
    int64_t out_stride;
};

// Packed weights of the experts of one layer. Gate and up share one matrix: groups of two gate and two up panels. Biases
// lie likewise, zero where there is no output.
struct ExpertWeights {
    ElementType type;  // of rows in and out
    PackedFormat gate_up_format;
    PackedFormat down_format;
    Activation activation;
    float alpha;  // of swiglu_oai, as is limit
    float limit;
    int64_t num_experts;
    int64_t hidden;
    int64_t intermediate;
    const char* data;   // all gate_up matrices, then all down matrices
    const float* bias;  // of each expert gate_up, then down; null: none
    const int32_t* order;  // [num_experts][hidden], the element of a row for each column of gate_up; null: as they are

    int64_t gate_up_outputs() const { return 2 * round_up(intermediate, panel_width); }
    int64_t num_gate_up_groups() const { return divide_up(intermediate, group_width / 2); }
    size_t gate_up_bytes() const { return gate_up_format.num_bytes(gate_up_outputs(), hidden); }
    size_t down_bytes() const { return down_format.num_bytes(hidden, intermediate); }
    size_t num_bytes() const { return static_cast<size_t>(num_experts) * (gate_up_bytes() + down_bytes()); }
    // Elements from row to row of the activations between the two halves: room for whole panels.
    int64_t hidden_stride() const { return spread_stride(down_format.type, round_up(intermediate, panel_width)); }

    PackedMatrix gate_up(int64_t expert) const {
        const char* first = data + static_cast<size_t>(expert) * gate_up_bytes();
        return packed_matrix(gate_up_format, first, gate_up_outputs(), hidden);
    }
    // Whole groups, so that kernels may read past the last output.
    int64_t gate_up_bias_width() const { return round_up(gate_up_outputs(), group_width); }
    int64_t bias_width() const { return gate_up_bias_width() + round_up(hidden, group_width); }
    // Biases of one group of outputs, or null.
    const float* gate_up_bias(int64_t expert, int64_t group) const {
        return bias == nullptr ? nullptr : bias + expert * bias_width() + group * group_width;
    }
    const float* down_bias(int64_t expert, int64_t group) const {
        return bias == nullptr ? nullptr : gate_up_bias(expert, group) + gate_up_bias_width();
    }
    PackedMatrix down(int64_t expert) const {
        const char* first = data + static_cast<size_t>(num_experts) * gate_up_bytes();
        return packed_matrix(down_format, first + static_cast<size_t>(expert) * down_bytes(), hidden, intermediate);
    }
};

struct GroupedFfnCall {
    ExpertWeights experts;
    Rows x;
    const int32_t* ids;    // [rows][top_k], -1: not held here
    const float* weights;  // [rows][top_k]
    int64_t top_k;
    void* out;  // [rows][hidden]
};

// Where the rows of a micro-batch stand; see AttentionBatch in antiphon/kernels/api.py.
struct BatchView {
    const int32_t* positions;     // [rows]
    const int32_t* slots;         // [rows]
    const int32_t* query_starts;  // [sequences + 1]
    const int32_t* context_lens;  // [sequences]
    const int32_t* block_tables;  // [sequences][table_stride]
    int64_t table_stride;
    int64_t num_sequences;
};

struct RotateCall {
    KVLayout cache;
    int64_t layer;
    BatchView batch;
    Rows qkv;
    int64_t num_heads;
    const float* cos;  // [positions][rotary_half]
    const float* sin;
    int64_t rotary_half;
    bool interleaved;
    const void* q_norm;  // [key_dim] or null
    const void* k_norm;
    float eps;
    void* q;  // [rows][num_heads][key_dim]
};

struct AttentionCall {
    KVLayout cache;
    int64_t layer;
    BatchView batch;
    const void* q;  // [rows][num_heads][key_dim]
    int64_t num_heads;
    float scale;
    int64_t sliding_window;  // keys visible to a row, its own included; 0: all
    const float* sinks;      // [num_heads] or null: logits of a key that every row sees and that has no value
    void* out;               // [rows][num_heads][value_dim]
};

enum class Scoring { softmax, sigmoid };

struct GateCall {
    LinearCall logits;  // its `out` is set by the gate
    Scoring scoring;
    const float* score_bias;  // [experts] or null: steers the choice, not the weights
    int64_t top_k;
    int64_t num_groups;
    int64_t top_k_groups;
    bool group_score_top2;  // else the group's maximum
    bool normalize;
    bool softmax_after_top_k;
    float scaling;
    int32_t* ids;    // [rows][top_k]
    float* weights;  // [rows][top_k]
};

struct ArgmaxCall {
    const float* logits;  // [rows][width]
    int64_t num_rows;
    int64_t width;
    int64_t stride;
    int64_t* ids;  // [rows]
};

// How the token of a row is chosen. `ROW_CHOICE` of antiphon/kernels/cpu.py has the same fields.
struct RowChoice {
    double uniform;  // in [0, 1)
    double top_p;    // 1: off
    const int64_t* token_ids;  // distinct; other tokens have no penalty
    const float* counts;       // how often each was generated; 0: it is in the prompt only
    int64_t num_counts;
    int64_t top_k;      // 0 or less: off
    float temperature;  // 0: the largest logit
    float min_p;
    float repetition;
    float frequency;
    float presence;
    float unused;
};

struct ChooseCall {
    const float* logits;  // [rows][width]
    int64_t num_rows;
    int64_t width;
    int64_t stride;
    const RowChoice* rows;
    int64_t* ids;  // [rows]
};

// One instruction set's kernels for one element type.
struct ElementKernels {
    void (*linear)(const LinearCall&, ThreadPool&);
    void (*rms_norm)(const RmsNormCall&, ThreadPool&);
    void (*grouped_ffn)(const GroupedFfnCall&, ThreadPool&);
    void (*rotate_and_store)(const RotateCall&, ThreadPool&);
    void (*paged_attention)(const AttentionCall&, ThreadPool&);
    void (*gate)(const GateCall&, ThreadPool&);
};

struct KernelTable {
    const char* name;
    ElementKernels bf16;
    ElementKernels fp32;
    void (*argmax)(const ArgmaxCall&, ThreadPool&);
    void (*choose)(const ChooseCall&, ThreadPool&);

    const ElementKernels& of(ElementType type) const { return type == ElementType::bf16 ? bf16 : fp32; }
};

// A matrix to be packed, rows of floats or of codes: the tensors of a QuantizedWeight with a scale for every row.
struct SourceMatrix {
    const char* data = nullptr;
    int64_t rows = 0;
    int64_t row_bytes = 0;  // from row to row
    const char* scales = nullptr;
    const char* offsets = nullptr;  // or zero points
    const char* units = nullptr;    // consecutive
    int64_t scale_stride = 0;       // elements from row to row, of scales and offsets
};

void pack_matrix(const PackedFormat& format, const SourceMatrix& source, int64_t inner, char* packed,
                 ThreadPool& pool);

// One expert's three matrices; gate and up are [intermediate][hidden], down is [hidden][intermediate].
void pack_expert(const ExpertWeights& experts, int64_t index, const SourceMatrix& gate, const SourceMatrix& up,
                 const SourceMatrix& down, ThreadPool& pool);

// Biases [intermediate] of one expert's gate and up, in the order of their outputs; places without one are left alone.
void pack_gate_up_bias(const ExpertWeights& experts, const float* gate, const float* up, float* packed);

}  // namespace antiphon::kernels

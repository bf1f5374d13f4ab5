// Copies weights and biases into the packed layout. The source is [outputs][inner] of the same element type.
#pragma once

#include "kernels/operations.h"

namespace antiphon::kernels {

// `stride`: elements from one output's row to the next.
void pack_matrix(ElementType type, const Rows& source, int64_t inner, char* packed, ThreadPool& pool);

// One expert's three matrices; gate and up are [intermediate][hidden], down is [hidden][intermediate].
void pack_expert(const ExpertWeights& experts, int64_t index, const Rows& gate, const Rows& up, const Rows& down,
                 ThreadPool& pool);

// Biases [intermediate] of one expert's gate and up, in the order of their outputs; places without one are left alone.
void pack_gate_up_bias(const ExpertWeights& experts, const float* gate, const float* up, float* packed);

}  // namespace antiphon::kernels

// Index of the first largest value of every row: the greedy choice over a vocabulary.
#pragma once

#include <limits>

#include "kernels/operations.h"

namespace antiphon::kernels {

constexpr int64_t argmax_block = 1024;    // searched again once its maximum is known to be the best
constexpr int64_t argmax_chunk = 16384;  // one work item

struct BestIndex {
    float value;
    int64_t index;
};

template <class V>
BestIndex best_of_chunk(const float* values, int64_t first, int64_t end) {
    BestIndex best{-std::numeric_limits<float>::infinity(), first};
    int64_t best_block = -1;
    for (int64_t block = first; block < end; block += argmax_block) {
        const int64_t width = smaller(argmax_block, end - block);
        auto highest = V::set1(-std::numeric_limits<float>::infinity());
        for_lanes(width, [&](int64_t i, int lanes) {
            highest = V::max(V::keep_lanes(load_lanes<V>(values + block + i, lanes), 0, lanes, highest), highest);
        });
        const float value = V::reduce_max(highest);
        if (value > best.value) {
            best.value = value;
            best_block = block;
        }
    }
    if (best_block < 0) return best;
    int64_t index = best_block;
    while (values[index] != best.value) ++index;
    best.index = index;
    return best;
}

template <class Arch>
void argmax(const ArgmaxCall& call, ThreadPool& pool) {
    const int64_t num_chunks = divide_up(call.width, argmax_chunk);
    auto* best = Scratch::get<BestIndex>(ScratchUse::plan, static_cast<size_t>(call.num_rows * num_chunks));
    pool.for_each(call.num_rows * num_chunks, [&](int64_t item) {
        const int64_t first = item % num_chunks * argmax_chunk;
        best[item] = best_of_chunk<typename Arch::Vector>(call.logits + item / num_chunks * call.stride, first,
                                                          smaller(call.width, first + argmax_chunk));
    });
    for (int64_t row = 0; row < call.num_rows; ++row) {
        BestIndex found = best[row * num_chunks];
        for (int64_t chunk = 1; chunk < num_chunks; ++chunk) {
            const BestIndex& other = best[row * num_chunks + chunk];
            if (other.value > found.value) found = other;
        }
        call.ids[row] = found.index;
    }
}

}  // namespace antiphon::kernels

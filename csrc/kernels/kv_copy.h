// Keys and values of a run of tokens of one layer, out of a paged cache into plain rows and back: what travels between
// workers whose caches differ in block size and in heads.
//
// Plain rows, for each head one after the other: keys [tokens][key_dim], then values [tokens][value_dim]. Of a cache in
// 8 bits these are its codes as they are, and behind each key and each value its scale, a float of 4 bytes.
// One thread: this runs beside a worker's steps, whose threads have work of their own.
#pragma once

#include <cstdint>

#include "kernels/packed_layout.h"

namespace antiphon::kernels {

// Tokens `first` to `first + count - 1` of a sequence whose blocks are `blocks`, in `num_heads` heads of the cache.
struct TokenRun {
    int64_t layer;
    const int32_t* blocks;
    int64_t first;
    int64_t count;
    const int32_t* heads;
    int64_t num_heads;
};

void read_tokens(const KVLayout& cache, const TokenRun& run, char* rows);
void write_tokens(const KVLayout& cache, const TokenRun& run, const char* rows);

}  // namespace antiphon::kernels

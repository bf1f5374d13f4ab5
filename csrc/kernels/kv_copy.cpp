#include "kernels/kv_copy.h"

#include <cstring>

namespace antiphon::kernels {

namespace {

// Keys of tokens that are neighbours in one panel: element pairs lie side by side, tokens 4 bytes apart, and a step of
// the key is 64 bytes behind the previous one. `visit(place in the cache, byte in the row, number of bytes)`.
template <class Visit>
void each_key_piece(const KVLayout& cache, char* keys, int64_t token, Visit&& visit) {
    const int64_t width = cache.key_dim * static_cast<int64_t>(element_bytes(cache.type));
    char* lane = keys + token / panel_width * cache.key_steps() * panel_bytes + token % panel_width * 4;
    for (int64_t byte = 0; byte < width; byte += 4) visit(lane + byte * panel_width, byte, smaller(4, width - byte));
}

// Values of one token: each element in the panel of its 16 dims, at the token's step.
template <class Visit>
void each_value_piece(const KVLayout& cache, char* values, int64_t token, Visit&& visit) {
    const auto size = static_cast<int64_t>(element_bytes(cache.type));
    const int64_t per_step = 4 / size;
    char* first = values + token / per_step * panel_bytes + token % per_step * size;
    const int64_t panel_stride = cache.block_steps() * panel_bytes;
    for (int64_t dim = 0; dim < cache.value_dim; ++dim) {
        visit(first + dim / panel_width * panel_stride + dim % panel_width * 4, dim * size, size);
    }
}

// A key in 8 bits: its codes are 16 bytes apart, its scale is at the head of its panel.
template <class Visit>
void each_coded_key_piece(const KVLayout& cache, char* keys, int64_t token, Visit&& visit) {
    char* panel = keys + token / panel_width * static_cast<int64_t>(cache.key_panel_bytes());
    const int64_t lane = token % panel_width;
    char* codes = panel + panel_width * cache.scale_bytes() + lane;
    for (int64_t dim = 0; dim < cache.key_dim; ++dim) visit(codes + dim * panel_width, dim, 1);
    visit(panel + lane * cache.scale_bytes(), cache.key_dim, cache.scale_bytes());
}

// A value in 8 bits: 16 codes lie side by side, its scale is at the head of the block's values.
template <class Visit>
void each_coded_value_piece(const KVLayout& cache, char* values, int64_t token, Visit&& visit) {
    char* codes = values + (cache.block_size * cache.scale_bytes() + token * panel_width);
    for (int64_t dim = 0; dim < cache.value_dim; dim += panel_width) {
        visit(codes + dim * cache.block_size, dim, smaller(panel_width, cache.value_dim - dim));
    }
    visit(values + token * cache.scale_bytes(), cache.value_dim, cache.scale_bytes());
}

// copy(in the cache, in the rows, number of bytes) for each piece of the run.
template <class Rows, class Copy>
void each_piece(const KVLayout& cache, const TokenRun& run, Rows* rows, Copy&& copy) {
    const int64_t key_width = cache.key_dim * cache.stored_bytes() + cache.scale_bytes();
    const int64_t value_width = cache.value_dim * cache.stored_bytes() + cache.scale_bytes();
    for (int64_t place = 0; place < run.num_heads; ++place) {
        Rows* key_rows = rows + place * run.count * (key_width + value_width);
        Rows* value_rows = key_rows + run.count * key_width;
        for (int64_t index = 0; index < run.count; ++index) {
            const int64_t block = run.blocks[(run.first + index) / cache.block_size];
            const int64_t token = (run.first + index) % cache.block_size;
            char* keys = cache.keys(run.layer, block, run.heads[place]);
            char* values = cache.values(run.layer, block, run.heads[place]);
            const auto copy_key = [&](char* at, int64_t byte, int64_t num) {
                copy(at, key_rows + index * key_width + byte, num);
            };
            const auto copy_value = [&](char* at, int64_t byte, int64_t num) {
                copy(at, value_rows + index * value_width + byte, num);
            };
            if (cache.is_quantized()) {
                each_coded_key_piece(cache, keys, token, copy_key);
                each_coded_value_piece(cache, values, token, copy_value);
            } else {
                each_key_piece(cache, keys, token, copy_key);
                each_value_piece(cache, values, token, copy_value);
            }
        }
    }
}

// Nearly all pieces have 1, 2, 4 or 16 bytes: as constants, so that a copy is one move.
void copy_piece(char* to, const char* from, int64_t num) {
    switch (num) {
        case 1: *to = *from; break;
        case 2: std::memcpy(to, from, 2); break;
        case 4: std::memcpy(to, from, 4); break;
        case panel_width: std::memcpy(to, from, panel_width); break;
        default: std::memcpy(to, from, static_cast<size_t>(num));
    }
}

}  // namespace

void read_tokens(const KVLayout& cache, const TokenRun& run, char* rows) {
    each_piece(cache, run, rows, [](const char* at, char* row, int64_t num) { copy_piece(row, at, num); });
}

void write_tokens(const KVLayout& cache, const TokenRun& run, const char* rows) {
    each_piece(cache, run, rows, [](char* at, const char* row, int64_t num) { copy_piece(at, row, num); });
}

}  // namespace antiphon::kernels

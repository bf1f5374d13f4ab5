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

// copy(in the cache, in the rows, number of bytes) for each piece of the run.
template <class Rows, class Copy>
void each_piece(const KVLayout& cache, const TokenRun& run, Rows* rows, Copy&& copy) {
    const auto size = static_cast<int64_t>(element_bytes(cache.type));
    const int64_t key_width = cache.key_dim * size;
    const int64_t value_width = cache.value_dim * size;
    for (int64_t place = 0; place < run.num_heads; ++place) {
        Rows* key_rows = rows + place * run.count * (key_width + value_width);
        Rows* value_rows = key_rows + run.count * key_width;
        for (int64_t index = 0; index < run.count; ++index) {
            const int64_t block = run.blocks[(run.first + index) / cache.block_size];
            const int64_t token = (run.first + index) % cache.block_size;
            const int64_t head = run.heads[place];
            each_key_piece(cache, cache.keys(run.layer, block, head), token, [&](char* at, int64_t byte, int64_t num) {
                copy(at, key_rows + index * key_width + byte, num);
            });
            each_value_piece(cache, cache.values(run.layer, block, head), token,
                             [&](char* at, int64_t byte, int64_t num) {
                                 copy(at, value_rows + index * value_width + byte, num);
                             });
        }
    }
}

// The number of bytes is 4 or 2: as a constant, so that a copy is one move.
void copy_piece(char* to, const char* from, int64_t num) {
    if (num == 4) {
        std::memcpy(to, from, 4);
    } else {
        std::memcpy(to, from, 2);
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

#include "kernels/kv_copy.h"

#include <cstring>

namespace antiphon::kernels {

namespace {

// Keys of tokens that are neighbours in one panel: element pairs lie side by side, tokens 4 bytes apart, and a step of
// the key is 64 bytes behind the previous one. `visit(place in the cache, byte in the row, number of bytes)`, from byte
// `first` of the key on.
template <class Visit>
void each_key_piece(const KVLayout& cache, char* keys, int64_t token, int64_t first, Visit&& visit) {
    const int64_t width = cache.key_dim * static_cast<int64_t>(element_bytes(cache.type));
    char* lane = keys + token / panel_width * cache.key_steps() * panel_bytes + token % panel_width * 4;
    for (int64_t byte = first; byte < width; byte += 4) visit(lane + byte * panel_width, byte, smaller(4, width - byte));
}

// Values of one token: each element in the panel of its 16 dims, at the token's step. From `first_dim` on.
template <class Visit>
void each_value_piece(const KVLayout& cache, char* values, int64_t token, int64_t first_dim, Visit&& visit) {
    const auto size = static_cast<int64_t>(element_bytes(cache.type));
    const int64_t per_step = 4 / size;
    char* first = values + token / per_step * panel_bytes + token % per_step * size;
    const int64_t panel_stride = cache.block_steps() * panel_bytes;
    for (int64_t dim = first_dim; dim < cache.value_dim; ++dim) {
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

// A square of four words in four rows, turned round.
void transpose(const char* from, int64_t from_stride, char* to, int64_t to_stride) {
    Words words[4];
    for (int64_t n = 0; n < 4; ++n) std::memcpy(&words[n], from + n * from_stride, sizeof(Words));
    transpose_words(words);
    for (int64_t n = 0; n < 4; ++n) std::memcpy(to + n * to_stride, &words[n], sizeof(Words));
}

using Halves = uint16_t __attribute__((vector_size(16)));

// 16 bf16 values of two neighbouring tokens: one after the other in their rows, side by side in a step of the cache.
void interleave(const char* row, const char* next, char* step) {
    for (size_t half = 0; half < 2; ++half, row += sizeof(Halves), next += sizeof(Halves)) {
        Halves a, b;
        std::memcpy(&a, row, sizeof(Halves));
        std::memcpy(&b, next, sizeof(Halves));
        const Halves pairs[2] = {__builtin_shuffle(a, b, Halves{0, 8, 1, 9, 2, 10, 3, 11}),
                                 __builtin_shuffle(a, b, Halves{4, 12, 5, 13, 6, 14, 7, 15})};
        std::memcpy(step + half * sizeof(pairs), pairs, sizeof(pairs));
    }
}

void separate(const char* step, char* row, char* next) {
    for (size_t half = 0; half < 2; ++half, row += sizeof(Halves), next += sizeof(Halves)) {
        Halves pairs[2];
        std::memcpy(pairs, step + half * sizeof(pairs), sizeof(pairs));
        const Halves a = __builtin_shuffle(pairs[0], pairs[1], Halves{0, 2, 4, 6, 8, 10, 12, 14});
        const Halves b = __builtin_shuffle(pairs[0], pairs[1], Halves{1, 3, 5, 7, 9, 11, 13, 15});
        std::memcpy(row, &a, sizeof(Halves));
        std::memcpy(next, &b, sizeof(Halves));
    }
}

// Keys of the 16 tokens of a panel, as far as squares go: that many bytes of each.
template <bool into_cache, class Row>
int64_t copy_key_squares(const KVLayout& cache, char* panel, Row* rows, int64_t row_bytes) {
    const int64_t square_bytes = sizeof(Words);
    const int64_t whole = cache.key_dim * static_cast<int64_t>(element_bytes(cache.type)) / square_bytes * square_bytes;
    for (int64_t byte = 0; byte < whole; byte += square_bytes) {
        for (int64_t token = 0; token < panel_width; token += 4) {
            char* steps = panel + byte * panel_width + token * 4;
            Row* row = rows + token * row_bytes + byte;
            if constexpr (into_cache) {
                transpose(row, row_bytes, steps, panel_bytes);
            } else {
                transpose(steps, panel_bytes, row, row_bytes);
            }
        }
    }
    return whole;
}

// Values of 16 tokens, the first of which is in step 0, as far as panels of 16 dims are full: that many dims of each.
template <bool into_cache, class Row>
int64_t copy_value_panels(const KVLayout& cache, char* values, Row* rows, int64_t row_bytes) {
    const int64_t whole = cache.value_dim / panel_width * panel_width;
    const int64_t panel_stride = cache.block_steps() * panel_bytes;
    const bool in_pairs = cache.type == ElementType::bf16;
    for (int64_t step = 0; step < cache.panel_steps(); ++step, rows += (in_pairs ? 2 : 1) * row_bytes) {
        for (int64_t panel = 0; panel < whole / panel_width; ++panel) {
            char* dims = values + panel * panel_stride + step * panel_bytes;
            Row* row = rows + panel * panel_bytes / (in_pairs ? 2 : 1);
            if constexpr (into_cache) {
                in_pairs ? interleave(row, row + row_bytes, dims) : void(std::memcpy(dims, row, panel_bytes));
            } else {
                in_pairs ? separate(dims, row, row + row_bytes) : void(std::memcpy(row, dims, panel_bytes));
            }
        }
    }
    return whole;
}

// A run's tokens in one head. 16 that fill a panel are copied in vectors.
template <bool into_cache, class Row>
void copy_head(const KVLayout& cache, const TokenRun& run, int64_t head, Row* key_rows, int64_t key_width, Row* value_rows,
               int64_t value_width) {
    const auto copy = [](char* at, Row* row, int64_t num) {
        if constexpr (into_cache) {
            copy_piece(at, row, num);
        } else {
            copy_piece(row, at, num);
        }
    };
    for (int64_t first = 0, num = 1; first < run.count; first += num) {
        const int64_t block = run.blocks[(run.first + first) / cache.block_size];
        const int64_t token = (run.first + first) % cache.block_size;
        char* keys = cache.keys(run.layer, block, head);
        char* values = cache.values(run.layer, block, head);
        Row* key = key_rows + first * key_width;
        Row* value = value_rows + first * value_width;
        int64_t first_byte = 0, first_dim = 0;
        num = 1;
        if (!cache.is_quantized() && token % panel_width == 0 && run.count - first >= panel_width) {
            const int64_t panel = token / panel_width;
            char* key_panel = keys + panel * static_cast<int64_t>(cache.key_panel_bytes());
            first_byte = copy_key_squares<into_cache>(cache, key_panel, key, key_width);
            char* value_steps = values + panel * cache.panel_steps() * panel_bytes;
            first_dim = copy_value_panels<into_cache>(cache, value_steps, value, value_width);
            num = panel_width;
        }
        for (int64_t n = 0; n < num; ++n, key += key_width, value += value_width) {
            const auto copy_key = [&](char* at, int64_t byte, int64_t size) { copy(at, key + byte, size); };
            const auto copy_value = [&](char* at, int64_t byte, int64_t size) { copy(at, value + byte, size); };
            if (cache.is_quantized()) {
                each_coded_key_piece(cache, keys, token + n, copy_key);
                each_coded_value_piece(cache, values, token + n, copy_value);
            } else {
                each_key_piece(cache, keys, token + n, first_byte, copy_key);
                each_value_piece(cache, values, token + n, first_dim, copy_value);
            }
        }
    }
}

template <bool into_cache, class Row>
void copy_run(const KVLayout& cache, const TokenRun& run, Row* rows) {
    const int64_t key_width = cache.key_dim * cache.stored_bytes() + cache.scale_bytes();
    const int64_t value_width = cache.value_dim * cache.stored_bytes() + cache.scale_bytes();
    for (int64_t place = 0; place < run.num_heads; ++place) {
        Row* key_rows = rows + place * run.count * (key_width + value_width);
        copy_head<into_cache>(cache, run, run.heads[place], key_rows, key_width, key_rows + run.count * key_width,
                              value_width);
    }
}

}  // namespace

void read_tokens(const KVLayout& cache, const TokenRun& run, char* rows) { copy_run<false>(cache, run, rows); }

void write_tokens(const KVLayout& cache, const TokenRun& run, const char* rows) { copy_run<true>(cache, run, rows); }

}  // namespace antiphon::kernels

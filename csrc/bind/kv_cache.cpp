#include "base/huge_buffer.h"
#include "bind/bind.h"
#include "kernels/calls.h"
#include "kernels/kv_copy.h"

#include <nanobind/stl/string.h>

#include <algorithm>
#include <stdexcept>
#include <string>

namespace nb = nanobind;

namespace antiphon::bind {

namespace {

using kernels::BatchView;

[[noreturn]] void refuse(const std::string& what, int64_t value, int64_t limit) {
    throw std::invalid_argument(what + " " + std::to_string(value) + " is outside 0.." + std::to_string(limit - 1));
}

void check_below(const std::string& what, int64_t value, int64_t limit) {
    if (value < 0 || value >= limit) refuse(what, value, limit);
}

// Addresses of an AttentionBatch's int32 arrays. The arrays must outlive it.
struct BatchAddresses {
    BatchView view;
    int64_t num_rows;
    // The largest values that `look` saw.
    int32_t position = 0, slot = 0, block = 0;

    BatchAddresses(uintptr_t positions, uintptr_t slots, uintptr_t query_starts, uintptr_t context_lens,
                   uintptr_t block_tables, int64_t table_stride, int64_t num_sequences, int64_t rows)
        : view{pointer<const int32_t>(positions),    pointer<const int32_t>(slots),
               pointer<const int32_t>(query_starts), pointer<const int32_t>(context_lens),
               pointer<const int32_t>(block_tables), table_stride,
               num_sequences},
          num_rows(rows) {}

    // Looks at the values once, for all layers.
    void look(int64_t block_size) {
        position = largest("position", view.positions, num_rows);
        slot = largest("slot", view.slots, num_rows);
        if (view.query_starts[0] != 0 || view.query_starts[view.num_sequences] != num_rows) {
            throw std::invalid_argument("query_starts begin with " + std::to_string(view.query_starts[0]) +
                                        " and end with " + std::to_string(view.query_starts[view.num_sequences]) +
                                        ": they go from 0 to the " + std::to_string(num_rows) + " rows");
        }
        for (int64_t i = 0; i < view.num_sequences; ++i) {
            const int32_t rows = view.query_starts[i + 1] - view.query_starts[i];
            const int32_t length = view.context_lens[i];
            if (rows < 0 || length < rows) {
                throw std::invalid_argument("sequence " + std::to_string(i) + " has " + std::to_string(rows) +
                                            " rows and sees " + std::to_string(length) + " keys: its rows are among them");
            }
            if (length > view.table_stride * block_size) {
                throw std::invalid_argument("a context of " + std::to_string(length) + " tokens: the table has " +
                                            std::to_string(view.table_stride) + " blocks of " +
                                            std::to_string(block_size) + " for a sequence");
            }
            block = std::max(block, largest("block", view.block_tables + i * view.table_stride,
                                            (length + block_size - 1) / block_size));
        }
    }

  private:
    static int32_t largest(const std::string& what, const int32_t* values, int64_t count) {
        int32_t most = 0;
        for (int64_t i = 0; i < count; ++i) {
            if (values[i] < 0) throw std::invalid_argument(what + " " + std::to_string(values[i]) + " is below 0");
            most = std::max(most, values[i]);
        }
        return most;
    }
};

// How queries and keys are prepared; the same for every layer but the two norm weights.
struct RotaryAddresses {
    const float* cos;
    const float* sin;
    int64_t num_positions;
    int64_t half;
    bool interleaved;

    RotaryAddresses(uintptr_t cos_address, uintptr_t sin_address, int64_t positions, int64_t half_width,
                    bool is_interleaved)
        : cos(pointer<const float>(cos_address)), sin(pointer<const float>(sin_address)), num_positions(positions),
          half(half_width), interleaved(is_interleaved) {}
};

class KVCache {
  public:
    KVCache(bool is_bf16, const std::string& storage, int64_t num_layers, int64_t num_blocks, int64_t block_size,
            int64_t num_kv_heads, int64_t key_dim, int64_t value_dim)
        : type_(element_type(is_bf16)),
          layout_{storage_named(storage), storage.empty() ? type_ : kernels::ElementType::fp32, nullptr, num_layers,
                  num_blocks, block_size, num_kv_heads, key_dim, value_dim},
          buffer_(layout_.num_bytes()) {
        layout_.data = buffer_.data();
    }

    size_t num_bytes() const { return buffer_.size(); }

    void rotate_and_store(int64_t layer, const BatchAddresses& batch, const RotaryAddresses& rotary, uintptr_t qkv,
                          int64_t num_heads, uintptr_t q_norm, uintptr_t k_norm, float eps, uintptr_t q) {
        const nb::gil_scoped_release released;
        check_below("layer", layer, layout_.num_layers);
        check_below("slot", batch.slot, layout_.num_blocks * layout_.block_size);
        if (rotary.half > 0) check_below("position", batch.position, rotary.num_positions);
        if (2 * rotary.half > layout_.key_dim) {
            throw std::invalid_argument("a rotary table that turns " + std::to_string(2 * rotary.half) +
                                        " dims: keys have " + std::to_string(layout_.key_dim));
        }
        const int64_t width = (num_heads + layout_.num_kv_heads) * layout_.key_dim +
                              layout_.num_kv_heads * layout_.value_dim;
        const kernels::RotateCall call{
            .cache = layout_,
            .layer = layer,
            .batch = batch.view,
            .qkv = rows(qkv, batch.num_rows, width),
            .num_heads = num_heads,
            .cos = rotary.cos,
            .sin = rotary.sin,
            .rotary_half = rotary.half,
            .interleaved = rotary.interleaved,
            .q_norm = pointer<const void>(q_norm),
            .k_norm = pointer<const void>(k_norm),
            .eps = eps,
            .q = pointer<void>(q),
        };
        kernels::perform(type_, call);
    }

    void paged_attention(int64_t layer, const BatchAddresses& batch, uintptr_t q, int64_t num_heads, float scale,
                         int64_t sliding_window, uintptr_t sinks, uintptr_t out) const {
        const nb::gil_scoped_release released;
        check_below("layer", layer, layout_.num_layers);
        check_below("block", batch.block, layout_.num_blocks);
        const kernels::AttentionCall call{
            .cache = layout_,
            .layer = layer,
            .batch = batch.view,
            .q = pointer<const void>(q),
            .num_heads = num_heads,
            .scale = scale,
            .sliding_window = sliding_window,
            .sinks = pointer<const float>(sinks),
            .out = pointer<void>(out),
        };
        kernels::perform(type_, call);
    }

    // Addresses of int32 arrays, and of as many bytes as the run has rows of; the caller has checked all ranges.
    void read_tokens(int64_t layer, uintptr_t blocks, int64_t first, int64_t count, uintptr_t heads, int64_t num_heads,
                     uintptr_t rows) const {
        const nb::gil_scoped_release released;
        kernels::read_tokens(layout_, token_run(layer, blocks, first, count, heads, num_heads), pointer<char>(rows));
    }

    void write_tokens(int64_t layer, uintptr_t blocks, int64_t first, int64_t count, uintptr_t heads,
                      int64_t num_heads, uintptr_t rows) {
        const nb::gil_scoped_release released;
        kernels::write_tokens(layout_, token_run(layer, blocks, first, count, heads, num_heads),
                              pointer<const char>(rows));
    }

  private:
    static kernels::TokenRun token_run(int64_t layer, uintptr_t blocks, int64_t first, int64_t count, uintptr_t heads,
                                       int64_t num_heads) {
        return {layer, pointer<const int32_t>(blocks), first, count, pointer<const int32_t>(heads), num_heads};
    }

    static kernels::KVStorage storage_named(const std::string& name) {
        if (name.empty()) return kernels::KVStorage::floats;
        if (name == "int8") return kernels::KVStorage::int8;
        if (name == "fp8") return kernels::KVStorage::fp8;
        throw std::invalid_argument("keys and values in " + name + " are not known here: use int8 or fp8");
    }

    kernels::ElementType type_;  // of rows in and out
    kernels::KVLayout layout_;
    HugeBuffer buffer_;
};

}  // namespace

void bind_kv_cache(nb::module_& module) {
    nb::class_<BatchAddresses>(module, "BatchAddresses")
        .def(nb::init<uintptr_t, uintptr_t, uintptr_t, uintptr_t, uintptr_t, int64_t, int64_t, int64_t>(),
             nb::arg("positions_address"), nb::arg("slots_address"), nb::arg("query_starts_address"),
             nb::arg("context_lens_address"), nb::arg("block_tables_address"), nb::arg("table_stride"),
             nb::arg("num_sequences"), nb::arg("num_rows"))
        .def("look", &BatchAddresses::look, nb::arg("block_size"));
    nb::class_<RotaryAddresses>(module, "RotaryAddresses")
        .def(nb::init<uintptr_t, uintptr_t, int64_t, int64_t, bool>(), nb::arg("cos_address"), nb::arg("sin_address"),
             nb::arg("num_positions"), nb::arg("half"), nb::arg("interleaved"));
    nb::class_<KVCache>(module, "KVCache")
        .def(nb::init<bool, const std::string&, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t>(),
             nb::arg("is_bf16"), nb::arg("storage"), nb::arg("num_layers"), nb::arg("num_blocks"),
             nb::arg("block_size"), nb::arg("num_kv_heads"), nb::arg("key_dim"), nb::arg("value_dim"))
        .def_prop_ro("num_bytes", &KVCache::num_bytes)
        .def("rotate_and_store", &KVCache::rotate_and_store, nb::arg("layer"), nb::arg("batch"), nb::arg("rotary"),
             nb::arg("qkv_address"), nb::arg("num_heads"), nb::arg("q_norm_address"), nb::arg("k_norm_address"),
             nb::arg("eps"), nb::arg("q_address"))
        .def("paged_attention", &KVCache::paged_attention, nb::arg("layer"), nb::arg("batch"), nb::arg("q_address"),
             nb::arg("num_heads"), nb::arg("scale"), nb::arg("sliding_window"), nb::arg("sinks_address"),
             nb::arg("out_address"))
        .def("read_tokens", &KVCache::read_tokens, nb::arg("layer"), nb::arg("blocks_address"), nb::arg("first"),
             nb::arg("count"), nb::arg("heads_address"), nb::arg("num_heads"), nb::arg("rows_address"))
        .def("write_tokens", &KVCache::write_tokens, nb::arg("layer"), nb::arg("blocks_address"), nb::arg("first"),
             nb::arg("count"), nb::arg("heads_address"), nb::arg("num_heads"), nb::arg("rows_address"));
}

}  // namespace antiphon::bind

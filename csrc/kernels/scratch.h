// Working memory of one thread: one growing, 64-byte-aligned block per use, kept for the next call.
#pragma once

#include <cstddef>
#include <cstdlib>
#include <new>

namespace antiphon::kernels {

enum class ScratchUse {
    padded_rows,   // rows copied so that their width is a whole number of steps
    activations,   // between the two halves of a feed-forward
    row_lists,     // which rows go to which expert
    unpacked,      // a block of a quantized weight as floats
    run_sums,      // of rows, by run of columns of a quantized weight with offsets
    products,      // float32 results of one panel group
    sums,          // float32 output columns of one panel group
    logits,        // router scores
    cached,        // a tile of 8-bit keys and values as floats
    attention,     // everything one attention item needs
    plan,          // work lists
    count,
};

class Scratch {
  public:
    template <class T>
    static T* get(ScratchUse use, size_t count) {
        thread_local Scratch scratch;
        Block& block = scratch.blocks_[static_cast<size_t>(use)];
        const size_t num_bytes = (count * sizeof(T) + 127) / 64 * 64;
        if (num_bytes > block.num_bytes) {
            std::free(block.data);
            const size_t grown = num_bytes + num_bytes / 2 / 64 * 64;
            block.data = std::aligned_alloc(64, grown);
            block.num_bytes = block.data == nullptr ? 0 : grown;
            if (block.data == nullptr) throw std::bad_alloc();
        }
        return static_cast<T*>(block.data);
    }

    ~Scratch() {
        for (Block& block : blocks_) std::free(block.data);
    }

  private:
    struct Block {
        void* data = nullptr;
        size_t num_bytes = 0;
    };
    Block blocks_[static_cast<size_t>(ScratchUse::count)];
};

}  // namespace antiphon::kernels

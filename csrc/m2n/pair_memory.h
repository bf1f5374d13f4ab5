// One pair's slots in memory that both ends can reach: the form that shm and loopback share.
//
// First page: one word for each slot that the sender publishes (arrived) and one that the receiver publishes
// (released), each the packed immediate of the slot's last message. Then the slots. A word is published after what it
// announces, so whoever reads it with acquire order sees the whole message; a sender that dies half way has published
// nothing. A fresh word is zero, which no immediate is, because sequences of first uses begin with 1.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>

#include "m2n/transport.h"

namespace antiphon::m2n {

class PairMemory {
  public:
    static constexpr uint64_t control_bytes = 4096;
    static uint64_t bytes(const PairSpec& spec) { return control_bytes + spec.slots * slot_stride(spec.slot_bytes); }

    PairMemory() = default;
    PairMemory(std::byte* base, const PairSpec& spec)
        : base_(base), slots_(spec.slots), stride_(slot_stride(spec.slot_bytes)) {}

    uint32_t slots() const { return slots_; }
    std::byte* slot(SlotId slot) const { return base_ + control_bytes + slot * stride_; }
    std::atomic<uint32_t>& arrived(SlotId slot) const { return words()[slot]; }
    std::atomic<uint32_t>& released(SlotId slot) const { return words()[max_slots + slot]; }

  private:
    std::atomic<uint32_t>* words() const { return reinterpret_cast<std::atomic<uint32_t>*>(base_); }
    static_assert(2 * max_slots * sizeof(uint32_t) <= control_bytes);

    std::byte* base_ = nullptr;
    uint32_t slots_ = 0;
    uint64_t stride_ = 0;
};

// Reads one direction's words and reports those that changed.
class WordReader {
  public:
    explicit WordReader(uint32_t slots) : seen_(slots, 0) {}

    template <class WordOf>
    void read(ImmediateSink& sink, WordOf&& word_of) {
        for (size_t slot = 0; slot < seen_.size(); ++slot) {
            const uint32_t word = word_of(static_cast<SlotId>(slot)).load(std::memory_order_acquire);
            if (word == seen_[slot]) continue;
            seen_[slot] = word;
            sink.push_back(Immediate::unpack(word));
        }
    }

  private:
    std::vector<uint32_t> seen_;
};

}  // namespace antiphon::m2n

// One pair's slots in memory that both ends can reach: the form that shm and loopback share.
//
// First page: one word for each slot that the sender publishes (arrived) and one that the receiver publishes
// (released), each the packed immediate of the slot's last message. Then the slots. A word is published after what it
// announces, so a reader with acquire order sees the whole message; a sender that dies half way has published
// nothing. A fresh word is zero, which no immediate is, because sequences of first uses begin with 1.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <utility>

#include "base/huge_buffer.h"
#include "m2n/transport.h"
#include "m2n/waiting.h"

namespace antiphon::m2n {

FileDescriptor duplicate(const FileDescriptor& descriptor, const char* what);  // to hand to a peer

// An anonymous memory file and its mapping. The file has no name that could collide or leak, and goes away with the
// last process that holds it, however that one dies. Sealed against resizing, so that a peer cannot pull the memory
// away under a reader.
class MappedFile {
  public:
    static MappedFile create(uint64_t bytes);  // zero-filled; pages are used once written
    // A file from a peer: Error(refused) unless it is a sealed memory file of exactly the expected size.
    static MappedFile adopt(FileDescriptor descriptor, uint64_t bytes);

    std::byte* data() const { return data_.get(); }
    const FileDescriptor& descriptor() const { return descriptor_; }

  private:
    MappedFile(FileDescriptor descriptor, uint64_t bytes);

    FileDescriptor descriptor_;
    std::unique_ptr<std::byte, Unmap> data_;
};

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

// The receiver's end. `kept` keeps the memory and the sender's bells alive.
class MemoryLanding : public Landing {
  public:
    MemoryLanding(PairMemory memory, Bell& credits, std::shared_ptr<const void> kept)
        : memory_(memory), credits_(credits), kept_(std::move(kept)), arrivals_(memory.slots()) {}

    const std::byte* slot(SlotId slot) const override { return memory_.slot(slot); }

    bool poll(ImmediateSink& sink, std::string&) override {
        arrivals_.read(sink, [&](SlotId slot) -> std::atomic<uint32_t>& { return memory_.arrived(slot); });
        return true;
    }

    void release(Immediate immediate) override {
        memory_.released(immediate.slot).store(immediate.pack(), std::memory_order_release);
        ring(credits_);
    }

  private:
    PairMemory memory_;
    Bell& credits_;
    std::shared_ptr<const void> kept_;
    WordReader arrivals_;
};

// The sender's end. `kept` keeps the memory and the receiver's bells alive.
class MemoryLink : public Link {
  public:
    MemoryLink(PairMemory memory, Bell& arrivals, std::shared_ptr<const void> kept)
        : memory_(memory), arrivals_(arrivals), kept_(std::move(kept)), credits_(memory.slots()) {}

    std::byte* slot(SlotId slot) override { return memory_.slot(slot); }

    void post(Immediate immediate, const MessageHeader& header, const std::byte* payload) override {
        std::byte* slot = memory_.slot(immediate.slot);
        if (payload != nullptr && header.length > 0) std::memcpy(slot + header_bytes, payload, header.length);
        std::memcpy(slot, &header, header_bytes);
        memory_.arrived(immediate.slot).store(immediate.pack(), std::memory_order_release);
        ring(arrivals_);
    }

    bool source_reusable(SlotId) override { return true; }

    bool poll(ImmediateSink& sink, std::string&) override {
        credits_.read(sink, [&](SlotId slot) -> std::atomic<uint32_t>& { return memory_.released(slot); });
        return true;
    }

  private:
    PairMemory memory_;
    Bell& arrivals_;
    std::shared_ptr<const void> kept_;
    WordReader credits_;
};

// What both transports do alike: wait for the own bells.
class MemoryTransport : public Transport {
  public:
    bool same_host_only() const override { return true; }
    bool adopt(FileDescriptor&, std::span<const std::byte>) override { return false; }
    void progress() override {}

    uint32_t prepare(Event event) override { return own().of(event).count.load(); }

    void block(Event event, uint32_t prepared, uint32_t needed, Deadline deadline, int64_t spin_ns, EndId) override {
        wait(own().of(event), prepared, needed, interrupted_, deadline, spin_ns);
        interrupted_.store(false);
    }

    void interrupt() override {
        interrupted_.store(true);
        ring_always(own().of(Event::arrival));
        ring_always(own().of(Event::credit));
    }

  protected:
    virtual Bells& own() = 0;

  private:
    std::atomic<bool> interrupted_{false};
};

}  // namespace antiphon::m2n

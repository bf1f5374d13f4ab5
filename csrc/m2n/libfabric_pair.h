// One end of a pair over libfabric: what it has in flight, what the provider refused for now, and what came in.
//
// Both ends do the same with different things: a sender writes messages and hears of credits, a receiver writes credits
// and hears of messages. So there is one class, and its direction decides which endpoint it writes from. Every slot has
// at most one write under way; all containers have their size from the start, and nothing here allocates afterwards.
// Nothing here locks; LibfabricFabric holds its mutex around every call.
#pragma once

#if defined(ANTIPHON_HAVE_LIBFABRIC)

#include <cstdint>
#include <string>
#include <vector>

#include "base/huge_buffer.h"
#include "m2n/fixed_size.h"
#include "m2n/libfabric_domain.h"
#include "m2n/stream_device.h"
#include "m2n/transport.h"

namespace antiphon::m2n {

class LibfabricPair;

// A write handed to the provider, or waiting to be. Its address is the provider's context for it.
struct PairWrite {
    fi_context2 context{};  // scratch space of providers that want some; must come first
    LibfabricPair* pair = nullptr;
    uint32_t word = 0;  // travels beside the write
    uint64_t num_bytes = 0;              // header included
    const std::byte* payload = nullptr;  // the caller's memory; nullptr: behind the header, in the slot
    bool in_flight = false;
    bool waiting = false;
};

enum class PairRole { sender, receiver };

class LibfabricPair {
  public:
    static constexpr uint64_t least_gathered_bytes = 16 * 1024;  // below, a copy costs less than a second segment

    // `credit_source`: four registered bytes that a receiver writes credits from.
    LibfabricPair(LibfabricDomain& domain, PairRole role, const PairSpec& spec, PairTag tag,
                  const MemoryRegion& credit_source, const void* credit_bytes);
    ~LibfabricPair();
    LibfabricPair(const LibfabricPair&) = delete;
    LibfabricPair& operator=(const LibfabricPair&) = delete;

    PairRole role() const { return role_; }
    const PairSpec& spec() const { return spec_; }
    PairTag tag() const { return tag_; }
    std::byte* slot(SlotId slot) const { return memory() + slot * stride_; }
    const MemoryRegion& region() const { return region_; }
    uint64_t memory_bytes() const { return spec_.slots * stride_; }
    Event event() const { return role_ == PairRole::sender ? Event::credit : Event::arrival; }
    uint32_t in_flight() const { return in_flight_; }
    bool has_waiting() const { return !waiting_.empty(); }
    const std::string& broken() const { return broken_; }
    bool gathers(uint64_t payload_bytes) const { return gathers_ && payload_bytes >= least_gathered_bytes; }

    // Where this end writes to. Uses both of the peer's addresses: that of the lane to write on, and the other one,
    // which EFA must know. Error: as LibfabricDomain::acquire_address.
    void connect(const LibfabricPeer& peer, uint64_t base, uint64_t key, PairTag tag);

    // Starts the write of a slot's message (`num_bytes`, header included) or of its credit, or keeps it for `flush`.
    // With `payload` only the header lies in the slot; only where `gathers`.
    void submit(SlotId slot, uint16_t sequence, uint64_t num_bytes, const std::byte* payload = nullptr);
    void flush();  // hands over what waits
    // The provider is done with it. True: it wrote from the caller's memory, which may change now.
    bool on_written(PairWrite& write);
    bool source_reusable(SlotId slot) const;
    void on_immediate(SlotId slot, uint16_t sequence);
    void take(ImmediateSink& sink);  // what came in
    void break_off(const std::string& reason);
    bool owns(const PairWrite* write) const;

    // The registration ends, so that nothing can be written here any more.
    void close_registration() { region_.registration.reset(); }
    // Gives the pages back and keeps the addresses: the provider may be in the middle of a message.
    void hollow();
    HugeBuffer take_memory() { return std::move(buffer_); }

  private:
    std::byte* memory() const {
        return device_memory_ ? device_memory_.get() : reinterpret_cast<std::byte*>(buffer_.data());
    }
    int64_t hand_over(PairWrite& write);
    int64_t write_gathered(PairWrite& write, SlotId slot);
    void keep(PairWrite& write);

    LibfabricDomain& domain_;
    PairRole role_;
    PairSpec spec_;
    PairTag tag_;
    uint64_t stride_;
    HugeBuffer buffer_;                         // unless slots lie in a device's memory
    std::shared_ptr<std::byte> device_memory_;  // goes before the device in `spec_`, after the registration
    MemoryRegion region_;
    void* credit_descriptor_;
    const void* credit_bytes_;
    bool inject_credits_;
    bool gathers_;
    fi_addr_t target_address_ = FI_ADDR_UNSPEC;
    fi_addr_t other_address_ = FI_ADDR_UNSPEC;
    uint64_t target_base_ = 0;
    uint64_t target_key_ = 0;
    PairTag target_tag_ = 0;
    std::vector<PairWrite> writes_;  // by slot
    FixedQueue<SlotId> waiting_;     // slots of writes that the provider refused for now
    FixedQueue<Immediate> news_;     // what came in
    uint32_t in_flight_ = 0;
    std::string broken_;  // why, once it is
};

}  // namespace antiphon::m2n

#endif

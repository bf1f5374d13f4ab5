#include "m2n/libfabric_pair.h"

#if defined(ANTIPHON_HAVE_LIBFABRIC)

#include <rdma/fi_rma.h>
#include <sys/mman.h>

namespace antiphon::m2n {

namespace {

// Whether a write may take its payload from memory that was not registered. Only the provider that hands it to the
// kernel: a caller that frees the memory of a lost peer's message then costs an error of that write, where one that
// copies it later by itself would crash.
bool can_gather(const LibfabricDomain& domain) {
    const fi_info& info = domain.info();
    const bool kernel_reads = connects_over_tcp(domain.provider());
    return kernel_reads && (info.domain_attr->mr_mode & FI_MR_LOCAL) == 0 && info.tx_attr->iov_limit >= 2;
}

}  // namespace

LibfabricPair::LibfabricPair(LibfabricDomain& domain, PairRole role, const PairSpec& spec, PairTag tag,
                             const MemoryRegion& credit_source, const void* credit_bytes)
    : domain_(domain),
      role_(role),
      spec_(spec),
      tag_(tag),
      stride_(slot_stride(spec.slot_bytes)),
      buffer_(spec.device ? 0 : spec.slots * slot_stride(spec.slot_bytes)),
      device_memory_(spec.device ? spec.device->allocate(spec.slots * slot_stride(spec.slot_bytes)) : nullptr),
      credit_descriptor_(credit_source.descriptor()),
      credit_bytes_(credit_bytes),
      inject_credits_(domain.info().tx_attr->inject_size >= credit_payload_bytes),
      gathers_(role == PairRole::sender && can_gather(domain)),
      writes_(spec.slots),
      waiting_(spec.slots),
      news_(spec.slots) {
    const uint64_t largest = domain.info().ep_attr->max_msg_size;
    if (header_bytes + spec.slot_bytes > largest) {
        throw_invalid("libfabric provider ", domain.provider(), " writes at most ", largest,
                      " bytes at once, a slot of ", spec.slot_bytes, " with its header needs ",
                      header_bytes + spec.slot_bytes, ": make the slots smaller");
    }
    for (PairWrite& write : writes_) write.pair = this;
    const uint64_t access = role == PairRole::sender ? FI_WRITE : FI_REMOTE_WRITE;
    region_ = domain.register_memory(memory(), memory_bytes(), access, Lane::data, spec.device.get());
}

LibfabricPair::~LibfabricPair() {
    if (target_address_ != FI_ADDR_UNSPEC) domain_.release_address(target_address_);
    if (other_address_ != FI_ADDR_UNSPEC) domain_.release_address(other_address_);
}

void LibfabricPair::connect(const LibfabricPeer& peer, uint64_t base, uint64_t key, PairTag tag) {
    const bool sends = role_ == PairRole::sender;
    const auto acquire = [&](const std::vector<std::byte>& address) {
        return domain_.acquire_address(address, peer.provider, peer.protocol);
    };
    target_base_ = base;
    target_key_ = key;
    target_tag_ = tag;
    target_address_ = acquire(sends ? peer.data_address : peer.credit_address);
    other_address_ = acquire(sends ? peer.credit_address : peer.data_address);
}

int64_t LibfabricPair::write_gathered(PairWrite& write, SlotId slot_id) {
    const iovec parts[2] = {{slot(slot_id), header_bytes},
                            {const_cast<std::byte*>(write.payload), write.num_bytes - header_bytes}};
    void* descriptors[2] = {region_.descriptor(), nullptr};
    const fi_rma_iov place{target_base_ + slot_id * stride_, write.num_bytes, target_key_};
    const fi_msg_rma message{parts, descriptors, 2, target_address_, &place, 1, &write.context, write.word};
    return fi_writemsg(domain_.endpoint(Lane::data), &message, FI_REMOTE_CQ_DATA | FI_COMPLETION);
}

int64_t LibfabricPair::hand_over(PairWrite& write) {
    const auto slot_id = static_cast<SlotId>(&write - writes_.data());
    if (write.payload != nullptr) return write_gathered(write, slot_id);
    if (role_ == PairRole::sender) {
        return fi_writedata(domain_.endpoint(Lane::data), slot(slot_id), write.num_bytes, region_.descriptor(),
                            write.word, target_address_, target_base_ + slot_id * stride_, target_key_,
                            &write.context);
    }
    if (inject_credits_) {
        return fi_inject_writedata(domain_.endpoint(Lane::credit), credit_bytes_, credit_payload_bytes, write.word,
                                   target_address_, target_base_, target_key_);
    }
    return fi_writedata(domain_.endpoint(Lane::credit), credit_bytes_, credit_payload_bytes, credit_descriptor_,
                        write.word, target_address_, target_base_, target_key_, &write.context);
}

void LibfabricPair::keep(PairWrite& write) {
    if (write.waiting) return;
    waiting_.push(static_cast<SlotId>(&write - writes_.data()));
    write.waiting = true;
}

void LibfabricPair::submit(SlotId slot, uint16_t sequence, uint64_t num_bytes, const std::byte* payload) {
    if (!broken_.empty() || slot >= writes_.size()) return;
    PairWrite& write = writes_[slot];
    write.word = Immediate{target_tag_, slot, sequence}.pack();
    write.num_bytes = num_bytes;
    write.payload = payload;
    keep(write);
    flush();
}

void LibfabricPair::flush() {
    for (size_t left = waiting_.size(); left > 0 && broken_.empty(); --left) {
        const SlotId index = waiting_.pop();
        PairWrite& write = writes_[index];
        // A credit can overtake the completion of the write it answers; the context is the provider's until then.
        const int64_t result = write.in_flight ? -FI_EAGAIN : hand_over(write);
        if (result == -FI_EAGAIN) {
            waiting_.push(index);
            if (!write.in_flight) return;  // what refuses one write to this peer refuses all
            continue;
        }
        write.waiting = false;
        if (result != 0) {
            break_off("libfabric provider " + domain_.provider() + " does not write: " +
                      domain_.library().words_for(result));
        } else if (role_ == PairRole::sender || !inject_credits_) {
            write.in_flight = true;
            ++in_flight_;
            domain_.note_started();
        }
    }
}

bool LibfabricPair::on_written(PairWrite& write) {
    if (!write.in_flight) return false;
    write.in_flight = false;
    --in_flight_;
    domain_.note_ended();
    return write.payload != nullptr;
}

bool LibfabricPair::source_reusable(SlotId slot) const {
    if (slot >= writes_.size()) return true;
    const PairWrite& write = writes_[slot];
    return write.payload == nullptr || (!write.in_flight && (!write.waiting || !broken_.empty()));
}

void LibfabricPair::on_immediate(SlotId slot, uint16_t sequence) {
    if (slot >= spec_.slots) {
        break_off("the peer wrote to slot " + std::to_string(slot) + " of " + std::to_string(spec_.slots));
    } else if (news_.full()) {
        break_off("the peer sent more than its " + std::to_string(spec_.slots) + " slots allow");
    } else {
        news_.push({spec_.source, slot, sequence});
    }
}

void LibfabricPair::take(ImmediateSink& sink) {
    while (!news_.empty()) sink.push_back(news_.pop());
}

void LibfabricPair::break_off(const std::string& reason) {
    if (broken_.empty()) broken_ = reason;
}

bool LibfabricPair::owns(const PairWrite* write) const {
    return !writes_.empty() && write >= writes_.data() && write < writes_.data() + writes_.size();
}

void LibfabricPair::hollow() {
    if (buffer_.size() > 0) ::madvise(buffer_.data(), buffer_.size(), MADV_DONTNEED);
}

}  // namespace antiphon::m2n

#endif

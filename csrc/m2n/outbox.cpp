#include "m2n/outbox.h"

#include <cstring>
#include <utility>

namespace antiphon::m2n {

Tie::~Tie() { hang_up_(); }

void Tie::lose(const std::string& reason) {
    const std::lock_guard lock(mutex_);
    if (lost_.load()) return;
    reason_ = reason;
    lost_.store(true);
}

std::string Tie::reason() const {
    const std::lock_guard lock(mutex_);
    return reason_;
}

Outbox::Outbox(std::string name, std::string peer, const PairSpec& spec, std::shared_ptr<Link> link,
               std::shared_ptr<Tie> tie, std::shared_ptr<Transport> transport, WaitPolicy policy,
               std::shared_ptr<std::atomic<bool>> interrupted)
    : name_(std::move(name)),
      peer_(std::move(peer)),
      spec_(spec),
      transport_(std::move(transport)),
      policy_(policy),
      interrupted_(std::move(interrupted)),
      slots_(spec.slots),
      link_(std::move(link)),
      tie_(std::move(tie)) {
    for (uint32_t slot = spec.slots; slot > 0; --slot) free_.push_back(static_cast<SlotId>(slot - 1));
    sink_.reserve(max_slots);
}

void Outbox::look() {
    sink_.clear();
    std::string reason;
    const bool sound = link_->poll(sink_, reason);
    const int64_t now_ns = sink_.empty() ? 0 : monotonic_ns();
    for (const Immediate credit : sink_) {
        if (credit.slot >= slots_.size()) continue;
        Slot& slot = slots_[credit.slot];
        if (!slot.in_flight || slot.sequence != credit.sequence) continue;  // not ours to believe
        slot.in_flight = false;
        slot.owner.reset();
        round_trips_.add(now_ns - slot.sent_ns);
        // A reserved slot stays the last one.
        free_.insert(free_.end() - (reserved_ ? 1 : 0), credit.slot);
    }
    if (!sound) tie_->lose(reason);
}

void Outbox::throw_if_lost() const {
    if (tie_->lost()) throw_lost(peer_, tie_->reason());
}

void Outbox::throw_if_unusable() {
    throw_if_lost();
    if (interrupted_->exchange(false)) throw Error(Code::interrupted, name_ + ": the wait was interrupted");
}

void Outbox::time_out(Code code, const std::string& what) const {
    throw Error(code, name_ + " " + what + " (peer " + peer_ + ")", {peer_});
}

uint32_t Outbox::credits() {
    transport_->progress();
    look();
    return static_cast<uint32_t>(free_.size());
}

std::byte* Outbox::slot(Deadline deadline) {
    look();
    throw_if_lost();
    if (free_.empty() && credits() == 0) {
        ++counters_.credit_waits;
        try {
            wait_credits(1, deadline);
        } catch (const Error& error) {
            if (error.code != Code::timeout) throw;
            time_out(Code::no_credit, "has no free slot of " + std::to_string(slots_.size()));
        }
    }
    reserved_ = true;
    return link_->slot(free_.back()) + header_bytes;
}

void Outbox::check_length(uint64_t length) const {
    if (length <= spec_.slot_bytes) return;
    throw_invalid(name_, ": a message of ", length, " bytes to ", peer_, ", whose slots hold ", spec_.slot_bytes,
                  ": make the inbox with larger slots or split the message");
}

void Outbox::commit(const MessageLabel& label, uint64_t length) {
    if (!reserved_) throw_invalid(name_, ": commit without slot(): there is nothing to send");
    check_length(length);
    throw_if_lost();
    post(label, nullptr, length);
}

SlotId Outbox::send(const MessageLabel& label, const std::byte* payload, uint64_t length, Deadline deadline) {
    check_length(length);
    slot(deadline);
    return post(label, payload, length);
}

SlotId Outbox::post(const MessageLabel& label, const std::byte* payload, uint64_t length) {
    const SlotId id = free_.back();
    free_.pop_back();
    reserved_ = false;
    Slot& slot = slots_[id];
    slot.sequence = next_sequence(slot.sequence);
    slot.in_flight = true;
    slot.sent_ns = monotonic_ns();
    const Immediate immediate{spec_.source, id, slot.sequence};
    MessageHeader header;
    header.immediate = immediate.pack();
    header.incarnation = spec_.incarnation;
    header.participants = label.participants;
    header.step = label.step;
    header.length = length;
    std::memcpy(header.user, label.user, sizeof(header.user));
    ++counters_.messages;
    counters_.bytes += length;
    link_->post(immediate, header, payload);
    return id;
}

void Outbox::wait_reusable(Deadline deadline) {
    const auto pending = [&] {
        for (SlotId slot = 0; slot < slots_.size(); ++slot) {
            if (slots_[slot].in_flight && !link_->source_reusable(slot)) return true;
        }
        return false;
    };
    Patience patience(policy_);
    const bool came = wait_for(*transport_, Event::credit, patience, deadline, [&]() -> Lacking {
        transport_->progress();
        look();
        if (!pending()) return {};
        throw_if_unusable();
        return {1};
    });
    if (!came) time_out(Code::timeout, "wait for a source to be reusable");
    for (Slot& slot : slots_) slot.owner.reset();
}

void Outbox::wait_credits(uint32_t num_credits, Deadline deadline) {
    if (num_credits > slots_.size()) {
        throw_invalid(name_, ": waiting for ", num_credits, " credits, ", peer_, " gives ", slots_.size());
    }
    Patience patience(policy_);
    const bool came = wait_for(*transport_, Event::credit, patience, deadline, [&]() -> Lacking {
        transport_->progress();
        look();
        if (free_.size() >= num_credits) return {};
        throw_if_unusable();
        return {static_cast<uint32_t>(num_credits - free_.size()), link_->id()};
    });
    if (!came) time_out(Code::timeout, "wait for credits");
}

void Outbox::wait_all_credits(std::span<Outbox* const> outboxes, Deadline deadline) {
    if (outboxes.empty()) return;
    for (const Outbox* outbox : outboxes) {
        if (outbox->transport_ == outboxes.front()->transport_) continue;
        throw_invalid("outboxes of ", outboxes.front()->name_, " and of ", outbox->name_,
                      ": one wait serves those of one endpoint");
    }
    Transport& transport = *outboxes.front()->transport_;
    Patience patience(outboxes.front()->policy_);
    Outbox* late = nullptr;
    const bool came = wait_for(transport, Event::credit, patience, deadline, [&]() -> Lacking {
        transport.progress();
        Lacking lacking;
        for (Outbox* outbox : outboxes) {
            outbox->look();
            const auto missing = static_cast<uint32_t>(outbox->slots_.size() - outbox->free_.size());
            if (missing == 0) continue;
            outbox->throw_if_unusable();
            lacking = {lacking.num_events + missing, outbox->link_->id()};
            late = outbox;
        }
        return lacking;
    });
    if (!came) late->time_out(Code::timeout, "wait for all credits");
}

}  // namespace antiphon::m2n

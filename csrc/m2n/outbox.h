// The sender's side of one pair: slots to write into, credits that bound what is in flight.
//
// Three things complete, with three names: the source is reusable (`wait_reusable`), the data is visible (the
// receiver's `wait` returns), the credit is returned (`wait_credits`: the receiver is done with the slot).
//
// One thread owns an outbox; the control thread reports the loss of the receiver through its `Tie`. A payload that is
// sent from the caller's memory is the transport's until `source_reusable`, also after the receiver is lost: then until
// the outbox is gone.
#pragma once

#include <atomic>
#include <functional>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "m2n/fixed_size.h"
#include "m2n/transport.h"
#include "m2n/types.h"
#include "m2n/waiting.h"

namespace antiphon::m2n {

// What the sender says besides the payload.
struct MessageLabel {
    Step step = 0;
    uint32_t participants = 0;
    uint32_t user[num_user_words] = {};
};

struct OutboxCounters {
    uint64_t messages = 0;
    uint64_t bytes = 0;
    uint64_t credit_waits = 0;  // sends that found no free slot
};

// The control connection behind an outbox: hears of the receiver's loss, hangs up when the outbox goes away.
class Tie {
  public:
    explicit Tie(std::function<void()> hang_up) : hang_up_(std::move(hang_up)) {}
    ~Tie();
    Tie(const Tie&) = delete;
    Tie& operator=(const Tie&) = delete;

    void lose(const std::string& reason);  // any thread; the first reason stays
    bool lost() const { return lost_.load(); }
    std::string reason() const;

  private:
    const std::function<void()> hang_up_;
    std::atomic<bool> lost_{false};
    mutable std::mutex mutex_;
    std::string reason_;
};

class Outbox {
  public:
    // `name`: of the endpoint, `peer`: of the receiver, for errors.
    Outbox(std::string name, std::string peer, const PairSpec& spec, std::shared_ptr<Link> link,
           std::shared_ptr<Tie> tie, std::shared_ptr<Transport> transport, WaitPolicy policy,
           std::shared_ptr<std::atomic<bool>> interrupted);

    const PairSpec& spec() const { return spec_; }
    const std::string& peer() const { return peer_; }
    uint32_t credits();  // slots free now

    // Payload of the next free slot, `spec().slot_bytes` long; the same one until `commit`. Without a free slot waits
    // until the deadline, then Error(no_credit).
    std::byte* slot(Deadline deadline);
    // No wait, so nothing interrupts it.
    void commit(const MessageLabel& label, uint64_t length);

    // Copies the payload, or starts to send it from where it lies (then it must not change before `source_reusable` of
    // the slot that is returned, or `wait_reusable`).
    SlotId send(const MessageLabel& label, const std::byte* payload, uint64_t length, Deadline deadline);
    bool source_reusable(SlotId slot) { return link_->source_reusable(slot); }
    // Lets go of `owner` once the payload it owns is not needed any more.
    void keep(SlotId slot, std::shared_ptr<const void> owner) { slots_[slot].owner = std::move(owner); }

    void wait_reusable(Deadline deadline);
    void wait_credits(uint32_t num_credits, Deadline deadline);
    // All slots of all outboxes, which belong to one endpoint: sleeps until the last credit, where waiting for one
    // outbox after another would be woken by each.
    static void wait_all_credits(std::span<Outbox* const> outboxes, Deadline deadline);

    bool lost() const { return tie_->lost(); }

    const OutboxCounters& counters() const { return counters_; }
    const Histogram& credit_histogram() const { return round_trips_; }

  private:
    void look();
    void throw_if_lost() const;
    void throw_if_unusable();
    void check_length(uint64_t length) const;
    SlotId post(const MessageLabel& label, const std::byte* payload, uint64_t length);
    [[noreturn]] void time_out(Code code, const std::string& what) const;

    std::string name_;
    std::string peer_;
    PairSpec spec_;
    std::shared_ptr<Transport> transport_;
    WaitPolicy policy_;
    std::shared_ptr<std::atomic<bool>> interrupted_;

    struct Slot {
        uint16_t sequence = 0;  // of the last message
        bool in_flight = false;
        int64_t sent_ns = 0;
        std::shared_ptr<const void> owner;  // of the payload, where it must be kept alive
    };
    std::vector<Slot> slots_;
    std::vector<SlotId> free_;  // the last one is the warmest in the caches and is used first
    bool reserved_ = false;     // the last of free_ was handed out by slot()
    ImmediateSink sink_;
    OutboxCounters counters_;
    Histogram round_trips_;
    std::shared_ptr<Link> link_;  // goes before the payloads' owners
    std::shared_ptr<Tie> tie_;    // goes first: the receiver hears a goodbye before anything breaks
};

}  // namespace antiphon::m2n

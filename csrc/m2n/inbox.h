// The receiver's side: rooms for messages of many sources, and waiting for them by counting.
//
// A message is visible once its immediate arrived; nothing is assumed about the order of sources, slots or steps. Each
// source has a fixed number of slots, so what can be in flight is bounded, and a slow receiver makes senders wait
// instead of losing anything. A source that dies keeps what it had sent completely; when it returns it is a new
// incarnation with new memory, and what was left of the old one is dropped.
//
// One thread owns an inbox; the control thread reports joins and losses through `Membership`.
#pragma once

#include <atomic>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "m2n/control.h"
#include "m2n/fixed_size.h"
#include "m2n/stream_device.h"
#include "m2n/transport.h"
#include "m2n/types.h"
#include "m2n/waiting.h"
#include "m2n/wire.h"

namespace antiphon::m2n {

// What the control thread has to say to the owner, in order.
struct MembershipEvent {
    ConnectionId connection = 0;
    bool joined = false;  // else gone
    SourceId source = 0;
    Incarnation incarnation = 0;
    std::string name;    // joined: of the source; gone: the reason
    std::shared_ptr<Landing> landing;
};

class Membership {
  public:
    void push(MembershipEvent event);
    std::vector<MembershipEvent> take();  // empty and cheap when nothing happened
    void close() { closed_.store(true); }  // no source will join any more
    bool closed() const { return closed_.load(); }

  private:
    std::mutex mutex_;
    std::atomic<bool> any_{false};
    std::atomic<bool> closed_{false};
    std::vector<MembershipEvent> events_;
};

// A visible message. `landing` keeps the payload mapped; its bytes are the message's until it is released.
struct Message {
    SourceId source = 0;
    Step step = 0;
    uint32_t participants = 0;
    uint32_t user[num_user_words] = {};
    const std::byte* payload = nullptr;
    uint64_t length = 0;
    std::shared_ptr<Landing> landing;
};

enum class SourceState { absent, live, lost };

struct SourceCounters {
    std::string name;
    SourceState state = SourceState::absent;
    Incarnation incarnation = 0;
    uint64_t messages = 0;
    uint64_t bytes = 0;
    uint64_t stale = 0;     // of a discarded step
    uint64_t rejected = 0;  // malformed: the source was dropped for it
    uint64_t lost = 0;      // incarnations that went away
    std::string reason;     // why it was lost last
};

// Whom a wait expects: `count` sources, or these.
struct Expected {
    uint32_t count = 0;
    std::span<const SourceId> sources;
};

struct InboxSpec {
    uint64_t id = 0;
    uint32_t sources = 0;
    uint32_t slots = 0;
    uint64_t slot_bytes = 0;
    std::vector<std::string> names;  // of the sources as we expect them, for errors before they connect; or empty
    std::shared_ptr<StreamDevice> device{};  // in whose memory payloads lie; none: host memory
};

class Inbox {
  public:
    // `name`: of the endpoint, for errors. `interrupted`: set to end a wait early. `hang_up`: on a source that
    // sends nonsense.
    Inbox(std::string name, const InboxSpec& spec, std::shared_ptr<Transport> transport, WaitPolicy policy,
          std::shared_ptr<std::atomic<bool>> interrupted, std::function<void(ConnectionId)> hang_up);

    const InboxSpec& spec() const { return spec_; }
    Membership& membership() { return membership_; }

    std::vector<SourceId> connected();
    void wait_connected(const Expected& expected, Deadline deadline);

    // Until messages of `step` are visible from all expected sources. Error: timeout (names the missing), peer_lost,
    // interrupted, invalid (this endpoint was closed).
    void wait(Step step, const Expected& expected, Deadline deadline);

    // Whether `wait` would not wait.
    bool is_here(Step step, const Expected& expected);

    // The next step of which as many messages are here as its messages announced. Each complete step is returned once.
    // nullopt at the deadline. A lost source: Error(peer_lost), once for each loss, after the steps that were complete
    // before it and before those that were completed later, so that neither keeps the other waiting.
    std::optional<Step> wait_complete(Deadline deadline);
    // `wait_complete` will not mention the sources lost so far: the caller knows.
    void forget_losses();

    struct Partial {
        std::vector<SourceId> arrived;
        std::vector<SourceId> missing;  // connected, but not arrived
    };
    Partial partial(Step step);

    // Steps that have begun to arrive and whose announced messages are not all here, with the age of the first.
    struct Incomplete {
        Step step;
        int64_t age_ns;
    };
    std::vector<Incomplete> incomplete();

    // By source, ascending; as the last wait (or `partial`, `incomplete`) has seen it. So what a wait promised is here.
    std::vector<Message> messages(Step step);
    // visit(message header copy, source, payload) for each message of `step`, by arrival; no allocation.
    template <class Visit>
    void for_each(Step step, Visit&& visit) {
        const StepEntry* entry = table_.find(step);
        if (entry == nullptr) return;
        for (uint32_t place = entry->first; place != no_place; place = stored_[place].next) {
            const Stored& stored = stored_[place];
            visit(stored.header, stored.immediate.source,
                  sources_[stored.immediate.source].landing->slot(stored.immediate.slot) + header_bytes);
        }
    }

    // Payload bytes, wherever they lie, to `to`, which may be the device's memory. There until `finish_copies`.
    void copy(void* to, const std::byte* from, uint64_t num_bytes) const;
    void finish_copies() const;

    void release(Step step);
    void release(Step step, SourceId source);
    void discard_below(Step step);

    // Its connection is of no use any more: from now on the source counts as lost, until it connects again.
    void drop(SourceId source);

    std::vector<SourceCounters> counters();
    const Histogram& wait_histogram() const { return waits_; }
    std::string name_of(SourceId source) const;

  private:
    struct Source {
        SourceCounters counters;
        ConnectionId connection = 0;
        std::shared_ptr<Landing> landing;
        bool loss_reported = true;
        uint64_t lost_after = 0;  // the last announcement before the loss
    };
    struct Stored {
        MessageHeader header;
        Immediate immediate;
        uint16_t sequence = 0;  // last one seen of this slot
        bool held = false;
        uint32_t next = no_place;
    };

    uint32_t place_of(Immediate immediate) const { return immediate.source * spec_.slots + immediate.slot; }
    void look();  // takes in everything that happened since the last look
    void take_arrivals();
    bool poll(SourceId source, std::string& reason);  // false: broken, and why
    bool take_membership();  // true: there was some news
    void join(MembershipEvent& event);
    void lose(SourceId source, const std::string& reason);
    void arrive(SourceId source, Immediate immediate);
    void announce(StepEntry& entry);
    std::optional<Step> next_complete();
    void report_losses_before(uint64_t announcement);
    void drop_messages_of(SourceId source);
    void unlink(StepEntry& entry, uint32_t place);
    void give_back(uint32_t place);
    uint32_t missing(Step step, const Expected& expected);
    bool here(const StepEntry* entry, SourceId source) const;
    [[noreturn]] void time_out(const std::string& what, const std::vector<std::string>& names);
    // A source that the wait cannot do without, if all that can still send are needed; else any. Error(peer_lost): too
    // few can.
    EndId look_for_needed(const StepEntry* entry, const Expected& expected, uint32_t missing);
    void throw_if_over();
    // The sources that are expected: all, where only their number is.
    template <class Body>
    void for_each_of(const Expected& expected, Body&& body) const;
    std::vector<std::string> names_of_missing(const StepEntry* entry, const Expected& expected) const;

    std::string name_;
    InboxSpec spec_;
    std::shared_ptr<Transport> transport_;
    WaitPolicy policy_;
    std::shared_ptr<std::atomic<bool>> interrupted_;
    std::function<void(ConnectionId)> hang_up_;
    Membership membership_;
    std::vector<Source> sources_;
    std::vector<Stored> stored_;
    StepTable table_;
    struct Announcement {
        Step step = 0;
        uint64_t number = 0;  // as in the step's entry, or withdrawn: the step was released, or lost a message again
    };
    std::vector<Announcement> complete_;  // ring of steps that wait_complete has not handed out
    size_t complete_begin_ = 0;
    size_t complete_count_ = 0;
    uint64_t announcements_ = 0;
    Step floor_ = 0;
    ImmediateSink sink_;
    Histogram waits_;
};

}  // namespace antiphon::m2n

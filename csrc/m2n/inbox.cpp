#include "m2n/inbox.h"

#include <algorithm>
#include <cstring>
#include <utility>

namespace antiphon::m2n {

void Membership::push(MembershipEvent event) {
    const std::lock_guard lock(mutex_);
    events_.push_back(std::move(event));
    any_.store(true);
}

std::vector<MembershipEvent> Membership::take() {
    if (!any_.load()) return {};
    const std::lock_guard lock(mutex_);
    any_.store(false);
    return std::exchange(events_, {});
}

namespace {

std::string joined(const std::vector<std::string>& names) {
    std::string text;
    for (const std::string& name : names) text += (text.empty() ? "" : ", ") + name;
    return text;
}

const char* words_for(HeaderFault fault) {
    switch (fault) {
        case HeaderFault::none: return "no fault";
        case HeaderFault::magic: return "not a message header";
        case HeaderFault::immediate: return "the header's immediate is not the one that came with it";
        case HeaderFault::incarnation: return "it is another incarnation's";
        case HeaderFault::length: return "the length is more than a slot holds";
    }
    return "unknown fault";
}

}  // namespace

Inbox::Inbox(std::string name, const InboxSpec& spec, std::shared_ptr<Transport> transport, WaitPolicy policy,
             std::shared_ptr<std::atomic<bool>> interrupted, std::function<void(ConnectionId)> hang_up)
    : name_(std::move(name)),
      spec_(spec),
      transport_(std::move(transport)),
      policy_(policy),
      interrupted_(std::move(interrupted)),
      hang_up_(std::move(hang_up)),
      sources_(spec.sources),
      stored_(size_t{spec.sources} * spec.slots),
      table_(spec.sources * spec.slots),
      // Each step here is in it once at most; the other half has room for withdrawn ones, so that clearing them away is
      // rare.
      complete_(size_t{2} * spec.sources * spec.slots) {
    sink_.reserve(max_slots);
}

// --- taking in what happened ---

// Joins after arrivals: what a replaced incarnation wrote after its successor was welcomed is seen, if at all, before
// the join that drops it. And both again after any news: a newcomer's messages may have rung the bell already.
void Inbox::look() {
    transport_->progress();
    do {
        take_arrivals();
    } while (take_membership());
}

void Inbox::take_arrivals() {
    std::string reason;
    for (SourceId source = 0; source < sources_.size(); ++source) {
        if (sources_[source].counters.state != SourceState::live) continue;
        if (!poll(source, reason)) lose(source, reason);  // the sender's end breaks with ours
    }
}

bool Inbox::poll(SourceId source, std::string& reason) {
    sink_.clear();
    const bool sound = sources_[source].landing->poll(sink_, reason);
    for (const Immediate immediate : sink_) arrive(source, immediate);
    return sound;
}

bool Inbox::take_membership() {
    std::vector<MembershipEvent> events = membership_.take();
    for (MembershipEvent& event : events) {
        if (event.joined) {
            join(event);
            continue;
        }
        for (SourceId source = 0; source < sources_.size(); ++source) {
            Source& gone = sources_[source];
            if (gone.connection != event.connection || gone.counters.state != SourceState::live) continue;
            // What a source wrote completely before it died still counts, also if the news of its death overtook it.
            transport_->progress();
            std::string unused;
            poll(source, unused);
            lose(source, event.name);
        }
    }
    return !events.empty();
}

void Inbox::join(MembershipEvent& event) {
    Source& source = sources_[event.source];
    if (source.counters.state == SourceState::live) lose(event.source, "replaced by a new incarnation");
    drop_messages_of(event.source);
    source.counters.state = SourceState::live;
    source.counters.name = event.name;
    source.counters.incarnation = event.incarnation;
    source.connection = event.connection;
    source.landing = std::move(event.landing);
    source.loss_reported = true;
    for (SlotId slot = 0; slot < spec_.slots; ++slot) stored_[place_of({event.source, slot, 0})].sequence = 0;
}

void Inbox::lose(SourceId index, const std::string& reason) {
    Source& source = sources_[index];
    if (source.counters.state != SourceState::live) return;
    source.counters.state = SourceState::lost;
    source.counters.reason = reason;
    ++source.counters.lost;
    source.loss_reported = false;
    source.lost_after = announcements_;
}

void Inbox::arrive(SourceId index, Immediate immediate) {
    Source& source = sources_[index];
    if (source.counters.state != SourceState::live) return;
    MessageHeader header;
    HeaderFault fault = HeaderFault::immediate;
    if (immediate.source == index && immediate.slot < spec_.slots) {
        std::memcpy(&header, source.landing->header(immediate.slot), header_bytes);
        fault = check(header, immediate, source.counters.incarnation, spec_.slot_bytes);
        const Stored& stored = stored_[place_of(immediate)];
        const bool in_turn = !stored.held && immediate.sequence == next_sequence(stored.sequence);
        if (fault == HeaderFault::none && !in_turn) fault = HeaderFault::immediate;
    }
    if (fault != HeaderFault::none) {
        ++source.counters.rejected;
        lose(index, std::string("sent a malformed message: ") + words_for(fault));
        hang_up_(source.connection);  // it lives, and learns of it
        return;
    }
    const uint32_t place = place_of(immediate);
    Stored& stored = stored_[place];
    stored.sequence = immediate.sequence;
    stored.header = header;
    stored.immediate = immediate;
    ++source.counters.messages;
    source.counters.bytes += header.length;
    if (header.step < floor_) {
        ++source.counters.stale;
        source.landing->release(immediate);
        return;
    }
    stored.held = true;
    StepEntry& entry = table_.find_or_add(header.step, monotonic_ns());
    stored.next = entry.first;
    entry.first = place;
    ++entry.count;
    if (entry.participants == 0) entry.participants = header.participants;
    if (entry.announcement == 0 && entry.participants != 0 && entry.count >= entry.participants) announce(entry);
}

void Inbox::announce(StepEntry& entry) {
    const auto at = [&](size_t i) -> Announcement& { return complete_[(complete_begin_ + i) % complete_.size()]; };
    if (complete_count_ == complete_.size()) {
        size_t kept = 0;
        for (size_t i = 0; i < complete_count_; ++i) {
            const StepEntry* other = table_.find(at(i).step);
            if (other != nullptr && other->announcement == at(i).number) at(kept++) = at(i);
        }
        complete_count_ = kept;
    }
    entry.announcement = ++announcements_;
    at(complete_count_++) = {entry.step, entry.announcement};
}

void Inbox::drop(SourceId source) {
    take_membership();
    lose(source, "dropped: a new connection is awaited");
    sources_[source].loss_reported = true;
}

// --- giving back ---

void Inbox::give_back(uint32_t place) {
    Stored& stored = stored_[place];
    stored.held = false;
    Source& source = sources_[stored.immediate.source];
    if (source.counters.state == SourceState::live && source.counters.incarnation == stored.header.incarnation) {
        source.landing->release(stored.immediate);
    }
}

void Inbox::unlink(StepEntry& entry, uint32_t place) {
    uint32_t* link = &entry.first;
    while (*link != place) link = &stored_[*link].next;
    *link = stored_[place].next;
    --entry.count;
}

void Inbox::release(Step step) {
    StepEntry* entry = table_.find(step);
    if (entry == nullptr) return;
    for (uint32_t place = entry->first; place != no_place; place = stored_[place].next) give_back(place);
    entry->count = 0;
    table_.erase(*entry);
}

void Inbox::release(Step step, SourceId source) {
    StepEntry* entry = table_.find(step);
    if (entry == nullptr) return;
    for (uint32_t place = entry->first; place != no_place;) {
        const uint32_t next = stored_[place].next;
        if (stored_[place].immediate.source == source) {
            unlink(*entry, place);
            give_back(place);
        }
        place = next;
    }
    if (entry->count == 0) table_.erase(*entry);
}

void Inbox::drop_messages_of(SourceId source) {
    for (SlotId slot = 0; slot < spec_.slots; ++slot) {
        const uint32_t place = place_of({source, slot, 0});
        if (!stored_[place].held) continue;
        StepEntry* entry = table_.find(stored_[place].header.step);
        unlink(*entry, place);
        stored_[place].held = false;
        if (entry->count == 0) {
            table_.erase(*entry);
        } else if (!entry->handed_out && entry->count < entry->participants) {
            entry->announcement = 0;  // to be announced again when the new incarnation has sent its part
        }
    }
}

void Inbox::discard_below(Step step) {
    look();
    floor_ = std::max(floor_, step);
    std::vector<Step> old;
    table_.for_each([&](const StepEntry& entry) {
        if (entry.step < floor_) old.push_back(entry.step);
    });
    for (const Step each : old) {
        for_each(each, [&](const MessageHeader&, SourceId source, const std::byte*) {
            ++sources_[source].counters.stale;
        });
        release(each);
    }
}

// --- waiting ---

bool Inbox::here(const StepEntry* entry, SourceId source) const {
    if (entry == nullptr) return false;
    for (uint32_t place = entry->first; place != no_place; place = stored_[place].next) {
        if (stored_[place].immediate.source == source) return true;
    }
    return false;
}

uint32_t Inbox::missing(Step step, const Expected& expected) {
    const StepEntry* entry = table_.find(step);
    if (expected.sources.empty()) {
        const uint32_t count = entry == nullptr ? 0 : entry->count;
        return count < expected.count ? expected.count - count : 0;
    }
    uint32_t missing = 0;
    for (const SourceId source : expected.sources) missing += here(entry, source) ? 0 : 1;
    return missing;
}

std::string Inbox::name_of(SourceId source) const {
    const std::string& name = sources_[source].counters.name;
    if (!name.empty()) return name;
    if (source < spec_.names.size()) return spec_.names[source];
    return "source " + std::to_string(source) + " (never connected)";
}

template <class Body>
void Inbox::for_each_of(const Expected& expected, Body&& body) const {
    for (const SourceId source : expected.sources) body(source);
    if (!expected.sources.empty()) return;
    for (SourceId source = 0; source < sources_.size(); ++source) body(source);
}

std::vector<std::string> Inbox::names_of_missing(const StepEntry* entry, const Expected& expected) const {
    std::vector<std::string> names;
    for_each_of(expected, [&](SourceId source) {
        if (!here(entry, source)) names.push_back(name_of(source));
    });
    return names;
}

void Inbox::time_out(const std::string& what, const std::vector<std::string>& names) {
    throw Error(Code::timeout, name_ + " " + what + ": still waiting for " + joined(names), names);
}

void Inbox::throw_if_over() {
    if (membership_.closed()) throw_invalid(name_, " is closed: nothing can arrive any more");
    if (interrupted_->exchange(false)) throw Error(Code::interrupted, name_ + ": the wait was interrupted");
}

EndId Inbox::look_for_needed(const StepEntry* entry, const Expected& expected, uint32_t missing) {
    uint32_t can_come = 0;
    const Source* lost = nullptr;
    EndId live = any_end;
    for_each_of(expected, [&](SourceId index) {
        if (here(entry, index)) return;
        if (sources_[index].counters.state == SourceState::lost) {
            lost = &sources_[index];
        } else {
            ++can_come;
            if (sources_[index].counters.state == SourceState::live) live = sources_[index].landing->id();
        }
    });
    if (can_come == missing) return live;
    if (lost == nullptr || can_come > missing) return any_end;
    throw_lost(lost->counters.name, lost->counters.reason);
}

void Inbox::wait(Step step, const Expected& expected, Deadline deadline) {
    Patience patience(policy_);
    const bool came = wait_for(*transport_, Event::arrival, patience, deadline, [&]() -> Lacking {
        look();
        const uint32_t lacking = missing(step, expected);
        if (lacking == 0) return {};
        const EndId awaited = look_for_needed(table_.find(step), expected, lacking);
        throw_if_over();
        return {lacking, awaited};
    });
    if (!came) time_out("wait for step " + std::to_string(step), names_of_missing(table_.find(step), expected));
    waits_.add(patience.waited_ns());
}

bool Inbox::is_here(Step step, const Expected& expected) {
    look();
    return missing(step, expected) == 0;
}

std::optional<Step> Inbox::next_complete() {
    while (complete_count_ > 0) {
        const Announcement next = complete_[complete_begin_];
        StepEntry* entry = table_.find(next.step);
        const bool valid =
            entry != nullptr && entry->announcement == next.number && entry->count >= entry->participants;
        if (valid) report_losses_before(next.number);
        complete_begin_ = (complete_begin_ + 1) % complete_.size();
        --complete_count_;
        if (!valid) continue;
        entry->handed_out = true;
        return next.step;
    }
    report_losses_before(announcements_ + 1);
    return std::nullopt;
}

void Inbox::report_losses_before(uint64_t announcement) {
    for (Source& source : sources_) {
        if (source.loss_reported || source.lost_after >= announcement) continue;
        source.loss_reported = true;
        throw_lost(source.counters.name, source.counters.reason);
    }
}

std::optional<Step> Inbox::wait_complete(Deadline deadline) {
    Patience patience(policy_);
    std::optional<Step> step;
    const bool came = wait_for(*transport_, Event::arrival, patience, deadline, [&]() -> Lacking {
        look();
        step = next_complete();
        if (step) return {};
        throw_if_over();
        return {1};  // any message may complete a step: one that has only one participant begins and ends with it
    });
    if (came) waits_.add(patience.waited_ns());
    return step;
}

void Inbox::forget_losses() {
    take_membership();
    for (Source& source : sources_) source.loss_reported = true;
}

std::vector<SourceId> Inbox::connected() {
    take_membership();
    std::vector<SourceId> live;
    for (SourceId source = 0; source < sources_.size(); ++source) {
        if (sources_[source].counters.state == SourceState::live) live.push_back(source);
    }
    return live;
}

void Inbox::wait_connected(const Expected& expected, Deadline deadline) {
    Patience patience(policy_);
    std::vector<std::string> absent;
    const bool came = wait_for(*transport_, Event::arrival, patience, deadline, [&]() -> Lacking {
        const std::vector<SourceId> live = connected();
        absent.clear();
        for_each_of(expected, [&](SourceId source) {
            if (std::ranges::find(live, source) == live.end()) absent.push_back(name_of(source));
        });
        if (expected.sources.empty() ? live.size() >= expected.count : absent.empty()) return {};
        throw_if_over();
        return {1};
    });
    if (!came) time_out("wait for connections", absent);
}

// --- looking ---

Inbox::Partial Inbox::partial(Step step) {
    look();
    const StepEntry* entry = table_.find(step);
    Partial result;
    for (SourceId source = 0; source < sources_.size(); ++source) {
        if (here(entry, source)) {
            result.arrived.push_back(source);
        } else if (sources_[source].counters.state == SourceState::live) {
            result.missing.push_back(source);
        }
    }
    return result;
}

std::vector<Inbox::Incomplete> Inbox::incomplete() {
    look();
    const int64_t now_ns = monotonic_ns();
    std::vector<Incomplete> result;
    table_.for_each([&](const StepEntry& entry) {
        if (entry.participants == 0 || entry.announcement != 0) return;
        result.push_back({entry.step, now_ns - entry.first_arrival_ns});
    });
    return result;
}

std::vector<Message> Inbox::messages(Step step) {
    std::vector<Message> result;
    for_each(step, [&](const MessageHeader& header, SourceId source, const std::byte* payload) {
        Message message{source, header.step, header.participants, {}, payload, header.length, sources_[source].landing};
        std::memcpy(message.user, header.user, sizeof(message.user));
        result.push_back(std::move(message));
    });
    std::ranges::sort(result, {}, &Message::source);
    return result;
}

void Inbox::copy(void* to, const std::byte* from, uint64_t num_bytes) const {
    if (spec_.device) {
        spec_.device->copy(to, from, num_bytes);
    } else {
        std::memcpy(to, from, num_bytes);
    }
}

void Inbox::finish_copies() const {
    if (spec_.device) spec_.device->finish_copies();
}

std::vector<SourceCounters> Inbox::counters() {
    take_membership();
    std::vector<SourceCounters> result;
    for (const Source& source : sources_) result.push_back(source.counters);
    return result;
}

}  // namespace antiphon::m2n

#include "m2n/libfabric_fabric.h"

#if defined(ANTIPHON_HAVE_LIBFABRIC)

#include <poll.h>
#include <sched.h>
#include <sys/eventfd.h>

#include <algorithm>
#include <array>
#include <utility>

#include "m2n/types.h"
#include "m2n/waiting.h"

namespace antiphon::m2n {

namespace {

constexpr int64_t grace_ns = 2'000'000'000;      // how long a closed landing swallows late writes
constexpr int64_t reap_every_ns = 100'000'000;
constexpr size_t most_hollow = 4096;             // far below the system's limit on mappings
constexpr int64_t longest_sleep_ns = 50'000'000;  // a wake-up that a provider forgets costs no more than this
constexpr int64_t retry_sleep_ns = 1'000'000;    // while a write waits for room or for its connection
constexpr int64_t connecting_ns = 5'000'000'000;  // how long a new pair without news may be a connection in the making
constexpr int64_t first_pause_ns = 10'000;       // without a descriptor: look, pause, look, pausing longer and longer
constexpr int64_t longest_pause_ns = 100'000;
constexpr int most_reads = 64;  // of the queue in one look: no other thread gets the mutex meanwhile
constexpr uint32_t entries_per_slot = 2;  // what comes in for it, and the end of what goes out

class OwnerBlocks {
  public:
    explicit OwnerBlocks(std::atomic<bool>& flag) : flag_(flag) { flag_.store(true); }
    ~OwnerBlocks() { flag_.store(false); }
  private:
    std::atomic<bool>& flag_;
};

}  // namespace

// std::mutex is not fair: an owner that polls takes it again before a thread that waits for it has woken up. So
// visitors announce themselves, and `block` lets them through.
class LibfabricFabric::Visit {
  public:
    explicit Visit(LibfabricFabric& fabric) : lock_(fabric.mutex_, std::defer_lock) {
        fabric.visitors_.fetch_add(1);
        lock_.lock();
        fabric.visitors_.fetch_sub(1);
    }

  private:
    std::unique_lock<std::mutex> lock_;
};

LibfabricFabric::LibfabricFabric(const TransportOptions& options)
    : domain_(options),
      name_("libfabric:" + domain_.provider()),
      layered_(core_provider(domain_.provider()) != domain_.provider()),
      tags_(num_tags),
      last_tag_(static_cast<uint32_t>(random_value<uint64_t>() % num_tags)) {
    mailbox_region_ =
        domain_.register_memory(mailbox_, sizeof(mailbox_), FI_WRITE | FI_REMOTE_WRITE, Lane::credit);
    stalled_.reserve(num_tags);  // so that sending never allocates
    wake_ = FileDescriptor(::eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC));
    if (!wake_) throw_errno("eventfd");
    keeper_ = std::make_unique<LibfabricKeeper>([this] { return visit_for_keeper(); });
}

LibfabricFabric::~LibfabricFabric() {
    keeper_.reset();
    // First nothing can come in, then nothing is under way, then the memory goes.
    for (Entry& entry : tags_) {
        if (entry.pair) entry.pair->close_registration();
    }
    mailbox_region_.registration.reset();
    domain_.close_endpoints();
    for (Entry& entry : tags_) entry.pair.reset();
}

// --- opening and closing ---

PairTag LibfabricFabric::next_free_tag() {
    // Unanswered introductions keep their tags only until all others are in use.
    for (const bool spare_introduced : {true, false}) {
        for (uint32_t step = 1; step <= num_tags; ++step) {
            const uint32_t tag = (last_tag_ + step) % num_tags;
            if (tags_[tag].pair || (spare_introduced && tags_[tag].nonce != 0)) continue;
            last_tag_ = tag;
            return static_cast<PairTag>(tag);
        }
    }
    throw_invalid("libfabric: all ", num_tags,
                  " pairs of this endpoint are in use: close some, or use another endpoint");
}

LibfabricIntroduction LibfabricFabric::make_introduction() {
    LibfabricIntroduction introduction;
    introduction.peer = domain_.own_peer();
    introduction.nonce = random_value<uint64_t>() | 1;
    const Visit visit(*this);
    introduction.tag = next_free_tag();
    tags_[introduction.tag].nonce = introduction.nonce;
    introduction.credit_base = mailbox_region_.remote_base + sizeof(mailbox_) / 2;
    introduction.credit_key = mailbox_region_.key();
    return introduction;
}

std::unique_ptr<LibfabricPair> LibfabricFabric::make_pair(PairRole role, const PairSpec& spec, PairTag tag) {
    if (spec.slots == 0 || spec.slots > max_slots || spec.slot_bytes > max_slot_bytes) {
        throw_invalid("libfabric: a pair of ", spec.slots, " slots of ", spec.slot_bytes, " bytes: 1 to ", max_slots,
                      " slots of up to ", max_slot_bytes, " bytes");
    }
    reap();
    if (reserved_entries_ + entries_per_slot * spec.slots > LibfabricDomain::queue_entries) {
        throw_invalid("libfabric: the pairs of this endpoint have ", reserved_entries_ / entries_per_slot, " slots, ",
                      spec.slots, " more are too many: the completion queue allows ",
                      LibfabricDomain::queue_entries / entries_per_slot,
                      " in all; use fewer slots for each source, or several endpoints");
    }
    return std::make_unique<LibfabricPair>(domain_, role, spec, tag, mailbox_region_, mailbox_);
}

LibfabricPair& LibfabricFabric::adopt(PairTag tag, std::unique_ptr<LibfabricPair> pair) {
    Entry& entry = tags_[tag];
    entry.pair = std::move(pair);
    entry.open = true;
    entry.stalled = false;
    entry.nonce = 0;
    entry.polled_at = 0;
    entry.heard = false;
    ++unheard_;
    connecting_until_ns_ = monotonic_ns() + connecting_ns;
    reserved_entries_ += entries_per_slot * entry.pair->spec().slots;
    const Lane heard_on = entry.pair->role() == PairRole::receiver ? Lane::data : Lane::credit;
    receives_wanted_[static_cast<size_t>(heard_on)] += entry.pair->spec().slots;
    post_receives();
    return *entry.pair;
}

std::string LibfabricFabric::why_staged(const std::shared_ptr<StreamDevice>& device) {
    if (!domain_.takes_device_memory()) {
        return "libfabric's provider " + domain_.provider() + " registers no memory of devices (FI_HMEM)";
    }
    if (std::string reason = device->why_not_written(); !reason.empty()) return reason;
    constexpr size_t trial_bytes = 65536;  // a page of a GPU
    const Visit visit(*this);
    try {
        const std::shared_ptr<std::byte> memory = device->allocate(trial_bytes);
        domain_.register_memory(memory.get(), trial_bytes, FI_REMOTE_WRITE, Lane::data, device.get());
        return {};
    } catch (const Error& error) {
        return error.what();
    }
}

LibfabricPair& LibfabricFabric::make_receiver(const PairSpec& spec, const LibfabricIntroduction& introduction,
                                              LibfabricWelcome& welcome) {
    const Visit visit(*this);
    const PairTag tag = next_free_tag();
    std::unique_ptr<LibfabricPair> pair = make_pair(PairRole::receiver, spec, tag);
    pair->connect(introduction.peer, introduction.credit_base, introduction.credit_key, introduction.tag);
    welcome.peer = domain_.own_peer();
    welcome.tag = tag;
    welcome.introduced_tag = introduction.tag;
    welcome.nonce = introduction.nonce;
    welcome.slots_base = pair->region().remote_base;
    welcome.slots_key = pair->region().key();
    welcome.slots_bytes = pair->memory_bytes();
    return adopt(tag, std::move(pair));
}

LibfabricPair& LibfabricFabric::make_sender(const PairSpec& spec, const LibfabricWelcome& welcome) {
    const Visit visit(*this);
    const PairTag tag = welcome.introduced_tag;
    if (welcome.nonce == 0 || tags_[tag].nonce != welcome.nonce || tags_[tag].pair) {
        throw Error(Code::refused, "libfabric: the welcome answers no introduction of this endpoint: connect again");
    }
    if (welcome.slots_bytes != spec.slots * slot_stride(spec.slot_bytes)) {
        throw Error(Code::refused,
                    concat("libfabric: the receiver has ", welcome.slots_bytes, " bytes of slots, ", spec.slots,
                           " slots of ", spec.slot_bytes, " bytes take ", spec.slots * slot_stride(spec.slot_bytes),
                           ": run the same version of Antiphon on both sides"));
    }
    std::unique_ptr<LibfabricPair> pair = make_pair(PairRole::sender, spec, tag);
    pair->connect(welcome.peer, welcome.slots_base, welcome.slots_key, welcome.tag);
    return adopt(tag, std::move(pair));
}

void LibfabricFabric::close(LibfabricPair& pair) {
    const Visit visit(*this);
    Entry& entry = tags_[pair.tag()];
    entry.open = false;
    entry.closed_at_ns = monotonic_ns();
    if (!std::exchange(entry.heard, true)) --unheard_;
    if (std::exchange(entry.stalled, false)) std::erase(stalled_, &pair);
    if (pair.role() == PairRole::receiver) pair.hollow();
    closed_.push_back(pair.tag());
    reap();
}

void LibfabricFabric::reap() {
    const int64_t now_ns = monotonic_ns();
    next_reap_ns_ = now_ns + reap_every_ns;
    std::erase_if(closed_, [&](PairTag tag) {
        Entry& entry = tags_[tag];
        LibfabricPair& pair = *entry.pair;
        const bool receiver = pair.role() == PairRole::receiver;
        if (pair.in_flight() > 0 || (receiver && now_ns - entry.closed_at_ns < grace_ns)) return false;
        reserved_entries_ -= entries_per_slot * pair.spec().slots;
        receives_wanted_[static_cast<size_t>(receiver ? Lane::data : Lane::credit)] -= pair.spec().slots;
        if (receiver) {
            // The provider checks a key once for each message: of one that stopped half way it still has the address.
            pair.close_registration();
            pair.hollow();
            hollow_.push_back(pair.take_memory());
            if (hollow_.size() > most_hollow) hollow_.pop_front();
        }
        entry.pair.reset();
        return true;
    });
}

// --- posted receives, for providers whose completions consume them ---

void LibfabricFabric::post(Receive& receive) {
    const auto lane = static_cast<size_t>(receive.lane);
    const bool wanted = receives_posted_[lane] < receives_wanted_[lane];
    if (wanted && fi_recv(domain_.endpoint(receive.lane), nullptr, 0, nullptr, FI_ADDR_UNSPEC, &receive.context) == 0) {
        ++receives_posted_[lane];
        return;
    }
    idle_receives_.push_back(&receive);
}

void LibfabricFabric::post_receives() {
    if (!domain_.posts_receives()) return;
    for (const Lane lane : {Lane::data, Lane::credit}) {
        const auto index = static_cast<size_t>(lane);
        while (receives_posted_[index] < receives_wanted_[index]) {
            const uint32_t before = receives_posted_[index];
            if (idle_receives_.empty()) idle_receives_.push_back(&receives_.emplace_back());
            Receive& receive = *idle_receives_.back();
            idle_receives_.pop_back();
            receive.lane = lane;
            post(receive);
            if (receives_posted_[index] == before) return;  // refused for now: the next look tries again
        }
    }
}

// --- looking ---

void LibfabricFabric::look() {
    ++looks_;
    std::array<fi_cq_data_entry, 64> completions;
    for (int reads = 0; reads < most_reads; ++reads) {
        const ssize_t count = fi_cq_read(domain_.queue(), completions.data(), completions.size());
        if (count == -FI_EAGAIN) break;
        if (count == -FI_EAVAIL) {
            if (!take_error()) break;
            continue;
        }
        if (count < 0) {
            break_all("libfabric provider " + domain_.provider() + ": reading the completion queue: " +
                      domain_.library().words_for(count));
            break;
        }
        for (ssize_t i = 0; i < count; ++i) take_in(completions[static_cast<size_t>(i)]);
        if (static_cast<size_t>(count) < completions.size()) break;
    }
    if (!stalled_.empty()) flush_stalled();
    if (domain_.posts_receives()) post_receives();
    if (!closed_.empty() && monotonic_ns() >= next_reap_ns_) reap();
}

void LibfabricFabric::take_in(const fi_cq_data_entry& completion) {
    const bool remote = (completion.flags & FI_REMOTE_CQ_DATA) != 0;
    if (remote) {
        const Immediate immediate = Immediate::unpack(static_cast<uint32_t>(completion.data));
        Entry& entry = tags_[immediate.source];  // 12 bits: always within
        if (entry.open) {
            if (!std::exchange(entry.heard, true)) --unheard_;
            entry.pair->on_immediate(immediate.slot, immediate.sequence);
            alarm_ = alarm_ || !entry.pair->broken().empty();
            counts_[static_cast<size_t>(entry.pair->event())].fetch_add(1);
        }
    }
    if (remote || (completion.flags & FI_RECV) != 0) {
        // Only where receives are posted is the context of an incoming write one of ours.
        if (!domain_.posts_receives() || completion.op_context == nullptr) return;
        Receive& receive = *static_cast<Receive*>(completion.op_context);
        --receives_posted_[static_cast<size_t>(receive.lane)];
        post(receive);
        return;
    }
    if (completion.op_context != nullptr) take_written(*static_cast<PairWrite*>(completion.op_context));
}

void LibfabricFabric::take_written(PairWrite& write) {
    // Who waits for its own memory back waits for credits, as far as a bell is concerned.
    if (write.pair->on_written(write)) counts_[static_cast<size_t>(Event::credit)].fetch_add(1);
}

// False: there was none after all.
bool LibfabricFabric::take_error() {
    fi_cq_err_entry error{};
    if (fi_cq_readerr(domain_.queue(), &error, 0) < 0) return false;
    // Incoming writes that failed are the peer's affair, and their context is not ours to look at.
    if ((error.flags & (FI_REMOTE_WRITE | FI_REMOTE_CQ_DATA | FI_RECV)) != 0) return true;
    auto* write = static_cast<PairWrite*>(error.op_context);
    for (Entry& entry : tags_) {
        if (!entry.pair || !entry.pair->owns(write)) continue;
        take_written(*write);
        entry.pair->break_off("libfabric provider " + domain_.provider() + ": a write failed: " +
                              domain_.library().words_for(error.err));
        alarm_ = alarm_ || entry.open;
    }
    return true;
}

void LibfabricFabric::break_all(const std::string& reason) {
    for (Entry& entry : tags_) {
        if (entry.open) entry.pair->break_off(reason);
    }
    alarm_ = true;
}

void LibfabricFabric::note_stalled(LibfabricPair& pair) {
    Entry& entry = tags_[pair.tag()];
    if (!pair.has_waiting() || std::exchange(entry.stalled, true)) return;
    stalled_.push_back(&pair);
}

void LibfabricFabric::flush_stalled() {
    std::erase_if(stalled_, [&](LibfabricPair* pair) {
        pair->flush();
        alarm_ = alarm_ || !pair->broken().empty();
        if (pair->has_waiting() && pair->broken().empty()) return false;
        tags_[pair->tag()].stalled = false;
        return true;
    });
}

// --- the owner's calls ---

void LibfabricFabric::submit(LibfabricPair& pair, SlotId slot, uint16_t sequence, uint64_t num_bytes,
                             const std::byte* payload) {
    {
        const std::lock_guard lock(mutex_);
        pair.submit(slot, sequence, num_bytes, payload);
        ++submitted_;
        note_stalled(pair);
    }
    keeper_->note_write();
}

bool LibfabricFabric::source_reusable(const LibfabricPair& pair, SlotId slot) {
    const std::lock_guard lock(mutex_);
    return pair.source_reusable(slot);
}

bool LibfabricFabric::poll(LibfabricPair& pair, ImmediateSink& sink, std::string& reason) {
    const std::lock_guard lock(mutex_);
    const size_t before = sink.size();
    pair.take(sink);
    uint64_t& polled_at = tags_[pair.tag()].polled_at;
    // Who polls twice without progress in between wants news: one look serves all pairs that are polled in turn.
    if (sink.size() == before && polled_at == looks_) {
        look();
        pair.take(sink);
    }
    polled_at = looks_;
    if (pair.broken().empty()) return true;
    reason = pair.broken();
    return false;
}

void LibfabricFabric::progress() {
    const std::lock_guard lock(mutex_);
    look();
}

void LibfabricFabric::interrupt() {
    interrupted_.store(true);
    const uint64_t one = 1;
    // Fails only when the counter is full, and then the descriptor is readable anyway.
    [[maybe_unused]] const ssize_t written = ::write(wake_.get(), &one, sizeof(one));
}

bool LibfabricFabric::take_interrupt() {
    if (!interrupted_.exchange(false)) return false;
    uint64_t count = 0;
    [[maybe_unused]] const ssize_t taken = ::read(wake_.get(), &count, sizeof(count));
    return true;
}

// Layered providers connect in several steps, of which their descriptor reports none.
int64_t LibfabricFabric::longest_sleep() const {
    const bool connecting = layered_ && unheard_ > 0 && monotonic_ns() < connecting_until_ns_;
    return connecting || !stalled_.empty() ? retry_sleep_ns : longest_sleep_ns;
}

void LibfabricFabric::sleep(int64_t longest_ns, bool by_descriptor) {
    std::array<pollfd, 2> descriptors = {pollfd{wake_.get(), POLLIN, 0},
                                         pollfd{domain_.wait_descriptor(), POLLIN, 0}};
    const timespec limit = to_timespec(longest_ns);
    ::ppoll(descriptors.data(), by_descriptor ? 2 : 1, &limit, nullptr);
}

LibfabricKeeper::Found LibfabricFabric::visit_for_keeper() {
    // Who holds the mutex looks, or is about to.
    const std::unique_lock lock(mutex_, std::try_to_lock);
    if (!lock) return {.owner_looks = true, .active = true};
    const bool owner_looks = looks_ != seen_looks_ || owner_blocks_.load();
    if (!owner_looks) look();
    seen_looks_ = looks_;
    const bool handed_in = submitted_ != std::exchange(seen_submitted_, submitted_);
    return {.owner_looks = owner_looks, .active = handed_in || domain_.under_way() > 0 || !stalled_.empty()};
}

void LibfabricFabric::block(Event event, uint32_t prepared, uint32_t needed, Deadline deadline, int64_t spin_ns,
                            EndId) {
    const bool has_descriptor = domain_.wait_descriptor() >= 0;
    int64_t pause_ns = first_pause_ns;
    const OwnerBlocks owner_blocks(owner_blocks_);
    Spin spin(spin_ns, deadline);
    bool spinning = spin_ns > 0;
    for (;;) {
        int64_t sleep_ns = 0;
        bool may_sleep = true;
        {
            const std::lock_guard lock(mutex_);
            look();
            if (std::exchange(alarm_, false)) return;
            sleep_ns = longest_sleep();
            if (!spinning && has_descriptor) may_sleep = domain_.may_sleep();
        }
        if (take_interrupt() || prepare(event) - prepared >= std::max(needed, 1u)) return;
        const int64_t left_ns = deadline.left_ns();
        if (left_ns == 0) return;
        while (visitors_.load() > 0) ::sched_yield();
        if (spinning) {
            spinning = spin.again();
        } else if (has_descriptor) {
            if (may_sleep) sleep(std::min(left_ns, sleep_ns), true);
        } else {
            sleep(std::min(left_ns, pause_ns), false);
            pause_ns = std::min(2 * pause_ns, longest_pause_ns);
        }
    }
}

}  // namespace antiphon::m2n

#endif

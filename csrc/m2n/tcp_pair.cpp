#include "m2n/tcp.h"

#include <sys/epoll.h>
#include <sys/socket.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cassert>
#include <cerrno>
#include <cstring>
#include <mutex>
#include <new>
#include <utility>
#include <vector>

#include "base/huge_buffer.h"
#include "m2n/tcp_connection.h"
#include "m2n/tcp_frames.h"
#include "m2n/types.h"

namespace antiphon::m2n {

namespace {

constexpr uint32_t input_events = EPOLLIN | EPOLLRDHUP | EPOLLHUP | EPOLLERR;
constexpr int max_pieces = 16;  // of one sendmsg

HugeBuffer make_slots(const PairSpec& spec) {
    try {
        return HugeBuffer(spec.slots * slot_stride(spec.slot_bytes));
    } catch (const std::bad_alloc&) {
        throw Error(Code::system, concat("tcp: no address space for ", spec.slots, " slots of ", spec.slot_bytes,
                                         " bytes: ask for less or smaller ones"));
    }
}

// What both ends have: slots, the connection, and a queue of news for the owner.
class PairChannel : public TcpChannel {
  public:
    PairChannel(std::shared_ptr<TcpHub> hub, const PairSpec& spec)
        : hub_(std::move(hub)), spec_(spec), slots_(make_slots(spec)) {}

    bool has_news() const override { return news_.load(std::memory_order_acquire); }

    int connection() override {
        const std::lock_guard lock(mutex_);
        return connection_.get();
    }

    void on_ready(const Visit& visit) override {
        std::unique_lock lock(mutex_, std::defer_lock);
        if (visit.patient) {
            lock.lock();
        } else if (!lock.try_lock()) {
            return;  // the thread that holds it works on it; the event is reported again
        }
        if (connection_ && (visit.events & EPOLLOUT) != 0) write();
        if (connection_ && (visit.events & input_events) != 0) read();
        if (connection_ && (visit.events & EPOLLERR) != 0) {
            int error = 0;
            socklen_t size = sizeof(error);
            ::getsockopt(connection_.get(), SOL_SOCKET, SO_ERROR, &error, &size);
            if (error != 0) break_off(std::string("data connection: ") + std::strerror(error));
        }
    }

    bool hand_out(ImmediateSink& sink, std::string& reason) {
        if (!news_.load(std::memory_order_acquire)) return true;
        const std::lock_guard lock(mutex_);
        const bool handed_out = take_news(sink);
        if (broken_.empty()) {
            news_.store(false, std::memory_order_release);
            return true;
        }
        if (handed_out) return true;
        reason = broken_;
        return false;
    }

    // The handle goes away.
    void close() {
        hub_->remove(id_);
        const std::lock_guard lock(mutex_);
        closed_ = true;
        hang_up();
    }

  protected:
    virtual bool take_news(ImmediateSink& sink) = 0;
    virtual void read() = 0;
    virtual void write() = 0;
    virtual void forget_queued() = 0;  // the connection is gone

    std::byte* memory() const { return reinterpret_cast<std::byte*>(slots_.data()); }
    std::byte* place_of(SlotId slot) const { return memory() + slot * slot_stride(spec_.slot_bytes); }
    void set_id(TcpHub::ChannelId id) { id_ = id; }
    void tell(Event event, size_t num_events) {
        if (num_events == 0) return;
        news_.store(true, std::memory_order_release);
        for (size_t i = 0; i < num_events; ++i) hub_->count(event);
    }
    // A thread that sleeps on the connection holds it open until it wakes, even if its descriptor is closed: closing
    // alone would neither wake it nor tell the peer.
    void hang_up() {
        if (connection_) ::shutdown(connection_.get(), SHUT_RDWR);
        connection_.reset();
        forget_queued();
    }
    void break_off(std::string reason) {
        hang_up();
        broken_ = std::move(reason);
        news_.store(true, std::memory_order_release);
        hub_->interrupt();
    }
    void want_output(bool wanted) {
        if (wanted == output_wanted_) return;
        hub_->want_output(id_, connection_.get(), wanted);
        output_wanted_ = wanted;
    }
    // After a failed call: true if it should be made again, false if nothing can be done now or ever.
    bool try_again(const char* doing) {
        if (errno == EINTR) return true;
        if (errno != EAGAIN && errno != EWOULDBLOCK) break_off(std::string(doing) + ": " + std::strerror(errno));
        return false;
    }

    const std::shared_ptr<TcpHub> hub_;
    const PairSpec spec_;
    std::mutex mutex_;  // of everything below
    const HugeBuffer slots_;
    TcpHub::ChannelId id_ = 0;
    FileDescriptor connection_;
    bool closed_ = false;
    bool output_wanted_ = false;
    std::string broken_;  // why, once it is
    std::atomic<bool> news_{false};
};

class LandingChannel final : public PairChannel, public Landing {
  public:
    LandingChannel(std::shared_ptr<TcpHub> hub, const PairSpec& spec, const TransportOptions& options,
                   const TcpTuning& tuning)
        : PairChannel(std::move(hub), spec),
          options_(options),
          tuning_(tuning),
          reader_(spec, memory()),
          credits_((spec.slots + 1) * sizeof(uint32_t)) {}

    void expect_connection(TcpHub::ChannelId id, TcpHub::Token& token) {
        set_id(id);
        token = hub_->expect(id);
    }

    void attach(FileDescriptor connection) override {
        const std::lock_guard lock(mutex_);
        if (closed_ || connection_) return;
        connection_ = std::move(connection);
        try {
            set_receiver_options(connection_.get(), options_);
            const uint64_t wanted = spec_.slots * slot_stride(spec_.slot_bytes);
            hub_->note_buffer(wanted, widen_receive_buffer(connection_.get(), wanted, tuning_));
            hub_->watch_landing(id_, connection_.get());
        } catch (const Error& error) {
            break_off(error.what());
        }
    }

    EndId id() const override { return id_; }
    const std::byte* slot(SlotId slot) const override { return place_of(slot); }
    bool poll(ImmediateSink& sink, std::string& reason) override { return hand_out(sink, reason); }

    void release(Immediate immediate) override {
        const std::lock_guard lock(mutex_);
        const bool held = reader_.release(immediate);
        assert(held);
        if (!held || !connection_) return;
        const uint32_t word = immediate.pack();
        if (num_credit_bytes_ + sizeof(word) > credits_.size()) {
            // Only a sender that writes again without its credit gets us here.
            break_off("the sender takes no credits while it goes on sending");
            return;
        }
        std::memcpy(credits_.data() + num_credit_bytes_, &word, sizeof(word));
        num_credit_bytes_ += sizeof(word);
        if (!output_wanted_) write();
    }

  private:
    bool take_news(ImmediateSink& sink) override {
        const bool any = reader_.num_arrivals() > 0;
        while (reader_.num_arrivals() > 0) sink.push_back(reader_.next_arrival());
        return any;
    }

    // A low-water mark (SO_RCVLOWAT) at the payload's end would save wake-ups only where a sender is slower than its
    // receiver: between processes of one machine it saved none, and it costs two calls a message. So there is none.
    void read() override {
        for (;;) {
            iovec pieces[2];
            const int num_pieces = reader_.targets(pieces);
            const size_t room = pieces[0].iov_len + (num_pieces > 1 ? pieces[1].iov_len : 0);
            const ssize_t got = ::readv(connection_.get(), pieces, num_pieces);
            if (got < 0) {
                if (try_again("reading from the data connection")) continue;
                return;
            }
            if (got == 0) return break_off(end_of_stream());
            const size_t before = reader_.num_arrivals();
            std::string fault;
            const bool sound = reader_.advance(static_cast<size_t>(got), fault);
            tell(Event::arrival, reader_.num_arrivals() - before);
            if (!sound) return break_off("the sender broke the protocol: " + fault);
            if (static_cast<size_t>(got) < room) return;  // that was all
        }
    }

    std::string end_of_stream() const {
        if (!reader_.inside_message()) return "the sender closed its data connection";
        return "the sender closed its data connection in the middle of a message, " +
               std::to_string(reader_.missing_bytes()) + " payload bytes before its end";
    }

    void write() override {
        while (num_credit_bytes_ > 0) {
            const ssize_t sent =
                ::send(connection_.get(), credits_.data(), num_credit_bytes_, MSG_NOSIGNAL | MSG_DONTWAIT);
            if (sent < 0) {
                if (try_again("returning credits")) continue;
                if (!connection_) return;
                break;
            }
            num_credit_bytes_ -= static_cast<size_t>(sent);
            std::memmove(credits_.data(), credits_.data() + sent, num_credit_bytes_);
        }
        want_output(num_credit_bytes_ > 0);
    }

    void forget_queued() override { num_credit_bytes_ = 0; }

    const TransportOptions options_;
    const TcpTuning tuning_;
    TcpFrameReader reader_;
    std::vector<std::byte> credits_;  // released, not yet with the kernel
    size_t num_credit_bytes_ = 0;
};

class LinkChannel final : public PairChannel, public Link {
  public:
    // `cached_bytes`: so much on its way at this endpoint is taken to be in the caches.
    LinkChannel(std::shared_ptr<TcpHub> hub, const PairSpec& spec, uint64_t cached_bytes)
        : PairChannel(std::move(hub), spec),
          cached_bytes_(cached_bytes),
          writer_(spec, memory()),
          credits_(spec.slots) {}

    void start(TcpHub::ChannelId id, FileDescriptor connection) {
        const std::lock_guard lock(mutex_);
        set_id(id);
        connection_ = std::move(connection);
        hub_->watch_link(id_, connection_.get());
    }

    EndId id() const override { return id_; }
    std::byte* slot(SlotId slot) override { return place_of(slot); }
    bool poll(ImmediateSink& sink, std::string& reason) override { return hand_out(sink, reason); }

    void post(Immediate immediate, const MessageHeader& header, const std::byte* payload) override {
        const std::lock_guard lock(mutex_);
        if (!connection_) return;  // `poll` says so
        std::byte* in_slot = slot(immediate.slot);
        const void* given = &header;
        if (given != in_slot) std::memcpy(in_slot, &header, header_bytes);
        writer_.push(immediate, payload, header.length);
        outstanding_bytes_ += header.length;
        hub_->outstanding().add(header.length);
        all_taken_.store(false, std::memory_order_release);
        if (!output_wanted_) write();
    }

    bool source_reusable(SlotId slot) override {
        if (all_taken_.load(std::memory_order_acquire)) return true;
        const std::lock_guard lock(mutex_);
        return !writer_.queued(slot);
    }

  private:
    bool take_news(ImmediateSink& sink) override {
        const bool any = !credits_.empty();
        while (!credits_.empty()) sink.push_back(credits_.pop());
        return any;
    }

    void write() override {
        while (!writer_.empty()) {
            const ssize_t sent = send_some();
            if (sent < 0) {
                if (try_again("sending")) continue;
                if (!connection_) return;
                break;
            }
            writer_.advance(static_cast<size_t>(sent));
        }
        const bool drained_late = writer_.empty() && output_wanted_;
        want_output(!writer_.empty());
        if (!writer_.empty()) return;
        all_taken_.store(true, std::memory_order_release);
        if (drained_late) hub_->rouse(Event::credit);  // a caller may wait for `source_reusable`
    }

    ssize_t send_some() {
        const std::span<const std::byte> rest = writer_.rest_in_slot();
        const bool cached = hub_->outstanding().recent_peak() <= cached_bytes_;
        if (pipe_.takes(rest, cached)) return pipe_.send(connection_.get(), rest);
        std::array<iovec, max_pieces> pieces;
        msghdr message{};
        message.msg_iov = pieces.data();
        message.msg_iovlen = static_cast<size_t>(writer_.pieces(pieces.data(), max_pieces));
        return ::sendmsg(connection_.get(), &message, MSG_NOSIGNAL | MSG_DONTWAIT);
    }

    void read() override {
        std::array<std::byte, max_slots * sizeof(uint32_t)> bytes;
        for (;;) {
            std::memcpy(bytes.data(), partial_.data(), num_partial_);
            const size_t room = bytes.size() - num_partial_;
            const ssize_t got = ::recv(connection_.get(), bytes.data() + num_partial_, room, MSG_DONTWAIT);
            if (got < 0) {
                if (try_again("reading credits")) continue;
                return;
            }
            if (got == 0) return break_off("the receiver closed its data connection");
            if (!take_credits({bytes.data(), num_partial_ + static_cast<size_t>(got)})) return;
            if (static_cast<size_t>(got) < room) return;  // that was all
        }
    }

    bool take_credits(std::span<const std::byte> bytes) {
        size_t num_credits = 0;
        std::string fault;
        while (bytes.size() >= sizeof(uint32_t) && fault.empty()) {
            uint32_t word = 0;
            std::memcpy(&word, bytes.data(), sizeof(word));
            bytes = bytes.subspan(sizeof(word));
            const Immediate immediate = Immediate::unpack(word);
            if (!writer_.credit(immediate, fault)) continue;
            forget_outstanding(writer_.length(immediate.slot));
            credits_.push(immediate);
            ++num_credits;
        }
        tell(Event::credit, num_credits);
        if (!fault.empty()) {
            break_off("the receiver broke the protocol: " + fault);
            return false;
        }
        num_partial_ = bytes.size();
        std::memcpy(partial_.data(), bytes.data(), num_partial_);
        return true;
    }

    void forget_queued() override {
        writer_.abandon();
        pipe_.close();
        forget_outstanding(outstanding_bytes_);
        all_taken_.store(true, std::memory_order_release);
    }

    void forget_outstanding(uint64_t bytes) {
        outstanding_bytes_ -= bytes;
        hub_->outstanding().subtract(bytes);
    }

    const uint64_t cached_bytes_;
    TcpFrameWriter writer_;
    SplicePipe pipe_;
    uint64_t outstanding_bytes_ = 0;  // our part of the hub's
    FixedQueue<Immediate> credits_;  // came back, not yet handed out
    std::array<std::byte, sizeof(uint32_t)> partial_{};  // of a credit
    size_t num_partial_ = 0;
    std::atomic<bool> all_taken_{true};  // the kernel has all that was posted
};

// Letting go of the handle closes the channel, which lives on while a thread visits it.
template <class End, class Channel>
std::shared_ptr<End> handle_of(std::shared_ptr<Channel> channel) {
    return {channel.get(), [channel](End*) { channel->close(); }};
}

}  // namespace

std::shared_ptr<Landing> make_tcp_landing(const std::shared_ptr<TcpHub>& hub, const PairSpec& spec,
                                          const TransportOptions& options, const TcpTuning& tuning,
                                          TcpHub::Token& token) {
    auto channel = std::make_shared<LandingChannel>(hub, spec, options, tuning);
    auto landing = handle_of<Landing>(channel);
    channel->expect_connection(hub->add(channel), token);
    return landing;
}

std::shared_ptr<Link> make_tcp_link(const std::shared_ptr<TcpHub>& hub, const PairSpec& spec,
                                    const TransportOptions& options, const TcpTuning& tuning,
                                    FileDescriptor connection) {
    const uint64_t wanted = spec.slots * slot_stride(spec.slot_bytes);
    hub->note_buffer(wanted, widen_send_buffer(connection.get(), wanted, tuning));
    const uint64_t cached_bytes = tuning.cached_bytes / std::max(options.local_processes, 1u);
    auto channel = std::make_shared<LinkChannel>(hub, spec, cached_bytes);
    auto link = handle_of<Link>(channel);
    channel->start(hub->add(channel), std::move(connection));
    return link;
}

}  // namespace antiphon::m2n

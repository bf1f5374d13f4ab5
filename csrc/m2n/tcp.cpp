// The back-end for any two machines that reach each other by TCP, without a library: one connection a pair (see
// tcp_frames.h for what travels on it, tcp_connection.h for its marks and buffers, tcp.h for waiting).
//
// The receiver makes room and a token; the sender connects to where the receiver's control listens, presents the token,
// and the control thread hands the connection over. From then on everything happens in the owner's calls, while the
// kernel carries what fits into its buffers. Only where they are smaller than a pair's slots a progress thread moves
// bytes while the owner computes. It is not the rule, because it costs a switch between the last byte and the waiter.
#include "m2n/tcp.h"

#include <poll.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <iterator>
#include <memory>
#include <optional>
#include <system_error>
#include <thread>
#include <utility>

#include "m2n/control.h"
#include "m2n/socket.h"
#include "m2n/types.h"
#include "m2n/waiting.h"

namespace antiphon::m2n {

namespace {

constexpr int max_events = 64;  // per call; the rest is reported by the next one
// In place of channels' numbers.
constexpr uint64_t knock_id = 0;
constexpr uint64_t urgent_id = 1;
constexpr uint64_t arrivals_id = 2;
constexpr uint64_t first_channel_id = 3;
static_assert(first_channel_id > any_end);

}  // namespace

TcpHub::TcpHub()
    : urgent_(make_epoll()),
      arrivals_(make_epoll()),
      everything_(make_epoll()),
      knock_(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)),
      next_id_(first_channel_id) {
    if (!knock_) throw_errno("eventfd");
    control_epoll(urgent_.get(), EPOLL_CTL_ADD, knock_.get(), EPOLLIN, knock_id);
    control_epoll(arrivals_.get(), EPOLL_CTL_ADD, urgent_.get(), EPOLLIN, urgent_id);
    control_epoll(everything_.get(), EPOLL_CTL_ADD, arrivals_.get(), EPOLLIN, arrivals_id);
}

TcpHub::ChannelId TcpHub::add(std::shared_ptr<TcpChannel> channel) {
    const std::lock_guard lock(mutex_);
    const ChannelId id = next_id_++;
    channels_.emplace(id, std::move(channel));
    return id;
}

void TcpHub::remove(ChannelId id) {
    std::shared_ptr<TcpChannel> channel;  // its destructor runs without the lock
    const std::lock_guard lock(mutex_);
    std::erase_if(expected_, [id](const auto& entry) { return entry.second == id; });
    const auto found = channels_.find(id);
    if (found == channels_.end()) return;
    channel = std::move(found->second);
    channels_.erase(found);
}

TcpHub::Token TcpHub::expect(ChannelId id) {
    const Token token = random_value<Token>();
    const std::lock_guard lock(mutex_);
    expected_.emplace(token, id);
    return token;
}

bool TcpHub::attach(std::span<const std::byte> token, FileDescriptor& connection) {
    if (token.size() != token_bytes) return false;
    Token presented;
    std::ranges::copy(token, presented.begin());
    std::shared_ptr<TcpChannel> channel;
    {
        const std::lock_guard lock(mutex_);
        const auto found = expected_.find(presented);
        if (found == expected_.end()) return false;
        channel = channels_.at(found->second);
        expected_.erase(found);
    }
    channel->attach(std::move(connection));
    return true;
}

void TcpHub::watch_landing(ChannelId id, int fd) { control_epoll(arrivals_.get(), EPOLL_CTL_ADD, fd, EPOLLIN, id); }

void TcpHub::watch_link(ChannelId id, int fd) {
    control_epoll(arrivals_.get(), EPOLL_CTL_ADD, fd, EPOLLRDHUP, id);
    control_epoll(everything_.get(), EPOLL_CTL_ADD, fd, EPOLLIN, id);
}

void TcpHub::want_output(ChannelId id, int fd, bool wanted) {
    control_epoll(urgent_.get(), wanted ? EPOLL_CTL_ADD : EPOLL_CTL_DEL, fd, EPOLLOUT, id);
}

void TcpHub::rouse(Event event) {
    roused(event).store(true);
    ring_always(bells_.of(event));
}

void TcpHub::interrupt() {
    rouse(Event::arrival);
    rouse(Event::credit);
    knock();
}

void TcpHub::knock() {
    const uint64_t one = 1;
    // It fails only where the counter is full, and then a knock is pending anyway.
    [[maybe_unused]] const ssize_t written = ::write(knock_.get(), &one, sizeof(one));
}

void TcpHub::note_buffer(uint64_t wanted, uint64_t granted) {
    if (granted < wanted && !wants_thread_.exchange(true)) knock();  // the owner starts it; if it sleeps, now
}

bool TcpHub::reached(Event event, uint32_t target) {
    return static_cast<int32_t>(bells_.of(event).count.load() - target) >= 0;
}

void TcpHub::wait_on_bell(Event event, uint32_t prepared, uint32_t needed, Deadline deadline) {
    wait(bells_.of(event), prepared, needed, roused(event), deadline, 0);
}

bool TcpHub::has_news(ChannelId id) {
    if (id == any_end) return false;
    const std::shared_ptr<TcpChannel> channel = find(id);
    return channel != nullptr && channel->has_news();
}

bool TcpHub::sleep_on(ChannelId id, Deadline deadline) {
    if (id == any_end) return false;
    const std::shared_ptr<TcpChannel> channel = find(id);
    const int fd = channel == nullptr ? -1 : channel->connection();
    if (fd < 0) return false;
    pollfd entries[] = {{fd, POLLIN | POLLRDHUP, 0}, {urgent_.get(), POLLIN, 0}};
    const timespec limit = to_timespec(deadline.left_ns());
    if (::ppoll(entries, std::size(entries), &limit, nullptr) < 0 && errno != EINTR) throw_errno("ppoll");
    return true;
}

std::shared_ptr<TcpChannel> TcpHub::find(ChannelId id) {
    const std::lock_guard lock(mutex_);
    const auto found = channels_.find(id);
    return found == channels_.end() ? nullptr : found->second;
}

void TcpHub::visit_ready(int epoll, int timeout_ms, Visit visit) {
    epoll_event events[max_events];
    const int ready = ::epoll_wait(epoll, events, max_events, timeout_ms);
    if (ready < 0 && errno != EINTR) throw_errno("epoll_wait");
    std::optional<int> nested;  // each set holds one other at most
    for (int i = 0; i < ready; ++i) {
        const uint64_t id = events[i].data.u64;
        if (id == knock_id) {
            uint64_t knocks = 0;
            [[maybe_unused]] const ssize_t taken = ::read(knock_.get(), &knocks, sizeof(knocks));
        } else if (id == urgent_id) {
            nested = urgent_.get();
        } else if (id == arrivals_id) {
            nested = arrivals_.get();
        } else if (const std::shared_ptr<TcpChannel> channel = find(id)) {
            visit.events = events[i].events;
            channel->on_ready(visit);
        }
    }
    if (nested) visit_ready(*nested, 0, visit);
}

namespace {

constexpr int64_t longest_sleep_ms = 60'000;  // then look again, whatever happened

void check_spec(const PairSpec& spec) {
    check_range("tcp: the source's number", spec.source, 0, max_sources - 1);
    check_range("tcp: the number of slots", spec.slots, 1, max_slots);
    check_range("tcp: a slot's size", spec.slot_bytes, 0, max_slot_bytes);
}

int sleep_ms(Deadline deadline) {
    const int64_t left_ns = deadline.left_ns();
    return static_cast<int>(std::min(left_ns / 1'000'000 + (left_ns % 1'000'000 != 0), longest_sleep_ms));
}

class Tcp final : public Transport {
  public:
    Tcp(const TransportOptions& options, const TcpTuning& tuning)
        : options_(options), tuning_(tuning), hub_(std::make_shared<TcpHub>()) {}

    ~Tcp() override {
        if (!thread_.joinable()) return;
        stopping_.store(true);
        hub_->knock();
        thread_.join();
    }

    const char* name() const override { return "tcp"; }
    bool same_host_only() const override { return false; }

    Blob introduce() override { return {}; }

    std::shared_ptr<Landing> open_landing(const PairSpec& spec, const Blob&, Blob& welcome) override {
        check_spec(spec);
        TcpHub::Token token;
        std::shared_ptr<Landing> landing = make_tcp_landing(hub_, spec, options_, tuning_, token);
        welcome.bytes.assign(token.begin(), token.end());
        return landing;
    }

    std::shared_ptr<Link> open_link(const PairSpec& spec, Blob& welcome, const std::string& host, uint16_t port,
                                    Deadline deadline) override {
        check_spec(spec);
        if (welcome.bytes.size() != token_bytes) {
            throw Error(Code::refused,
                        concat("tcp: the receiver's welcome holds ", welcome.bytes.size(), " bytes, not a token of ",
                               token_bytes, ": is its endpoint of another transport?"));
        }
        FileDescriptor connection = connect_tcp(host, port, options_, deadline);
        const std::string peer = host + ":" + std::to_string(port);
        write_tcp(connection.get(), attach_greeting(welcome.bytes), peer, deadline);
        std::shared_ptr<Link> link = make_tcp_link(hub_, spec, options_, tuning_, std::move(connection));
        start_thread_if_wanted();
        return link;
    }

    bool adopt(FileDescriptor& connection, std::span<const std::byte> token) override {
        return hub_->attach(token, connection);
    }

    void progress() override {
        start_thread_if_wanted();
        hub_->visit_everything(0, visit());
    }

    uint32_t prepare(Event event) override { return hub_->prepare(event); }

    void block(Event event, uint32_t prepared, uint32_t needed, Deadline deadline, int64_t spin_ns,
               EndId awaited) override {
        const uint32_t target = prepared + needed;
        Spin spin(spin_ns, deadline);
        while (!hub_->reached(event, target) && !hub_->take_rouse(event) && !deadline.passed()) {
            start_thread_if_wanted();
            if (spin.again()) {
                visit_for(event, 0);
            } else if (thread_.joinable()) {
                hub_->wait_on_bell(event, prepared, needed, deadline);
            } else if (hub_->has_news(awaited)) {
                return;  // the caller knows whom it misses next
            } else {
                visit_for(event, hub_->sleep_on(awaited, deadline) ? 0 : sleep_ms(deadline));
            }
        }
    }

    void interrupt() override { hub_->interrupt(); }

  private:
    // With a progress thread about, a channel that is busy is in good hands.
    Visit visit() const { return {.events = 0, .patient = !thread_.joinable()}; }

    void visit_for(Event event, int timeout_ms) {
        if (event == Event::arrival) {
            hub_->visit_arrivals(timeout_ms, visit());
        } else {
            hub_->visit_everything(timeout_ms, visit());
        }
    }

    void start_thread_if_wanted() {
        if (thread_.joinable() || !hub_->wants_thread()) return;
        try {
            thread_ = std::thread([this] { move_bytes(); });
        } catch (const std::system_error& error) {
            throw Error(Code::system, concat("tcp: the progress thread cannot be started: ", error.what()));
        }
    }

    void move_bytes() {
        const Visit visit{.events = 0, .patient = true};
        while (!stopping_.load()) hub_->visit_everything(-1, visit);
    }

    const TransportOptions options_;
    const TcpTuning tuning_;
    const std::shared_ptr<TcpHub> hub_;
    std::thread thread_;  // started by the owner, once
    std::atomic<bool> stopping_{false};
};

}  // namespace

std::shared_ptr<Transport> make_tcp(const TransportOptions& options, const TcpTuning& tuning) {
    check_tcp_options(options);
    return std::make_shared<Tcp>(options, tuning);
}

std::shared_ptr<Transport> make_tcp(const TransportOptions& options) { return make_tcp(options, TcpTuning{}); }

}  // namespace antiphon::m2n

#include "m2n/tcp_hub.h"

#include <poll.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <ctime>
#include <iterator>
#include <optional>
#include <utility>

#include "m2n/error.h"

namespace antiphon::m2n {

namespace {

constexpr int max_events = 64;  // per call; the rest is reported by the next one
// In place of channels' numbers.
constexpr uint64_t knock_id = 0;
constexpr uint64_t urgent_id = 1;
constexpr uint64_t arrivals_id = 2;
constexpr uint64_t first_channel_id = 3;
static_assert(first_channel_id > any_end);

void control(int epoll, int operation, int fd, uint32_t events, uint64_t id) {
    epoll_event event{};
    event.events = events;
    event.data.u64 = id;
    if (::epoll_ctl(epoll, operation, fd, &event) != 0) throw_errno("epoll_ctl");
}

FileDescriptor make_epoll() {
    FileDescriptor fd(::epoll_create1(EPOLL_CLOEXEC));
    if (!fd) throw_errno("epoll_create1");
    return fd;
}

}  // namespace

TcpHub::TcpHub()
    : urgent_(make_epoll()),
      arrivals_(make_epoll()),
      everything_(make_epoll()),
      knock_(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)),
      next_id_(first_channel_id) {
    if (!knock_) throw_errno("eventfd");
    control(urgent_.get(), EPOLL_CTL_ADD, knock_.get(), EPOLLIN, knock_id);
    control(arrivals_.get(), EPOLL_CTL_ADD, urgent_.get(), EPOLLIN, urgent_id);
    control(everything_.get(), EPOLL_CTL_ADD, arrivals_.get(), EPOLLIN, arrivals_id);
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
    Token token;
    fill_random(token);
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

void TcpHub::watch_landing(ChannelId id, int fd) { control(arrivals_.get(), EPOLL_CTL_ADD, fd, EPOLLIN, id); }

void TcpHub::watch_link(ChannelId id, int fd) {
    control(arrivals_.get(), EPOLL_CTL_ADD, fd, EPOLLRDHUP, id);
    control(everything_.get(), EPOLL_CTL_ADD, fd, EPOLLIN, id);
}

void TcpHub::want_output(ChannelId id, int fd, bool wanted) {
    control(urgent_.get(), wanted ? EPOLL_CTL_ADD : EPOLL_CTL_DEL, fd, EPOLLOUT, id);
}

void TcpHub::rouse(Event event) {
    roused(event).store(true);
    ring_always(bell(event));
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

void TcpHub::note_buffers(uint64_t wanted, uint64_t granted_send, uint64_t granted_receive) {
    const auto least = [](uint64_t before, uint64_t now) {
        if (now == 0) return before;
        return before == 0 ? now : std::min(before, now);
    };
    {
        const std::lock_guard lock(mutex_);
        buffers_.wanted = std::max(buffers_.wanted, wanted);
        buffers_.granted_send = least(buffers_.granted_send, granted_send);
        buffers_.granted_receive = least(buffers_.granted_receive, granted_receive);
    }
    if (std::max(granted_send, granted_receive) >= wanted) return;
    if (!wants_thread_.exchange(true)) knock();  // the owner starts it; if it sleeps, now
}

TcpBufferReport TcpHub::buffers() const {
    const std::lock_guard lock(mutex_);
    return buffers_;
}

bool TcpHub::reached(Event event, uint32_t target) {
    return static_cast<int32_t>(bell(event).count.load() - target) >= 0;
}

void TcpHub::wait_on_bell(Event event, uint32_t prepared, uint32_t needed, Deadline deadline) {
    wait(bell(event), prepared, needed, roused(event), deadline, 0);
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
    const int64_t left_ns = deadline.left_ns();
    const timespec limit{left_ns / 1'000'000'000, left_ns % 1'000'000'000};
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

}  // namespace antiphon::m2n

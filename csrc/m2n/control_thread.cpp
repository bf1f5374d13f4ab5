#include "m2n/control_thread.h"

#include <netinet/in.h>
#include <netinet/tcp.h>
#include <pthread.h>
#include <signal.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/timerfd.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cinttypes>
#include <cstdio>
#include <exception>
#include <limits>
#include <system_error>

#include "m2n/types.h"

namespace antiphon::m2n {

namespace {

constexpr int64_t no_time = std::numeric_limits<int64_t>::max();
// A stopped process reads nothing. Its receive buffer must never fill up with heartbeats, because a full one looks like
// a dead machine; TCP keep-alives, which carry no data, watch over the peer from here on.
constexpr uint32_t max_unanswered_heartbeats = 100;

std::string random_unix_name() {
    char digits[17];
    std::snprintf(digits, sizeof(digits), "%016" PRIx64, random_value<uint64_t>());
    return "antiphon-m2n-" + std::to_string(getpid()) + "-" + digits;
}

void check_positive(const char* what, int64_t value) {
    if (value > 0) return;
    throw_invalid(what, " is ", value, ": it must be positive");
}

void check(const ControlOptions& options) {
    check_text("the endpoint's name", options.name, max_name_bytes);
    check_positive("heartbeat_ns", options.heartbeat_ns);
    check_positive("handshake_ns", options.handshake_ns);
    check_positive("max_connections", options.max_connections);
    if (options.dead_after_ns <= options.heartbeat_ns) {
        throw_invalid("dead_after_ns is ", options.dead_after_ns, ": it must be longer than heartbeat_ns, which is ",
                      options.heartbeat_ns);
    }
}

void set_keep_alive(int socket, int option_level, int option, int value) {
    if (setsockopt(socket, option_level, option, &value, sizeof(value)) != 0) throw_errno("setsockopt keep-alive");
}

}  // namespace

Control::Control(ControlOptions options, ControlHandler& handler)
    : options_(std::move(options)), handler_(handler), next_id_(first_connection_key) {
    check(options_);
    epoll_ = make_epoll();
    bell_ = FileDescriptor(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
    if (!bell_) throw_errno("eventfd");
    timer_ = FileDescriptor(timerfd_create(CLOCK_MONOTONIC, TFD_CLOEXEC | TFD_NONBLOCK));
    if (!timer_) throw_errno("timerfd_create");
    watch(bell_.get(), bell_key);
    watch(timer_.get(), timer_key);
    listen();
    start();
}

Control::~Control() {
    {
        const std::lock_guard lock(mutex_);
        stop_ = true;
    }
    ring();
    thread_.join();
}

void Control::listen() {
    address_.unix_name = random_unix_name();
    unix_listener_ = listen_abstract(address_.unix_name);
    watch(unix_listener_.get(), unix_listener_key);
    if (options_.host.empty()) return;
    tcp_listener_ = listen_tcp(options_.host, options_.port);
    address_.host = bound_host(tcp_listener_.get());
    address_.port = bound_port(tcp_listener_.get());
    // Settings that this process may not have fail here and not with the first peer. A listener passes most of them on,
    // so they are tried on another socket: data connections must not travel as control packets.
    FileDescriptor trial(::socket(address_.host.find(':') == std::string::npos ? AF_INET : AF_INET6,
                                  SOCK_STREAM | SOCK_CLOEXEC, 0));
    if (!trial) throw_errno("socket");
    prepare(trial.get());
    watch(tcp_listener_.get(), tcp_listener_key);
}

void Control::start() {
    // The thread inherits the mask: signals are for the threads of the program that uses us.
    sigset_t all;
    sigset_t before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    try {
        thread_ = std::thread(&Control::run, this);
    } catch (const std::system_error& error) {
        pthread_sigmask(SIG_SETMASK, &before, nullptr);
        throw Error(Code::system, concat("cannot start the control thread: ", error.what()));
    }
    pthread_sigmask(SIG_SETMASK, &before, nullptr);
}

void Control::watch(int fd, uint64_t key) const {
    control_epoll(epoll_.get(), EPOLL_CTL_ADD, fd, key < first_connection_key ? EPOLLIN : EPOLLIN | EPOLLRDHUP, key);
}

void Control::ring() const {
    const uint64_t one = 1;
    // It fails only when the bell has rung 2^64 - 2 times unheard.
    [[maybe_unused]] const ssize_t written = write(bell_.get(), &one, sizeof(one));
}

void Control::prepare(int socket) const {
    apply_settings(socket, {options_.type_of_service, options_.priority, options_.dead_after_ns});
    set_keep_alive(socket, SOL_SOCKET, SO_KEEPALIVE, 1);
    set_keep_alive(socket, IPPROTO_TCP, TCP_KEEPIDLE, 1);
    set_keep_alive(socket, IPPROTO_TCP, TCP_KEEPINTVL, 1);
}

ConnectionId Control::hand_over(FileDescriptor socket, bool unix_socket) {
    const ConnectionId id = next_id_.fetch_add(1);
    auto connection = std::make_unique<Connection>(id, std::move(socket), unix_socket, FrameTypes{});
    connection->announced = true;
    {
        const std::lock_guard lock(mutex_);
        orders_.push_back({id, std::move(connection)});
    }
    ring();
    return id;
}

void Control::hang_up(ConnectionId id) {
    std::unique_lock lock(mutex_);
    hung_up_.insert(id);
    orders_.push_back({id, nullptr});
    ring();
    if (std::this_thread::get_id() == thread_id_) return;  // from within a callback
    called_.wait(lock, [&] { return calling_ != id; });
}

void Control::run() {
    pthread_setname_np(pthread_self(), "m2n-control");
    {
        const std::lock_guard lock(mutex_);
        thread_id_ = std::this_thread::get_id();
    }
    std::array<epoll_event, 64> events;
    while (true) {
        const int count = epoll_wait(epoll_.get(), events.data(), static_cast<int>(events.size()), -1);
        for (int i = 0; i < count; ++i) {
            try {
                dispatch(events[i].data.u64, events[i].events);
            } catch (...) {
                // Memory or descriptors ran out outside of any connection's service. Nothing is lost: epoll reports
                // again whatever was not dealt with.
            }
        }
        if (!carry_out_orders()) break;
        arm_timer();
    }
    for (auto& [id, connection] : connections_) {
        if (connection->opening == nullptr) say_goodbye(*connection);
    }
    connections_.clear();
}

void Control::dispatch(uint64_t key, uint32_t events) {
    switch (key) {
        case bell_key: {
            uint64_t count = 0;
            [[maybe_unused]] const ssize_t got = read(bell_.get(), &count, sizeof(count));
            return;  // orders are looked at after every batch of events
        }
        case timer_key: return on_timer();
        case unix_listener_key: return accept_from(unix_listener_.get(), true);
        case tcp_listener_key: return accept_from(tcp_listener_.get(), false);
        default: break;
    }
    const auto found = connections_.find(key);  // not there: it ended earlier in the same batch
    if (found != connections_.end()) serve(*found->second, events);
}

bool Control::carry_out_orders() {
    std::vector<Order> orders;
    bool stop = false;
    {
        const std::lock_guard lock(mutex_);
        orders.swap(orders_);
        stop = stop_;
    }
    for (Order& order : orders) carry_out(order);
    return !stop;
}

void Control::carry_out(Order& order) {
    if (order.adopt != nullptr) {
        Connection& connection = *order.adopt;
        try {
            watch(connection.socket.get(), order.id);
            connections_[order.id] = std::move(order.adopt);
            join_peers(connection);
        } catch (const std::exception& error) {
            order.adopt.reset();
            connections_.erase(order.id);
            announce_gone(order.id, std::string("cannot be watched: ") + error.what());
        }
        return;
    }
    // An opening that was not announced belongs to no caller, so none can hang it up.
    if (const auto found = connections_.find(order.id); found != connections_.end() && found->second->announced) {
        say_goodbye(*found->second);
        found->second->end(Fate::lost, "we hung up");
        bury(*found->second);
    }
    const std::lock_guard lock(mutex_);
    hung_up_.erase(order.id);
}

bool Control::is_opening(ConnectionId id) const {
    const auto found = connections_.find(id);
    // Welcomed but with the welcome still unread counts as opening.
    return found != connections_.end() && (found->second->opening != nullptr || !found->second->output.empty());
}

void Control::arm_timer() {
    while (!openings_.empty() && !is_opening(openings_.front().second)) openings_.pop_front();
    int64_t next_ns = openings_.empty() ? no_time : openings_.front().first;
    if (num_tcp_peers_ > 0) next_ns = std::min(next_ns, next_heartbeat_ns_);
    if (resume_accepting_ns_ != 0) next_ns = std::min(next_ns, resume_accepting_ns_);
    if (next_ns == armed_ns_) return;
    armed_ns_ = next_ns;
    itimerspec when{};
    if (next_ns != no_time) when.it_value = to_timespec(next_ns);
    timerfd_settime(timer_.get(), TFD_TIMER_ABSTIME, &when, nullptr);
}

void Control::on_timer() {
    uint64_t expirations = 0;
    [[maybe_unused]] const ssize_t got = read(timer_.get(), &expirations, sizeof(expirations));
    armed_ns_ = 0;  // it fires once; the next arm_timer must set it, whatever the time
    const int64_t now = monotonic_ns();
    if (resume_accepting_ns_ != 0 && now >= resume_accepting_ns_) {
        listen_for(EPOLLIN);
        resume_accepting_ns_ = 0;
    }
    expire_openings(now);
    if (num_tcp_peers_ > 0 && now >= next_heartbeat_ns_) send_heartbeats();
}

void Control::expire_openings(int64_t now) {
    while (!openings_.empty() && openings_.front().first <= now) {
        const ConnectionId id = openings_.front().second;
        openings_.pop_front();
        if (!is_opening(id)) continue;
        Connection& connection = *connections_.at(id);
        if (connection.opening != nullptr) {
            reject(connection, "did not prove itself in time");
        } else {
            connection.end(Fate::lost, "did not read its welcome");
        }
        bury(connection);
    }
}

void Control::send_heartbeats() {
    static const std::vector<std::byte> frame = encode_frame(FrameType::heartbeat);
    const int64_t now = monotonic_ns();
    // From now, not from the time it was due: after a pause one heartbeat says as much as many.
    next_heartbeat_ns_ = now + options_.heartbeat_ns;
    // A little early rather than a whole heartbeat late.
    const int64_t limit_ns = options_.dead_after_ns - options_.heartbeat_ns / 4;
    std::vector<ConnectionId> dead;
    for (auto& [id, connection] : connections_) {
        if (!connection->heartbeats) continue;
        const int64_t unacknowledged = unacknowledged_ns(connection->socket.get());
        if (unacknowledged == 0) connection->acknowledged_at_ns = now;
        // Both clocks: the kernel's alone runs on while we have nothing to send, ours alone while acknowledgements are
        // on their way at every look.
        if (std::min(unacknowledged, now - connection->acknowledged_at_ns) >= limit_ns) {
            dead.push_back(id);
        } else if (connection->output.empty() && connection->unanswered_heartbeats < max_unanswered_heartbeats) {
            ++connection->unanswered_heartbeats;
            send(*connection, frame);
        }
    }
    for (const ConnectionId id : dead) {
        Connection& connection = *connections_.at(id);
        connection.end(Fate::lost, words_for(ETIMEDOUT));
        bury(connection);
    }
}

std::string Control::words_for(int error) const {
    switch (error) {
        case 0:
        case EPIPE:
        case ECONNRESET: return "hung up";
        case ETIMEDOUT:
        case EHOSTUNREACH:
        case ENETUNREACH: {
            // The last two say which ICMP messages came while nothing was acknowledged.
            char words[64];
            std::snprintf(words, sizeof(words), "does not answer for %.3g s",
                          static_cast<double>(options_.dead_after_ns) * 1e-9);
            return words;
        }
        default: return "connection failed: " + std::generic_category().message(error);
    }
}

void Control::announce_gone(ConnectionId id, const std::string& reason) {
    {
        const std::lock_guard lock(mutex_);
        if (hung_up_.contains(id)) return;
        calling_ = id;
    }
    counters_->gone.fetch_add(1, std::memory_order_relaxed);
    try {
        handler_.on_gone(id, reason);
    } catch (...) {
        // No caller hears of a handler that throws here, and the other peers need this thread.
    }
    const std::lock_guard lock(mutex_);
    calling_ = 0;
    called_.notify_all();
}

}  // namespace antiphon::m2n

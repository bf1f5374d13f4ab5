#include "m2n/tcp_connection.h"

#include <fcntl.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <signal.h>
#include <sys/socket.h>
#include <sys/uio.h>
#include <unistd.h>

#include <algorithm>
#include <cassert>
#include <cerrno>
#include <cstring>
#include <fstream>
#include <utility>

#include "m2n/socket.h"
#include "m2n/types.h"

namespace antiphon::m2n {

namespace {

bool set_congestion(int socket, const std::string& name) {
    return ::setsockopt(socket, IPPROTO_TCP, TCP_CONGESTION, name.data(), static_cast<socklen_t>(name.size())) == 0;
}

std::string available() {
    std::ifstream file("/proc/sys/net/ipv4/tcp_available_congestion_control");
    std::string names;
    std::getline(file, names);
    return names.empty() ? "unknown" : names;
}

std::string congestion_of(int socket) {
    char name[16] = {};
    socklen_t size = sizeof(name) - 1;
    return ::getsockopt(socket, IPPROTO_TCP, TCP_CONGESTION, name, &size) == 0 ? name : "";
}

// BBR paces each connection by what it believes the path carries. Many pairs that send at the same moment on one host
// gave 106 to 136 ms p99 for 8 x 8 messages of 1 MB with it, and 30 ms with cubic or reno. So where the system's
// default is BBR and the options ask for nothing, connections that carry data take cubic, or reno, or are left as they
// are. It must be chosen before a connection stands: Linux keeps pacing one that began with BBR.
//
// `asked`: a name of the system's; empty: this rule. Error(invalid): not available to this process.
void choose_congestion(int socket, const std::string& asked) {
    if (asked.empty()) {
        if (!congestion_of(socket).starts_with("bbr")) return;
        if (!set_congestion(socket, "cubic")) set_congestion(socket, "reno");
        return;
    }
    if (set_congestion(socket, asked)) return;
    throw_invalid("tcp: congestion control \"", asked,
                  "\" is not available to this process; the system has: ", available());
}

bool set_option(int fd, int level, int name, int value) {
    return ::setsockopt(fd, level, name, &value, sizeof(value)) == 0;
}

int int_option(int fd, int level, int name) {
    int value = 0;
    socklen_t size = sizeof(value);
    if (::getsockopt(fd, level, name, &value, &size) != 0) throw_errno("getsockopt " + std::to_string(name));
    return value;
}

// The word behind `name` of a file of whitespace-separated numbers; 0 where there is none.
uint64_t kernel_limit(const char* path, int index) {
    std::ifstream file(path);
    uint64_t value = 0;
    for (int i = 0; i <= index; ++i) {
        if (!(file >> value)) return 0;
    }
    return value;
}

// The kernel counts its own overhead too, so it doubles what it is asked for and reports the double.
uint64_t payload_part(int fd, int option) { return static_cast<uint64_t>(int_option(fd, SOL_SOCKET, option)) / 2; }

int buffer_request(uint64_t wanted, const TcpTuning& tuning) {
    // A limit below the least one is a test's: it wins.
    return static_cast<int>(std::min(std::max(wanted, tuning.least_buffer_bytes), tuning.largest_buffer_bytes));
}

// The window a connection can ever announce was fixed when it was opened.
uint64_t largest_window(int fd) {
    tcp_info info{};
    socklen_t size = sizeof(info);
    if (::getsockopt(fd, IPPROTO_TCP, TCP_INFO, &info, &size) != 0) return UINT64_MAX;
    if (info.tcpi_state != TCP_ESTABLISHED) return UINT64_MAX;
    return uint64_t{65535} << info.tcpi_rcv_wscale;
}

}  // namespace

void check_tcp_options(const TransportOptions& options) {
    const FileDescriptor fd(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, IPPROTO_TCP));  // it connects to no peer
    if (!fd) throw_errno("socket");
    for (const int priority : {options.data_priority, options.credit_priority}) {
        if (set_option(fd.get(), SOL_SOCKET, SO_PRIORITY, priority)) continue;
        throw_invalid("tcp: priority ", priority,
                      " is not allowed to this process: use 0 to 6, or grant it CAP_NET_ADMIN");
    }
    for (const int service : {options.data_type_of_service, options.credit_type_of_service}) {
        if (service >= 0 && service <= 255 && set_option(fd.get(), IPPROTO_IP, IP_TOS, service)) continue;
        throw_invalid("tcp: type of service ", service, ": it must be 0 to 255");
    }
    choose_congestion(fd.get(), options.congestion);
}

FileDescriptor connect_tcp(const std::string& host, uint16_t port, const TransportOptions& options, Deadline deadline) {
    const std::string peer = host + ":" + std::to_string(port);
    if (host.empty() || port == 0) {
        throw_invalid("tcp: the receiver listens on no TCP address: give its endpoint a host");
    }
    FileDescriptor fd;
    const int error = connect_socket(numeric_address(host, port), deadline, fd, [&](int socket) {
        apply_settings(socket, {options.data_type_of_service, options.data_priority});
        choose_congestion(socket, options.congestion);
    });
    if (error == 0) return fd;
    const std::string reason =
        error == ETIMEDOUT && deadline.passed() ? "no answer before the deadline" : std::strerror(error);
    throw Error(deadline.passed() ? Code::timeout : Code::system, "tcp: data connection to " + peer + ": " + reason,
                {peer}, reason);
}

void write_tcp(int fd, std::span<const std::byte> bytes, const std::string& peer, Deadline deadline) {
    while (!bytes.empty()) {
        const int64_t sent = send_some(fd, bytes);
        if (sent >= 0) {
            bytes = bytes.subspan(static_cast<size_t>(sent));
        } else if (sent != -EAGAIN) {
            errno = static_cast<int>(-sent);
            throw_errno("greeting " + peer + " on a TCP data connection");
        } else if (wait_ready(fd, POLLOUT, deadline) == 0) {
            throw Error(Code::timeout, "tcp: greeting " + peer + ": it takes no bytes before the deadline", {peer});
        }
    }
}

void set_receiver_options(int fd, const TransportOptions& options) {
    const int flags = ::fcntl(fd, F_GETFL);
    if (flags < 0 || ::fcntl(fd, F_SETFL, flags | O_NONBLOCK) < 0) throw_errno("fcntl O_NONBLOCK");
    apply_settings(fd, {options.credit_type_of_service, options.credit_priority});
}

// Setting a size ends the kernel's own growth, so where it may neither hold what is wanted nor reach what the kernel
// would grow to, we leave it alone.
uint64_t widen_send_buffer(int fd, uint64_t wanted, const TcpTuning& tuning) {
    const int request = buffer_request(wanted, tuning);
    if (tuning.force && set_option(fd, SOL_SOCKET, SO_SNDBUFFORCE, request)) return payload_part(fd, SO_SNDBUF);
    const uint64_t allowed = std::min<uint64_t>(request, kernel_limit("/proc/sys/net/core/wmem_max", 0));
    const uint64_t grown = std::min<uint64_t>(request, kernel_limit("/proc/sys/net/ipv4/tcp_wmem", 2) / 2);
    if (allowed >= wanted || allowed >= grown) set_option(fd, SOL_SOCKET, SO_SNDBUF, request);
    return payload_part(fd, SO_SNDBUF);
}

uint64_t widen_receive_buffer(int fd, uint64_t wanted, const TcpTuning& tuning) {
    const int request = buffer_request(wanted, tuning);
    if (!tuning.force || !set_option(fd, SOL_SOCKET, SO_RCVBUFFORCE, request)) {
        const uint64_t allowed = std::min<uint64_t>(request, kernel_limit("/proc/sys/net/core/rmem_max", 0));
        const uint64_t grown = std::min<uint64_t>(request, kernel_limit("/proc/sys/net/ipv4/tcp_rmem", 2) / 2);
        if (allowed >= wanted || allowed >= grown) {
            set_option(fd, SOL_SOCKET, SO_RCVBUF, request);
        } else if (set_option(fd, SOL_SOCKET, SO_RCVLOWAT, request)) {
            // A low-water mark makes the kernel grow the buffer to twice the mark at once, within its own limit, and
            // the buffer stays when the mark goes.
            set_option(fd, SOL_SOCKET, SO_RCVLOWAT, 1);
        }
    }
    return std::min(payload_part(fd, SO_RCVBUF), largest_window(fd));
}

namespace {

constexpr int wanted_pipe_bytes = 512 << 10;  // a page each way takes a place of the pipe
constexpr int least_pipe_bytes = 64 << 10;    // what is left to a user with many pipes is no gain

bool sigpipe_is_ignored() {
    struct sigaction action {};
    return ::sigaction(SIGPIPE, nullptr, &action) == 0 && (action.sa_flags & SA_SIGINFO) == 0 &&
           action.sa_handler == SIG_IGN;
}

}  // namespace

void OutstandingBytes::add(uint64_t bytes) {
    const std::lock_guard lock(mutex_);
    now_ += bytes;
    peak_ = std::max(peak_, now_);
}

void OutstandingBytes::subtract(uint64_t bytes) {
    const std::lock_guard lock(mutex_);
    assert(bytes <= now_);
    now_ -= bytes;
    if (now_ == 0 && bytes > 0) former_peak_ = std::exchange(peak_, 0);
}

uint64_t OutstandingBytes::recent_peak() const {
    const std::lock_guard lock(mutex_);
    return std::max(peak_, former_peak_);
}

bool SplicePipe::takes(std::span<const std::byte> rest, bool cached) {
    if (num_inside_ > 0) return true;
    if (cached || rest.size() < least_bytes || useless_ || !sigpipe_is_ignored()) return false;
    return reading_end_ || open();
}

bool SplicePipe::open() {
    int ends[2];
    if (::pipe2(ends, O_CLOEXEC | O_NONBLOCK) != 0) {
        useless_ = true;
        return false;
    }
    reading_end_ = FileDescriptor(ends[0]);
    writing_end_ = FileDescriptor(ends[1]);
    ::fcntl(ends[1], F_SETPIPE_SZ, wanted_pipe_bytes);
    if (::fcntl(ends[1], F_GETPIPE_SZ) >= least_pipe_bytes) return true;
    close();
    useless_ = true;
    return false;
}

ssize_t SplicePipe::send(int socket, std::span<const std::byte> rest) {
    if (num_inside_ < rest.size()) {
        const iovec more{const_cast<std::byte*>(rest.data()) + num_inside_, rest.size() - num_inside_};
        const ssize_t filled = ::vmsplice(writing_end_.get(), &more, 1, SPLICE_F_NONBLOCK);
        if (filled > 0) num_inside_ += static_cast<size_t>(filled);
        if (num_inside_ == 0) {
            if (errno != EINTR) useless_ = true;
            errno = EINTR;  // the next try copies
            return -1;
        }
    }
    const unsigned more_follows = num_inside_ < rest.size() ? SPLICE_F_MORE : 0;
    const ssize_t sent =
        ::splice(reading_end_.get(), nullptr, socket, nullptr, num_inside_, SPLICE_F_NONBLOCK | more_follows);
    if (sent > 0) num_inside_ -= static_cast<size_t>(sent);
    return sent;
}

void SplicePipe::close() {
    reading_end_.reset();
    writing_end_.reset();
    num_inside_ = 0;
}

}  // namespace antiphon::m2n

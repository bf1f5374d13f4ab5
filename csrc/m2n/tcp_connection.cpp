#include "m2n/tcp_connection.h"

#include <fcntl.h>
#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <fstream>
#include <memory>

#include "m2n/error.h"

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
    throw Error(Code::invalid, "tcp: congestion control \"" + asked +
                                   "\" is not available to this process; the system has: " + available());
}

constexpr int longest_poll_ms = 60'000;

bool set_option(int fd, int level, int name, int value) {
    return ::setsockopt(fd, level, name, &value, sizeof(value)) == 0;
}

int int_option(int fd, int level, int name) {
    int value = 0;
    socklen_t size = sizeof(value);
    if (::getsockopt(fd, level, name, &value, &size) != 0) throw_errno("getsockopt " + std::to_string(name));
    return value;
}

// For asking what is allowed; it connects to no peer.
FileDescriptor make_probe() {
    FileDescriptor fd(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, IPPROTO_TCP));
    if (!fd) throw_errno("socket");
    return fd;
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

bool set_type_of_service(int fd, int value) {
    const bool version_6 = int_option(fd, SOL_SOCKET, SO_DOMAIN) == AF_INET6;
    if (!version_6) return set_option(fd, IPPROTO_IP, IP_TOS, value);
    set_option(fd, IPPROTO_IP, IP_TOS, value);  // for IPv4 addresses mapped into IPv6; fails where there are none
    return set_option(fd, IPPROTO_IPV6, IPV6_TCLASS, value);
}

// The type of service first: on Linux setting it also sets a priority, which ours must overrule.
void set_marks(int fd, int priority, int type_of_service) {
    if (!set_type_of_service(fd, type_of_service)) throw_errno("setsockopt IP_TOS " + std::to_string(type_of_service));
    if (!set_option(fd, SOL_SOCKET, SO_PRIORITY, priority)) {
        throw_errno("setsockopt SO_PRIORITY " + std::to_string(priority));
    }
    if (!set_option(fd, IPPROTO_TCP, TCP_NODELAY, 1)) throw_errno("setsockopt TCP_NODELAY");
}

// Waits until `fd` is ready for `events`; false at the deadline.
bool wait_ready(int fd, short events, Deadline deadline) {
    for (;;) {
        const int64_t left_ms = deadline.left_ns() / 1'000'000;
        pollfd entry{fd, events, 0};
        const int ready = ::poll(&entry, 1, static_cast<int>(std::min<int64_t>(left_ms + 1, longest_poll_ms)));
        if (ready > 0) return true;
        if (ready < 0 && errno != EINTR) throw_errno("poll of a TCP data connection");
        if (deadline.passed()) return false;
    }
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

// Empty: `result` is connected. Else why not.
std::string try_connect(const addrinfo& address, const TransportOptions& options, Deadline deadline,
                        FileDescriptor& result) {
    FileDescriptor fd(::socket(address.ai_family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, IPPROTO_TCP));
    if (!fd) return std::strerror(errno);
    set_sender_options(fd.get(), options);
    if (::connect(fd.get(), address.ai_addr, address.ai_addrlen) != 0) {
        if (errno != EINPROGRESS && errno != EINTR) return std::strerror(errno);
        if (!wait_ready(fd.get(), POLLOUT, deadline)) return "no answer before the deadline";
        const int error = int_option(fd.get(), SOL_SOCKET, SO_ERROR);
        if (error != 0) return std::strerror(error);
    }
    result = std::move(fd);
    return {};
}

}  // namespace

void check_tcp_options(const TransportOptions& options) {
    const FileDescriptor fd = make_probe();
    for (const int priority : {options.data_priority, options.credit_priority}) {
        if (set_option(fd.get(), SOL_SOCKET, SO_PRIORITY, priority)) continue;
        throw Error(Code::invalid, "tcp: priority " + std::to_string(priority) +
                                       " is not allowed to this process: use 0 to 6, or grant it CAP_NET_ADMIN");
    }
    for (const int service : {options.data_type_of_service, options.credit_type_of_service}) {
        if (service >= 0 && service <= 255 && set_option(fd.get(), IPPROTO_IP, IP_TOS, service)) continue;
        throw Error(Code::invalid, "tcp: type of service " + std::to_string(service) + ": it must be 0 to 255");
    }
    choose_congestion(fd.get(), options.congestion);
}

FileDescriptor connect_tcp(const std::string& host, uint16_t port, const TransportOptions& options, Deadline deadline) {
    const std::string peer = host + ":" + std::to_string(port);
    if (host.empty() || port == 0) {
        throw Error(Code::invalid, "tcp: the receiver listens on no TCP address: give its endpoint a host");
    }
    addrinfo hints{};
    hints.ai_socktype = SOCK_STREAM;
    hints.ai_flags = AI_NUMERICHOST | AI_NUMERICSERV;  // as in tickets; a name server would not know our deadline
    addrinfo* found = nullptr;
    const int code = ::getaddrinfo(host.c_str(), std::to_string(port).c_str(), &hints, &found);
    if (code != 0) {
        throw Error(Code::invalid, "tcp: " + peer + " is no IPv4 or IPv6 address in numbers: " + ::gai_strerror(code));
    }
    const std::unique_ptr<addrinfo, decltype(&::freeaddrinfo)> address(found, ::freeaddrinfo);
    FileDescriptor fd;
    const std::string reason = try_connect(*address, options, deadline, fd);
    if (fd) return fd;
    throw Error(deadline.passed() ? Code::timeout : Code::system, "tcp: data connection to " + peer + ": " + reason,
                {peer}, reason);
}

void write_tcp(int fd, std::span<const std::byte> bytes, const std::string& peer, Deadline deadline) {
    while (!bytes.empty()) {
        const ssize_t sent = ::send(fd, bytes.data(), bytes.size(), MSG_NOSIGNAL | MSG_DONTWAIT);
        if (sent > 0) {
            bytes = bytes.subspan(static_cast<size_t>(sent));
        } else if (errno == EAGAIN || errno == EWOULDBLOCK) {
            if (wait_ready(fd, POLLOUT, deadline)) continue;
            throw Error(Code::timeout, "tcp: greeting " + peer + ": it takes no bytes before the deadline", {peer});
        } else if (errno != EINTR) {
            throw_errno("greeting " + peer + " on a TCP data connection");
        }
    }
}

void set_sender_options(int fd, const TransportOptions& options) {
    set_marks(fd, options.data_priority, options.data_type_of_service);
    choose_congestion(fd, options.congestion);
}

void set_receiver_options(int fd, const TransportOptions& options) {
    const int flags = ::fcntl(fd, F_GETFL);
    if (flags < 0 || ::fcntl(fd, F_SETFL, flags | O_NONBLOCK) < 0) throw_errno("fcntl O_NONBLOCK");
    set_marks(fd, options.credit_priority, options.credit_type_of_service);
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

TcpBufferReport probe_tcp_buffers(uint64_t wanted, const TcpTuning& tuning) {
    const FileDescriptor fd = make_probe();
    return {wanted, widen_send_buffer(fd.get(), wanted, tuning), widen_receive_buffer(fd.get(), wanted, tuning)};
}

}  // namespace antiphon::m2n

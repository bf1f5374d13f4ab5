#include "m2n/socket.h"

#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/epoll.h>
#include <sys/un.h>

#include <algorithm>
#include <cerrno>
#include <climits>
#include <cstddef>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <system_error>

#include "m2n/types.h"

namespace antiphon::m2n {

namespace {

FileDescriptor make_socket(int family) {
    FileDescriptor made(::socket(family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0));
    if (!made) throw_errno("socket");
    return made;
}

SocketAddress look_up(const std::string& host, uint16_t port, int flags) {
    addrinfo hints{};
    hints.ai_family = AF_UNSPEC;
    hints.ai_socktype = SOCK_STREAM;
    hints.ai_flags = flags | AI_NUMERICSERV;
    addrinfo* found = nullptr;
    const int status = getaddrinfo(host.c_str(), std::to_string(port).c_str(), &hints, &found);
    const std::unique_ptr<addrinfo, decltype(&freeaddrinfo)> owner(found, &freeaddrinfo);
    if (status != 0 || found == nullptr) {
        const char* kind = flags & AI_NUMERICHOST ? " is not an IPv4 or IPv6 address in numbers: "
                                                  : " is not the name or address of a host: ";
        throw_invalid("'", host, "'", kind, gai_strerror(status));
    }
    SocketAddress address;
    std::memcpy(&address.storage, found->ai_addr, found->ai_addrlen);
    address.length = found->ai_addrlen;
    return address;
}

SocketAddress bound_address(int socket) {
    SocketAddress address;
    address.length = sizeof(address.storage);
    if (getsockname(socket, reinterpret_cast<sockaddr*>(&address.storage), &address.length) != 0) {
        throw_errno("getsockname");
    }
    return address;
}

FileDescriptor listen_on(const SocketAddress& address, const std::string& words) {
    FileDescriptor listener = make_socket(address.family());
    const int on = 1;
    if (address.family() != AF_UNIX) setsockopt(listener.get(), SOL_SOCKET, SO_REUSEADDR, &on, sizeof(on));
    if (bind(listener.get(), address.get(), address.length) != 0) throw_errno("bind to " + words);
    if (listen(listener.get(), SOMAXCONN) != 0) throw_errno("listen on " + words);
    return listener;
}

void set_option(int socket, int level, int option, int value, const char* name) {
    if (setsockopt(socket, level, option, &value, sizeof(value)) == 0) return;
    throw_errno(std::string("setsockopt ") + name + " = " + std::to_string(value));
}

// Room for the descriptors of one message, aligned as the kernel wants it.
struct ControlBuffer {
    alignas(cmsghdr) std::byte bytes[CMSG_SPACE(sizeof(int) * max_descriptors_per_message)] = {};
};

void attach_descriptors(msghdr& message, ControlBuffer& buffer, std::span<const FileDescriptor> descriptors) {
    const size_t num_bytes = descriptors.size() * sizeof(int);
    message.msg_control = buffer.bytes;
    message.msg_controllen = CMSG_SPACE(num_bytes);
    cmsghdr* header = CMSG_FIRSTHDR(&message);
    header->cmsg_level = SOL_SOCKET;
    header->cmsg_type = SCM_RIGHTS;
    header->cmsg_len = CMSG_LEN(num_bytes);
    for (size_t i = 0; i < descriptors.size(); ++i) {
        const int number = descriptors[i].get();
        std::memcpy(CMSG_DATA(header) + i * sizeof(int), &number, sizeof(int));
    }
}

// Takes over every descriptor of the message, also when there are too many: nothing else would close them.
void take_descriptors(msghdr& message, std::vector<FileDescriptor>& descriptors) {
    for (cmsghdr* header = CMSG_FIRSTHDR(&message); header != nullptr; header = CMSG_NXTHDR(&message, header)) {
        if (header->cmsg_level != SOL_SOCKET || header->cmsg_type != SCM_RIGHTS) continue;
        const size_t count = (header->cmsg_len - CMSG_LEN(0)) / sizeof(int);
        for (size_t i = 0; i < count; ++i) {
            int number = -1;
            std::memcpy(&number, CMSG_DATA(header) + i * sizeof(int), sizeof(int));
            FileDescriptor taken(number);  // owned before the vector may have to grow
            descriptors.push_back(std::move(taken));
        }
    }
}

}  // namespace

SocketAddress abstract_address(const std::string& name) {
    SocketAddress address;
    auto* local = reinterpret_cast<sockaddr_un*>(&address.storage);
    const size_t longest = sizeof(local->sun_path) - 1;
    if (name.empty() || name.size() > longest) {
        throw_invalid("the name of an abstract Unix socket has ", name.size(), " bytes; it needs 1 to ", longest);
    }
    local->sun_family = AF_UNIX;
    std::memcpy(local->sun_path + 1, name.data(), name.size());
    address.length = static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + name.size());
    return address;
}

SocketAddress numeric_address(const std::string& host, uint16_t port) { return look_up(host, port, AI_NUMERICHOST); }

FileDescriptor listen_abstract(const std::string& name) {
    return listen_on(abstract_address(name), "the abstract Unix socket " + name);
}

FileDescriptor listen_tcp(const std::string& host, uint16_t port) {
    return listen_on(look_up(host, port, AI_PASSIVE), host + " port " + std::to_string(port));
}

std::string bound_host(int socket) {
    const SocketAddress address = bound_address(socket);
    char host[NI_MAXHOST] = {};
    const int status = getnameinfo(address.get(), address.length, host, sizeof(host), nullptr, 0, NI_NUMERICHOST);
    if (status != 0) throw Error(Code::system, concat("getnameinfo: ", gai_strerror(status)));
    return host;
}

uint16_t bound_port(int socket) {
    const SocketAddress address = bound_address(socket);
    if (address.family() == AF_INET6) {
        return ntohs(reinterpret_cast<const sockaddr_in6*>(&address.storage)->sin6_port);
    }
    return ntohs(reinterpret_cast<const sockaddr_in*>(&address.storage)->sin_port);
}

int connect_socket(const SocketAddress& address, Deadline deadline, FileDescriptor& connected,
                   const std::function<void(int socket)>& set_up) {
    FileDescriptor made = make_socket(address.family());
    if (set_up) set_up(made.get());
    if (connect(made.get(), address.get(), address.length) != 0) {
        // An interrupted connect goes on by itself, like one in progress.
        if (errno != EINPROGRESS && errno != EINTR) return errno;
        if (wait_ready(made.get(), POLLOUT, deadline) == 0) return ETIMEDOUT;
        int error = 0;
        socklen_t length = sizeof(error);
        if (getsockopt(made.get(), SOL_SOCKET, SO_ERROR, &error, &length) != 0) return errno;
        if (error != 0) return error;
    }
    connected = std::move(made);
    return 0;
}

FileDescriptor accept_socket(int listener) {
    return FileDescriptor(accept4(listener, nullptr, nullptr, SOCK_NONBLOCK | SOCK_CLOEXEC));
}

short wait_ready(int fd, short events, Deadline deadline) {
    while (true) {
        pollfd waiting{fd, events, 0};
        const timespec left = to_timespec(deadline.left_ns());
        const int ready = ppoll(&waiting, 1, &left, nullptr);
        if (ready > 0) return waiting.revents;
        if (ready < 0 && errno != EINTR) throw_errno("ppoll");
        if (deadline.passed()) return 0;
    }
}

void sleep_until(Deadline deadline, int64_t at_most_ns) {
    const timespec time = to_timespec(std::min(deadline.left_ns(), at_most_ns));
    nanosleep(&time, nullptr);  // a signal may end it early; callers look again
}

FileDescriptor make_epoll() {
    FileDescriptor made(epoll_create1(EPOLL_CLOEXEC));
    if (!made) throw_errno("epoll_create1");
    return made;
}

void control_epoll(int epoll, int operation, int fd, uint32_t events, uint64_t key) {
    epoll_event event{};
    event.events = events;
    event.data.u64 = key;
    if (epoll_ctl(epoll, operation, fd, &event) != 0) throw_errno("epoll_ctl");
}

void apply_settings(int socket, const TcpSettings& settings) {
    set_option(socket, IPPROTO_TCP, TCP_NODELAY, 1, "TCP_NODELAY");
    if (settings.type_of_service >= 0) {
        if (bound_address(socket).family() == AF_INET6) {
            const int mapped = settings.type_of_service;  // of IPv4 addresses within IPv6; fails where there are none
            setsockopt(socket, IPPROTO_IP, IP_TOS, &mapped, sizeof(mapped));
            set_option(socket, IPPROTO_IPV6, IPV6_TCLASS, settings.type_of_service, "IPV6_TCLASS");
        } else {
            set_option(socket, IPPROTO_IP, IP_TOS, settings.type_of_service, "IP_TOS");
        }
    }
    // After IP_TOS, which sets the priority too.
    if (settings.priority >= 0) set_option(socket, SOL_SOCKET, SO_PRIORITY, settings.priority, "SO_PRIORITY");
    if (settings.user_timeout_ns > 0) {
        const int64_t timeout_ms = std::clamp<int64_t>(settings.user_timeout_ns / 1'000'000, 1, INT_MAX);
        set_option(socket, IPPROTO_TCP, TCP_USER_TIMEOUT, static_cast<int>(timeout_ms), "TCP_USER_TIMEOUT");
    }
}

int64_t unacknowledged_ns(int socket) {
    tcp_info info{};
    socklen_t length = sizeof(info);
    if (getsockopt(socket, IPPROTO_TCP, TCP_INFO, &info, &length) != 0 || info.tcpi_unacked == 0) return 0;
    return int64_t{info.tcpi_last_ack_recv} * 1'000'000;
}

int64_t send_some(int socket, std::span<const std::byte> bytes, std::span<const FileDescriptor> descriptors) {
    iovec part{const_cast<std::byte*>(bytes.data()), bytes.size()};
    msghdr message{};
    message.msg_iov = &part;
    message.msg_iovlen = 1;
    ControlBuffer buffer;
    if (descriptors.size() > max_descriptors_per_message) return -EMSGSIZE;
    if (!descriptors.empty()) attach_descriptors(message, buffer, descriptors);
    while (true) {
        const ssize_t sent = sendmsg(socket, &message, MSG_NOSIGNAL | MSG_DONTWAIT);
        if (sent >= 0) return sent;
        if (errno != EINTR) return -errno;
    }
}

int64_t receive_some(int socket, std::span<std::byte> space, std::vector<FileDescriptor>* descriptors) {
    iovec part{space.data(), space.size()};
    msghdr message{};
    message.msg_iov = &part;
    message.msg_iovlen = 1;
    ControlBuffer buffer;
    if (descriptors != nullptr) {
        message.msg_control = buffer.bytes;
        message.msg_controllen = sizeof(buffer.bytes);
    }
    while (true) {
        const ssize_t received = recvmsg(socket, &message, MSG_DONTWAIT | MSG_CMSG_CLOEXEC);
        if (received < 0) {
            if (errno == EINTR) continue;
            return -errno;
        }
        if (descriptors != nullptr) {
            take_descriptors(message, *descriptors);
            if (message.msg_flags & MSG_CTRUNC) return -EMSGSIZE;
        }
        return received;
    }
}

bool same_user_or_root(int socket) {
    ucred credentials{};
    socklen_t length = sizeof(credentials);
    if (getsockopt(socket, SOL_SOCKET, SO_PEERCRED, &credentials, &length) != 0) return false;
    return credentials.uid == 0 || credentials.uid == geteuid();
}

}  // namespace antiphon::m2n

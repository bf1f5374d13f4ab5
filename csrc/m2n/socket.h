// Sockets that never block and never raise a signal: what the control plane and the tcp back-end share.
//
// Every descriptor made here is non-blocking and closed by exec. Host addresses are numbers: a name server's answer
// can take long, so names are resolved once, where an endpoint starts to listen, and tickets carry the result.
#pragma once

#include <sys/socket.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <span>
#include <string>
#include <vector>

#include "m2n/types.h"

namespace antiphon::m2n {

constexpr size_t max_descriptors_per_message = 8;

struct SocketAddress {
    sockaddr_storage storage{};
    socklen_t length = 0;

    const sockaddr* get() const { return reinterpret_cast<const sockaddr*>(&storage); }
    int family() const { return storage.ss_family; }
};

// `name` without the leading zero byte that makes it abstract. Error(invalid): empty or too long.
SocketAddress abstract_address(const std::string& name);
// `host`: IPv4 or IPv6 in numbers. Error(invalid): it is not.
SocketAddress numeric_address(const std::string& host, uint16_t port);

// Error(system), or Error(invalid) for a host that means no address of this machine. `host` may be a name.
FileDescriptor listen_abstract(const std::string& name);
FileDescriptor listen_tcp(const std::string& host, uint16_t port);
// Where a TCP socket is bound, in numbers.
std::string bound_host(int socket);
uint16_t bound_port(int socket);

// Starts and awaits a connection. 0: `connected` holds it; ETIMEDOUT at the deadline; else what connect(2) says
// (EAGAIN: the backlog of an abstract socket is full). Error(system): no socket to be had. `set_up`: what must be set
// before the connection stands.
int connect_socket(const SocketAddress& address, Deadline deadline, FileDescriptor& connected,
                   const std::function<void(int socket)>& set_up = {});

// One waiting connection, or an empty descriptor with errno set.
FileDescriptor accept_socket(int listener);

// Until `events` (POLLIN, POLLOUT) or an error happens; 0 at the deadline.
short wait_ready(int fd, short events, Deadline deadline);
void sleep_until(Deadline deadline, int64_t at_most_ns);

FileDescriptor make_epoll();
// `operation`: EPOLL_CTL_ADD, MOD or DEL. Error(system).
void control_epoll(int epoll, int operation, int fd, uint32_t events, uint64_t key);

struct TcpSettings {
    int type_of_service = -1;       // IP_TOS or IPv6 traffic class; -1: as it is
    int priority = -1;              // SO_PRIORITY; above 6 needs CAP_NET_ADMIN; -1: as it is
    int64_t user_timeout_ns = 0;    // TCP_USER_TIMEOUT, at least 1 ms; 0: the system's
};
// These and TCP_NODELAY. Error(system) names the option and the value.
void apply_settings(int socket, const TcpSettings& settings);

// Time since a TCP peer's kernel last acknowledged anything, if something is waiting to be acknowledged; else 0.
// TCP_USER_TIMEOUT alone is late: it counts from the first retransmission, which is 0.2 s and more after the loss.
int64_t unacknowledged_ns(int socket);

// Bytes sent, or -errno. The descriptors, at most max_descriptors_per_message, travel with the first byte: pass them
// only once.
int64_t send_some(int socket, std::span<const std::byte> bytes, std::span<const FileDescriptor> descriptors = {});

// Bytes received, 0 at the end of the stream, or -errno. Descriptors that came along are appended to `descriptors`;
// without it they are refused by the kernel. -EMSGSIZE: more descriptors than allowed, or than this process may open.
int64_t receive_some(int socket, std::span<std::byte> space, std::vector<FileDescriptor>* descriptors = nullptr);

// The other end of a Unix socket belongs to our user or to root.
bool same_user_or_root(int socket);

}  // namespace antiphon::m2n

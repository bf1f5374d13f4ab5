// The way in: connections are opened on the calling thread, then left to the control thread (control_thread.h).
//
// A process that forks while it has an endpoint is not supported: the child inherits the sockets, so that peers would
// not see the parent's death before the child's, and no control thread. exec closes them.
#include "m2n/control.h"

#include <sys/random.h>

#include <algorithm>
#include <cerrno>
#include <system_error>
#include <utility>

#include "m2n/control_thread.h"
#include "m2n/error.h"
#include "m2n/handshake.h"
#include "m2n/socket.h"
#include "m2n/wire.h"

namespace antiphon::m2n {

namespace {

constexpr int64_t first_retry_ns = 1'000'000;
constexpr int64_t longest_retry_ns = 50'000'000;

std::string words_of(int error) { return std::generic_category().message(error); }

[[noreturn]] void throw_timeout(const std::string& peer_name, const std::string& where, int last_error) {
    throw Error(Code::timeout, "no connection to " + peer_name + " at " + where + " in time: " + words_of(last_error),
                {peer_name}, words_of(last_error));
}

[[noreturn]] void throw_failure(const std::string& peer_name, const std::string& where, int error) {
    throw Error(Code::system, "connect to " + peer_name + " at " + where + ": " + words_of(error), {peer_name},
                words_of(error));
}

// Empty: no process listens there.
FileDescriptor connect_abstract(const std::string& name, const std::string& peer_name, Deadline deadline) {
    const std::string where = "the Unix socket " + name;
    const SocketAddress address = abstract_address(name);
    FileDescriptor socket;
    while (true) {
        const int error = connect_socket(address, deadline, socket);
        if (error == 0) break;
        if (error == ECONNREFUSED) return {};
        if (error != EAGAIN) throw_failure(peer_name, where, error);
        // Its backlog is full. The kernel has no way to wait for room without blocking.
        if (deadline.passed()) throw_timeout(peer_name, where, error);
        sleep_until(deadline, first_retry_ns);
    }
    // Names of abstract sockets can be taken by any process.
    if (!same_user_or_root(socket.get())) {
        throw Error(Code::refused, peer_name + " is not at " + where + ": another user listens there", {peer_name},
                    "another user listens there");
    }
    return socket;
}

// A peer that is still starting refuses, or its machine cannot be reached yet.
bool may_come_later(int error) {
    return error == ECONNREFUSED || error == ECONNRESET || error == EHOSTUNREACH || error == ENETUNREACH ||
           error == ETIMEDOUT || error == EAGAIN;
}

FileDescriptor connect_tcp(const Address& peer, const std::string& peer_name, Deadline deadline) {
    const std::string where = peer.host + " port " + std::to_string(peer.port);
    const SocketAddress address = numeric_address(peer.host, peer.port);
    FileDescriptor socket;
    for (int64_t pause_ns = first_retry_ns;; pause_ns = std::min(2 * pause_ns, longest_retry_ns)) {
        const int error = connect_socket(address, deadline, socket);
        if (error == 0) return socket;
        if (!may_come_later(error)) throw_failure(peer_name, where, error);
        if (deadline.passed()) throw_timeout(peer_name, where, error);
        sleep_until(deadline, pause_ns);
    }
}

}  // namespace

Control::Control(ControlOptions options, ControlHandler& handler)
    : thread_(std::make_unique<Thread>(std::move(options), handler)) {}

Control::~Control() = default;

const Address& Control::address() const { return thread_->address(); }

const ControlCounters& Control::counters() const { return thread_->counters(); }

std::pair<ConnectionId, Welcome> Control::connect(const Address& peer, const std::string& peer_name, bool local,
                                                  const Hello& hello, Deadline deadline) {
    FileDescriptor socket;
    bool unix_socket = local && !peer.unix_name.empty();
    if (unix_socket) {
        socket = connect_abstract(peer.unix_name, peer_name, deadline);
        if (!socket && peer.host.empty()) {
            throw Error(Code::refused, peer_name + " is not there any more: nobody listens on its Unix socket",
                        {peer_name}, "nobody listens on its Unix socket");
        }
    }
    if (!socket) {
        unix_socket = false;
        if (peer.host.empty()) {
            throw Error(Code::invalid, peer_name + " listens on its own machine only, and this is another one: give it "
                                                   "a host and a transport that reaches other machines",
                        {peer_name});
        }
        socket = connect_tcp(peer, peer_name, deadline);
        thread_->prepare(socket.get());
    }
    Welcome welcome =
        open_connection(socket.get(), unix_socket, thread_->options().secret, peer_name, hello, deadline);
    const ConnectionId id = thread_->hand_over(std::move(socket), unix_socket);
    return {id, std::move(welcome)};
}

void Control::hang_up(ConnectionId connection) { thread_->hang_up(connection); }

std::vector<std::byte> attach_greeting(std::span<const std::byte> token) {
    if (token.empty() || token.size() > max_token_bytes) {
        throw Error(Code::invalid, "a token of " + std::to_string(token.size()) + " bytes: it must have 1 to " +
                                       std::to_string(max_token_bytes));
    }
    return encode_frame(FrameType::attach, token);
}

void fill_random(std::span<std::byte> bytes) {
    while (!bytes.empty()) {
        const ssize_t filled = getrandom(bytes.data(), bytes.size(), 0);
        if (filled < 0) {
            if (errno == EINTR) continue;
            throw_errno("getrandom");
        }
        bytes = bytes.subspan(static_cast<size_t>(filled));
    }
}

}  // namespace antiphon::m2n

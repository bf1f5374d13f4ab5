// The way in: connections are opened on the calling thread, then left to the control thread (control_thread.h).
//
// A process that forks while it has an endpoint is not supported: the child inherits the sockets, so that peers would
// not see the parent's death before the child's, and no control thread. exec closes them.
//
// What the control thread does with one connection: accept it, read its frames, answer, and bury it.
#include <sys/epoll.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <exception>
#include <system_error>
#include <utility>

#include "m2n/control_thread.h"
#include "m2n/types.h"

namespace antiphon::m2n {

namespace {

constexpr int64_t accept_pause_ns = 100'000'000;
constexpr int accepts_per_event = 64;
constexpr int reads_per_event = 64;
constexpr size_t max_openings = 256;  // of strangers, who may all be silent
constexpr FrameTypes from_peers = {FrameType::heartbeat, FrameType::goodbye};

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

std::pair<ConnectionId, Welcome> Control::connect(const Address& peer, const std::string& peer_name, bool local,
                                                  const Hello& hello, Deadline deadline) {
    FileDescriptor socket;
    bool unix_socket = local && !peer.unix_name.empty();
    if (unix_socket) {
        socket = connect_abstract(peer.unix_name, peer_name, deadline);
        if (!socket && peer.host.empty()) {
            throw Error(Code::refused, peer_name + " is not there any more: nothing listens on its Unix socket",
                        {peer_name}, "nothing listens on its Unix socket");
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
        prepare(socket.get());
    }
    Welcome welcome =
        open_connection(socket.get(), unix_socket, options_.secret, peer_name, hello, deadline);
    return {hand_over(std::move(socket), unix_socket), std::move(welcome)};
}

std::vector<std::byte> attach_greeting(std::span<const std::byte> token) {
    if (token.empty() || token.size() > max_token_bytes) {
        throw_invalid("a token of ", token.size(), " bytes: it must have 1 to ", max_token_bytes);
    }
    return encode_frame(FrameType::attach, token);
}

void Control::accept_from(int listener, bool unix_socket) {
    for (int i = 0; i < accepts_per_event; ++i) {
        FileDescriptor socket = accept_socket(listener);
        if (socket) {
            admit(std::move(socket), unix_socket);
            continue;
        }
        if (errno == EAGAIN) return;
        if ((errno == EMFILE || errno == ENFILE) && drop_oldest_opening()) continue;
        // Out of descriptors or memory: the listener would be reported again and again.
        if (errno == EMFILE || errno == ENFILE || errno == ENOBUFS || errno == ENOMEM) {
            listen_for(0);
            resume_accepting_ns_ = monotonic_ns() + accept_pause_ns;
            return;
        }
        // Anything else concerns a connection that is already gone.
    }
}

void Control::admit(FileDescriptor socket, bool unix_socket) {
    const bool is_foreign = unix_socket && !same_user_or_root(socket.get());
    bool too_many = connections_.size() >= options_.max_connections;
    if (openings_.size() >= max_openings) {
        std::erase_if(openings_, [&](const auto& each) { return !is_opening(each.second); });
    }
    if (!is_foreign && (too_many || openings_.size() >= max_openings)) {
        const bool dropped = drop_oldest_opening();
        too_many = too_many && !dropped;
    }
    if (too_many || is_foreign) {
        counters_->rejected.fetch_add(1, std::memory_order_relaxed);
        const std::string words = too_many ? "has " + std::to_string(connections_.size()) + " connections, its limit"
                                           : "serves peers of its own user only";
        send_some(socket.get(), encode_frame(FrameType::refusal, encode_refusal(words)));
        return;
    }
    const ConnectionId id = next_id_.fetch_add(1);
    auto opening = std::make_unique<ServerOpening>(options_.secret, unix_socket, random_nonce());
    auto connection = std::make_unique<Connection>(id, std::move(socket), unix_socket, opening->allowed());
    connection->opening = std::move(opening);
    watch(connection->socket.get(), id);
    connections_[id] = std::move(connection);
    openings_.emplace_back(monotonic_ns() + options_.handshake_ns, id);
}

// Who came first and has not proved itself makes room, so that peers get in beside any number of strangers. What it has
// said is heard before. False: all are peers.
bool Control::drop_oldest_opening() {
    const auto oldest = std::find_if(openings_.begin(), openings_.end(), [&](const auto& each) {
        const auto found = connections_.find(each.second);
        return found != connections_.end() && found->second->opening != nullptr;
    });
    if (oldest == openings_.end()) return false;
    const ConnectionId id = oldest->second;
    serve(*connections_.at(id), EPOLLIN);
    const auto found = connections_.find(id);
    if (found == connections_.end()) return true;
    if (found->second->opening == nullptr) return drop_oldest_opening();  // it was a peer
    reject(*found->second, "made room for others");
    bury(*found->second);
    return true;
}

void Control::listen_for(uint32_t events) {
    control_epoll(epoll_.get(), EPOLL_CTL_MOD, unix_listener_.get(), events, unix_listener_key);
    if (tcp_listener_) control_epoll(epoll_.get(), EPOLL_CTL_MOD, tcp_listener_.get(), events, tcp_listener_key);
}

void Control::serve(Connection& connection, uint32_t events) {
    try {
        if (events & EPOLLOUT) flush(connection);
        const bool drained = receive(connection);
        if (connection.fate == Fate::alive && drained && (events & (EPOLLHUP | EPOLLERR))) {
            int error = 0;
            socklen_t length = sizeof(error);
            getsockopt(connection.socket.get(), SOL_SOCKET, SO_ERROR, &error, &length);
            end_of_stream(connection, error);
        }
    } catch (const Error& error) {
        const bool ours = error.code == Code::system;
        reject(connection, std::string(ours ? "could not be served: " : "sent nonsense: ") + error.what());
        // A peer that only lacks the secret gets an answer; a sender of nonsense would not understand one.
        if (error.code == Code::refused) refuse(connection, error.what());
    } catch (const std::exception& error) {
        reject(connection, std::string("could not be served: ") + error.what());
    }
    if (connection.fate != Fate::alive) bury(connection);
}

bool Control::receive(Connection& connection) {
    for (int i = 0; i < reads_per_event; ++i) {
        std::vector<FileDescriptor>* descriptors = connection.unix_socket ? &connection.received : nullptr;
        const int64_t received = receive_some(connection.socket.get(), connection.reader.space(), descriptors);
        if (received == -EAGAIN) return true;
        if (received == -EMSGSIZE || connection.received.size() > max_descriptors_per_message) {
            throw_invalid("more descriptors than ", max_descriptors_per_message, ", or than this process may open");
        }
        if (received <= 0) {
            end_of_stream(connection, static_cast<int>(-received));
            return true;
        }
        connection.unanswered_heartbeats = 0;
        if (!connection.reader.filled(static_cast<size_t>(received))) continue;
        take_frame(connection);
        if (connection.fate != Fate::alive) return true;
    }
    return false;
}

void Control::end_of_stream(Connection& connection, int error) {
    // A failed send has taken the socket's error with it.
    if (connection.send_error != 0) error = connection.send_error;
    if (connection.opening != nullptr) return reject(connection, words_for(error));
    connection.end(Fate::lost, words_for(error));
}

void Control::take_frame(Connection& connection) {
    const Frame frame = connection.reader.take();
    if (connection.opening == nullptr) {
        if (!connection.received.empty()) throw_invalid("descriptors that were not asked for");
        if (frame.type == FrameType::goodbye) connection.end(Fate::lost, "closed its endpoint");
        return;
    }
    const ServerOpening::Next next = connection.opening->take(frame, connection.received);
    connection.reader.allow(connection.opening->allowed());
    switch (next) {
        case ServerOpening::Next::send_challenge: return challenge(connection);
        case ServerOpening::Next::ask_handler: return ask_handler(connection);
        case ServerOpening::Next::attach: return attach(connection);
    }
}

void Control::challenge(Connection& connection) {
    // Only now it is known to be a control connection: data connections keep the settings of their owner.
    if (!connection.unix_socket) prepare(connection.socket.get());
    send(connection, connection.opening->challenge());
}

void Control::attach(Connection& connection) {
    epoll_ctl(epoll_.get(), EPOLL_CTL_DEL, connection.socket.get(), nullptr);
    bool taken = false;
    try {
        taken = handler_.on_attach(connection.socket, connection.opening->token());
    } catch (...) {
        // Not taken.
    }
    if (!taken) return reject(connection, "presented an unknown token");
    connection.end(Fate::adopted, "became a data connection");
}

void Control::ask_handler(Connection& connection) {
    counters_->accepted.fetch_add(1, std::memory_order_relaxed);
    Welcome welcome;
    try {
        welcome = handler_.on_hello(connection.id, connection.opening->hello());
    } catch (const std::exception& error) {
        refuse(connection, error.what());
        return connection.end(Fate::turned_down, error.what());
    } catch (...) {
        refuse(connection, "failed for no known reason");
        return connection.end(Fate::turned_down, "failed for no known reason");
    }
    connection.announced = true;
    try {
        // In two statements: arguments are evaluated in any order, and the words count the descriptors.
        std::vector<std::byte> words = connection.opening->welcome(welcome);
        send(connection, std::move(words), std::move(welcome.blob.descriptors));
    } catch (const std::exception& error) {
        refuse(connection, error.what());
        return connection.end(Fate::lost, std::string("could not be welcomed: ") + error.what());
    }
    connection.opening.reset();
    join_peers(connection);
}

void Control::join_peers(Connection& connection) {
    connection.reader.allow(from_peers);
    if (connection.unix_socket) return;  // a hang-up says everything
    connection.heartbeats = true;
    connection.acknowledged_at_ns = monotonic_ns();
    if (num_tcp_peers_++ == 0) next_heartbeat_ns_ = connection.acknowledged_at_ns + options_.heartbeat_ns;
}

void Control::send(Connection& connection, Bytes bytes, std::vector<FileDescriptor> descriptors) {
    connection.output.insert(connection.output.end(), bytes.begin(), bytes.end());
    if (!descriptors.empty()) connection.output_descriptors = std::move(descriptors);
    // Otherwise something waits already, and epoll will tell when there is room.
    if (connection.output.size() == bytes.size()) flush(connection);
}

void Control::flush(Connection& connection) {
    size_t sent = 0;
    while (sent < connection.output.size()) {
        const int64_t now = send_some(connection.socket.get(), std::span(connection.output).subspan(sent),
                                      connection.output_descriptors);
        if (now == -EAGAIN) break;
        if (now < 0) {
            // Not the end yet: a goodbye may be waiting to be read, and epoll reports the hang-up in any case.
            connection.send_error = static_cast<int>(-now);
            connection.output.clear();
            sent = 0;
            break;
        }
        connection.output_descriptors.clear();
        sent += static_cast<size_t>(now);
    }
    const bool waited = connection.waits_for_room;
    connection.output.erase(connection.output.begin(), connection.output.begin() + static_cast<ptrdiff_t>(sent));
    connection.waits_for_room = !connection.output.empty();
    if (connection.waits_for_room == waited) return;
    const uint32_t events = EPOLLIN | EPOLLRDHUP | (connection.waits_for_room ? uint32_t{EPOLLOUT} : 0u);
    control_epoll(epoll_.get(), EPOLL_CTL_MOD, connection.socket.get(), events, connection.id);
}

void Control::say_goodbye(Connection& connection) {
    const std::vector<std::byte> frame = encode_frame(FrameType::goodbye);
    if (connection.output.empty()) send_some(connection.socket.get(), frame);
    // Closing a TCP socket with unread bytes resets it, and a reset can overtake the goodbye.
    std::array<std::byte, 4096> unread;
    for (int i = 0; i < reads_per_event; ++i) {
        if (receive_some(connection.socket.get(), unread) <= 0) break;
    }
}

// Counts before the peer can know.
void Control::reject(Connection& connection, std::string reason) {
    counters_->rejected.fetch_add(1, std::memory_order_relaxed);
    connection.end(Fate::rejected, std::move(reason));
}

void Control::refuse(Connection& connection, std::string_view words) {
    // What the client sent has been read to the last byte, so that closing will not overtake the words.
    send_some(connection.socket.get(), encode_frame(FrameType::refusal, encode_refusal(words)));
}

void Control::bury(Connection& connection) {
    const ConnectionId id = connection.id;
    const bool announced = connection.announced;
    const std::string reason = std::move(connection.reason);
    if (connection.heartbeats) --num_tcp_peers_;
    connections_.erase(id);  // closes the socket
    if (announced) announce_gone(id, reason);
}

}  // namespace antiphon::m2n

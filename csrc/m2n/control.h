// Who is there, and who is gone. Every pair has a control connection beside its data path, because data paths do not
// say when a peer has died: after a kill, RDMA providers were seen to stay silent for seconds.
//
// On one machine the connection is a Unix socket: the kernel closes it with the process, at once, and it can carry
// descriptors. Between machines it is TCP with small heartbeats and TCP_USER_TIMEOUT: the peer's kernel acknowledges
// them even while its processes are busy or stopped, so only a dead machine or network makes the timeout, never load.
//
// Opening: hello (inbox, source, name, nonce) -> challenge (nonce) -> proof (HMAC-SHA256 of both under the shared
// secret) -> welcome (incarnation, sizes, the receiver's proof, blobs) or refusal (words). Every length is checked
// before it is believed; a stranger's bytes cost one closed connection and one counter.
#pragma once

#include <atomic>
#include <cstdint>
#include <span>
#include <string>

#include "m2n/transport.h"
#include "m2n/types.h"

namespace antiphon::m2n {

// Where an endpoint's control thread listens. `unix_name`: an abstract Unix socket, for peers of the same machine and
// network namespace; `host` and `port`: TCP, empty and 0 where only local peers are served.
struct Address {
    std::string unix_name;
    std::string host;
    uint16_t port = 0;
};

struct Hello {
    uint64_t inbox = 0;
    SourceId source = 0;
    std::string name;  // of the sender, for errors: "attention[3]"
    Blob introduction;
};

struct Welcome {
    Incarnation incarnation = 0;
    uint32_t slots = 0;
    uint64_t slot_bytes = 0;
    std::string name;  // of the receiver
    Blob blob;
};

using ConnectionId = uint64_t;

// Called on the control thread, one call at a time.
class ControlHandler {
  public:
    virtual ~ControlHandler() = default;
    // A peer that proved itself wants to become a source. Throw Error(Code::refused or invalid) to turn it down.
    virtual Welcome on_hello(ConnectionId connection, const Hello& hello) = 0;
    // A second connection presents a token from a welcome; take the descriptor if the token is known.
    virtual bool on_attach(FileDescriptor& connection, std::span<const std::byte> token) = 0;
    // The peer of `connection` (accepted or made by `connect`) is gone. Called once per connection, not after hang_up.
    virtual void on_gone(ConnectionId connection, const std::string& reason) = 0;
};

struct ControlOptions {
    std::string name;              // of this endpoint
    std::string secret;            // shared by all peers; empty: only proves that both have none
    std::string host;              // listen on TCP too, at this address; empty: do not
    uint16_t port = 0;             // 0: any free one
    int64_t heartbeat_ns = 200'000'000;
    int64_t dead_after_ns = 800'000'000;   // unacknowledged for so long: gone
    int64_t handshake_ns = 5'000'000'000;  // a stranger that says nothing is hung up on
    uint32_t max_connections = 4096;
    int type_of_service = 0x10;    // of control packets (IP_TOS); they go ahead of bulk data where the network obeys it
    int priority = 6;              // SO_PRIORITY of control packets
};

struct ControlCounters {
    std::atomic<uint64_t> accepted{0};   // connections that proved themselves
    std::atomic<uint64_t> rejected{0};   // closed for nonsense, a wrong proof, silence, or too many
    std::atomic<uint64_t> gone{0};       // peers lost after they had been welcomed
};

// First bytes of a data connection that wants to be adopted (see ControlHandler::on_attach): write this, then data.
std::vector<std::byte> attach_greeting(std::span<const std::byte> token);
constexpr size_t token_bytes = 16;

}  // namespace antiphon::m2n

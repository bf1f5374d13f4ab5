// Making and setting up the sockets of TCP data connections.
//
// Marks: data travels from sender to receiver, so the receiver's socket sends credits and TCP's own acknowledgements
// and nothing else. Marking that socket alone puts both in a queue of higher priority, on this host (SO_PRIORITY) and
// in a network that obeys IP_TOS: MegaScale-Infer's high-priority acknowledgements (section 5), without a second
// connection.
//
// Buffers: a pair never has more than its slots under way. Socket buffers of that size let the kernel carry messages
// while both processes compute. They are asked for explicitly instead of left to the kernel's own growth, because that
// begins small and grows only while the receiver reads, which is when it is not needed.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>

#include "m2n/file_descriptor.h"
#include "m2n/transport.h"
#include "m2n/types.h"

namespace antiphon::m2n {

// What pairs need so that the kernel can hold all their slots, and what it grants: payload bytes, one connection.
struct TcpBufferReport {
    uint64_t wanted = 0;           // the largest pair's slots * slot_stride
    uint64_t granted_send = 0;     // 0: not asked for yet
    uint64_t granted_receive = 0;
};

// What users have no reason to change.
struct TcpTuning {
    uint64_t least_buffer_bytes = uint64_t{4} << 20;     // 17% faster than 256 KiB with 8 x 8 messages of that size
    uint64_t largest_buffer_bytes = uint64_t{64} << 20;  // a pair with larger slots gets a progress thread
    uint64_t cached_bytes = uint64_t{16} << 20;  // on its way among all local processes: half a last-level cache
    bool force = true;  // go beyond the system's limit where this process may (CAP_NET_ADMIN)
};

// Error(invalid) if a priority, type of service or congestion control of the options cannot be had here.
void check_tcp_options(const TransportOptions& options);

// Connects, marked as carrying data. Error: timeout or system, both naming host and port; invalid for an empty host.
FileDescriptor connect_tcp(const std::string& host, uint16_t port, const TransportOptions& options, Deadline deadline);
// Writes all of it. Errors as above; `peer` is for their words.
void write_tcp(int fd, std::span<const std::byte> bytes, const std::string& peer, Deadline deadline);

// Options of an established socket: the sender's, and the one that a receiver adopted. Error(system).
void set_sender_options(int fd, const TransportOptions& options);
void set_receiver_options(int fd, const TransportOptions& options);

// Ask for room for `wanted` payload bytes; returns the payload bytes that the kernel promises.
uint64_t widen_send_buffer(int fd, uint64_t wanted, const TcpTuning& tuning);
uint64_t widen_receive_buffer(int fd, uint64_t wanted, const TcpTuning& tuning);

// What this machine grants to this process, asked of a socket that connects to no peer.
TcpBufferReport probe_tcp_buffers(uint64_t wanted, const TcpTuning& tuning = {});

}  // namespace antiphon::m2n

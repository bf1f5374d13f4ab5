// The sockets of TCP data connections: made, set up, and sent to without copies.
//
// Marks: data travels from sender to receiver, so the receiver's socket sends credits and TCP's own acknowledgements
// and nothing else. Marking that socket alone puts both in a queue of higher priority, on this host (SO_PRIORITY) and
// in a network that obeys IP_TOS: MegaScale-Infer's high-priority acknowledgements (section 5), without a second
// connection.
//
// Buffers: a pair never has more than its slots under way. Socket buffers of that size let the kernel carry messages
// while both processes compute. They are asked for explicitly instead of left to the kernel's own growth, because that
// begins small and grows only while the receiver reads, which is when it is not needed.
//
// Sending without copying: through a pipe, the kernel's way to hand pages from a process to a socket. It earns its
// place because the engine composes every message in its slot: a prefill's rows leave over a network card without the
// copy into the kernel, and over loopback 9% more bytes a second arrive (8 x 8 of 256 KiB).
//
// The kernel keeps referring to the pages until the peer's process has read them, so only memory that is not changed
// before its credit is back may be sent like this: a slot in which the message was composed. (A retransmission after
// that carries bytes the peer has had already, and its kernel drops them.) A caller's own memory must be reusable once
// the kernel has it, so that is copied. Over loopback this saves one of two copies, over a network card the copy into
// the kernel.
//
// Handing over a page costs as much as copying it from a cache: it pays where so much is on its way, in all processes
// of the machine, that messages have left the caches. Measured on loopback, pages against copies: 64 messages of
// 256 KiB among 16 processes 0.87 of the time, of 1 MiB 0.79, of 64 KiB 1.10; 4 of 1 MiB among 4 processes 1.20, one of
// 4 MiB 1.20.
#pragma once

#include <sys/types.h>

#include <cstddef>
#include <cstdint>
#include <mutex>
#include <span>
#include <string>

#include "m2n/transport.h"
#include "m2n/types.h"

namespace antiphon::m2n {

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

// Options of an established socket that a receiver adopted. Error(system).
void set_receiver_options(int fd, const TransportOptions& options);

// Ask for room for `wanted` payload bytes; returns the payload bytes that the kernel promises.
uint64_t widen_send_buffer(int fd, uint64_t wanted, const TcpTuning& tuning);
uint64_t widen_receive_buffer(int fd, uint64_t wanted, const TcpTuning& tuning);

// How much of an endpoint's messages is on its way, posted and not credited. Any thread.
class OutstandingBytes {
  public:
    void add(uint64_t bytes);
    void subtract(uint64_t bytes);
    uint64_t recent_peak() const;  // since the last moment without any, or before it if that was more

  private:
    mutable std::mutex mutex_;
    uint64_t now_ = 0;
    uint64_t peak_ = 0;
    uint64_t former_peak_ = 0;
};

class SplicePipe {
  public:
    static constexpr size_t least_bytes = 32 << 10;  // below, two calls to the kernel cost more than any copy

    // Whether the rest of a message, in the caches or not, goes through the pipe, which is made at the first
    // use. Never where SIGPIPE would end the process, as `splice` knows no MSG_NOSIGNAL; nor once making or filling a
    // pipe has failed.
    bool takes(std::span<const std::byte> rest, bool cached);

    // As send(2) on a socket that does not block: how much of `rest` the socket took, or -1 and `errno`. What went into
    // the pipe beyond that must be offered again first.
    ssize_t send(int socket, std::span<const std::byte> rest);

    void close();  // and forget what is in it

  private:
    bool open();

    FileDescriptor reading_end_;
    FileDescriptor writing_end_;
    size_t num_inside_ = 0;  // bytes of the message in the pipe
    bool useless_ = false;
};

}  // namespace antiphon::m2n

// What a back-end implements. Nothing above this file knows how bytes travel, nothing below knows what they mean.
//
// A pair is one source of one inbox. The sender holds its `Link`, the receiver its `Landing`. The sender composes a
// message in a slot of the link (header, then payload) and posts it; the landing reports it once header and payload
// are visible. The receiver releases the slot; the link reports the credit. Slots are independent: a back-end may
// deliver them in any order, and nothing above assumes one.
//
// Threads. The endpoint's owner (one thread at a time) calls progress, poll, post, release, prepare and block. The
// control thread calls open_landing, adopt and interrupt at any time. The destructors of Link and Landing run on
// either.
//
// The back-ends, and the choice among them.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "m2n/types.h"
#include "m2n/waiting.h"

namespace antiphon::m2n {

class StreamDevice;

// Bytes and descriptors that one end of a new pair hands to the other through the control connection.
struct Blob {
    std::vector<std::byte> bytes;
    std::vector<FileDescriptor> descriptors;  // only where both ends share a machine
};

struct PairSpec {
    SourceId source = 0;
    uint32_t slots = 0;
    uint64_t slot_bytes = 0;  // payload bytes a slot has room for
    Incarnation incarnation = 0;
    uint32_t sources = 1;  // of the inbox
    std::shared_ptr<StreamDevice> device{};  // receiver: in whose memory slots lie, where the transport can; none: host
};

// Bytes from one slot's header to the next one's.
inline uint64_t slot_stride(uint64_t slot_bytes) { return (header_bytes + slot_bytes + 63) / 64 * 64; }

// Receives the immediates of one pair: messages that became visible (Landing) or credits that came back (Link).
using ImmediateSink = std::vector<Immediate>;

class Landing {
  public:
    virtual ~Landing() = default;
    virtual EndId id() const { return any_end; }
    // Header of `slot`, the payload right behind it. Written by the sender: treat as foreign.
    virtual const std::byte* slot(SlotId slot) const = 0;
    // Of a message that `poll` has reported: its header in host memory. The rest of a slot may be the device's.
    virtual const std::byte* header(SlotId slot_id) const { return slot(slot_id); }
    // Appends what became visible since the last call; never blocks, never allocates beyond `sink`'s capacity
    // (slots entries at most). False: the connection is broken, `reason` says why.
    virtual bool poll(ImmediateSink& sink, std::string& reason) = 0;
    // Returns the slot to the sender. May queue; must not block.
    virtual void release(Immediate immediate) = 0;
};

class Link {
  public:
    virtual ~Link() = default;
    virtual EndId id() const { return any_end; }
    // Where to compose: header_bytes for the header, then the payload. Writable while the slot is the sender's.
    virtual std::byte* slot(SlotId slot) = 0;
    // Starts the write; returns at once. The header lies in the slot. `payload` of header.length bytes: nullptr if it
    // lies in the slot too, else the caller's memory, which must stay untouched until `source_reusable(slot)`.
    virtual void post(Immediate immediate, const MessageHeader& header, const std::byte* payload) = 0;
    virtual bool source_reusable(SlotId slot) = 0;
    // Appends credits that came back since the last call. False: broken, as in Landing.
    virtual bool poll(ImmediateSink& sink, std::string& reason) = 0;
};

// What an endpoint waits for. Each kind has its own bell, so that credits do not wake who waits for data.
enum class Event { arrival = 0, credit = 1 };

struct Bells {
    Bell bells[2];

    Bell& of(Event event) { return bells[static_cast<size_t>(event)]; }
};

class Transport {
  public:
    virtual ~Transport() = default;
    virtual const char* name() const = 0;  // "shm", "tcp", "libfabric:tcp", ...
    virtual bool same_host_only() const = 0;
    // Why peers cannot write into the memory of this device; empty: they can.
    virtual std::string why_staged(const std::shared_ptr<StreamDevice>&) {
        return std::string("the transport ") + name() + " writes to host memory";
    }

    // Sender, before the control connection's hello: what the receiver needs to know of us.
    virtual Blob introduce() = 0;
    // Receiver (control thread): make room for a source; fill what the sender needs to write here.
    virtual std::shared_ptr<Landing> open_landing(const PairSpec& spec, const Blob& introduction, Blob& welcome) = 0;
    // Sender: connect to the landing described by `welcome`. `host` and `port`: where the receiver's control listens.
    virtual std::shared_ptr<Link> open_link(const PairSpec& spec, Blob& welcome, const std::string& host,
                                            uint16_t port, Deadline deadline) = 0;
    // Receiver (control thread): a second connection that presented `token` (issued in a welcome). False: unknown.
    virtual bool adopt(FileDescriptor& connection, std::span<const std::byte> token) = 0;

    // Moves bytes that wait to be moved; never blocks.
    virtual void progress() = 0;
    // Take the bell's value before looking for news; `block` returns if it has moved since, when `needed` more events
    // have happened, at the deadline, after `interrupt`, or for no reason. It spins for `spin_ns` first.
    // `awaited`: an end without whose news the caller cannot go on, so a back-end that has no way to sleep until the
    // last of several events may sleep until that end has some, and look at the others then.
    virtual uint32_t prepare(Event event) = 0;
    virtual void block(Event event, uint32_t prepared, uint32_t needed, Deadline deadline, int64_t spin_ns,
                       EndId awaited = any_end) = 0;
    // Any thread: make `block` return now.
    virtual void interrupt() = 0;
};

// What a wait has not got yet. `end`: see Transport::block.
struct Lacking {
    uint32_t num_events = 0;
    EndId end = any_end;
};

// Until `look`, which takes in what has happened, lacks nothing; false at the deadline. `look` throws what ends the
// wait.
template <class Look>
bool wait_for(Transport& transport, Event event, Patience& patience, Deadline deadline, Look&& look) {
    for (;;) {
        const uint32_t prepared = transport.prepare(event);
        const Lacking lacking = look();
        if (lacking.num_events == 0) return true;
        if (deadline.passed()) return false;
        transport.block(event, prepared, lacking.num_events, patience.sleep_until(deadline), patience.spin_ns(),
                        patience.woken_by(lacking.end));
        patience.slept();
    }
}

struct TransportOptions {
    std::string host = "127.0.0.1";  // where this endpoint can be reached; not used by shm and loopback
    uint32_t local_processes = 0;    // of this program on this machine; 0: not known, taken for one
    // tcp. Bulk data and credits are marked apart, so that a network can let credits overtake data
    // (MegaScale-Infer, section 5: acknowledgements in a high-priority queue).
    int data_priority = 0;       // SO_PRIORITY
    int data_type_of_service = 0x08;
    int credit_priority = 6;
    int credit_type_of_service = 0x10;
    std::string congestion;      // TCP_CONGESTION; empty: cubic where the system's is BBR
    // libfabric
    std::string library;         // path; empty: searched
    std::string provider;        // "tcp", "verbs", "efa", "shm"; empty: the best there is
    int data_traffic_class = -1;    // FI_TC_*; -1: the provider's default
    int credit_traffic_class = -1;
    // loopback
    uint64_t shuffle_seed = 0;   // not 0: deliver in a random order, a few at a time
};

std::shared_ptr<Transport> make_loopback(const TransportOptions& options);
std::shared_ptr<Transport> make_shared_memory(const TransportOptions& options);
std::shared_ptr<Transport> make_tcp(const TransportOptions& options);
std::shared_ptr<Transport> make_libfabric(const TransportOptions& options);

// What this build has.
std::vector<std::string> transport_names();

// By name: loopback, shm, tcp, libfabric. Error(invalid) names the choices.
std::shared_ptr<Transport> make_transport(const std::string& kind, const TransportOptions& options);

}  // namespace antiphon::m2n

// The tcp back-end: what the pairs of one endpoint share, and the two ends of a pair.
//
// The hub: readiness of their sockets, the two bells, and tokens that wait for their connection.
//
// Three epoll sets, level-triggered, each within the next. `urgent` holds what no thread may sleep through: the knock,
// and every connection for which bytes are queued. `arrivals` holds the landings (and links, to hear that a peer has
// closed), `everything` the links, for credits. Who waits for data sleeps on the second and is not woken by credits;
// who waits for credits sleeps on the third, because its peer may need us to read before it can go on. Rejected: one
// set whose waiter sorts out what it was woken for; every credit then costs a process that waits for data a switch.
//
// Who needs news of several channels sleeps on one of them, and on `urgent`: by the time that one is ready, most others
// are too. The kernel has no sleep until the last of several sockets is ready. Sleeping until the first, again and
// again, took a tenth to a half more time for a round of 8 x 8 processes on two cores.
//
// Channels are found by a number that is never used twice, so an event that was fetched before its channel went away
// finds no thread.
//
// The two ends of a pair: a landing reads frames and writes credits, a link writes frames and reads credits. Each is a
// channel, which the hub shares, and a handle, which the core owns: the channel may be visited by the owner and the
// progress thread while the control thread lets go of the handle. One lock a channel. The owner's common questions (is
// there news, is the source reusable) are answered from atomics without it.
//
// After a fault the connection is closed at once. What had arrived whole before is still handed out; the poll that
// finds nothing more says false and why.
#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <span>
#include <unordered_map>

#include "m2n/control.h"
#include "m2n/tcp_connection.h"
#include "m2n/transport.h"
#include "m2n/types.h"
#include "m2n/waiting.h"

namespace antiphon::m2n {

struct Visit {
    uint32_t events = 0;   // EPOLL*
    bool patient = false;  // wait for a channel that another thread is busy with, instead of passing by
};

// One data connection, either end. Locks itself.
class TcpChannel {
  public:
    virtual ~TcpChannel() = default;
    virtual void on_ready(const Visit& visit) = 0;
    virtual bool has_news() const = 0;  // for the owner, not handed out yet
    virtual int connection() = 0;       // negative: there is none
    // The data connection that presented our token. Only landings are ever expected to have one.
    virtual void attach(FileDescriptor) {}
};

class TcpHub {
  public:
    using Token = std::array<std::byte, token_bytes>;
    using ChannelId = uint64_t;

    TcpHub();

    // Any thread.
    ChannelId add(std::shared_ptr<TcpChannel> channel);
    void remove(ChannelId id);
    Token expect(ChannelId id);  // a token whose presenter becomes the channel's connection, once
    bool attach(std::span<const std::byte> token, FileDescriptor& connection);
    void watch_landing(ChannelId id, int fd);
    void watch_link(ChannelId id, int fd);
    // Also report when `fd` can be written. Closing a descriptor ends its watch.
    void want_output(ChannelId id, int fd, bool wanted);

    void count(Event event) { ring(bells_.of(event)); }  // one more of them happened
    void rouse(Event event);                        // end the owner's wait: it should look
    void interrupt();                               // both, wherever the owner sleeps

    OutstandingBytes& outstanding() { return outstanding_; }

    void note_buffer(uint64_t wanted, uint64_t granted);  // payload bytes of a pair's slots, and of its socket's buffer
    bool wants_thread() const { return wants_thread_.load(); }  // some pair's slots do not fit into its buffer
    void knock();                                               // make a sleeper on an epoll set look around

    // Owner.
    uint32_t prepare(Event event) { return bells_.of(event).count.load(); }
    bool reached(Event event, uint32_t target);
    bool take_rouse(Event event) { return roused(event).exchange(false); }
    void wait_on_bell(Event event, uint32_t prepared, uint32_t needed, Deadline deadline);
    bool has_news(ChannelId id);
    // Sleeps until the channel's connection, or anything urgent, is ready. False, at once: it has no connection.
    bool sleep_on(ChannelId id, Deadline deadline);

    // Owner and progress thread: visit the channels that are ready, after waiting for one for at most `timeout_ms`.
    void visit_arrivals(int timeout_ms, Visit visit) { visit_ready(arrivals_.get(), timeout_ms, visit); }
    void visit_everything(int timeout_ms, Visit visit) { visit_ready(everything_.get(), timeout_ms, visit); }

  private:
    std::atomic<bool>& roused(Event event) { return roused_[static_cast<size_t>(event)]; }
    void visit_ready(int epoll, int timeout_ms, Visit visit);
    std::shared_ptr<TcpChannel> find(ChannelId id);

    FileDescriptor urgent_;
    FileDescriptor arrivals_;
    FileDescriptor everything_;
    FileDescriptor knock_;  // an eventfd
    Bells bells_ = {};
    std::atomic<bool> roused_[2] = {};
    std::atomic<bool> wants_thread_{false};
    OutstandingBytes outstanding_;

    std::mutex mutex_;  // of what follows; held for look-ups only, never while a channel is visited
    std::unordered_map<ChannelId, std::shared_ptr<TcpChannel>> channels_;
    std::map<Token, ChannelId> expected_;
    ChannelId next_id_;
};

std::shared_ptr<Transport> make_tcp(const TransportOptions& options, const TcpTuning& tuning);

// Makes room for a source. `token`: what the source's data connection must present.
std::shared_ptr<Landing> make_tcp_landing(const std::shared_ptr<TcpHub>& hub, const PairSpec& spec,
                                          const TransportOptions& options, const TcpTuning& tuning,
                                          TcpHub::Token& token);

// `connection` has been greeted and is the link's from now on.
std::shared_ptr<Link> make_tcp_link(const std::shared_ptr<TcpHub>& hub, const PairSpec& spec,
                                    const TransportOptions& options, const TcpTuning& tuning,
                                    FileDescriptor connection);

}  // namespace antiphon::m2n

// The tcp back-end beyond what `Transport` offers: test limits, and what `doctor` reports.
//
// The two ends of a TCP pair: a landing reads frames and writes credits, a link writes frames and reads credits.
//
// Each end is a channel, which the hub shares, and a thin handle, which the core owns: the channel may be visited by
// the owner and the progress thread while the control thread destroys the handle. One lock a channel. The owner's
// common questions (is there news, is the source reusable) are answered from atomics without it.
//
// After a fault the connection is closed at once. What had arrived whole before is still handed out; the poll that
// finds nothing more says false and why.
#pragma once

#include <memory>
#include <span>

#include "m2n/tcp_connection.h"
#include "m2n/tcp_hub.h"
#include "m2n/transport.h"

namespace antiphon::m2n {

class TcpTransport : public Transport {
  public:
    virtual TcpBufferReport buffers() const = 0;     // of the pairs opened so far; any thread
    virtual bool has_progress_thread() const = 0;    // owner
};

std::unique_ptr<TcpTransport> make_tcp(const TransportOptions& options, const TcpTuning& tuning);

// Makes room for a source. `token`: what the source's data connection must present.
std::unique_ptr<Landing> make_tcp_landing(const std::shared_ptr<TcpHub>& hub, const PairSpec& spec,
                                          const TransportOptions& options, const TcpTuning& tuning,
                                          TcpHub::Token& token);

// `connection` has been greeted and is the link's from now on.
std::unique_ptr<Link> make_tcp_link(const std::shared_ptr<TcpHub>& hub, const PairSpec& spec,
                                    const TransportOptions& options, const TcpTuning& tuning,
                                    FileDescriptor connection);

}  // namespace antiphon::m2n

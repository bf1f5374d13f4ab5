// The tcp back-end beyond what `Transport` offers: test limits, and what `doctor` reports.
#pragma once

#include <memory>

#include "m2n/tcp_connection.h"
#include "m2n/transports.h"

namespace antiphon::m2n {

class TcpTransport : public Transport {
  public:
    virtual TcpBufferReport buffers() const = 0;     // of the pairs opened so far; any thread
    virtual bool has_progress_thread() const = 0;    // owner
};

std::unique_ptr<TcpTransport> make_tcp(const TransportOptions& options, const TcpTuning& tuning);

}  // namespace antiphon::m2n

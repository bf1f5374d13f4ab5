// One process's end of any number of pairs: a transport, a control connection for each peer, inboxes and outboxes.
//
// A receiver makes an inbox and gives its ticket to the senders; a sender connects with the ticket and a source number
// and gets an outbox. No group is formed and no peer waits for a third: peers come and go one by one.
#pragma once

#include <atomic>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "m2n/control_thread.h"
#include "m2n/inbox.h"
#include "m2n/outbox.h"
#include "m2n/wire.h"
#include "m2n/transport.h"
#include "m2n/waiting.h"

namespace antiphon::m2n {

struct EndpointOptions {
    std::string name;
    std::string transport = "shm";
    std::string host = "127.0.0.1";  // where peers of other machines reach us; shm and loopback listen locally only
    uint16_t port = 0;
    std::string secret;
    std::string waiting = "auto";
    uint32_t local_processes = 0;
    Cores cores;  // that it may use
    int64_t spin_ns = 100'000;
    void (*between_sleeps)() = nullptr;  // see WaitPolicy
    int64_t heartbeat_ns = 200'000'000;
    int64_t dead_after_ns = 800'000'000;
    TransportOptions transport_options;
};

class Endpoint final : private ControlHandler {
  public:
    explicit Endpoint(EndpointOptions options);
    ~Endpoint() override;
    Endpoint(const Endpoint&) = delete;
    Endpoint& operator=(const Endpoint&) = delete;

    const std::string& name() const { return options_.name; }
    const char* transport_name() const { return transport_->name(); }
    Waiting waiting() const { return policy_.waiting; }
    const ControlCounters& control_counters() const { return *counters_; }

    // `names`: of the sources, by number, for errors before they connect; as many as `sources`, or none.
    // `device`: payloads lie in its memory; only where `why_staged` has no reason against it.
    std::shared_ptr<Inbox> make_inbox(uint32_t sources, uint32_t slots, uint64_t slot_bytes,
                                      std::vector<std::string> names = {},
                                      std::shared_ptr<StreamDevice> device = nullptr);
    std::string why_staged(const std::shared_ptr<StreamDevice>& device) { return transport_->why_staged(device); }
    Ticket ticket(const Inbox& inbox) const;
    std::shared_ptr<Outbox> connect(const Ticket& ticket, SourceId source, Deadline deadline);

    void interrupt();  // any thread: the current or next wait ends with Error(interrupted)
    void close();      // goodbye to all peers; nothing can be sent or received afterwards

  private:
    Welcome on_hello(ConnectionId connection, const Hello& hello) override;
    bool on_attach(FileDescriptor& connection, std::span<const std::byte> token) override;
    void on_gone(ConnectionId connection, const std::string& reason) override;
    std::shared_ptr<Tie> make_tie(ConnectionId connection);

    EndpointOptions options_;
    WaitPolicy policy_;
    std::shared_ptr<Transport> transport_;
    std::shared_ptr<std::atomic<bool>> interrupted_;

    // Through which inboxes and outboxes hang up. They may outlive the endpoint.
    struct ControlLine {
        std::mutex mutex;
        Control* control = nullptr;

        void hang_up(ConnectionId connection) {
            const std::lock_guard lock(mutex);
            if (control != nullptr) control->hang_up(connection);
        }
    };
    struct OpenInbox {
        std::shared_ptr<Inbox> inbox;
        std::map<SourceId, ConnectionId> connections;
        Incarnation next_incarnation = 1;
    };
    std::mutex mutex_;  // guards the tables below, which both threads use
    std::map<uint64_t, OpenInbox> inboxes_;
    std::map<ConnectionId, std::weak_ptr<Tie>> ties_;  // of the outboxes
    std::map<ConnectionId, std::string> gone_early_;   // lost between the handshake and the outbox's registration
    bool closing_ = false;                             // the control thread must not use `control_` any more
    std::shared_ptr<ControlLine> line_;
    std::shared_ptr<const ControlCounters> counters_;
    std::unique_ptr<Control> control_;  // last: its thread uses all of the above
};

}  // namespace antiphon::m2n

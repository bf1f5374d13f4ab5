// The back-end for any two machines that reach each other by TCP, without a library: one connection a pair (see
// tcp_frames.h for what travels on it, tcp_connection.h for its marks and buffers, tcp_hub.h for waiting).
//
// The receiver makes room and a token; the sender connects to where the receiver's control listens, presents the token,
// and the control thread hands the connection over. From then on everything happens in the owner's calls, while the
// kernel carries what fits into its buffers. Only where they are smaller than a pair's slots a progress thread moves
// bytes while the owner computes. It is not the rule, because it costs a switch between the last byte and the waiter.
#include "m2n/tcp.h"

#include <algorithm>
#include <atomic>
#include <memory>
#include <system_error>
#include <thread>
#include <utility>

#include "m2n/control.h"
#include "m2n/error.h"
#include "m2n/waiting.h"
#include "m2n/tcp_hub.h"

namespace antiphon::m2n {

namespace {

constexpr int64_t longest_sleep_ms = 60'000;  // then look again, whatever happened

void check_spec(const PairSpec& spec) {
    const auto refuse = [](const char* what, uint64_t value, uint64_t least, uint64_t most) {
        throw Error(Code::invalid, std::string("tcp: ") + what + " is " + std::to_string(value) + ": it must be " +
                                       std::to_string(least) + " to " + std::to_string(most));
    };
    if (spec.source >= max_sources) refuse("the source's number", spec.source, 0, max_sources - 1);
    if (spec.slots == 0 || spec.slots > max_slots) refuse("the number of slots", spec.slots, 1, max_slots);
    if (spec.slot_bytes > max_slot_bytes) refuse("a slot's size", spec.slot_bytes, 0, max_slot_bytes);
}

int sleep_ms(Deadline deadline) {
    const int64_t left_ns = deadline.left_ns();
    return static_cast<int>(std::min(left_ns / 1'000'000 + (left_ns % 1'000'000 != 0), longest_sleep_ms));
}

class Tcp final : public TcpTransport {
  public:
    Tcp(const TransportOptions& options, const TcpTuning& tuning)
        : options_(options), tuning_(tuning), hub_(std::make_shared<TcpHub>()) {}

    ~Tcp() override {
        if (!thread_.joinable()) return;
        stopping_.store(true);
        hub_->knock();
        thread_.join();
    }

    const char* name() const override { return "tcp"; }
    bool same_host_only() const override { return false; }
    TcpBufferReport buffers() const override { return hub_->buffers(); }
    bool has_progress_thread() const override { return thread_.joinable(); }

    Blob introduce() override { return {}; }

    std::unique_ptr<Landing> open_landing(const PairSpec& spec, const Blob&, Blob& welcome) override {
        check_spec(spec);
        TcpHub::Token token;
        std::unique_ptr<Landing> landing = make_tcp_landing(hub_, spec, options_, tuning_, token);
        welcome.bytes.assign(token.begin(), token.end());
        return landing;
    }

    std::unique_ptr<Link> open_link(const PairSpec& spec, Blob& welcome, const std::string& host, uint16_t port,
                                    Deadline deadline) override {
        check_spec(spec);
        if (welcome.bytes.size() != token_bytes) {
            throw Error(Code::refused, "tcp: the receiver's welcome holds " + std::to_string(welcome.bytes.size()) +
                                           " bytes, not a token of " + std::to_string(token_bytes) +
                                           ": is its endpoint of another transport?");
        }
        FileDescriptor connection = connect_tcp(host, port, options_, deadline);
        const std::string peer = host + ":" + std::to_string(port);
        write_tcp(connection.get(), attach_greeting(welcome.bytes), peer, deadline);
        std::unique_ptr<Link> link = make_tcp_link(hub_, spec, options_, tuning_, std::move(connection));
        start_thread_if_wanted();
        return link;
    }

    bool adopt(FileDescriptor& connection, std::span<const std::byte> token) override {
        return hub_->attach(token, connection);
    }

    void progress() override {
        start_thread_if_wanted();
        hub_->visit_everything(0, visit());
    }

    uint32_t prepare(Event event) override { return hub_->prepare(event); }

    void block(Event event, uint32_t prepared, uint32_t needed, Deadline deadline, int64_t spin_ns,
               EndId awaited) override {
        const uint32_t target = prepared + needed;
        Spin spin(spin_ns, deadline);
        while (!hub_->reached(event, target) && !hub_->take_rouse(event) && !deadline.passed()) {
            start_thread_if_wanted();
            if (spin.again()) {
                visit_for(event, 0);
            } else if (thread_.joinable()) {
                hub_->wait_on_bell(event, prepared, needed, deadline);
            } else if (hub_->has_news(awaited)) {
                return;  // the caller knows whom it misses next
            } else {
                visit_for(event, hub_->sleep_on(awaited, deadline) ? 0 : sleep_ms(deadline));
            }
        }
    }

    void interrupt() override { hub_->interrupt(); }

  private:
    // With a progress thread about, a channel that is busy is in good hands.
    Visit visit() const { return {.events = 0, .patient = !thread_.joinable()}; }

    void visit_for(Event event, int timeout_ms) {
        if (event == Event::arrival) {
            hub_->visit_arrivals(timeout_ms, visit());
        } else {
            hub_->visit_everything(timeout_ms, visit());
        }
    }

    void start_thread_if_wanted() {
        if (thread_.joinable() || !hub_->wants_thread()) return;
        try {
            thread_ = std::thread([this] { move_bytes(); });
        } catch (const std::system_error& error) {
            throw Error(Code::system, std::string("tcp: the progress thread cannot be started: ") + error.what());
        }
    }

    void move_bytes() {
        const Visit visit{.events = 0, .patient = true};
        while (!stopping_.load()) hub_->visit_everything(-1, visit);
    }

    const TransportOptions options_;
    const TcpTuning tuning_;
    const std::shared_ptr<TcpHub> hub_;
    std::thread thread_;  // started by the owner, once
    std::atomic<bool> stopping_{false};
};

}  // namespace

std::unique_ptr<TcpTransport> make_tcp(const TransportOptions& options, const TcpTuning& tuning) {
    check_tcp_options(options);
    return std::make_unique<Tcp>(options, tuning);
}

std::unique_ptr<Transport> make_tcp(const TransportOptions& options) { return make_tcp(options, TcpTuning{}); }

}  // namespace antiphon::m2n

// The pipe that hands a slot's pages to the kernel: alone over one connection, and under whole pairs.
#include <sys/socket.h>

#include <cerrno>
#include <csignal>

#include "harness.h"
#include "m2n/tcp_connection.h"

namespace antiphon::m2n::test {

namespace {

constexpr bool not_cached = false;

// A connection over loopback whose sending end does not block.
struct Connection {
    Connection() {
        const Listener listener;
        sender = connect_tcp("127.0.0.1", listener.port(), TransportOptions{}, soon());
        receiver = listener.accept();
    }

    FileDescriptor sender, receiver;
};

// How often the socket took nothing, until it had taken all of `bytes`; what is read goes to `sink`.
size_t send_all(SplicePipe& pipe, const Connection& connection, std::span<const std::byte> bytes,
                std::span<std::byte> sink) {
    size_t sent = 0, received = 0, num_refusals = 0;
    const Deadline deadline = soon();
    while (received < bytes.size()) {
        CHECK(!deadline.passed());
        const ssize_t took = sent < bytes.size() ? pipe.send(connection.sender.get(), bytes.subspan(sent)) : 0;
        CHECK(took >= 0 || errno == EAGAIN);
        if (took > 0) {
            sent += static_cast<size_t>(took);
            continue;
        }
        num_refusals += took < 0 ? 1 : 0;
        const std::span<std::byte> room = sink.subspan(received);
        const ssize_t got = ::recv(connection.receiver.get(), room.data(), room.size(), MSG_DONTWAIT);
        if (got > 0) received += static_cast<size_t>(got);
    }
    return num_refusals;
}

void pages_arrive() {
    const Connection connection;
    SplicePipe pipe;
    std::vector<std::byte> bytes(9'000'001), sink(bytes.size());
    for (const uint64_t round : {1, 2, 3}) {
        fill_pattern(bytes, 5, round);
        CHECK(pipe.takes(bytes, not_cached));
        CHECK(send_all(pipe, connection, bytes, sink) > 0);  // more than the socket holds: it was full at times
        fill_pattern(bytes, 6, round);                       // what was read is the reader's own
        CHECK(has_pattern(sink, 5, round));
    }
}

void who_is_taken() {
    SplicePipe pipe;
    std::vector<std::byte> bytes(SplicePipe::least_bytes);
    CHECK(!pipe.takes(std::span(bytes).subspan(1), not_cached));
    CHECK(!pipe.takes(bytes, true));
    std::signal(SIGPIPE, SIG_DFL);
    CHECK(!pipe.takes(bytes, not_cached));
    std::signal(SIGPIPE, SIG_IGN);
    CHECK(pipe.takes(bytes, not_cached));
    const Connection connection;
    std::vector<std::byte> large(4 << 20);
    while (pipe.send(connection.sender.get(), large) > 0) {  // nobody reads
    }
    CHECK(errno == EAGAIN);
    CHECK(pipe.takes(std::span(large).first(1), true));  // some of it is inside, and must go first
    pipe.close();
    CHECK(!pipe.takes(std::span(large).first(1), not_cached));
    CHECK(pipe.takes(bytes, not_cached));
}

void peaks_are_remembered() {
    OutstandingBytes outstanding;
    CHECK(outstanding.recent_peak() == 0);
    outstanding.add(3);
    outstanding.add(4);
    outstanding.subtract(3);
    CHECK(outstanding.recent_peak() == 7);
    outstanding.subtract(4);
    outstanding.subtract(0);  // an empty message's credit ends no burst
    outstanding.add(1);
    CHECK(outstanding.recent_peak() == 7);  // the burst before counts, so the first message of the next is judged by it
    outstanding.subtract(1);
    CHECK(outstanding.recent_peak() == 1);  // and then no more
    outstanding.add(9);
    CHECK(outstanding.recent_peak() == 9);
}

// Memory that cannot be read ends it: the caller is told to try again, and then copies.
void unreadable_memory() {
    const Connection connection;
    SplicePipe pipe;
    const std::span nowhere(reinterpret_cast<const std::byte*>(uintptr_t{4096}), size_t{1} << 20);
    CHECK(pipe.takes(nowhere, not_cached));
    CHECK(pipe.send(connection.sender.get(), nowhere) == -1 && errno == EINTR);
    CHECK(!pipe.takes(nowhere, not_cached));
}

void peer_goes_away() {
    Connection connection;
    SplicePipe pipe;
    const std::vector<std::byte> bytes(1 << 20);
    CHECK(pipe.takes(bytes, not_cached));
    connection.receiver.reset();
    const Deadline deadline = soon();
    while (pipe.send(connection.sender.get(), bytes) >= 0 || errno == EAGAIN) CHECK(!deadline.passed());
    CHECK(errno == EPIPE || errno == ECONNRESET);
}

// Slots are written again the moment their credits are back, while the kernel may still know their pages.
void slots_are_reused() {
    constexpr TcpTuning wide{.cached_bytes = 0};
    constexpr TcpTuning tight{.least_buffer_bytes = 0, .largest_buffer_bytes = 65'536, .cached_bytes = 0};
    for (const TcpTuning& tuning : {wide, tight}) {
        for (const auto disposition : {SIG_IGN, SIG_DFL}) {
            std::signal(SIGPIPE, disposition);
            Node sender(tuning), receiver(tuning);
            const PairSpec spec{.source = 2, .slots = 2, .slot_bytes = 400'000, .incarnation = 3};
            constexpr size_t num_messages = 120;
            Pair pair = open_pair(sender, receiver, spec);
            std::thread receiving([&] { Collector(receiver.transport(), *pair.landing, spec).take(num_messages); });
            Sender from(sender.transport(), *pair.link, spec);
            std::vector<std::byte> apart(spec.slot_bytes);
            for (Step step = 0; step < num_messages; ++step) {
                const uint64_t length = step % 4 == 3 ? 100 : 30'000 + 3'083 * step;
                if (step % 5 != 4) {
                    from.send(step, length);
                    continue;
                }
                fill_pattern({apart.data(), length}, spec.source, step);
                from.send(step, length, apart.data());
                from.wait_reusable();
            }
            from.wait_credits(spec.slots);
            receiving.join();
        }
    }
    std::signal(SIGPIPE, SIG_IGN);
}

}  // namespace

std::vector<Case> splice_cases() {
    return {{"splice: pages arrive", pages_arrive},
            {"splice: who is taken", who_is_taken},
            {"splice: peaks are remembered", peaks_are_remembered},
            {"splice: memory that cannot be read", unreadable_memory},
            {"splice: the peer goes away", peer_goes_away},
            {"splice: slots are reused", slots_are_reused}};
}

}  // namespace antiphon::m2n::test

// Whole pairs over loopback: bytes, back-pressure, both directions, many pairs, wrap-around, memory, marks.
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cstring>
#include <filesystem>
#include <fstream>
#include <iterator>

#include "allocations.h"
#include "harness.h"

namespace antiphon::m2n::test {

namespace {

constexpr TcpTuning tiny_buffers{.least_buffer_bytes = 0, .largest_buffer_bytes = 65'536};

void sizes() {
    for (const TcpTuning& tuning : {TcpTuning{}, tiny_buffers}) {
        Node sender(tuning), receiver(tuning);
        const PairSpec spec{.source = 7, .slots = 3, .slot_bytes = 300'000, .incarnation = 4};
        Pair pair = open_pair(sender, receiver, spec);
        Sender from(sender.transport(), *pair.link, spec);
        Collector to(receiver.transport(), *pair.landing, spec);
        std::vector<std::byte> apart(spec.slot_bytes);
        Step step = 0;
        for (const uint64_t length : {0, 1, 63, 64, 8127, 8128, 8129, 65'536, 299'999, 300'000}) {
            from.send(++step, length);
            fill_pattern({apart.data(), length}, spec.source, ++step);
            std::thread receiving([&] { to.take(2); });
            from.send(step, length, apart.data());
            from.wait_reusable();
            fill_pattern({apart.data(), length}, 99, 99);  // must no longer matter
            receiving.join();
            from.wait_credits(spec.slots);
        }
        CHECK(to.num_taken() == step);
    }
}

void wrap_around() {
    Node sender, receiver;
    const PairSpec spec{.source = 4095, .slots = 2, .slot_bytes = 100, .incarnation = UINT32_MAX};
    Pair pair = open_pair(sender, receiver, spec);
    constexpr size_t num_messages = 2 * (2 * sequence_modulus + 10);
    std::thread receiving([&] { Collector(receiver.transport(), *pair.landing, spec).take(num_messages); });
    Sender from(sender.transport(), *pair.link, spec);
    for (Step step = 0; step < num_messages; ++step) from.send(step, step % 101);
    from.wait_credits(spec.slots);
    receiving.join();
}

long peak_kilobytes() {
    rusage usage{};
    ::getrusage(RUSAGE_SELF, &usage);
    return usage.ru_maxrss;
}

// 1e5 messages through one pair: no allocation on either thread, no growth.
void no_growth() {
    Node sender, receiver;
    const PairSpec spec{.source = 0, .slots = 16, .slot_bytes = 256, .incarnation = 1};
    Pair pair = open_pair(sender, receiver, spec);
    constexpr size_t num_messages = 100'000, num_first = 2'000;
    std::atomic<uint64_t> allocated{0};
    std::thread receiving([&] {
        Collector to(receiver.transport(), *pair.landing, spec);
        to.take(num_first);
        const uint64_t before = num_allocations();
        to.take(num_messages);
        allocated += num_allocations() - before;
    });
    Sender from(sender.transport(), *pair.link, spec);
    for (Step step = 0; step < num_first; ++step) from.send(step, 100);
    const uint64_t before = num_allocations();
    const long peak = peak_kilobytes();
    for (Step step = 0; step < num_messages; ++step) from.send(step, step % 257);
    from.wait_credits(spec.slots);
    allocated += num_allocations() - before;
    receiving.join();
    CHECK(allocated.load() == 0);
    CHECK(peak_kilobytes() - peak < 1'024 || !counts_allocations());
}

size_t num_threads() {
    const std::filesystem::directory_iterator tasks("/proc/self/task");
    return static_cast<size_t>(std::distance(begin(tasks), end(tasks)));
}

// Slots far larger than the buffers: bytes move on, both sides, while neither owner calls anything.
void progress_thread() {
    Node sender(tiny_buffers), receiver(tiny_buffers);
    const size_t before = num_threads();
    const PairSpec spec{.source = 1, .slots = 2, .slot_bytes = 1 << 20, .incarnation = 2};
    Pair pair = open_pair(sender, receiver, spec);
    wait_adopted(receiver);
    CHECK(num_threads() == before + 2);
    Sender from(sender.transport(), *pair.link, spec);
    from.send(1, spec.slot_bytes);
    from.send(2, spec.slot_bytes);
    for (const SlotId slot : {0, 1}) {
        const Deadline deadline = soon();
        while (!pair.link->source_reusable(slot)) {
            CHECK(!deadline.passed());
            sleep_for_ms(1);
        }
    }
    Collector to(receiver.transport(), *pair.landing, spec);
    const Deadline deadline = soon();
    while (to.num_taken() < 2) {
        CHECK(!deadline.passed());
        to.take_what_is_here();
        sleep_for_ms(1);
    }
    from.wait_credits(2);
}

// Two nodes send each other more than the buffers hold, at once, and wait for credits before they look at arrivals.
void both_directions() {
    for (const TcpTuning& tuning : {TcpTuning{}, tiny_buffers}) {
        Node nodes[2] = {Node(tuning), Node(tuning)};
        const PairSpec spec{.source = 3, .slots = 2, .slot_bytes = 4 << 20, .incarnation = 2};
        Pair pairs[2] = {open_pair(nodes[0], nodes[1], spec), open_pair(nodes[1], nodes[0], spec)};
        const auto run = [&](int self) {
            Transport& transport = nodes[self].transport();
            Sender from(transport, *pairs[self].link, spec);
            Collector to(transport, *pairs[1 - self].landing, spec);
            for (Step step = 0; step < 8; step += 2) {
                from.send(step, spec.slot_bytes);
                from.send(step + 1, spec.slot_bytes);
                from.wait_reusable();
                to.take(2);
                from.wait_credits(2);
            }
        };
        std::thread other([&] { run(1); });
        run(0);
        other.join();
    }
}

void many_pairs(const TcpTuning& tuning, uint64_t slot_bytes, int num_rounds, int64_t spin_ns) {
    constexpr int num_sides = 8;
    std::vector<std::unique_ptr<Node>> senders, receivers;
    for (int i = 0; i < num_sides; ++i) {
        senders.push_back(std::make_unique<Node>(tuning));
        receivers.push_back(std::make_unique<Node>(tuning));
    }
    Pair pairs[num_sides][num_sides];
    for (int s = 0; s < num_sides; ++s) {
        for (int r = 0; r < num_sides; ++r) {
            const auto incarnation = static_cast<Incarnation>(100 * s + r + 1);
            pairs[s][r] = open_pair(*senders[s], *receivers[r],
                                    {static_cast<SourceId>(s), 2, slot_bytes, incarnation});
        }
    }
    std::vector<std::thread> threads;
    for (int s = 0; s < num_sides; ++s) {
        threads.emplace_back([&, s] {
            std::vector<Sender> to;
            for (Pair& pair : pairs[s]) to.emplace_back(senders[s]->transport(), *pair.link, pair.spec);
            for (int round = 0; round < num_rounds; ++round) {
                for (Sender& each : to) each.send(round, round % 3 == 0 ? slot_bytes : slot_bytes / 7);
            }
            for (Sender& each : to) each.wait_credits(2);
        });
        threads.emplace_back([&, r = s] {
            Transport& transport = receivers[r]->transport();
            std::vector<Collector> from;
            for (int i = 0; i < num_sides; ++i) from.emplace_back(transport, *pairs[i][r].landing, pairs[i][r].spec);
            for (const Deadline deadline = soon();;) {
                const uint32_t prepared = transport.prepare(Event::arrival);
                transport.progress();
                size_t num_missing = 0;
                for (Collector& each : from) {
                    each.take_what_is_here();
                    num_missing += num_rounds - each.num_taken();
                }
                if (num_missing == 0) break;
                CHECK(!deadline.passed());
                // Not more than a pair has slots: its sender may wait for what we hold.
                transport.block(Event::arrival, prepared, num_missing < 2 ? 1 : 2, deadline, spin_ns);
            }
        });
    }
    for (std::thread& thread : threads) thread.join();
}

void many_pairs_roomy() { many_pairs({}, 64 << 10, 20, 0); }
void many_pairs_spinning() { many_pairs({}, 16 << 10, 10, 20'000); }
void many_pairs_tight() { many_pairs(tiny_buffers, 64 << 10, 6, 5'000); }

// Landings go away on another thread while the owner visits them.
void destruction_elsewhere() {
    for (const TcpTuning& tuning : {TcpTuning{}, tiny_buffers}) {
        Node sender(tuning), receiver(tuning);
        for (int round = 0; round < 60; ++round) {
            const PairSpec spec{.source = 1, .slots = 4, .slot_bytes = 40'000, .incarnation = round + 1u};
            Pair pair = open_pair(sender, receiver, spec);
            Sender from(sender.transport(), *pair.link, spec);
            for (Step step = 0; step < 4; ++step) from.send(step, spec.slot_bytes);
            std::thread control([landing = std::move(pair.landing)]() mutable { landing.reset(); });
            for (int i = 0; i < 20; ++i) receiver.transport().progress();
            control.join();
            wait_broken(sender.transport(), Event::credit, *pair.link);
        }
    }
}

// Who sleeps on a connection holds it open: the sender must hear of its end all the same.
void destruction_under_a_sleeper() {
    for (const TcpTuning& tuning : {TcpTuning{}, tiny_buffers}) {
        Node sender(tuning), receiver(tuning);
        const PairSpec spec{.source = 1, .slots = 4, .slot_bytes = 40'000, .incarnation = 1};
        Pair pair = open_pair(sender, receiver, spec);
        wait_adopted(receiver);
        Transport& transport = receiver.transport();
        std::thread sleeping([&, id = pair.landing->id()] {
            const Deadline at = soon();
            transport.block(Event::arrival, transport.prepare(Event::arrival), 1, at, 0, id);
            CHECK(!at.passed());
        });
        sleep_for_ms(20);  // let it fall asleep; there is no event for that
        pair.landing.reset();
        wait_broken(sender.transport(), Event::credit, *pair.link);
        transport.interrupt();
        sleeping.join();
    }
}

uint16_t port_of(int fd, bool peer) {
    sockaddr_in address{};
    socklen_t size = sizeof(address);
    const auto ask = peer ? ::getpeername : ::getsockname;
    const bool known = ask(fd, reinterpret_cast<sockaddr*>(&address), &size) == 0 && address.sin_family == AF_INET;
    return known ? ntohs(address.sin_port) : uint16_t{0};
}

int option_of(int fd, int level, int name) {
    int value = -1;
    socklen_t size = sizeof(value);
    CHECK(::getsockopt(fd, level, name, &value, &size) == 0);
    return value;
}

// The one connection of this process to (`outgoing`) or from `port`.
int find_connection(uint16_t port, bool outgoing) {
    for (int fd = 3; fd < 1024; ++fd) {
        if (port_of(fd, outgoing) == port && port_of(fd, !outgoing) != 0 && port_of(fd, true) != 0) return fd;
    }
    return -1;
}

// With buffers as large as the slots nobody needs a thread, and a message is under way while both owners compute.
void no_thread_needed() {
    Node sender, receiver;
    const size_t before = num_threads();
    const PairSpec spec{.source = 1, .slots = 2, .slot_bytes = 1 << 20, .incarnation = 2};
    Pair pair = open_pair(sender, receiver, spec);
    wait_adopted(receiver);
    const uint64_t wanted = 2 * slot_stride(1 << 20);
    const int buffer = option_of(find_connection(receiver.port(), true), SOL_SOCKET, SO_SNDBUF);
    const bool granted = static_cast<uint64_t>(buffer) / 2 >= wanted;
    CHECK((num_threads() == before) == granted);
    Sender from(sender.transport(), *pair.link, spec);
    from.send(1, spec.slot_bytes);
    from.send(2, spec.slot_bytes);
    if (granted) CHECK(pair.link->source_reusable(0) && pair.link->source_reusable(1));
    Collector(receiver.transport(), *pair.landing, spec).take(2);
    from.wait_credits(2);
}

void marks() {
    TransportOptions options;
    options.data_priority = 1;
    options.data_type_of_service = 0x20;
    options.credit_priority = 5;
    options.credit_type_of_service = 0x40;
    options.congestion = "reno";
    Node sender({}, options), receiver({}, options);
    Pair pair = open_pair(sender, receiver, {.source = 0, .slots = 1, .slot_bytes = 10, .incarnation = 1});
    wait_adopted(receiver);
    const int data = find_connection(receiver.port(), true);
    const int credits = find_connection(receiver.port(), false);
    CHECK(data >= 0 && credits >= 0);
    CHECK(option_of(data, SOL_SOCKET, SO_PRIORITY) == 1 && option_of(data, IPPROTO_IP, IP_TOS) == 0x20);
    CHECK(option_of(credits, SOL_SOCKET, SO_PRIORITY) == 5 && option_of(credits, IPPROTO_IP, IP_TOS) == 0x40);
    CHECK(option_of(data, IPPROTO_TCP, TCP_NODELAY) != 0 && option_of(credits, IPPROTO_TCP, TCP_NODELAY) != 0);
    char name[16] = {};
    socklen_t size = sizeof(name);
    CHECK(::getsockopt(data, IPPROTO_TCP, TCP_CONGESTION, name, &size) == 0);
    CHECK(std::string(name) == "reno");

    Node plain;
    Pair unmarked = open_pair(plain, plain, {.source = 0, .slots = 1, .slot_bytes = 10, .incarnation = 1});
    size = sizeof(name);
    CHECK(::getsockopt(find_connection(plain.port(), true), IPPROTO_TCP, TCP_CONGESTION, name, &size) == 0);
    std::ifstream file("/proc/sys/net/ipv4/tcp_available_congestion_control");
    const std::string available{std::istreambuf_iterator<char>(file), {}};
    if (available.find("cubic") != std::string::npos) CHECK(std::string(name) != "bbr");
}

// An ordinary process's buffers work.
void buffers_without_force() {
    const TcpTuning unforced{.force = false};
    Node sender(unforced), receiver(unforced);
    const PairSpec spec{.source = 1, .slots = 2, .slot_bytes = 24 << 20, .incarnation = 2};
    Pair pair = open_pair(sender, receiver, spec);
    std::thread receiving([&] { Collector(receiver.transport(), *pair.landing, spec).take(2); });
    Sender from(sender.transport(), *pair.link, spec);
    from.send(1, spec.slot_bytes);
    from.send(2, 12'345'678);
    from.wait_credits(2);
    receiving.join();
}

}  // namespace

std::vector<Case> pair_cases() {
    return {{"pairs: payloads of 0 bytes to a full slot, in place and apart", sizes},
            {"pairs: sequence numbers wrap around", wrap_around},
            {"pairs: 1e5 messages without allocation or growth", no_growth},
            {"pairs: a progress thread where buffers are small", progress_thread},
            {"pairs: none where they are not", no_thread_needed},
            {"pairs: both directions at once", both_directions},
            {"pairs: 8 x 8", many_pairs_roomy},
            {"pairs: 8 x 8, spinning", many_pairs_spinning},
            {"pairs: 8 x 8, small buffers", many_pairs_tight},
            {"pairs: destroyed by another thread", destruction_elsewhere},
            {"pairs: destroyed under a sleeper", destruction_under_a_sleeper},
            {"pairs: marks and congestion control", marks},
            {"pairs: buffers of an ordinary process", buffers_without_force}};
}

}  // namespace antiphon::m2n::test

// Waiting: what wakes, what does not, interrupts, deadlines.
#include <sys/resource.h>
#include <sys/socket.h>

#include "harness.h"
#include "m2n/types.h"

namespace antiphon::m2n::test {

namespace {

constexpr TcpTuning tiny_buffers{.least_buffer_bytes = 0, .largest_buffer_bytes = 65'536};
const PairSpec large_spec{.source = 1, .slots = 2, .slot_bytes = 1 << 20, .incarnation = 2};

// With and without a progress thread: the owner sleeps on a bell or on the sockets.
template <class Body>
void both_ways(Body body) {
    for (const TcpTuning& tuning : {TcpTuning{}, tiny_buffers}) {
        Node sender(tuning), receiver(tuning);
        Pair pair = open_pair(sender, receiver, large_spec);
        body(sender, receiver, pair);
    }
}

void deadline() {
    both_ways([](Node& sender, Node& receiver, Pair&) {
        for (Node* node : {&sender, &receiver}) {
            node->transport().progress();
            for (const Event event : {Event::arrival, Event::credit}) {
                for (const int64_t spin_ns : {int64_t{0}, int64_t{1'000'000}, INT64_MAX}) {
                    Transport& transport = node->transport();
                    const int64_t start = monotonic_ns();
                    // A wait may end early, for the adoption of a connection, but not for ever.
                    while (monotonic_ns() - start < 20'000'000) {
                        const Deadline at = Deadline::after_ns(20'000'000 - (monotonic_ns() - start));
                        transport.block(event, transport.prepare(event), 1, at, spin_ns);
                    }
                    CHECK(monotonic_ns() - start < 2 * second_ns);
                }
            }
        }
    });
}

void interrupt() {
    both_ways([](Node& sender, Node&, Pair& pair) {
        Transport& transport = sender.transport();
        for (const Event event : {Event::arrival, Event::credit}) {
            for (const int64_t spin_ns : {int64_t{0}, int64_t{30'000}}) {
                for (int i = 0; i < 20; ++i) {
                    const EndId awaited = i % 4 < 2 ? any_end : pair.link->id();
                    std::thread other([&] {
                        if (i % 2 == 0) sleep_for_ms(2);  // while it sleeps, or maybe before
                        transport.interrupt();
                    });
                    const Deadline at = soon();
                    transport.block(event, transport.prepare(event), 1, at, spin_ns, awaited);
                    CHECK(!at.passed());
                    other.join();
                    // If the first wait ended for no reason, the interrupt must end the next one. Bounded, because a
                    // wait that took it leaves none.
                    transport.block(event, transport.prepare(event), 1, Deadline::after_ns(1'000'000), spin_ns);
                }
            }
        }
        // One that came before the wait ends it too.
        transport.interrupt();
        const Deadline at = soon();
        transport.block(Event::arrival, transport.prepare(Event::arrival), 1, at, 0);
        CHECK(!at.passed());
    });
}

// A wait for several events ends with the last of them.
void needed() {
    for (const TcpTuning& tuning : {TcpTuning{}, tiny_buffers}) {
        Node sender(tuning), receiver(tuning);
        const PairSpec spec{.source = 1, .slots = 8, .slot_bytes = 100'000, .incarnation = 2};
        Pair pair = open_pair(sender, receiver, spec);
        wait_adopted(receiver);
        const uint32_t prepared = receiver.transport().prepare(Event::arrival);
        std::thread sending([&] {
            Sender from(sender.transport(), *pair.link, spec);
            for (Step step = 0; step < 8; ++step) {
                from.send(step, spec.slot_bytes);
                sleep_for_ms(2);
            }
            from.wait_credits(8);
        });
        const Deadline at = soon();
        int num_wakes = 0;
        while (receiver.transport().prepare(Event::arrival) - prepared < 8) {
            receiver.transport().block(Event::arrival, prepared, 8, at, 0);
            ++num_wakes;
            CHECK(!at.passed());
        }
        CHECK(num_wakes <= 2);  // one may be for the connection's beginning
        Collector to(receiver.transport(), *pair.landing, spec);
        to.take_what_is_here();
        CHECK(to.num_taken() == 8);
        sending.join();
    }
}

// Who waits for one pair's news sleeps through the others', and finds them when it wakes.
void sleeps_on_one() {
    Node sender, receiver;
    constexpr uint32_t num_early = 100;
    const PairSpec early_spec{.source = 1, .slots = num_early, .slot_bytes = 1000, .incarnation = 2};
    const PairSpec late_spec{.source = 2, .slots = 1, .slot_bytes = 1000, .incarnation = 2};
    Pair early = open_pair(sender, receiver, early_spec);
    Pair late = open_pair(sender, receiver, late_spec);
    wait_adopted(receiver);
    Transport& transport = receiver.transport();
    CHECK(early.landing->id() != any_end && early.landing->id() != late.landing->id());
    transport.block(Event::arrival, transport.prepare(Event::arrival), 1, Deadline::after_ns(1'000'000), 0);
    const uint32_t prepared = transport.prepare(Event::arrival);
    std::thread sending([&] {
        Sender first(sender.transport(), *early.link, early_spec), last(sender.transport(), *late.link, late_spec);
        for (Step step = 0; step < num_early; ++step) {
            first.send(step, early_spec.slot_bytes);
            std::this_thread::sleep_for(std::chrono::microseconds(300));
        }
        last.send(0, late_spec.slot_bytes);
    });
    rusage before{}, after{};
    ::getrusage(RUSAGE_THREAD, &before);
    transport.block(Event::arrival, prepared, num_early + 2, soon(), 0, late.landing->id());
    ::getrusage(RUSAGE_THREAD, &after);
    CHECK(after.ru_nvcsw - before.ru_nvcsw < 20);
    CHECK(transport.prepare(Event::arrival) - prepared == num_early + 1);
    sending.join();
    // Its news has not been taken: no reason to sleep.
    const Deadline at = soon();
    transport.block(Event::arrival, transport.prepare(Event::arrival), 1, at, 0, late.landing->id());
    CHECK(!at.passed());
    Collector(transport, *late.landing, late_spec).take_what_is_here();
}

// The pair that is slept on breaks; one that has no connection yet is no reason not to hear of the others.
void one_is_no_use() {
    Node sender, receiver;
    const PairSpec spec{.source = 1, .slots = 1, .slot_bytes = 1000, .incarnation = 2};
    Pair pair = open_pair(sender, receiver, spec);
    wait_adopted(receiver);
    Transport& transport = receiver.transport();
    Blob welcome;
    const PairSpec no_spec{.source = 2, .slots = 1, .slot_bytes = 8, .incarnation = 2};
    const auto unconnected = transport.open_landing(no_spec, {}, welcome);
    uint32_t prepared = transport.prepare(Event::arrival);
    Sender(sender.transport(), *pair.link, spec).send(0, 1000);
    Deadline at = soon();
    while (transport.prepare(Event::arrival) == prepared) {
        transport.block(Event::arrival, prepared, 1, at, 0, unconnected->id());
        CHECK(!at.passed());
    }
    Collector(transport, *pair.landing, spec).take_what_is_here();
    std::thread leaving([&] {
        sleep_for_ms(20);
        pair.link.reset();
    });
    at = soon();
    std::string reason;
    ImmediateSink sink;
    while (pair.landing->poll(sink, reason)) {
        prepared = transport.prepare(Event::arrival);
        transport.block(Event::arrival, prepared, 1, at, 0, pair.landing->id());
        CHECK(!at.passed());
    }
    leaving.join();
}

// Credits that come back do not wake who waits for data.
void credits_do_not_wake() {
    Node sender, receiver;
    const PairSpec spec{.source = 1, .slots = 200, .slot_bytes = 100, .incarnation = 2};
    Pair pair = open_pair(sender, receiver, spec);
    Sender from(sender.transport(), *pair.link, spec);
    for (Step step = 0; step < 200; ++step) from.send(step, 100);
    std::thread receiving([&] {
        Collector to(receiver.transport(), *pair.landing, spec);
        ImmediateSink sink;
        std::string reason;
        wait_until(receiver.transport(), Event::arrival, [&] {
            CHECK(pair.landing->poll(sink, reason));
            return sink.size() == 200;
        });
        for (const Immediate immediate : sink) {
            pair.landing->release(immediate);
            std::this_thread::sleep_for(std::chrono::microseconds(300));
        }
        sender.transport().interrupt();
    });
    Transport& transport = sender.transport();
    rusage before{}, after{};
    ::getrusage(RUSAGE_THREAD, &before);
    transport.block(Event::arrival, transport.prepare(Event::arrival), 1, soon(), 0);
    ::getrusage(RUSAGE_THREAD, &after);
    receiving.join();
    CHECK(after.ru_nvcsw - before.ru_nvcsw < 20);
    from.wait_credits(200);
}

// The peer goes away while we wait, whatever we wait for.
void peer_leaves() {
    both_ways([](Node&, Node& receiver, Pair& pair) {
        std::thread leaving([&] {
            sleep_for_ms(20);
            pair.link.reset();
        });
        CHECK_WORDS(wait_broken(receiver.transport(), Event::arrival, *pair.landing), "closed its data connection");
        leaving.join();
    });
    for (const Event event : {Event::credit, Event::arrival}) {
        both_ways([event](Node& sender, Node&, Pair& pair) {
            std::thread leaving([&] {
                sleep_for_ms(20);
                pair.landing.reset();
            });
            const std::string reason = wait_broken(sender.transport(), event, *pair.link);
            leaving.join();
            // What is posted afterwards goes nowhere, and its source is reusable.
            pair.link->post({1, 0, 1}, make_header({1, 0, 1}, 2, 0, 10), nullptr);
            CHECK(pair.link->source_reusable(0));
            std::string again;
            ImmediateSink sink;
            CHECK(!pair.link->poll(sink, again) && again == reason);
        });
    }
}

template <class Body>
void check_refused(Code code, const char* words, Body body) {
    try {
        body();
    } catch (const Error& error) {
        CHECK(error.code == code);
        if (std::string(error.what()).find(words) == std::string::npos) fail(__FILE__, __LINE__, words, error.what());
        return;
    }
    fail(__FILE__, __LINE__, "is refused", words);
}

void connecting() {
    Node node;
    const PairSpec spec{.source = 1, .slots = 2, .slot_bytes = 100, .incarnation = 2};
    const auto link_to = [&](const std::string& host, uint16_t port, int64_t timeout_ns) {
        Blob welcome{std::vector<std::byte>(16), {}};
        node.transport().open_link(spec, welcome, host, port, Deadline::after_ns(timeout_ns));
    };
    check_refused(Code::invalid, "give its endpoint a host", [&] { link_to("", 0, second_ns); });
    check_refused(Code::invalid, "not an IPv4 or IPv6 address in numbers", [&] { link_to("localhost", 9, second_ns); });
    uint16_t unused = 0;
    {
        const Listener listener;
        unused = listener.port();
    }
    check_refused(Code::system, "Connection refused", [&] { link_to("127.0.0.1", unused, second_ns); });
    Blob foreign{std::vector<std::byte>(3), {}};
    check_refused(Code::refused, "holds 3 bytes, not a token of 16",
                  [&] { node.transport().open_link(spec, foreign, "127.0.0.1", node.port(), soon()); });
    Blob welcome;
    const auto landing_of = [&](const PairSpec& wrong) { node.transport().open_landing(wrong, {}, welcome); };
    check_refused(Code::invalid, "number of slots is 0", [&] { landing_of({1, 0, 100, 2}); });
    check_refused(Code::invalid, "number of slots is 257", [&] { landing_of({1, 257, 100, 2}); });
    check_refused(Code::invalid, "source's number is 4096", [&] { landing_of({4096, 1, 100, 2}); });
    check_refused(Code::invalid, "slot's size is 4294967297", [&] { landing_of({1, 1, max_slot_bytes + 1, 2}); });
    TransportOptions options;
    options.congestion = "no-such";
    check_refused(Code::invalid, "\"no-such\" is not available", [&] { make_tcp(options); });
    options = {};
    options.data_type_of_service = 256;
    check_refused(Code::invalid, "type of service 256", [&] { make_tcp(options); });
}

// A listener whose queue is full answers nobody.
void connect_deadline() {
    const Listener listener(0);
    std::vector<FileDescriptor> queued;
    for (int i = 0; i < 4; ++i) {
        queued.emplace_back(::socket(AF_INET, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0));
        sockaddr_storage address{};
        socklen_t size = sizeof(address);
        ::getsockname(listener.fd(), reinterpret_cast<sockaddr*>(&address), &size);
        ::connect(queued.back().get(), reinterpret_cast<sockaddr*>(&address), size);
    }
    Node node;
    const int64_t start = monotonic_ns();
    check_refused(Code::timeout, "no answer before the deadline", [&] {
        Blob welcome{std::vector<std::byte>(16), {}};
        node.transport().open_link({1, 2, 100, 2}, welcome, "127.0.0.1", listener.port(),
                                   Deadline::after_ns(100'000'000));
    });
    CHECK(monotonic_ns() - start >= 100'000'000 && monotonic_ns() - start < 2 * second_ns);
}

}  // namespace

std::vector<Case> wait_cases() {
    return {{"waits: the deadline", deadline},
            {"waits: interrupt from another thread", interrupt},
            {"waits: only the last needed event wakes", needed},
            {"waits: for one pair, through the news of others", sleeps_on_one},
            {"waits: for one pair that breaks or is not connected", one_is_no_use},
            {"waits: credits wake nobody who waits for data", credits_do_not_wake},
            {"waits: the peer leaves", peer_leaves},
            {"opening: what is refused, in words", connecting},
            {"opening: nobody answers", connect_deadline}};
}

}  // namespace antiphon::m2n::test

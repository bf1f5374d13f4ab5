// Peers that hold a valid token and break the rules, and strangers that hold none.
#include <netinet/in.h>
#include <sys/socket.h>

#include <cstring>
#include <random>

#include "harness.h"
#include "m2n/control.h"
#include "m2n/types.h"

namespace antiphon::m2n::test {

namespace {

const PairSpec spec{.source = 6, .slots = 2, .slot_bytes = 50'000, .incarnation = 3};
constexpr TcpTuning tiny_buffers{.least_buffer_bytes = 0, .largest_buffer_bytes = 65'536};

void write_message(int fd, Immediate immediate, Step step, uint64_t length,
                   Incarnation incarnation = spec.incarnation) {
    std::vector<std::byte> frame(header_bytes + length);
    const MessageHeader header = make_header(immediate, incarnation, step, length);
    std::memcpy(frame.data(), &header, header_bytes);
    fill_pattern({frame.data() + header_bytes, length}, spec.source, step);
    write_fully(fd, frame.data(), frame.size());
}

// One good message, then `header`: the first arrives, the second breaks the connection and touches no slot.
std::string reason_for(const MessageHeader& header, const TcpTuning& tuning) {
    Node receiver(tuning);
    RawPair pair = open_raw_sender(receiver, spec);
    write_message(pair.sender.get(), {6, 0, 1}, 1, 1'000);
    write_fully(pair.sender.get(), &header, header_bytes);
    const std::vector<std::byte> junk(70'000, std::byte{0xEE});
    write_fully(pair.sender.get(), junk.data(), junk.size());
    ImmediateSink taken;
    const std::string reason = wait_broken(receiver.transport(), Event::arrival, *pair.landing, &taken);
    CHECK(taken.size() == 1 && taken[0] == (Immediate{6, 0, 1}));
    CHECK(has_pattern({pair.landing->slot(0) + header_bytes, 1'000}, 6, 1));
    for (uint64_t place = 0; place < slot_stride(spec.slot_bytes); ++place) {
        CHECK(pair.landing->slot(1)[place] == std::byte{0});
    }
    pair.landing->release(taken[0]);  // nobody to tell; harmless
    std::byte byte{};
    CHECK(read_fully(pair.sender.get(), &byte, 1) == 0);  // hung up on
    return reason;
}

void malformed_headers() {
    for (const TcpTuning& tuning : {TcpTuning{}, tiny_buffers}) {
        const MessageHeader good = make_header({6, 1, 1}, spec.incarnation, 2, 100);
        const auto changed = [&](auto change) {
            MessageHeader header = good;
            change(header);
            return reason_for(header, tuning);
        };
        CHECK_WORDS(changed([](MessageHeader& header) { header.magic = 0; }), "the sender broke the protocol");
        CHECK_WORDS(changed([](MessageHeader& header) { header.magic = 0; }), "magic");
        CHECK_WORDS(changed([](MessageHeader& header) { header.incarnation = 2; }),
                    "incarnation 2, this connection has 3");
        CHECK_WORDS(changed([](MessageHeader& header) { header.length = 50'001; }), "50001 bytes for slots of 50000");
        const auto immediate = [&](Immediate word) {
            return changed([&](MessageHeader& header) { header.immediate = word.pack(); });
        };
        CHECK_WORDS(immediate({5, 1, 1}), "of source 5");
        CHECK_WORDS(immediate({6, 2, 1}), "slot 2 of 2");
        CHECK_WORDS(immediate({6, 1, 2}), "sequence 2, expected was source 6, slot 1, sequence 1");
        CHECK_WORDS(immediate({6, 0, 1}), "expected was source 6, slot 0, sequence 2");  // a replay
        CHECK_WORDS(immediate({6, 0, 2}), "slot 0, which the receiver has not released");
    }
}

void closed_in_the_middle() {
    for (const size_t cut : {size_t{1}, size_t{63}, size_t{64}, size_t{65}, size_t{40'000}}) {
        Node receiver;
        RawPair pair = open_raw_sender(receiver, spec);
        write_message(pair.sender.get(), {6, 1, 1}, 9, 10);
        std::vector<std::byte> frame(header_bytes + 50'000);
        const MessageHeader header = make_header({6, 0, 1}, spec.incarnation, 2, 50'000);
        std::memcpy(frame.data(), &header, header_bytes);
        write_fully(pair.sender.get(), frame.data(), cut);
        sleep_for_ms(2);
        pair.sender.reset();
        ImmediateSink taken;
        CHECK_WORDS(wait_broken(receiver.transport(), Event::arrival, *pair.landing, &taken),
                    "in the middle of a message");
        CHECK(taken.size() == 1 && taken[0].slot == 1);
    }
    // A reset instead of an end.
    Node receiver;
    RawPair pair = open_raw_sender(receiver, spec);
    wait_adopted(receiver);
    const linger at_once{1, 0};
    ::setsockopt(pair.sender.get(), SOL_SOCKET, SO_LINGER, &at_once, sizeof(at_once));
    pair.sender.reset();
    CHECK_WORDS(wait_broken(receiver.transport(), Event::arrival, *pair.landing), "reset");
}

// A message that dribbles in byte by byte, around its borders.
void slow_sender() {
    Node receiver;
    RawPair pair = open_raw_sender(receiver, spec);
    std::thread writing([&] {
        for (uint16_t sequence = 1; sequence <= 3; ++sequence) {
            std::vector<std::byte> frame(header_bytes + 40'000);
            const MessageHeader header = make_header({6, 1, sequence}, spec.incarnation, sequence, 40'000);
            std::memcpy(frame.data(), &header, header_bytes);
            fill_pattern({frame.data() + header_bytes, 40'000}, spec.source, sequence);
            const size_t cuts[] = {1, 62, 1, 1, 1, 100, 20'000, 19'897, 1};
            size_t done = 0;
            for (const size_t part : cuts) {
                write_fully(pair.sender.get(), frame.data() + done, part);
                done += part;
                sleep_for_ms(1);
            }
            CHECK(done == frame.size());
            uint32_t credit = 0;
            CHECK(read_fully(pair.sender.get(), &credit, 4) == 4);
            CHECK(credit == (Immediate{6, 1, sequence}).pack());
        }
    });
    Collector(receiver.transport(), *pair.landing, spec).take(3);
    writing.join();
}

// A sender that goes on without taking credits is cut off before anything grows without bound.
void ignores_credits() {
    Node receiver;
    RawPair pair = open_raw_sender(receiver, spec);
    const int small = 2'304;
    ::setsockopt(pair.sender.get(), SOL_SOCKET, SO_RCVBUF, &small, sizeof(small));
    std::atomic<bool> stop{false};
    std::thread writing([&] {
        uint16_t sequence = 0;
        while (!stop.load()) write_message(pair.sender.get(), {6, 0, sequence = next_sequence(sequence)}, 1, 0);
    });
    ImmediateSink sink;
    std::string reason;
    // It writes on without a credit: cut off as soon as it is faster than the releases, or the credits pile up.
    wait_until(receiver.transport(), Event::arrival, [&] {
        sink.clear();
        const bool sound = pair.landing->poll(sink, reason);
        for (const Immediate immediate : sink) pair.landing->release(immediate);
        return !sound;
    });
    stop.store(true);
    writing.join();
    CHECK(reason.find("not released") != std::string::npos || reason.find("takes no credits") != std::string::npos);
}

// A receiver that sends nonsense as credits.
void malformed_credits() {
    const auto reason_for_credit = [](const std::vector<uint32_t>& words) {
        const Listener listener;
        Node sender;
        Blob welcome{std::vector<std::byte>(token_bytes, std::byte{1}), {}};
        const std::shared_ptr<Link> link =
            sender.transport().open_link(spec, welcome, "127.0.0.1", listener.port(), soon());
        const FileDescriptor peer = listener.accept();
        std::byte token[token_bytes];
        CHECK(read_fully(peer.get(), token, sizeof(token)) == sizeof(token) && token[0] == std::byte{1});
        Sender from(sender.transport(), *link, spec);
        from.send(1, 100);
        MessageHeader header;
        CHECK(read_fully(peer.get(), &header, header_bytes) == header_bytes && header.length == 100);
        std::byte payload[100];
        CHECK(read_fully(peer.get(), payload, sizeof(payload)) == sizeof(payload));
        write_fully(peer.get(), words.data(), words.size() * 4);
        return wait_broken(sender.transport(), Event::credit, *link);
    };
    const uint32_t good = Immediate{6, 0, 1}.pack();
    CHECK_WORDS(reason_for_credit({0xFFFFFFFF}), "the receiver broke the protocol");
    CHECK_WORDS(reason_for_credit({Immediate{6, 0, 2}.pack()}), "sequence 2, which answers no message on its way");
    CHECK_WORDS(reason_for_credit({Immediate{6, 1, 1}.pack()}), "slot 1");
    CHECK_WORDS(reason_for_credit({Immediate{5, 0, 1}.pack()}), "source 5");
    CHECK_WORDS(reason_for_credit({good, good}), "slot 0, sequence 1, which answers no message");
    CHECK_WORDS(reason_for_credit({0}), "source 0");
}

void strangers() {
    Node receiver;
    Blob welcome;
    std::shared_ptr<Landing> landing = receiver.transport().open_landing(spec, {}, welcome);
    const auto refused = [&](std::vector<std::byte> token) {
        const int before = receiver.num_refused();
        const FileDescriptor fd = connect_blocking(receiver.port());
        write_fully(fd.get(), token.data(), token.size());
        std::byte byte{};
        CHECK(read_fully(fd.get(), &byte, 1) == 0);
        CHECK(receiver.num_refused() == before + 1);
    };
    refused(std::vector<std::byte>(token_bytes));
    std::vector<std::byte> close = welcome.bytes;
    close.back() ^= std::byte{1};
    refused(close);
    FileDescriptor empty;
    CHECK(!receiver.transport().adopt(empty, {}));
    // Good once only.
    const FileDescriptor first = connect_blocking(receiver.port());
    write_fully(first.get(), welcome.bytes.data(), token_bytes);
    write_message(first.get(), {6, 0, 1}, 1, 10);
    wait_until(receiver.transport(), Event::arrival, [&] {
        ImmediateSink sink;
        std::string reason;
        CHECK(landing->poll(sink, reason));
        return sink.size() == 1;
    });
    refused(welcome.bytes);
    // Not at all once the landing is gone.
    Blob other;
    landing = receiver.transport().open_landing(spec, {}, other);
    CHECK(other.bytes != welcome.bytes);
    landing.reset();
    refused(other.bytes);
}

// Random bytes from a peer with a token: the connection breaks, the node lives on.
void random_peer() {
    Node receiver;
    std::mt19937_64 random(3);
    for (int round = 0; round < 50; ++round) {
        RawPair pair = open_raw_sender(receiver, spec);
        std::vector<std::byte> bytes(200);
        for (std::byte& byte : bytes) byte = static_cast<std::byte>(random());
        if (round % 2 == 0) {
            const MessageHeader header = make_header({6, 0, 1}, spec.incarnation, 1, 100);
            std::memcpy(bytes.data(), &header, header_bytes);  // then 36 bytes too few for a header
        }
        write_fully(pair.sender.get(), bytes.data(), bytes.size());
        pair.sender.reset();
        wait_broken(receiver.transport(), Event::arrival, *pair.landing);
    }
}

}  // namespace

std::vector<Case> fault_cases() {
    return {{"faults: malformed headers", malformed_headers},
            {"faults: closed in the middle", closed_in_the_middle},
            {"faults: byte by byte", slow_sender},
            {"faults: a sender without patience", ignores_credits},
            {"faults: malformed credits", malformed_credits},
            {"faults: strangers", strangers},
            {"faults: random bytes", random_peer}};
}

}  // namespace antiphon::m2n::test

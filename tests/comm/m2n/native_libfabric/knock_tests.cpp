// Over TCP: which end opens the connection that carries data, and that nothing is lost while it does not stand.
#include <netinet/in.h>
#include <sys/socket.h>

#include <fstream>

#include "harness.h"
#include "m2n/congestion.h"
#include "m2n/libfabric_wire.h"
#include "m2n/socket.h"
#include "tests.h"

namespace antiphon::m2n::test {

namespace {

const PairSpec spec{3, 2, 100'000, 1};

std::string default_congestion() {
    const FileDescriptor probe(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
    return congestion_of(probe.get());
}

// Empty: this system has only one.
std::string other_congestion() {
    std::ifstream file("/proc/sys/net/ipv4/tcp_available_congestion_control");
    const std::string usual = default_congestion();
    for (std::string name; file >> name;) {
        if (name != usual) return name;
    }
    std::printf("  this system has only %s: nothing to choose from, not tested\n", usual.c_str());
    return {};
}

std::unique_ptr<Transport> make_with(const std::string& congestion) {
    TransportOptions options = options_for(provider);
    options.congestion = congestion;
    return make_libfabric(options);
}

uint16_t data_port(Transport& transport) {
    const LibfabricPeer peer = decode_introduction(transport.introduce().bytes).peer;
    return bound_port(find_listener(peer.data_address));
}

// The connected socket of this process that is bound to `port`, as accepted ones are; -1: there is none.
int accepted_at(uint16_t port) {
    for (int fd = 3; fd < 1024; ++fd) {
        sockaddr_in own{}, peer{};
        socklen_t size = sizeof(own);
        if (::getsockname(fd, reinterpret_cast<sockaddr*>(&own), &size) != 0 || own.sin_family != AF_INET) continue;
        size = sizeof(peer);
        if (ntohs(own.sin_port) != port || ::getpeername(fd, reinterpret_cast<sockaddr*>(&peer), &size) != 0) continue;
        return fd;
    }
    return -1;
}

}  // namespace

// With a congestion control of its own the sender's end is the accepted one; without, it connects by itself.
void knock_decides_who_connects() {
    if (provider != "tcp") return;
    const std::string other = other_congestion();
    if (other.empty()) return;
    for (const bool knocks : {true, false}) {
        const auto receiver = make_with(default_congestion());
        const auto sender = make_with(knocks ? other : default_congestion());
        CHECK(decode_introduction(sender->introduce().bytes).wants_knock == knocks);
        Ends ends = open_pair(*receiver, *sender, spec);
        for (uint16_t sequence = 1; sequence <= 5; ++sequence) {
            round_trip(ends, 0, sequence, sequence, spec.slot_bytes);
            round_trip(ends, 1, sequence, sequence, 1, true);
        }
        const int accepted = accepted_at(data_port(knocks ? *sender : *receiver));
        CHECK(accepted >= 0 && accepted_at(data_port(knocks ? *receiver : *sender)) < 0);
        CHECK(congestion_of(accepted) == (knocks ? other : default_congestion()));
    }
}

// The control connection and the data lane are two, so a knock may come before the answer that announces it.
void knock_before_the_answer() {
    if (provider != "tcp") return;
    const std::string other = other_congestion();
    if (other.empty()) return;
    const auto receiver = make();
    const auto sender = make_with(other);
    const Blob introduction = sender->introduce();
    Ends ends{receiver.get(), sender.get(), spec, nullptr, nullptr};
    Blob welcome;
    ends.landing = receiver->open_landing(spec, introduction, welcome);
    for (const Deadline end = Deadline::after_ns(300'000'000); !end.passed();) {
        receiver->progress();
        sender->progress();
    }
    ends.link = sender->open_link(spec, welcome, "127.0.0.1", 0, soon());
    round_trip(ends, 0, 1, 1, 1000);
    round_trip(ends, 0, 2, 2, spec.slot_bytes);
}

// Whoever goes before the connection stands disturbs nobody.
void knock_of_the_departed() {
    if (provider != "tcp") return;
    const std::string other = other_congestion();
    if (other.empty()) return;
    const auto receiver = make();
    const auto sender = make_with(other);
    for (uint32_t incarnation = 1; incarnation <= 30; ++incarnation) {
        PairSpec next = spec;
        next.epoch = incarnation;
        Ends ends = open_pair(*receiver, *sender, next);
        if (incarnation % 3 != 0) post(*ends.link, next, 0, 1, 1, 1000);
        if (incarnation % 3 == 1) ends.landing.reset();
        if (incarnation % 3 == 2) ends.link.reset();
    }
    PairSpec last = spec;
    last.epoch = 31;
    Ends ends = open_pair(*receiver, *sender, last);
    round_trip(ends, 0, 1, 1, spec.slot_bytes);
}

void unknown_congestion() {
    if (provider != "tcp") return;
    const std::string words = message_of(Code::invalid, [] { make_with("no-such"); });
    CHECK(contains(words, "\"no-such\" is not available") && contains(words, default_congestion().c_str()));
}

}  // namespace antiphon::m2n::test

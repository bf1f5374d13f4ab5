#include "harness.h"

#include <arpa/inet.h>
#include <netinet/in.h>
#include <sys/socket.h>

#include <cstring>

#include "m2n/control.h"

namespace antiphon::m2n {

// In place of the control plane's: the token as it is.
std::vector<std::byte> attach_greeting(std::span<const std::byte> token) { return {token.begin(), token.end()}; }

namespace test {

void fail(const char* file, int line, const char* what, const std::string& detail) {
    std::fprintf(stderr, "%s:%d: not so: %s\n%s\n", file, line, what, detail.c_str());
    std::fflush(stderr);
    std::_Exit(1);  // other threads are in the middle of something
}

std::byte pattern(uint64_t source, uint64_t step, uint64_t place) {
    return static_cast<std::byte>(source * 17 + step * 131 + place * 7 + (place >> 8) * 3);
}

void fill_pattern(std::span<std::byte> bytes, uint64_t source, uint64_t step) {
    for (size_t i = 0; i < bytes.size(); ++i) bytes[i] = pattern(source, step, i);
}

bool has_pattern(std::span<const std::byte> bytes, uint64_t source, uint64_t step) {
    for (size_t i = 0; i < bytes.size(); ++i) {
        if (bytes[i] != pattern(source, step, i)) return false;
    }
    return true;
}

MessageHeader make_header(Immediate immediate, Incarnation incarnation, Step step, uint64_t length) {
    MessageHeader header;
    header.immediate = immediate.pack();
    header.incarnation = incarnation;
    header.step = step;
    header.length = length;
    return header;
}

Listener::Listener(int backlog) : fd_(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0)) {
    sockaddr_in address{};
    address.sin_family = AF_INET;
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    socklen_t size = sizeof(address);
    CHECK(::bind(fd_.get(), reinterpret_cast<sockaddr*>(&address), size) == 0);
    CHECK(::listen(fd_.get(), backlog) == 0);
    CHECK(::getsockname(fd_.get(), reinterpret_cast<sockaddr*>(&address), &size) == 0);
    port_ = ntohs(address.sin_port);
}

FileDescriptor Listener::accept() const { return FileDescriptor(::accept4(fd_.get(), nullptr, nullptr, SOCK_CLOEXEC)); }

void Listener::stop() const { ::shutdown(fd_.get(), SHUT_RDWR); }

size_t read_fully(int fd, void* data, size_t num_bytes) {
    size_t got = 0;
    while (got < num_bytes) {
        const ssize_t now = ::recv(fd, static_cast<char*>(data) + got, num_bytes - got, 0);
        if (now < 0 && errno == EINTR) continue;
        if (now <= 0) break;
        got += static_cast<size_t>(now);
    }
    return got;
}

void write_fully(int fd, const void* data, size_t num_bytes) {
    size_t done = 0;
    while (done < num_bytes) {
        const ssize_t now = ::send(fd, static_cast<const char*>(data) + done, num_bytes - done, MSG_NOSIGNAL);
        if (now < 0 && errno == EINTR) continue;
        if (now < 0) return;  // the other end hung up, which the test looks at there
        done += static_cast<size_t>(now);
    }
}

FileDescriptor connect_blocking(uint16_t port) {
    FileDescriptor fd(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
    sockaddr_in address{};
    address.sin_family = AF_INET;
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    address.sin_port = htons(port);
    CHECK(::connect(fd.get(), reinterpret_cast<sockaddr*>(&address), sizeof(address)) == 0);
    return fd;
}

Node::Node(const TcpTuning& tuning, const TransportOptions& options)
    : transport_(make_tcp(options, tuning)), acceptor_([this] { serve(); }) {}

Node::~Node() {
    listener_.stop();
    acceptor_.join();
}

void Node::serve() {
    while (FileDescriptor connection = listener_.accept()) {
        std::byte token[token_bytes];
        if (read_fully(connection.get(), token, sizeof(token)) != sizeof(token)) continue;
        ++(transport_->adopt(connection, token) ? num_adopted_ : num_refused_);
    }
}

Pair open_pair(Node& sender, Node& receiver, const PairSpec& spec) {
    Blob welcome;
    Pair pair;
    pair.spec = spec;
    pair.landing = receiver.transport().open_landing(spec, sender.transport().introduce(), welcome);
    pair.link = sender.transport().open_link(spec, welcome, "127.0.0.1", receiver.port(), soon());
    return pair;
}

RawPair open_raw_sender(Node& receiver, const PairSpec& spec) {
    Blob welcome;
    RawPair pair;
    pair.spec = spec;
    pair.landing = receiver.transport().open_landing(spec, {}, welcome);
    CHECK(welcome.bytes.size() == token_bytes);
    pair.sender = connect_blocking(receiver.port());
    write_fully(pair.sender.get(), welcome.bytes.data(), welcome.bytes.size());
    return pair;
}

void wait_adopted(Node& receiver) {
    const Deadline deadline = soon();
    while (receiver.num_adopted() == 0) {
        CHECK(!deadline.passed());
        sleep_for_ms(1);
    }
    receiver.transport().progress();
}

void wait_until(Transport& transport, Event event, const std::function<bool()>& condition) {
    const Deadline deadline = soon();
    for (;;) {
        const uint32_t prepared = transport.prepare(event);
        transport.progress();
        if (condition()) return;
        CHECK(!deadline.passed());
        transport.block(event, prepared, 1, deadline, 0);
    }
}

Sender::Sender(Transport& transport, Link& link, const PairSpec& spec)
    : transport_(transport), link_(link), spec_(spec), sequences_(spec.slots, 0) {
    for (uint32_t slot = spec.slots; slot > 0; --slot) free_.push_back(static_cast<SlotId>(slot - 1));
    sink_.reserve(spec.slots);
}

void Sender::send(Step step, uint64_t length, const std::byte* payload) {
    wait_credits(1);
    const SlotId slot = free_.back();
    free_.pop_back();
    sequences_[slot] = next_sequence(sequences_[slot]);
    const Immediate immediate{spec_.source, slot, sequences_[slot]};
    std::byte* in_slot = link_.slot(slot);
    if (payload == nullptr) fill_pattern({in_slot + header_bytes, length}, spec_.source, step);
    const MessageHeader header = make_header(immediate, spec_.incarnation, step, length);
    std::memcpy(in_slot, &header, header_bytes);
    link_.post(immediate, header, payload);
}

void Sender::collect() {
    sink_.clear();
    std::string reason;
    if (!link_.poll(sink_, reason)) fail(__FILE__, __LINE__, "the link is sound", reason);
    for (const Immediate credit : sink_) {
        CHECK(credit.source == spec_.source && credit.slot < spec_.slots);
        CHECK(credit.sequence == sequences_[credit.slot]);
        free_.push_back(credit.slot);
    }
}

void Sender::wait_credits(size_t num_credits) {
    collect();
    if (free_.size() >= num_credits) return;
    const Deadline deadline = soon();
    for (;;) {
        const uint32_t prepared = transport_.prepare(Event::credit);
        transport_.progress();
        collect();
        if (free_.size() >= num_credits) return;
        CHECK(!deadline.passed());
        transport_.block(Event::credit, prepared, static_cast<uint32_t>(num_credits - free_.size()), deadline, 0);
    }
}

void Sender::wait_reusable() {
    wait_until(transport_, Event::credit, [this] {
        collect();
        for (SlotId slot = 0; slot < spec_.slots; ++slot) {
            if (!link_.source_reusable(slot)) return false;
        }
        return true;
    });
}

Collector::Collector(Transport& transport, Landing& landing, const PairSpec& spec)
    : transport_(transport), landing_(landing), spec_(spec) {
    sink_.reserve(spec.slots);
}

void Collector::check_and_release(Immediate immediate) {
    CHECK(immediate.source == spec_.source && immediate.slot < spec_.slots);
    MessageHeader header;
    std::memcpy(&header, landing_.slot(immediate.slot), header_bytes);
    CHECK(check(header, immediate, spec_.incarnation, spec_.slot_bytes) == HeaderFault::none);
    CHECK(has_pattern({landing_.slot(immediate.slot) + header_bytes, header.length}, spec_.source, header.step));
    ++num_taken_;
    landing_.release(immediate);
}

void Collector::take_what_is_here() {
    sink_.clear();
    std::string reason;
    if (!landing_.poll(sink_, reason)) fail(__FILE__, __LINE__, "the landing is sound", reason);
    for (const Immediate immediate : sink_) check_and_release(immediate);
}

void Collector::take(size_t num_messages) {
    num_wanted_ += num_messages;
    const Deadline deadline = soon();
    for (;;) {
        const uint32_t prepared = transport_.prepare(Event::arrival);
        transport_.progress();
        take_what_is_here();
        if (num_taken_ >= num_wanted_) return;
        CHECK(!deadline.passed());
        transport_.block(Event::arrival, prepared, 1, deadline, 0);
    }
}

}  // namespace test
}  // namespace antiphon::m2n

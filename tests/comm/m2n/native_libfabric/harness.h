// What the libfabric tests share: checks that name their place, pairs without a control connection, patterned messages.
#pragma once

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "m2n/transport.h"
#include "m2n/types.h"

namespace antiphon::m2n::test {

[[noreturn]] inline void fail(const char* file, int line, const std::string& what) {
    std::fprintf(stderr, "%s:%d: %s\n", file, line, what.c_str());
    std::fflush(nullptr);
    std::_Exit(1);
}

#define CHECK(condition) \
    do { \
        if (!(condition)) ::antiphon::m2n::test::fail(__FILE__, __LINE__, "failed: " #condition); \
    } while (false)

constexpr int64_t patience_ns = 30'000'000'000;

inline Deadline soon() { return Deadline::after_ns(patience_ns); }

inline TransportOptions options_for(const std::string& provider) {
    TransportOptions options;
    options.provider = provider;
    return options;
}

template <class Call>
std::string message_of(Code code, Call&& call) {
    try {
        call();
    } catch (const Error& error) {
        if (error.code != code) fail(__FILE__, __LINE__, std::string("another code: ") + error.what());
        return error.what();
    }
    fail(__FILE__, __LINE__, "nothing was thrown");
}

inline bool contains(const std::string& text, const char* part) { return text.find(part) != std::string::npos; }

// The byte at `index` of the payload of message `number`.
inline std::byte pattern(uint64_t number, uint64_t index) {
    return static_cast<std::byte>((number * 131 + index * 7 + (index >> 8)) & 0xFF);
}

struct Ends {
    Transport* receiver = nullptr;
    Transport* sender = nullptr;
    PairSpec spec;
    std::shared_ptr<Landing> landing;
    std::shared_ptr<Link> link;
};

inline Ends open_pair(Transport& receiver, Transport& sender, const PairSpec& spec) {
    Ends ends{&receiver, &sender, spec, nullptr, nullptr};
    const Blob introduction = sender.introduce();
    Blob welcome;
    ends.landing = receiver.open_landing(spec, introduction, welcome);
    ends.link = sender.open_link(spec, welcome, "127.0.0.1", 0, soon());
    return ends;
}

inline MessageHeader header_for(const PairSpec& spec, Immediate immediate, uint64_t number, uint64_t length) {
    MessageHeader header;
    header.immediate = immediate.pack();
    header.incarnation = spec.incarnation;
    header.step = number;
    header.length = length;
    return header;
}

using Payload = std::vector<std::byte>;

// Sends message `number`, composed in the slot, or in `external`, which must live until its slot's source is reusable.
inline void post(Link& link, const PairSpec& spec, SlotId slot, uint16_t sequence, uint64_t number, uint64_t length,
                 Payload* external = nullptr) {
    const Immediate immediate{spec.source, slot, sequence};
    const MessageHeader header = header_for(spec, immediate, number, length);
    if (external != nullptr) external->resize(length + 1);
    std::byte* payload = external != nullptr ? external->data() : link.slot(slot) + header_bytes;
    for (uint64_t i = 0; i < length; ++i) payload[i] = pattern(number, i);
    link.post(immediate, header, external != nullptr ? external->data() : nullptr);
    if (external == nullptr) CHECK(link.source_reusable(slot));
}

// Whether the slot holds exactly what `post` sent.
inline void verify(const Landing& landing, const PairSpec& spec, Immediate immediate, uint64_t number,
                   uint64_t length) {
    MessageHeader header;
    std::memcpy(&header, landing.slot(immediate.slot), header_bytes);
    CHECK(check(header, immediate, spec.incarnation, spec.slot_bytes) == HeaderFault::none);
    CHECK(header.step == number && header.length == length);
    const std::byte* payload = landing.slot(immediate.slot) + header_bytes;
    for (uint64_t i = 0; i < length; ++i) CHECK(payload[i] == pattern(number, i));
}

// Lets all of `transports` make progress until `done`.
inline void until(const std::vector<Transport*>& transports, const std::function<bool()>& done) {
    const Deadline deadline = soon();
    while (!done()) {
        for (Transport* transport : transports) transport->progress();
        if (deadline.passed()) fail(__FILE__, __LINE__, "nothing came");
    }
}

inline std::vector<Immediate> poll(Landing& landing) {
    ImmediateSink sink;
    std::string reason;
    if (!landing.poll(sink, reason)) fail(__FILE__, __LINE__, "landing broke: " + reason);
    return sink;
}

inline std::vector<Immediate> poll(Link& link) {
    ImmediateSink sink;
    std::string reason;
    if (!link.poll(sink, reason)) fail(__FILE__, __LINE__, "link broke: " + reason);
    return sink;
}

// One message there, its credit back.
inline void round_trip(Ends& ends, SlotId slot, uint16_t sequence, uint64_t number, uint64_t length,
                       bool external = false) {
    const Immediate expected{ends.spec.source, slot, sequence};
    Payload own;
    post(*ends.link, ends.spec, slot, sequence, number, length, external ? &own : nullptr);
    const std::vector<Transport*> both = {ends.receiver, ends.sender};
    until(both, [&] {
        const std::vector<Immediate> arrived = poll(*ends.landing);
        if (arrived.empty()) return false;
        CHECK(arrived.size() == 1 && arrived[0] == expected);
        return true;
    });
    verify(*ends.landing, ends.spec, expected, number, length);
    ends.landing->release(expected);
    until(both, [&] {
        const std::vector<Immediate> credits = poll(*ends.link);
        if (credits.empty()) return false;
        CHECK(credits.size() == 1 && credits[0] == expected);
        return true;
    });
    until(both, [&] { return ends.link->source_reusable(slot); });
}

}  // namespace antiphon::m2n::test

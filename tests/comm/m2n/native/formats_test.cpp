// SHA-256, HMAC, tickets and frames. Reads lines "key message sha256 hmac" in hex from standard input.
#include <iostream>
#include <random>

#include "check.h"
#include "m2n/sha256.h"
#include "m2n/wire.h"
#include "peers.h"

using namespace antiphon;
using namespace antiphon::m2n;
using namespace antiphon::m2n::test;

namespace {

std::vector<std::byte> from_hex(const std::string& hex) {
    std::vector<std::byte> bytes;
    if (hex == "-") return bytes;
    for (size_t i = 0; i < hex.size(); i += 2) {
        bytes.push_back(static_cast<std::byte>(std::stoi(hex.substr(i, 2), nullptr, 16)));
    }
    return bytes;
}

void hashes() {
    std::string key_hex, message_hex, sha_hex, hmac_hex;
    int num_vectors = 0;
    std::mt19937 random(1);
    while (std::cin >> key_hex >> message_hex >> sha_hex >> hmac_hex) {
        const std::vector<std::byte> message = from_hex(message_hex);
        Sha256 hash;
        HmacSha256 mac(from_hex(key_hex));
        // In portions of any size, also none.
        for (size_t at = 0; at < message.size();) {
            const size_t part = std::min<size_t>(random() % 150, message.size() - at);
            hash.update(Bytes(message).subspan(at, part));
            mac.update(Bytes(message).subspan(at, part));
            at += part;
        }
        CHECK(equal_in_constant_time(hash.finish(), from_hex(sha_hex)));
        CHECK(equal_in_constant_time(mac.finish(), from_hex(hmac_hex)));
        ++num_vectors;
    }
    std::printf("vectors %d\n", num_vectors);
    CHECK(num_vectors > 0);
}

void comparison() {
    const auto left = to_bytes("abcd");
    CHECK(equal_in_constant_time(left, to_bytes("abcd")));
    CHECK(!equal_in_constant_time(left, to_bytes("abce")));
    CHECK(!equal_in_constant_time(left, to_bytes("bbcd")));
    CHECK(!equal_in_constant_time(left, to_bytes("abc")));
    CHECK(equal_in_constant_time({}, {}));
}

Ticket sample() {
    Ticket ticket;
    ticket.transport = "libfabric:tcp";
    ticket.name = "expert[1]";
    ticket.address = {"antiphon-m2n-1-00ff", "10.1.2.3", 4711};
    ticket.host_id = host_identity();
    ticket.inbox = 0x0123456789abcdef;
    ticket.sources = 4096;
    ticket.slots = 256;
    ticket.slot_bytes = uint64_t{1} << 32;
    return ticket;
}

void check_valid(const Ticket& ticket) {
    CHECK(ticket.sources >= 1 && ticket.sources <= max_sources);
    CHECK(ticket.slots >= 1 && ticket.slots <= max_slots);
    CHECK(ticket.slot_bytes <= max_slot_bytes);
    CHECK(ticket.address.host.empty() == (ticket.address.port == 0));
    CHECK(ticket.name.size() <= max_name_bytes);
    for (const std::string* text :
         {&ticket.transport, &ticket.name, &ticket.address.unix_name, &ticket.address.host, &ticket.host_id}) {
        for (const char c : *text) CHECK(c >= 0x20 && c <= 0x7e);
    }
}

void ticket_round_trip() {
    const Ticket ticket = sample();
    const Ticket again = Ticket::decode(ticket.encode());
    CHECK_EQUAL(again.transport, ticket.transport);
    CHECK_EQUAL(again.name, ticket.name);
    CHECK_EQUAL(again.address.unix_name, ticket.address.unix_name);
    CHECK_EQUAL(again.address.host, ticket.address.host);
    CHECK_EQUAL(again.address.port, ticket.address.port);
    CHECK_EQUAL(again.host_id, ticket.host_id);
    CHECK_EQUAL(again.inbox, ticket.inbox);
    CHECK_EQUAL(again.sources, ticket.sources);
    CHECK_EQUAL(again.slots, ticket.slots);
    CHECK_EQUAL(again.slot_bytes, ticket.slot_bytes);
    CHECK_EQUAL(host_identity(), ticket.host_id);
}

void ticket_damage() {
    const std::vector<std::byte> bytes = sample().encode();
    for (size_t length = 0; length < bytes.size(); ++length) {
        expect_error(Code::invalid, "", [&] { Ticket::decode(Bytes(bytes).first(length)); });
    }
    int num_decoded = 0;
    for (size_t bit = 0; bit < 8 * bytes.size(); ++bit) {
        std::vector<std::byte> damaged = bytes;
        damaged[bit / 8] ^= std::byte{1} << (bit % 8);
        try {
            check_valid(Ticket::decode(damaged));
            ++num_decoded;
        } catch (const Error& error) {
            CHECK(error.code == Code::invalid);
        }
    }
    CHECK(num_decoded > 0);  // letters and numbers may change into others
    std::vector<std::byte> longer = bytes;
    longer.push_back(std::byte{0});
    expect_error(Code::invalid, "1 bytes too many", [&] { Ticket::decode(longer); });
    std::vector<std::byte> newer = bytes;
    newer[4] = std::byte{9};
    expect_error(Code::invalid, "version 9", [&] { Ticket::decode(newer); });
    expect_error(Code::invalid, "not a ticket", [&] { Ticket::decode(to_bytes("something else entirely")); });
}

void ticket_limits() {
    Ticket ticket = sample();
    ticket.name = std::string(max_name_bytes + 1, 'x');
    expect_error(Code::invalid, "129 bytes: the limit is 128", [&] { ticket.encode(); });
    ticket.name = "tab\there";
    expect_error(Code::invalid, "not printable", [&] { ticket.encode(); });
    ticket = sample();
    ticket.slots = 257;
    expect_error(Code::invalid, "slots = 257; allowed are 1 to 256", [&] { ticket.encode(); });
    ticket = sample();
    ticket.address.port = 0;
    expect_error(Code::invalid, "both or neither", [&] { ticket.encode(); });
}

// Feeds `bytes` in portions of at most `portion`; the frames, until the first error.
std::vector<Frame> read_frames(Bytes bytes, size_t portion, FrameTypes allowed) {
    FrameReader reader(allowed);
    std::vector<Frame> frames;
    while (!bytes.empty()) {
        const std::span<std::byte> space = reader.space();
        CHECK(!space.empty());
        const size_t length = std::min({portion, space.size(), bytes.size()});
        std::copy_n(bytes.begin(), length, space.begin());
        bytes = bytes.subspan(length);
        if (reader.filled(length)) frames.push_back(reader.take());
    }
    return frames;
}

void frames_in_portions() {
    std::vector<std::byte> stream;
    const std::vector<std::byte> large(60'000, std::byte{5});
    const FrameTypes allowed = {FrameType::heartbeat, FrameType::proof, FrameType::goodbye};
    for (const auto& frame : {encode_frame(FrameType::heartbeat), encode_frame(FrameType::proof, large),
                              encode_frame(FrameType::goodbye)}) {
        stream.insert(stream.end(), frame.begin(), frame.end());
    }
    for (const size_t portion : {1u, 2u, 11u, 12u, 13u, 4096u, 100'000u}) {
        const std::vector<Frame> frames = read_frames(stream, portion, allowed);
        CHECK_EQUAL(frames.size(), 3u);
        CHECK(frames[0].type == FrameType::heartbeat && frames[0].body.empty());
        CHECK(frames[1].type == FrameType::proof && frames[1].body == large);
        CHECK(frames[2].type == FrameType::goodbye);
    }
}

void frame_faults() {
    const FrameTypes allowed = {FrameType::heartbeat, FrameType::proof};
    const auto damaged = [&](size_t at, uint8_t value) {
        std::vector<std::byte> frame = encode_frame(FrameType::heartbeat);
        frame[at] = static_cast<std::byte>(value);
        return [frame, allowed] { read_frames(frame, 100, allowed); };
    };
    expect_error(Code::invalid, "no frame", damaged(0, 0));
    expect_error(Code::invalid, "version 3", damaged(4, 3));
    expect_error(Code::invalid, "unknown type 77", damaged(5, 77));
    expect_error(Code::invalid, "unknown type 0", damaged(5, 0));
    expect_error(Code::invalid, "a hello frame, not allowed", damaged(5, 1));
    expect_error(Code::invalid, "reserved", damaged(6, 1));
    expect_error(Code::invalid, "a heartbeat frame of 1 bytes, the limit is 0", damaged(8, 1));
    std::vector<std::byte> huge = encode_frame(FrameType::proof);
    for (int i = 8; i < 12; ++i) huge[static_cast<size_t>(i)] = std::byte{0xff};
    expect_error(Code::invalid, "4294967295 bytes", [&] { read_frames(huge, 100, allowed); });
}

void room_grows_with_bytes() {
    std::vector<std::byte> header = encode_frame(FrameType::proof, std::vector<std::byte>(65'000));
    FrameReader reader({FrameType::proof});
    std::copy_n(header.begin(), frame_header_bytes, reader.space().begin());
    CHECK(!reader.filled(frame_header_bytes));
    CHECK(reader.space().size() <= 8192);  // not the 65,000 that were announced
}

void greeting() {
    const auto token = to_bytes(Recorder::known_token);
    const std::vector<Frame> frames = read_frames(attach_greeting(token), 7, {FrameType::attach});
    CHECK_EQUAL(frames.size(), 1u);
    CHECK(frames[0].body == token);
    expect_error(Code::invalid, "a token of 0 bytes", [] { attach_greeting({}); });
    expect_error(Code::invalid, "a token of 65 bytes", [] { attach_greeting(std::vector<std::byte>(65)); });
}

void refusal_words() {
    CHECK_EQUAL(decode_refusal(encode_refusal("no\nroom\x01 here \xff")), std::string("no?room? here ?"));
    CHECK_EQUAL(decode_refusal(encode_refusal(std::string(5000, 'x'))).size(), max_refusal_bytes);
}

void random_bytes() {
    Nonce first = random_nonce();
    CHECK(first != random_nonce());
    std::vector<std::byte> many(1000);
    fill_random(many);
    CHECK(std::count(many.begin(), many.end(), std::byte{0}) < 100);
}

}  // namespace

int main() {
    return run_all({{"hashes", hashes},
                    {"comparison", comparison},
                    {"ticket_round_trip", ticket_round_trip},
                    {"ticket_damage", ticket_damage},
                    {"ticket_limits", ticket_limits},
                    {"frames_in_portions", frames_in_portions},
                    {"frame_faults", frame_faults},
                    {"room_grows_with_bytes", room_grows_with_bytes},
                    {"greeting", greeting},
                    {"refusal_words", refusal_words},
                    {"random_bytes", random_bytes}});
}

// A ticket's bytes: magic, version, then fields in the order of the struct, little endian, texts with a length byte.
// Fields are checked on both ways, so that every Ticket makes sense.
#include "m2n/wire.h"

#include <sys/stat.h>

#include <algorithm>
#include <cassert>
#include <cstdint>
#include <cstdio>
#include <fstream>
#include <tuple>
#include <utility>

#include "m2n/bytes.h"
#include "m2n/socket.h"

namespace antiphon::m2n {

namespace {

constexpr uint32_t frame_magic = 0x434E324D;  // "M2NC", little endian
constexpr uint8_t frame_version = 1;
constexpr size_t growth_bytes = 8192;
constexpr size_t proof_bytes = std::tuple_size_v<Digest>;
constexpr size_t blob_overhead_bytes = 4 + 1;  // length and number of descriptors

struct TypeTraits {
    const char* name;
    size_t max_bytes;
};

// max_bytes 0 and no name: there is no such type.
TypeTraits traits_of(FrameType type) {
    switch (type) {
        case FrameType::hello: return {"hello", 8 + 2 + std::tuple_size_v<Nonce> + 1 + max_name_bytes};
        case FrameType::challenge: return {"challenge", std::tuple_size_v<Nonce>};
        case FrameType::proof: return {"proof", proof_bytes + blob_overhead_bytes + max_blob_bytes};
        case FrameType::welcome:
            return {"welcome", proof_bytes + 4 + 4 + 8 + 1 + max_name_bytes + blob_overhead_bytes + max_blob_bytes};
        case FrameType::refusal: return {"refusal", max_refusal_bytes};
        case FrameType::heartbeat: return {"heartbeat", 0};
        case FrameType::goodbye: return {"goodbye", 0};
        case FrameType::attach: return {"attach", max_token_bytes};
    }
    return {nullptr, 0};
}

void write_blob(ByteWriter& writer, const Blob& blob) {
    check_range("the blob's number of bytes", blob.bytes.size(), 0, max_blob_bytes);
    check_range("the blob's number of descriptors", blob.descriptors.size(), 0, max_descriptors_per_message);
    writer.u32(static_cast<uint32_t>(blob.bytes.size()));
    writer.raw(blob.bytes);
    writer.u8(static_cast<uint8_t>(blob.descriptors.size()));
}

Blob read_blob(ByteReader& reader, size_t& num_descriptors) {
    const uint32_t num_bytes = reader.u32();
    check_range("the blob's number of bytes", num_bytes, 0, max_blob_bytes);
    const Bytes bytes = reader.raw(num_bytes);
    num_descriptors = reader.u8();
    check_range("the blob's number of descriptors", num_descriptors, 0, max_descriptors_per_message);
    reader.expect_end();
    return {{bytes.begin(), bytes.end()}, {}};
}

Nonce read_nonce(ByteReader& reader) {
    Nonce nonce;
    const Bytes bytes = reader.raw(nonce.size());
    std::copy(bytes.begin(), bytes.end(), nonce.begin());
    return nonce;
}

bool printable(char c) { return c >= 0x20 && c <= 0x7e; }

}  // namespace

std::vector<std::byte> encode_frame(FrameType type, Bytes body) {
    assert(body.size() <= traits_of(type).max_bytes);
    std::vector<std::byte> frame;
    frame.reserve(frame_header_bytes + body.size());
    ByteWriter writer(frame);
    writer.numbers(frame_magic, frame_version, static_cast<uint8_t>(type), uint16_t{0});
    writer.u32(static_cast<uint32_t>(body.size()));
    writer.raw(body);
    return frame;
}

std::span<std::byte> FrameReader::space() {
    if (num_header_bytes_ < header_.size()) return std::span(header_).subspan(num_header_bytes_);
    std::vector<std::byte>& body = frame_.body;
    if (body.size() == num_body_bytes_) {
        body.resize(std::min<size_t>(body_length_, num_body_bytes_ + growth_bytes));
    }
    return std::span(body).subspan(num_body_bytes_);
}

bool FrameReader::filled(size_t num_bytes) {
    if (num_header_bytes_ < header_.size()) {
        num_header_bytes_ += num_bytes;
        if (num_header_bytes_ < header_.size()) return false;
        check_header();
    } else {
        num_body_bytes_ += num_bytes;
    }
    return num_body_bytes_ == body_length_;
}

Frame FrameReader::take() {
    assert(num_header_bytes_ == header_.size() && num_body_bytes_ == body_length_);
    num_header_bytes_ = 0;
    num_body_bytes_ = 0;
    body_length_ = 0;
    return std::exchange(frame_, Frame{});
}

void FrameReader::check_header() {
    ByteReader reader(header_, "the frame's header");
    if (reader.u32() != frame_magic) throw_invalid("bytes that are no frame of the M2N control protocol");
    const unsigned version = reader.u8();
    if (version != frame_version) {
        throw_invalid("a frame of version ", version, " of the control protocol, this library speaks ", frame_version);
    }
    const uint8_t type_byte = reader.u8();
    frame_.type = static_cast<FrameType>(type_byte);
    const TypeTraits traits = traits_of(frame_.type);
    if (traits.name == nullptr) throw_invalid("a frame of unknown type ", unsigned{type_byte});
    const std::string frame = std::string("a ") + traits.name + " frame";
    if (!allowed_.contains(frame_.type)) throw_invalid(frame, ", not allowed at this point");
    if (reader.u16() != 0) throw_invalid(frame, " whose reserved bits are set");
    body_length_ = reader.u32();
    if (body_length_ > traits.max_bytes) {
        throw_invalid(frame, " of ", body_length_, " bytes, the limit is ", traits.max_bytes);
    }
}

void check_text(const std::string& what, std::string_view text, size_t max_bytes) {
    if (text.size() > max_bytes) {
        throw_invalid(what, " has ", text.size(), " bytes: the limit is ", max_bytes);
    }
    if (!std::all_of(text.begin(), text.end(), printable)) {
        throw_invalid(what, " has characters that are not printable ASCII: use letters, digits and signs only");
    }
}

void write_text(ByteWriter& writer, std::string_view text) {
    assert(text.size() <= 255);
    writer.u8(static_cast<uint8_t>(text.size()));
    writer.raw(bytes_of(text));
}

std::string read_text(ByteReader& reader) {
    const Bytes bytes = reader.raw(reader.u8());
    return {reinterpret_cast<const char*>(bytes.data()), bytes.size()};
}

std::vector<std::byte> write_hello(const Hello& hello, const Nonce& nonce) {
    check_text("the endpoint's name", hello.name, max_name_bytes);
    check_range("the source", hello.source, 0, max_sources - 1);
    std::vector<std::byte> bytes;
    ByteWriter writer(bytes);
    writer.numbers(hello.inbox, hello.source);
    writer.raw(nonce);
    write_text(writer, hello.name);
    return bytes;
}

Hello read_hello(Bytes body) {
    ByteReader reader(body, "the hello");
    Hello hello;
    reader.numbers(hello.inbox, hello.source);
    read_nonce(reader);  // the proofs cover it
    hello.name = read_text(reader);
    reader.expect_end();
    check_range("the source", hello.source, 0, max_sources - 1);
    check_text("the sender's name", hello.name, max_name_bytes);
    return hello;
}

std::vector<std::byte> write_introduction(const Blob& introduction) {
    std::vector<std::byte> bytes;
    ByteWriter writer(bytes);
    write_blob(writer, introduction);
    return bytes;
}

Blob read_introduction(Bytes body, size_t& num_descriptors) {
    ByteReader reader(body, "the proof");
    return read_blob(reader, num_descriptors);
}

std::vector<std::byte> write_welcome(const Welcome& welcome) {
    check_text("the endpoint's name", welcome.name, max_name_bytes);
    check_range("slots", welcome.slots, 1, max_slots);
    check_range("slot bytes", welcome.slot_bytes, 0, max_slot_bytes);
    check_range("the incarnation", welcome.incarnation, 1, UINT32_MAX);
    std::vector<std::byte> bytes;
    ByteWriter writer(bytes);
    writer.numbers(welcome.incarnation, welcome.slots, welcome.slot_bytes);
    write_text(writer, welcome.name);
    write_blob(writer, welcome.blob);
    return bytes;
}

Welcome read_welcome(Bytes body, size_t& num_descriptors) {
    ByteReader reader(body, "the welcome");
    Welcome welcome;
    reader.numbers(welcome.incarnation, welcome.slots, welcome.slot_bytes);
    welcome.name = read_text(reader);
    welcome.blob = read_blob(reader, num_descriptors);
    check_range("the incarnation", welcome.incarnation, 1, UINT32_MAX);
    check_range("slots", welcome.slots, 1, max_slots);
    check_range("slot bytes", welcome.slot_bytes, 0, max_slot_bytes);
    check_text("the receiver's name", welcome.name, max_name_bytes);
    return welcome;
}

Nonce decode_challenge(Bytes body) {
    ByteReader reader(body, "the challenge");
    const Nonce nonce = read_nonce(reader);
    reader.expect_end();
    return nonce;
}

std::vector<std::byte> encode_refusal(std::string_view words) {
    const Bytes bytes = bytes_of(words.substr(0, max_refusal_bytes));
    return {bytes.begin(), bytes.end()};
}

std::string decode_refusal(Bytes body) {
    std::string words(reinterpret_cast<const char*>(body.data()), body.size());
    std::replace_if(words.begin(), words.end(), [](char c) { return !printable(c); }, '?');
    return words;
}

Digest prove(std::string_view secret, std::string_view label, std::initializer_list<Bytes> parts) {
    HmacSha256 mac(bytes_of(secret));
    const auto add = [&mac](Bytes part) {
        std::vector<std::byte> length;
        ByteWriter(length).u32(static_cast<uint32_t>(part.size()));
        mac.update(length);
        mac.update(part);
    };
    add(bytes_of(label));
    for (const Bytes part : parts) add(part);
    return mac.finish();
}

namespace {

constexpr uint32_t ticket_magic = 0x544E324D;  // "M2NT", little endian
constexpr uint8_t ticket_version = 1;
constexpr size_t max_unix_name_bytes = 107;  // sun_path without the leading zero byte

void check_ticket_range(const char* what, uint64_t value, uint64_t lowest, uint64_t highest) {
    if (value >= lowest && value <= highest) return;
    throw_invalid("a ticket with ", what, " = ", value, "; allowed are ", lowest, " to ", highest);
}

void check(const Ticket& ticket) {
    check_text("the ticket's transport", ticket.transport, max_name_bytes);
    check_text("the ticket's endpoint name", ticket.name, max_name_bytes);
    check_text("the ticket's Unix socket", ticket.address.unix_name, max_unix_name_bytes);
    check_text("the ticket's host", ticket.address.host, max_name_bytes);
    check_text("the ticket's host identity", ticket.host_id, max_name_bytes);
    check_ticket_range("sources", ticket.sources, 1, max_sources);
    check_ticket_range("slots", ticket.slots, 1, max_slots);
    check_ticket_range("slot_bytes", ticket.slot_bytes, 0, max_slot_bytes);
    if (ticket.address.host.empty() != (ticket.address.port == 0)) {
        throw_invalid("a ticket with host '", ticket.address.host, "' and port ", ticket.address.port,
                      "; it needs both or neither");
    }
}

std::string first_line(const char* path) {
    std::ifstream file(path);
    std::string line;
    if (!std::getline(file, line) || line.empty()) {
        throw Error(Code::system, concat("cannot read ", path, ", which identifies this machine"));
    }
    return line;
}

}  // namespace

std::vector<std::byte> Ticket::encode() const {
    check(*this);
    std::vector<std::byte> bytes;
    ByteWriter writer(bytes);
    writer.numbers(ticket_magic, ticket_version);
    for (const std::string& text : {transport, name, address.unix_name, address.host}) write_text(writer, text);
    writer.u16(address.port);
    write_text(writer, host_id);
    writer.numbers(inbox, sources, slots, slot_bytes);
    return bytes;
}

Ticket Ticket::decode(std::span<const std::byte> bytes) {
    ByteReader reader(bytes, "the ticket");
    if (reader.u32() != ticket_magic) throw_invalid("these bytes are not a ticket of an M2N inbox");
    const unsigned version = reader.u8();
    if (version != ticket_version) {
        throw_invalid("the ticket has version ", version, ", this library reads ", ticket_version,
                      "; run the same release on both sides");
    }
    Ticket ticket;
    for (std::string* text : {&ticket.transport, &ticket.name, &ticket.address.unix_name, &ticket.address.host}) {
        *text = read_text(reader);
    }
    ticket.address.port = reader.u16();
    ticket.host_id = read_text(reader);
    reader.numbers(ticket.inbox, ticket.sources, ticket.slots, ticket.slot_bytes);
    reader.expect_end();
    check(ticket);
    return ticket;
}

std::string host_identity() {
    struct stat network {};
    if (stat("/proc/self/ns/net", &network) != 0) throw_errno("stat /proc/self/ns/net");
    return first_line("/proc/sys/kernel/random/boot_id") + "/" + std::to_string(network.st_dev) + ":" +
           std::to_string(network.st_ino);
}

}  // namespace antiphon::m2n

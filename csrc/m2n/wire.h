// Frames of the control connection, as bytes. No sockets here, so that a fuzzer can feed any bytes.
//
// Frame: magic u32, version u8, type u8, reserved u16 (zero), body length u32, body; little endian. A length is
// compared with its type's limit, and a type with what is allowed at this point, before a byte of the body is read or
// given room; the room then grows with the bytes that come, not with the length that was announced.
//
// What a receiver gives its future senders, as bytes, by whatever way they can talk: how to reach one inbox.
// It holds no secret and no key to memory; those are exchanged once the control connection has proved itself.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "m2n/bytes.h"
#include "m2n/control.h"
#include "m2n/sha256.h"
#include "m2n/types.h"

namespace antiphon::m2n {

constexpr size_t frame_header_bytes = 12;
constexpr size_t max_body_bytes = 72 * 1024;
constexpr size_t max_blob_bytes = 64 * 1024;
constexpr size_t max_name_bytes = 128;
constexpr size_t max_refusal_bytes = 1024;
constexpr size_t max_token_bytes = 64;

enum class FrameType : uint8_t {
    hello = 1,
    challenge = 2,
    proof = 3,
    welcome = 4,
    refusal = 5,
    heartbeat = 6,
    goodbye = 7,
    attach = 8,
};

// A set of frame types.
class FrameTypes {
  public:
    constexpr FrameTypes() = default;
    constexpr FrameTypes(std::initializer_list<FrameType> types) {
        for (const FrameType type : types) bits_ |= 1u << static_cast<int>(type);
    }
    constexpr bool contains(FrameType type) const { return bits_ >> static_cast<int>(type) & 1u; }

  private:
    uint32_t bits_ = 0;
};

struct Frame {
    FrameType type = FrameType::heartbeat;
    std::vector<std::byte> body;
};

std::vector<std::byte> encode_frame(FrameType type, Bytes body = {});

// Assembles one frame after the other from bytes in any portions, and never asks for a byte behind the current frame:
// what follows an attach frame belongs to the data connection.
class FrameReader {
  public:
    explicit FrameReader(FrameTypes allowed) : allowed_(allowed) {}

    void allow(FrameTypes allowed) { allowed_ = allowed; }  // from the next frame on
    std::span<std::byte> space();                           // where the next bytes go; never empty
    // So many bytes were put into `space()`. True: `take` the frame. Error(invalid): this is no frame, too long or not
    // allowed here.
    bool filled(size_t num_bytes);
    Frame take();

  private:
    void check_header();

    FrameTypes allowed_;
    std::array<std::byte, frame_header_bytes> header_{};
    size_t num_header_bytes_ = 0;
    uint32_t body_length_ = 0;
    size_t num_body_bytes_ = 0;
    Frame frame_;
};

// Texts are printable ASCII, so that they can be shown and logged as they are. Error(invalid) names `what`.
void check_text(const std::string& what, std::string_view text, size_t max_bytes);
void write_text(ByteWriter& writer, std::string_view text);  // at most 255 bytes
std::string read_text(ByteReader& reader);

using Nonce = std::array<std::byte, 32>;

// Bodies. Every field that is read is compared with its limit, and so are names and blobs that are written:
// Error(invalid). Of a blob's descriptors, which travel beside the bytes, the body has the number.
std::vector<std::byte> write_hello(const Hello& hello, const Nonce& nonce);  // all but its introduction
Hello read_hello(Bytes body);
std::vector<std::byte> write_introduction(const Blob& introduction);  // accompanies the client's proof, which covers it
Blob read_introduction(Bytes body, size_t& num_descriptors);
std::vector<std::byte> write_welcome(const Welcome& welcome);  // accompanies the server's proof, which covers it
Welcome read_welcome(Bytes body, size_t& num_descriptors);
Nonce decode_challenge(Bytes body);

// A refusal's words: shortened to max_refusal_bytes, with '?' for what is not printable.
std::vector<std::byte> encode_refusal(std::string_view words);
std::string decode_refusal(Bytes body);

// HMAC of `label` and of every part behind its length, so that no two lists of parts look the same.
Digest prove(std::string_view secret, std::string_view label, std::initializer_list<Bytes> parts);
constexpr std::string_view client_label = "antiphon m2n client";
constexpr std::string_view server_label = "antiphon m2n server";

struct Ticket {
    std::string transport;  // the back-end's name
    std::string name;       // of the receiving endpoint
    Address address;
    std::string host_id;    // tells whether sender and receiver share a machine and a network namespace
    uint64_t inbox = 0;
    uint32_t sources = 0;
    uint32_t slots = 0;
    uint64_t slot_bytes = 0;

    std::vector<std::byte> encode() const;
    static Ticket decode(std::span<const std::byte> bytes);  // Error(invalid): not a ticket, or of another version
};

// Equal for processes that share a machine and a network namespace: boot id and the namespace's inode.
std::string host_identity();

}  // namespace antiphon::m2n

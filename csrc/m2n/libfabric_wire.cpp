#include "m2n/libfabric_wire.h"

namespace antiphon::m2n {

namespace {

constexpr uint32_t introduction_magic = 0x3249464C;  // "LFI2", little endian
constexpr uint32_t welcome_magic = 0x3257464C;       // "LFW2"
constexpr size_t longest_provider = 64;
constexpr size_t longest_address = 512;

void put_counted(ByteWriter& writer, Bytes bytes) {
    writer.u16(static_cast<uint16_t>(bytes.size()));
    writer.raw(bytes);
}

std::vector<std::byte> take_counted(ByteReader& reader, const char* what, size_t limit) {
    const size_t size = reader.u16();
    if (size == 0 || size > limit) {
        throw Error(Code::invalid, std::string("libfabric: the peer's ") + what + " has " + std::to_string(size) +
                                       " bytes: it must have 1 to " + std::to_string(limit));
    }
    const Bytes bytes = reader.raw(size);
    return {bytes.begin(), bytes.end()};
}

void put_peer(ByteWriter& writer, const LibfabricPeer& peer) {
    put_counted(writer, bytes_of(peer.provider));
    writer.u32(peer.protocol);
    put_counted(writer, peer.data_address);
    put_counted(writer, peer.credit_address);
}

LibfabricPeer take_peer(ByteReader& reader) {
    LibfabricPeer peer;
    for (const std::byte byte : take_counted(reader, "provider", longest_provider)) {
        const char letter = static_cast<char>(byte);
        peer.provider += letter >= ' ' && letter <= '~' ? letter : '?';  // it ends up in errors
    }
    peer.protocol = reader.u32();
    peer.data_address = take_counted(reader, "data address", longest_address);
    peer.credit_address = take_counted(reader, "credit address", longest_address);
    return peer;
}

void expect_magic(ByteReader& reader, uint32_t magic, const char* what) {
    if (reader.u32() == magic) return;
    throw Error(Code::invalid, std::string("libfabric: what the peer sent is not ") + what +
                                   " of this version: run the same version of Antiphon on both sides");
}

PairTag take_tag(ByteReader& reader) {
    const uint16_t tag = reader.u16();
    if (tag < num_tags) return tag;
    throw Error(Code::invalid, "libfabric: the peer's tag is " + std::to_string(tag) + ": it must be below " +
                                   std::to_string(num_tags));
}

}  // namespace

std::vector<std::byte> encode(const LibfabricIntroduction& introduction) {
    std::vector<std::byte> bytes;
    ByteWriter writer(bytes);
    writer.u32(introduction_magic);
    put_peer(writer, introduction.peer);
    writer.u16(introduction.tag);
    writer.u64(introduction.nonce);
    writer.u64(introduction.credit_base);
    writer.u64(introduction.credit_key);
    return bytes;
}

std::vector<std::byte> encode(const LibfabricWelcome& welcome) {
    std::vector<std::byte> bytes;
    ByteWriter writer(bytes);
    writer.u32(welcome_magic);
    put_peer(writer, welcome.peer);
    writer.u16(welcome.tag);
    writer.u16(welcome.introduced_tag);
    writer.u64(welcome.nonce);
    writer.u64(welcome.slots_base);
    writer.u64(welcome.slots_key);
    writer.u64(welcome.slots_bytes);
    return bytes;
}

LibfabricIntroduction decode_introduction(Bytes bytes) {
    ByteReader reader(bytes, "libfabric introduction");
    expect_magic(reader, introduction_magic, "an introduction");
    LibfabricIntroduction introduction;
    introduction.peer = take_peer(reader);
    introduction.tag = take_tag(reader);
    introduction.nonce = reader.u64();
    introduction.credit_base = reader.u64();
    introduction.credit_key = reader.u64();
    reader.expect_end();
    return introduction;
}

LibfabricWelcome decode_welcome(Bytes bytes) {
    ByteReader reader(bytes, "libfabric welcome");
    expect_magic(reader, welcome_magic, "a welcome");
    LibfabricWelcome welcome;
    welcome.peer = take_peer(reader);
    welcome.tag = take_tag(reader);
    welcome.introduced_tag = take_tag(reader);
    welcome.nonce = reader.u64();
    welcome.slots_base = reader.u64();
    welcome.slots_key = reader.u64();
    welcome.slots_bytes = reader.u64();
    reader.expect_end();
    return welcome;
}

}  // namespace antiphon::m2n

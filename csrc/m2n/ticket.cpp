// A ticket's bytes: magic, version, then fields in the order of the struct, little endian, texts with a length byte.
// Fields are checked on both ways, so that whoever holds a Ticket holds one that makes sense.
#include "m2n/ticket.h"

#include <sys/stat.h>

#include <cstdio>
#include <fstream>

#include "m2n/bytes.h"
#include "m2n/wire.h"

namespace antiphon::m2n {

namespace {

constexpr uint32_t ticket_magic = 0x544E324D;  // "M2NT", little endian
constexpr uint8_t ticket_version = 1;
constexpr size_t max_unix_name_bytes = 107;  // sun_path without the leading zero byte

void check_range(const char* what, uint64_t value, uint64_t lowest, uint64_t highest) {
    if (value >= lowest && value <= highest) return;
    throw Error(Code::invalid, std::string("a ticket with ") + what + " = " + std::to_string(value) + "; allowed are " +
                                   std::to_string(lowest) + " to " + std::to_string(highest));
}

void check(const Ticket& ticket) {
    check_text("the ticket's transport", ticket.transport, max_name_bytes);
    check_text("the ticket's endpoint name", ticket.name, max_name_bytes);
    check_text("the ticket's Unix socket", ticket.address.unix_name, max_unix_name_bytes);
    check_text("the ticket's host", ticket.address.host, max_name_bytes);
    check_text("the ticket's host identity", ticket.host_id, max_name_bytes);
    check_range("sources", ticket.sources, 1, max_sources);
    check_range("slots", ticket.slots, 1, max_slots);
    check_range("slot_bytes", ticket.slot_bytes, 0, max_slot_bytes);
    if (ticket.address.host.empty() != (ticket.address.port == 0)) {
        throw Error(Code::invalid, "a ticket with host '" + ticket.address.host + "' and port " +
                                       std::to_string(ticket.address.port) + "; it needs both or neither");
    }
}

std::string first_line(const char* path) {
    std::ifstream file(path);
    std::string line;
    if (!std::getline(file, line) || line.empty()) {
        throw Error(Code::system, std::string("cannot read ") + path + ", which identifies this machine");
    }
    return line;
}

}  // namespace

std::vector<std::byte> Ticket::encode() const {
    check(*this);
    std::vector<std::byte> bytes;
    ByteWriter writer(bytes);
    writer.u32(ticket_magic);
    writer.u8(ticket_version);
    write_text(writer, transport);
    write_text(writer, name);
    write_text(writer, address.unix_name);
    write_text(writer, address.host);
    writer.u16(address.port);
    write_text(writer, host_id);
    writer.u64(inbox);
    writer.u32(sources);
    writer.u32(slots);
    writer.u64(slot_bytes);
    return bytes;
}

Ticket Ticket::decode(std::span<const std::byte> bytes) {
    ByteReader reader(bytes, "the ticket");
    if (reader.u32() != ticket_magic) throw Error(Code::invalid, "these bytes are not a ticket of an M2N inbox");
    const unsigned version = reader.u8();
    if (version != ticket_version) {
        throw Error(Code::invalid, "the ticket has version " + std::to_string(version) + ", this library reads " +
                                       std::to_string(ticket_version) + "; run the same release on both sides");
    }
    Ticket ticket;
    ticket.transport = read_text(reader);
    ticket.name = read_text(reader);
    ticket.address.unix_name = read_text(reader);
    ticket.address.host = read_text(reader);
    ticket.address.port = reader.u16();
    ticket.host_id = read_text(reader);
    ticket.inbox = reader.u64();
    ticket.sources = reader.u32();
    ticket.slots = reader.u32();
    ticket.slot_bytes = reader.u64();
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

// What a receiver gives its future senders, as bytes, by whatever way they can talk: how to reach one inbox.
// It holds no secret and no key to memory; those are exchanged once the control connection has proved itself.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "m2n/control.h"

namespace antiphon::m2n {

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

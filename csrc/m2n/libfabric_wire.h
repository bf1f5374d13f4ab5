// What two libfabric ends tell each other through the control connection, as bytes.
//
// A write's completion carries 32 bits and nothing that says from whom, and source numbers are unique only within one
// inbox, while one transport serves several inboxes and many links that all send as the same source. So the 12 bits
// that are the source elsewhere are a *tag* here: a number that the end which will receive the completion hands out
// for one pair (the receiver for messages, the sender for credits) and translates back. No tag is used again before all
// others have been, so a late write of a closed pair leads nowhere. Rejected: an endpoint for each inbox, which costs
// connections and does not tell credits apart; guessing from headers, which cannot be right for two of one number.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "m2n/bytes.h"

namespace antiphon::m2n {

using PairTag = uint16_t;
constexpr uint32_t num_tags = 1u << 12;

// Where the other end can be written to. `protocol`: two providers understand each other if it is the same.
struct LibfabricPeer {
    std::string provider;
    uint32_t protocol = 0;
    std::vector<std::byte> data_address;    // of the endpoint that carries messages
    std::vector<std::byte> credit_address;  // of the endpoint that carries credits
};

struct LibfabricIntroduction {  // sender to receiver
    LibfabricPeer peer;
    PairTag tag = 0;    // for credits
    uint64_t nonce = 0;  // echoed in the welcome, which finds its introduction by it
    uint64_t credit_base = 0;  // where a credit is written, and the key to it
    uint64_t credit_key = 0;
};

struct LibfabricWelcome {  // receiver to sender
    LibfabricPeer peer;
    PairTag tag = 0;  // for messages
    PairTag introduced_tag = 0;
    uint64_t nonce = 0;
    uint64_t slots_base = 0;  // of slot 0, as the provider wants remote addresses; and the key to all slots
    uint64_t slots_key = 0;
    uint64_t slots_bytes = 0;  // of all slots together, so that both ends compute the same stride
};

std::vector<std::byte> encode(const LibfabricIntroduction& introduction);
std::vector<std::byte> encode(const LibfabricWelcome& welcome);
LibfabricIntroduction decode_introduction(Bytes bytes);  // Error(invalid): not what the other side must send
LibfabricWelcome decode_welcome(Bytes bytes);

}  // namespace antiphon::m2n

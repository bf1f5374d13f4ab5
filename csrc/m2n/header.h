// What precedes every payload, in the same write: one cache line.
//
// A receiver believes nothing in it: `check` compares it with what the connection was opened with, and a message that
// does not fit is dropped and counted, never delivered.
#pragma once

#include <cstddef>
#include <cstdint>

#include "m2n/types.h"

namespace antiphon::m2n {

constexpr uint32_t header_magic = 0x314E324D;  // "M2N1", little endian
constexpr size_t num_user_words = 8;

struct MessageHeader {
    uint32_t magic = header_magic;
    uint32_t immediate = 0;     // the same word that travels beside the write
    Incarnation incarnation = 0;            // of the source's connection
    uint32_t participants = 0;  // how many sources send for this step; 0: the sender does not say
    Step step = 0;
    uint64_t length = 0;        // payload bytes that follow
    uint32_t user[num_user_words] = {};
};

constexpr size_t header_bytes = 64;
static_assert(sizeof(MessageHeader) == header_bytes);

enum class HeaderFault { none, magic, immediate, incarnation, length };

inline HeaderFault check(const MessageHeader& header, Immediate expected, Incarnation incarnation,
                         uint64_t slot_bytes) {
    if (header.magic != header_magic) return HeaderFault::magic;
    if (header.incarnation != incarnation) return HeaderFault::incarnation;
    if (header.immediate != expected.pack()) return HeaderFault::immediate;
    if (header.length > slot_bytes) return HeaderFault::length;
    return HeaderFault::none;
}

}  // namespace antiphon::m2n

// Copies into slots that write past the caches, and when they are better than memcpy.
//
// An ordinary store first reads the line that it will overwrite, and pushes another one out of the caches. That pays as
// long as the line is still there when its slot is used again. If more bytes went by in between than the caches hold,
// it is not; nor is what is written now still there when its receiver looks, after everybody else's messages. A
// non-temporal store sends the line to memory and reads nothing.
//
// Measured on Zen 3 (32 MiB of last-level cache), 8 senders that write their payloads anew and 8 receivers that read
// theirs, non-temporal copies against memcpy: messages of 64 KiB 1.11 of the time, 128 KiB 0.96, 192 KiB 0.89, 256 KiB
// 0.92, 1 MiB 0.85. On a Xeon (Sapphire Rapids), 32 MiB in all, 1.4.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "m2n/transport.h"

namespace antiphon::m2n {

// memcpy with non-temporal stores; complete before any later store. Plain memcpy on processors other than x86-64.
void nontemporal_copy(std::byte* to, const std::byte* from, size_t num_bytes);

// All last-level caches of the machine together, as its folder of processors says; 0 if it does not.
uint64_t last_level_cache_bytes(const std::string& processors = "/sys/devices/system/cpu");

// Tells which slots of one link have left the caches. A message takes its bytes twice, at its source and in its slot,
// and every source of the inbox is taken to send as much as this one.
class ColdSlots {
  public:
    static constexpr uint64_t least_bytes = 4096;  // of a message that is copied past them

    // `cache_bytes`: as `last_level_cache_bytes`, of which a quarter is left to everything else; 0: not known, no slot
    // is cold. `sent_bytes` counts for all links of one endpoint, and outlives them.
    ColdSlots(const PairSpec& spec, uint64_t cache_bytes, uint64_t& sent_bytes);

    // A message of `length` is about to be written: whether it should be copied past the caches.
    bool write(SlotId slot, uint64_t length);

  private:
    static constexpr uint64_t never = ~uint64_t{0};

    const uint64_t cold_after_bytes_;  // of this endpoint's
    uint64_t& sent_bytes_;
    std::vector<uint64_t> written_at_;  // by slot: `sent_bytes_` before its last message
};

}  // namespace antiphon::m2n

// What `antiphon doctor` shows of libfabric: which library there is, which providers it has, and what they can do.
// Nothing here throws because something is missing; what is missing is the answer.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "m2n/transport.h"

namespace antiphon::m2n {

struct LibfabricProviderInfo {
    std::string name;    // "verbs;ofi_rxm"
    std::string fabric;  // which network, as libfabric names it
    std::string domain;  // which device
    bool waits_by_descriptor = false;  // else a wait looks again and again, 10 to 100 us apart
    bool device_memory = false;        // FI_HMEM
    bool posts_receives = false;       // a completion consumes a posted receive (FI_RX_CQ_DATA)
    uint32_t completion_data_bytes = 0;
    uint64_t largest_write_bytes = 0;
    uint64_t link_bits_per_s = 0;  // 0: unknown
    std::string note;              // traffic classes and congestion: what works, and where it is set
};

struct LibfabricInfo {
    bool built = false;           // this build has the back-end
    std::string headers_version;  // it was built with
    std::string library;          // path; empty: none found
    std::string version;          // of the library
    std::string chosen;           // provider that `options` lead to
    std::string problem;          // why something of the above is empty, and how to fix it
    std::vector<LibfabricProviderInfo> providers;
};

// Opens the library and asks every usable provider; some milliseconds, more where cards are.
LibfabricInfo libfabric_info(const TransportOptions& options);

}  // namespace antiphon::m2n

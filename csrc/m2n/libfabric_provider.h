// Which libfabric provider to use, and asking libfabric for it.
//
// Needed: reliable datagram endpoints, writes with at least 32 bits of remote completion data. Without a wish the best
// there is: efa, verbs, tcp, in this order. `shm` works but is never chosen by itself: it cannot block, and the
// library's own shared-memory back-end is faster and survives more. Refused are `sockets`, whose writes with completion
// data were seen to hang, and `shm` before 2.0, which hangs when a peer is killed. Other names are taken at their word.
#pragma once

#if defined(ANTIPHON_HAVE_LIBFABRIC)

#include <rdma/fabric.h>

#include <memory>
#include <string>

#include "m2n/libfabric_library.h"
#include "m2n/transport.h"

namespace antiphon::m2n {

struct InfoFreer {
    void (*freeinfo)(fi_info*) = nullptr;
    void operator()(fi_info* info) const { freeinfo(info); }
};
using FabricInfo = std::unique_ptr<fi_info, InfoFreer>;

struct ProviderWish {
    std::string name;            // empty: every provider
    std::string host;            // a local address to bind to; empty or not an IP provider: the provider's default
    bool posts_receives = false;  // may demand a posted receive for each completion (FI_RX_CQ_DATA)
    bool device_memory = false;
};

// All that fits, as a list (follow `next`), or nothing.
FabricInfo query_providers(const LibfabricLibrary& library, const ProviderWish& wish);

// One, for this transport. Error(invalid) names what was asked for and what there is.
FabricInfo choose_provider(const LibfabricLibrary& library, const TransportOptions& options);

FabricInfo copy_info(const LibfabricLibrary& library, const fi_info& info);

// "verbs" of "verbs;ofi_rxm".
std::string core_provider(const std::string& name);
// Its datagrams travel through the kernel's TCP, one connection for each peer, with no layer between.
bool connects_over_tcp(const std::string& name);

}  // namespace antiphon::m2n

#endif

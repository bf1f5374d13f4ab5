// libfabric, found and opened at run time: the project builds and runs without it.
//
// Searched in this order: the path the caller names, ANTIPHON_LIBFABRIC, vendors' installations, the system's library,
// and last the copy that `make` fetched (ANTIPHON_LIBFABRIC_PACKAGED, set by the Python side). A vendor's library comes
// before the system's because it knows the vendor's hardware. A path that was named is taken or refused, never passed
// over in silence. Rejected: linking against it, which would tie one build to one of many installations.
//
// Which libfabric provider to use, and asking libfabric for it.
//
// Needed: reliable datagram endpoints, writes with at least 32 bits of remote completion data. Without a wish the best
// there is: efa, verbs, tcp, in this order. `shm` works but is never chosen by itself: it cannot block, and the
// library's own shared-memory back-end is faster and survives more. Refused are `sockets`, whose writes with completion
// data were seen to hang, and `shm` before 2.0, which hangs when a peer is killed. Other names are taken at their word.
#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "m2n/transport.h"

#if defined(ANTIPHON_HAVE_LIBFABRIC)
#include <rdma/fabric.h>
#endif

struct fi_fabric_attr;
struct fi_info;
struct fid_fabric;

namespace antiphon::m2n {

// The few real functions of the library; everything else goes through tables of the objects they return. The library is
// never closed again, because providers leave threads and exit handlers behind.
struct LibfabricLibrary {
    std::string path;
    uint32_t version = 0;  // major << 16 | minor

    int (*getinfo)(uint32_t version, const char* node, const char* service, uint64_t flags, const fi_info* hints,
                   fi_info** info) = nullptr;
    void (*freeinfo)(fi_info* info) = nullptr;
    fi_info* (*dupinfo)(const fi_info* info) = nullptr;  // of nullptr: an empty one
    int (*fabric)(fi_fabric_attr* attributes, fid_fabric** fabric, void* context) = nullptr;
    const char* (*strerror)(int error) = nullptr;

    // What to ask for: 1.18 switches RDMA on for EFA, and nothing here needs a later interface.
    uint32_t api_version() const;
    std::string version_text() const;
    std::string words_for(int64_t error) const;  // of a negative return value, in any sign
};

// `path`: a library or the folder of one; empty: search. Error(invalid) says what was tried and how to fix it.
LibfabricLibrary open_libfabric(const std::string& path);

#if defined(ANTIPHON_HAVE_LIBFABRIC)

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

#endif

}  // namespace antiphon::m2n

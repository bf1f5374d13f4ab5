// libfabric, found and opened at run time: the project builds and runs without it.
//
// Searched in this order: the path the caller names, ANTIPHON_LIBFABRIC, vendors' installations, the system's library,
// and last the copy that `make` fetched (ANTIPHON_LIBFABRIC_PACKAGED, set by the Python side). A vendor's library comes
// before the system's because it knows the vendor's hardware. A path that was named is taken or refused, never passed
// over in silence. Rejected: linking against it, which would tie one build to one of many installations.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

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

// The files that a search would try, for display; globs are already resolved.
std::vector<std::string> libfabric_candidates();

}  // namespace antiphon::m2n

// The back-ends, and the choice among them.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "m2n/transport.h"

namespace antiphon::m2n {

struct TransportOptions {
    std::string host = "127.0.0.1";  // where this endpoint can be reached; not used by shm and loopback
    uint32_t local_processes = 0;    // of this program on this machine; 0: not known, taken for one
    // tcp. Bulk data and credits are marked apart, so that a network can let credits overtake data
    // (MegaScale-Infer, section 5: acknowledgements in a high-priority queue).
    int data_priority = 0;       // SO_PRIORITY
    int data_type_of_service = 0x08;
    int credit_priority = 6;
    int credit_type_of_service = 0x10;
    std::string congestion;      // TCP_CONGESTION; empty: cubic where the system's is BBR
    // libfabric
    std::string library;         // path; empty: searched
    std::string provider;        // "tcp", "verbs", "efa", "shm"; empty: the best there is
    int data_traffic_class = -1;    // FI_TC_*; -1: the provider's default
    int credit_traffic_class = -1;
    // loopback
    uint64_t shuffle_seed = 0;   // not 0: deliver in a random order, a few at a time
};

std::unique_ptr<Transport> make_loopback(const TransportOptions& options);
std::unique_ptr<Transport> make_shared_memory(const TransportOptions& options);
std::unique_ptr<Transport> make_tcp(const TransportOptions& options);
std::unique_ptr<Transport> make_libfabric(const TransportOptions& options);

// What this build has.
std::vector<std::string> transport_names();

// By name: loopback, shm, tcp, libfabric. Error(invalid) names the choices.
std::unique_ptr<Transport> make_transport(const std::string& kind, const TransportOptions& options);

}  // namespace antiphon::m2n

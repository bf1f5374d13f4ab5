#include "m2n/transport.h"

#include "m2n/error.h"

namespace antiphon::m2n {

std::vector<std::string> transport_names() {
#if defined(ANTIPHON_HAVE_LIBFABRIC)
    return {"shm", "tcp", "libfabric", "loopback"};
#else
    return {"shm", "tcp", "loopback"};
#endif
}

std::unique_ptr<Transport> make_transport(const std::string& kind, const TransportOptions& options) {
    if (kind == "loopback") return make_loopback(options);
    if (kind == "shm") return make_shared_memory(options);
    if (kind == "tcp") return make_tcp(options);
    if (kind == "libfabric") return make_libfabric(options);
    throw Error(Code::invalid, "transport is " + kind + ": it must be shm, tcp, libfabric or loopback");
}

}  // namespace antiphon::m2n

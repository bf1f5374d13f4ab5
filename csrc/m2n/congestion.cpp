#include "m2n/congestion.h"

#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/socket.h>

#include <fstream>

#include "m2n/error.h"

namespace antiphon::m2n {

namespace {

bool set_congestion(int socket, const std::string& name) {
    return ::setsockopt(socket, IPPROTO_TCP, TCP_CONGESTION, name.data(), static_cast<socklen_t>(name.size())) == 0;
}

std::string available() {
    std::ifstream file("/proc/sys/net/ipv4/tcp_available_congestion_control");
    std::string names;
    std::getline(file, names);
    return names.empty() ? "unknown" : names;
}

}  // namespace

bool choose_congestion(int socket, const std::string& asked) {
    const std::string before = congestion_of(socket);
    if (asked.empty()) {
        if (!before.starts_with("bbr")) return false;
        return set_congestion(socket, "cubic") || set_congestion(socket, "reno");
    }
    if (set_congestion(socket, asked)) return asked != before;
    throw Error(Code::invalid, "tcp: congestion control \"" + asked +
                                   "\" is not available to this process; the system has: " + available());
}

std::string congestion_of(int socket) {
    char name[16] = {};
    socklen_t size = sizeof(name) - 1;
    return ::getsockopt(socket, IPPROTO_TCP, TCP_CONGESTION, name, &size) == 0 ? name : "";
}

}  // namespace antiphon::m2n

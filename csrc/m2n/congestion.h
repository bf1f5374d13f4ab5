// TCP's congestion control of single sockets.
//
// BBR paces each connection by what it believes the path carries. Many pairs that send at the same moment on one host
// gave 106 to 136 ms p99 for 8 x 8 messages of 1 MB with it, and 30 ms with cubic or reno. So where the system's
// default is BBR and nobody asked for anything, connections that carry data take cubic, or reno, or are left as they
// are. It must be chosen before a connection stands: Linux keeps pacing one that began with BBR.
#pragma once

#include <string>

namespace antiphon::m2n {

// Chooses for the socket, and for the connections it will accept if it listens. `asked`: a name of the system's, empty:
// the rule above. True: it is no longer the system's default. Error(invalid): not available to this process; the words
// name what is.
bool choose_congestion(int socket, const std::string& asked);

std::string congestion_of(int socket);  // empty: the system does not say

}  // namespace antiphon::m2n

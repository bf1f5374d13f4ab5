// The one error type of the library: a code, and words that name the value, the limit and the peer.
#pragma once

#include <cerrno>
#include <cstdio>
#include <stdexcept>
#include <string>
#include <system_error>
#include <utility>
#include <vector>

namespace antiphon::m2n {

enum class Code {
    invalid,      // the caller asked for something impossible; nothing happened
    timeout,      // a deadline passed; `peers` lists whom we still waited for
    peer_lost,    // `peers[0]` is gone, `reason` says how we know
    no_credit,    // every slot of this pair is in use; nothing was sent
    refused,      // the other side turned the connection down, or could not prove that it knows the secret
    interrupted,  // Endpoint::interrupt was called
    system,       // a system or library call failed
};

class Error : public std::runtime_error {
  public:
    Error(Code code, const std::string& message) : std::runtime_error(message), code(code) {}
    Error(Code code, const std::string& message, std::vector<std::string> peers, std::string reason = {})
        : std::runtime_error(message), code(code), peers(std::move(peers)), reason(std::move(reason)) {}

    Code code;
    std::vector<std::string> peers;
    std::string reason;
};

// The same error; one of a deadline says how long was waited.
inline Error with_patience(const Error& error, double timeout_s) {
    if (error.code != Code::timeout && error.code != Code::no_credit) return error;
    char seconds[32];
    std::snprintf(seconds, sizeof(seconds), "%.3g", timeout_s);
    return Error(error.code, std::string(error.what()) + " after " + seconds + " s", error.peers, error.reason);
}

// "CALL: what errno means". For failed system calls.
[[noreturn]] inline void throw_errno(const std::string& call) {
    const int error = errno;  // building the message may change it
    throw Error(Code::system, call + ": " + std::generic_category().message(error));
}

}  // namespace antiphon::m2n

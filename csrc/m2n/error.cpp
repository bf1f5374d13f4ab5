#include "m2n/error.h"

#include <cerrno>
#include <system_error>

namespace antiphon::m2n {

void throw_errno(const std::string& call) {
    const int error = errno;  // building the message may change it
    throw Error(Code::system, call + ": " + std::generic_category().message(error));
}

}  // namespace antiphon::m2n

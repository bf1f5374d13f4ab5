// Sends memory without copying it: through a pipe, the kernel's way to hand pages from a process to a socket.
//
// The kernel keeps referring to the pages until the peer's process has read them, so only memory that nobody changes
// before its credit is back may be sent like this: a slot in which the message was composed. (A retransmission after
// that carries bytes the peer has had already, and its kernel drops them.) A caller's own memory must be reusable once
// the kernel has it, so that is copied. Over loopback this saves one of two copies, over a network card the copy into
// the kernel.
#pragma once

#include <sys/types.h>

#include <cstddef>
#include <span>

#include "m2n/file_descriptor.h"

namespace antiphon::m2n {

class SplicePipe {
  public:
    static constexpr size_t least_bytes = 32 << 10;  // below, copying costs less than handing over pages

    // Whether the rest of a message shall be sent through the pipe, which is made at the first use. Never where SIGPIPE
    // would end the process, as `splice` knows no MSG_NOSIGNAL; nor once making or filling a pipe has failed.
    bool takes(std::span<const std::byte> rest);

    // As send(2) on a socket that does not block: how much of `rest` the socket took, or -1 and `errno`. What went into
    // the pipe beyond that must be offered again first.
    ssize_t send(int socket, std::span<const std::byte> rest);

    void close();  // and forget what is in it

  private:
    bool open();

    FileDescriptor reading_end_;
    FileDescriptor writing_end_;
    size_t num_inside_ = 0;  // bytes of the message in the pipe
    bool useless_ = false;
};

}  // namespace antiphon::m2n

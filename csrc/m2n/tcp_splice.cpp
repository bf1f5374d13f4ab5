#include "m2n/tcp_splice.h"

#include <fcntl.h>
#include <signal.h>
#include <sys/uio.h>
#include <unistd.h>

#include <algorithm>
#include <cassert>
#include <cerrno>
#include <utility>

namespace antiphon::m2n {

namespace {

constexpr int wanted_pipe_bytes = 512 << 10;  // a page each way takes a place of the pipe
constexpr int least_pipe_bytes = 64 << 10;    // what is left to a user with many pipes is no gain

bool sigpipe_is_ignored() {
    struct sigaction action {};
    return ::sigaction(SIGPIPE, nullptr, &action) == 0 && (action.sa_flags & SA_SIGINFO) == 0 &&
           action.sa_handler == SIG_IGN;
}

}  // namespace

void OutstandingBytes::add(uint64_t bytes) {
    const std::lock_guard lock(mutex_);
    now_ += bytes;
    peak_ = std::max(peak_, now_);
}

void OutstandingBytes::subtract(uint64_t bytes) {
    const std::lock_guard lock(mutex_);
    assert(bytes <= now_);
    now_ -= bytes;
    if (now_ == 0 && bytes > 0) former_peak_ = std::exchange(peak_, 0);
}

uint64_t OutstandingBytes::recent_peak() const {
    const std::lock_guard lock(mutex_);
    return std::max(peak_, former_peak_);
}

bool SplicePipe::takes(std::span<const std::byte> rest, bool cached) {
    if (num_inside_ > 0) return true;
    if (cached || rest.size() < least_bytes || useless_ || !sigpipe_is_ignored()) return false;
    return reading_end_ || open();
}

bool SplicePipe::open() {
    int ends[2];
    if (::pipe2(ends, O_CLOEXEC | O_NONBLOCK) != 0) {
        useless_ = true;
        return false;
    }
    reading_end_ = FileDescriptor(ends[0]);
    writing_end_ = FileDescriptor(ends[1]);
    ::fcntl(ends[1], F_SETPIPE_SZ, wanted_pipe_bytes);
    if (::fcntl(ends[1], F_GETPIPE_SZ) >= least_pipe_bytes) return true;
    close();
    useless_ = true;
    return false;
}

ssize_t SplicePipe::send(int socket, std::span<const std::byte> rest) {
    if (num_inside_ < rest.size()) {
        const iovec more{const_cast<std::byte*>(rest.data()) + num_inside_, rest.size() - num_inside_};
        const ssize_t filled = ::vmsplice(writing_end_.get(), &more, 1, SPLICE_F_NONBLOCK);
        if (filled > 0) num_inside_ += static_cast<size_t>(filled);
        if (num_inside_ == 0) {
            if (errno != EINTR) useless_ = true;
            errno = EINTR;  // the next try copies
            return -1;
        }
    }
    const unsigned more_follows = num_inside_ < rest.size() ? SPLICE_F_MORE : 0;
    const ssize_t sent =
        ::splice(reading_end_.get(), nullptr, socket, nullptr, num_inside_, SPLICE_F_NONBLOCK | more_follows);
    if (sent > 0) num_inside_ -= static_cast<size_t>(sent);
    return sent;
}

void SplicePipe::close() {
    reading_end_.reset();
    writing_end_.reset();
    num_inside_ = 0;
}

}  // namespace antiphon::m2n

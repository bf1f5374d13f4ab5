// The small values of the M2N library: who, which slot, which message, until when; its one error type, which has a code
// and words that name the value, the limit and the peer; and what owns a file descriptor.
//
// Source: a sender's number in one inbox. Slot: a place for one message of one source. Sequence: counts the uses of a
// slot, so that a replayed or repeated write differs from a new one. Step: the caller's number for one exchange.
//
// What precedes every payload, in the same write: one cache line.
//
// A receiver believes nothing in it: `check` compares it with what the connection was opened with, and a message that
// does not fit is dropped and counted, never delivered.
#pragma once

#include <sys/random.h>
#include <unistd.h>

#include <cerrno>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <span>
#include <stdexcept>
#include <string>
#include <string_view>
#include <system_error>
#include <type_traits>
#include <utility>
#include <vector>

#include "base/wait_word.h"

namespace antiphon::m2n {

using SourceId = uint16_t;
using SlotId = uint16_t;
using Incarnation = uint32_t;  // of one source: a new number with each connection; 0 is never used
using Step = uint64_t;
using EndId = uint64_t;  // one end of a pair, among those of a transport

constexpr EndId any_end = 0;

constexpr uint32_t max_sources = 1u << 12;
constexpr uint32_t max_slots = 1u << 8;
constexpr uint32_t sequence_modulus = 1u << 12;
constexpr uint64_t max_slot_bytes = uint64_t{1} << 32;

// The 32 bits that travel beside a write: 12 bits source, 8 bits slot, 12 bits sequence.
struct Immediate {
    SourceId source = 0;
    SlotId slot = 0;
    uint16_t sequence = 0;  // of this slot, modulo `sequence_modulus`; the first use has 1

    uint32_t pack() const { return uint32_t{source} << 20 | uint32_t{slot} << 12 | sequence; }
    static Immediate unpack(uint32_t word) {
        return {static_cast<SourceId>(word >> 20), static_cast<SlotId>(word >> 12 & 0xFF),
                static_cast<uint16_t>(word & 0xFFF)};
    }
    bool operator==(const Immediate&) const = default;
};

inline uint16_t next_sequence(uint16_t sequence) {
    return static_cast<uint16_t>((sequence + 1u) % sequence_modulus);
}

// A point on the monotonic clock.
class Deadline {
  public:
    static Deadline after_ns(int64_t timeout_ns) { return Deadline(monotonic_ns() + timeout_ns); }

    int64_t left_ns() const {  // 0 once it has passed
        const int64_t left = at_ns_ - monotonic_ns();
        return left > 0 ? left : 0;
    }
    bool passed() const { return left_ns() == 0; }

  private:
    explicit Deadline(int64_t at_ns) : at_ns_(at_ns) {}
    int64_t at_ns_;
};

constexpr uint32_t header_magic = 0x314E324D;  // "M2N1", little endian
constexpr size_t num_user_words = 8;

struct MessageHeader {
    uint32_t magic = header_magic;
    uint32_t immediate = 0;     // the same word that travels beside the write
    Incarnation incarnation = 0;            // of the source's connection
    uint32_t participants = 0;  // how many sources send for this step; 0: the sender does not say
    Step step = 0;
    uint64_t length = 0;        // payload bytes that follow
    uint32_t user[num_user_words] = {};
};

constexpr size_t header_bytes = 64;
static_assert(sizeof(MessageHeader) == header_bytes);

enum class HeaderFault { none, magic, immediate, incarnation, length };

inline HeaderFault check(const MessageHeader& header, Immediate expected, Incarnation incarnation,
                         uint64_t slot_bytes) {
    if (header.magic != header_magic) return HeaderFault::magic;
    if (header.incarnation != incarnation) return HeaderFault::incarnation;
    if (header.immediate != expected.pack()) return HeaderFault::immediate;
    if (header.length > slot_bytes) return HeaderFault::length;
    return HeaderFault::none;
}

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

// One text of words and numbers.
template <class... Parts>
std::string concat(const Parts&... parts) {
    std::string text;
    const auto add = [&text]<class Part>(const Part& part) {
        if constexpr (std::is_arithmetic_v<Part>) {
            text += std::to_string(part);
        } else {
            text += part;
        }
    };
    (add(parts), ...);
    return text;
}

template <class... Parts>
[[noreturn]] void throw_invalid(const Parts&... parts) {
    throw Error(Code::invalid, concat(parts...));
}

inline void check_range(std::string_view what, uint64_t value, uint64_t lowest, uint64_t highest) {
    if (value >= lowest && value <= highest) return;
    throw_invalid(what, " is ", value, ": it must be ", lowest, " to ", highest);
}

// `name` is gone, and `reason` says how we know.
[[noreturn]] inline void throw_lost(const std::string& name, const std::string& reason) {
    throw Error(Code::peer_lost, "lost " + name + ": " + reason, {name}, reason);
}

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

inline void fill_random(std::span<std::byte> bytes) {  // from the kernel
    while (!bytes.empty()) {
        const ssize_t filled = getrandom(bytes.data(), bytes.size(), 0);
        if (filled < 0 && errno != EINTR) throw_errno("getrandom");
        if (filled > 0) bytes = bytes.subspan(static_cast<size_t>(filled));
    }
}

template <class T>
T random_value() {
    T value{};
    fill_random(std::as_writable_bytes(std::span(&value, 1)));
    return value;
}

class FileDescriptor {
  public:
    FileDescriptor() = default;
    explicit FileDescriptor(int fd) : fd_(fd) {}
    ~FileDescriptor() { reset(); }
    FileDescriptor(FileDescriptor&& other) noexcept : fd_(std::exchange(other.fd_, -1)) {}
    FileDescriptor& operator=(FileDescriptor&& other) noexcept {
        if (this != &other) {
            reset();
            fd_ = std::exchange(other.fd_, -1);
        }
        return *this;
    }
    FileDescriptor(const FileDescriptor&) = delete;
    FileDescriptor& operator=(const FileDescriptor&) = delete;

    int get() const { return fd_; }
    explicit operator bool() const { return fd_ >= 0; }
    void reset() {
        if (fd_ >= 0) ::close(fd_);
        fd_ = -1;
    }

  private:
    int fd_ = -1;
};

}  // namespace antiphon::m2n

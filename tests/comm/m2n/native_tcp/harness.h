// What the tests of the tcp back-end share: checks, a receiver whose control plane is only an acceptor thread, and a
// small sender and collector above Link and Landing, in place of the library's core.
#pragma once

#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <thread>
#include <vector>

#include "m2n/tcp.h"

namespace antiphon::m2n::test {

#define CHECK(condition)                                                                  \
    do {                                                                                  \
        if (!(condition)) ::antiphon::m2n::test::fail(__FILE__, __LINE__, #condition, ""); \
    } while (false)
#define CHECK_WORDS(text, words)                                                                         \
    do {                                                                                                 \
        const std::string checked = (text);                                                              \
        if (checked.find(words) == std::string::npos) {                                                  \
            ::antiphon::m2n::test::fail(__FILE__, __LINE__, #text " contains \"" words "\"", checked);   \
        }                                                                                                \
    } while (false)

[[noreturn]] void fail(const char* file, int line, const char* what, const std::string& detail);

struct Case {
    const char* name;
    void (*run)();
};
std::vector<Case> frame_cases();
std::vector<Case> pair_cases();
std::vector<Case> wait_cases();
std::vector<Case> fault_cases();
std::vector<Case> splice_cases();

constexpr int64_t second_ns = 1'000'000'000;
inline Deadline soon() { return Deadline::after_ns(20 * second_ns); }  // what a test never waits for in vain
inline void sleep_for_ms(int ms) { std::this_thread::sleep_for(std::chrono::milliseconds(ms)); }

// Every byte of a message depends on its source, its step and its place.
std::byte pattern(uint64_t source, uint64_t step, uint64_t place);
void fill_pattern(std::span<std::byte> bytes, uint64_t source, uint64_t step);
bool has_pattern(std::span<const std::byte> bytes, uint64_t source, uint64_t step);

MessageHeader make_header(Immediate immediate, Incarnation incarnation, Step step, uint64_t length);

// A socket that listens on 127.0.0.1.
class Listener {
  public:
    explicit Listener(int backlog = 64);
    uint16_t port() const { return port_; }
    int fd() const { return fd_.get(); }
    FileDescriptor accept() const;  // blocks; empty once `stop` was called
    void stop() const;

  private:
    FileDescriptor fd_;
    uint16_t port_ = 0;
};

// Reads exactly so many bytes of a blocking socket, or fewer at its end.
size_t read_fully(int fd, void* data, size_t num_bytes);
void write_fully(int fd, const void* data, size_t num_bytes);
FileDescriptor connect_blocking(uint16_t port);

// A transport and an acceptor that hands greeted connections to it.
class Node {
  public:
    explicit Node(const TcpTuning& tuning = {}, const TransportOptions& options = {});
    ~Node();

    Transport& transport() { return *transport_; }
    uint16_t port() const { return listener_.port(); }
    int num_adopted() const { return num_adopted_.load(); }
    int num_refused() const { return num_refused_.load(); }

  private:
    void serve();

    std::shared_ptr<Transport> transport_;
    Listener listener_;
    std::atomic<int> num_adopted_{0};
    std::atomic<int> num_refused_{0};
    std::thread acceptor_;
};

struct Pair {
    PairSpec spec;
    std::shared_ptr<Landing> landing;
    std::shared_ptr<Link> link;
};
Pair open_pair(Node& sender, Node& receiver, const PairSpec& spec);
// A landing whose sender is the test itself, writing to a blocking socket.
struct RawPair {
    PairSpec spec;
    std::shared_ptr<Landing> landing;
    FileDescriptor sender;
};
RawPair open_raw_sender(Node& receiver, const PairSpec& spec);

// Sends through a link, from free slot to free slot.
class Sender {
  public:
    Sender(Transport& transport, Link& link, const PairSpec& spec);
    // Waits for a free slot. `payload` nullptr: the pattern is written in place.
    void send(Step step, uint64_t length, const std::byte* payload = nullptr);
    void wait_credits(size_t num_credits);
    void wait_reusable();
    void collect();  // takes credits in; fails if the link is broken
    size_t num_credits() const { return free_.size(); }

  private:
    Transport& transport_;
    Link& link_;
    const PairSpec spec_;
    std::vector<uint16_t> sequences_;
    std::vector<SlotId> free_;
    ImmediateSink sink_;
};

// Takes messages from a landing, checks their bytes, releases them.
class Collector {
  public:
    Collector(Transport& transport, Landing& landing, const PairSpec& spec);
    // Waits until so many more messages than earlier calls asked for are here, releases each. Their bytes must be the
    // pattern of (source, step).
    void take(size_t num_messages);
    void take_what_is_here();  // after progress
    size_t num_taken() const { return num_taken_; }

  private:
    void check_and_release(Immediate immediate);

    Transport& transport_;
    Landing& landing_;
    const PairSpec spec_;
    ImmediateSink sink_;
    size_t num_wanted_ = 0;
    size_t num_taken_ = 0;
};

// The acceptor has handed the pair's connection over. No event tells: the library's core interrupts its own waits.
void wait_adopted(Node& receiver);
// Waits until `condition`, by progress and block for `event`.
void wait_until(Transport& transport, Event event, const std::function<bool()>& condition);
// Until poll says that the pair is broken; the reason. `taken`: what it handed out before.
template <class End>
std::string wait_broken(Transport& transport, Event event, End& end, ImmediateSink* taken = nullptr) {
    ImmediateSink sink;
    std::string reason;
    wait_until(transport, event, [&] { return !end.poll(sink, reason); });
    CHECK(!reason.empty());
    if (taken != nullptr) *taken = sink;
    return reason;
}

}  // namespace antiphon::m2n::test

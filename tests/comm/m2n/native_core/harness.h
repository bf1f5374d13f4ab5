// What the tests of the library's core share: checks, endpoints of each back-end, content that tells whose it is, threads.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <random>
#include <span>
#include <string>
#include <thread>
#include <vector>

#include "m2n/endpoint.h"

namespace antiphon::m2n::test {

#define CHECK(condition)                                                                  \
    do {                                                                                  \
        if (!(condition)) ::antiphon::m2n::test::fail(__FILE__, __LINE__, #condition, ""); \
    } while (false)
#define CHECK_ERROR(expected, words, ...)                                                          \
    do {                                                                                           \
        try {                                                                                      \
            __VA_ARGS__;                                                                           \
            ::antiphon::m2n::test::fail(__FILE__, __LINE__, #__VA_ARGS__, "no error");             \
        } catch (const Error& error) {                                                             \
            const std::string said = error.what();                                                 \
            if (error.code != (expected) || said.find(words) == std::string::npos) {               \
                ::antiphon::m2n::test::fail(__FILE__, __LINE__, #__VA_ARGS__, said);               \
            }                                                                                      \
        }                                                                                          \
    } while (false)

[[noreturn]] void fail(const char* file, int line, const char* what, const std::string& detail);

struct Backend {
    const char* name;
    const char* transport;
    uint64_t shuffle_seed = 0;
};

struct Case {
    const char* name;
    void (*run)(const Backend& backend);
};
std::vector<Case> flood_cases();     // for each back-end
std::vector<Case> life_cases();      // for each back-end
std::vector<Case> exchange_cases();  // for each back-end
std::vector<Case> rogue_cases();     // peers that lie, over shared memory
std::vector<Case> piece_cases();     // without any back-end
std::vector<Case> stream_cases();    // without any back-end

constexpr int64_t millisecond_ns = 1'000'000;
inline Deadline soon() { return Deadline::after_ns(60'000 * millisecond_ns); }  // what a test never waits for in vain
inline Deadline within_ms(int64_t ms) { return Deadline::after_ns(ms * millisecond_ns); }
inline void sleep_for_ms(int64_t ms) { std::this_thread::sleep_for(std::chrono::milliseconds(ms)); }

EndpointOptions options_for(const Backend& backend, const std::string& name);
std::unique_ptr<Endpoint> make_endpoint(const Backend& backend, const std::string& name);

// An endpoint with one inbox.
struct Receiver {
    Receiver(const Backend& backend, const std::string& name, uint32_t sources, uint32_t slots, uint64_t slot_bytes);

    std::unique_ptr<Endpoint> endpoint;
    std::shared_ptr<Inbox> inbox;
    Ticket ticket;
};

// The bytes of a message: of a length and content that `key` decides.
std::span<const std::byte> content(uint64_t key, uint64_t longest);
bool has_content(std::span<const std::byte> bytes, uint64_t key, uint64_t longest);
uint64_t key_of(uint64_t a, uint64_t b, uint64_t c);  // a hash

// Calls `wait` until it is not interrupted.
template <class Wait>
auto persistently(Wait&& wait) {
    for (;;) {
        try {
            return wait();
        } catch (const Error& error) {
            if (error.code != Code::interrupted) throw;
        }
    }
}

// Threads that end with the block; an exception in one of them fails the test.
class Crew {
  public:
    ~Crew();
    void start(std::function<void()> work);

  private:
    std::vector<std::thread> threads_;
};

}  // namespace antiphon::m2n::test

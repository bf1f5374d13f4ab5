#include "harness.h"

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <utility>

namespace antiphon::m2n::test {

namespace {

constexpr size_t base_bytes = 1 << 20;

const std::vector<std::byte>& base() {
    static const std::vector<std::byte> bytes = [] {
        std::mt19937_64 random(20);
        std::vector<std::byte> made(base_bytes);
        for (std::byte& byte : made) byte = static_cast<std::byte>(random());
        return made;
    }();
    return bytes;
}

}  // namespace

void fail(const char* file, int line, const char* what, const std::string& detail) {
    std::fprintf(stderr, "%s:%d: %s %s\n", file, line, what, detail.c_str());
    std::fflush(nullptr);
    std::abort();
}

EndpointOptions options_for(const Backend& backend, const std::string& name) {
    EndpointOptions options;
    options.name = name;
    options.transport = backend.transport;
    options.secret = "core";
    options.transport_options.shuffle_seed = backend.shuffle_seed;
    return options;
}

std::unique_ptr<Endpoint> make_endpoint(const Backend& backend, const std::string& name) {
    return std::make_unique<Endpoint>(options_for(backend, name));
}

Receiver::Receiver(const Backend& backend, const std::string& name, uint32_t sources, uint32_t slots,
                   uint64_t slot_bytes)
    : endpoint(make_endpoint(backend, name)),
      inbox(endpoint->make_inbox(sources, slots, slot_bytes)),
      ticket(endpoint->ticket(*inbox)) {}

uint64_t key_of(uint64_t a, uint64_t b, uint64_t c) {
    uint64_t key = 0x9E3779B97F4A7C15u;
    for (const uint64_t part : {a, b, c}) {
        key = (key ^ part) * 0xBF58476D1CE4E5B9u;
        key ^= key >> 29;
    }
    return key;
}

std::span<const std::byte> content(uint64_t key, uint64_t longest) {
    const uint64_t lengths[] = {0, 1, 63, 64, 65, longest / 3, longest - 1, longest};
    const uint64_t length = std::min(lengths[key % 8], longest);
    return std::span(base()).subspan((key >> 3) % (base_bytes - length), length);
}

bool has_content(std::span<const std::byte> bytes, uint64_t key, uint64_t longest) {
    const std::span<const std::byte> expected = content(key, longest);
    return bytes.size() == expected.size() && std::memcmp(bytes.data(), expected.data(), bytes.size()) == 0;
}

Crew::~Crew() {
    for (std::thread& thread : threads_) thread.join();
}

void Crew::start(std::function<void()> work) {
    threads_.emplace_back([work = std::move(work)] {
        try {
            work();
        } catch (const std::exception& error) {
            fail("a thread", 0, "ended with", error.what());
        }
    });
}

}  // namespace antiphon::m2n::test

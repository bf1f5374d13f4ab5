// SHA-256 (FIPS 180-4) and HMAC over it (RFC 2104): peers prove to each other that they know the same secret.
//
// Written here because it is the only cryptography the library needs, a few hundred bytes per connection; a crypto
// library would be a dependency of every build.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>

namespace antiphon::m2n {

using Digest = std::array<std::byte, 32>;

class Sha256 {
  public:
    Sha256();
    void update(std::span<const std::byte> bytes);
    Digest finish();  // once

    static constexpr size_t block_bytes = 64;

  private:
    void mix(const std::byte* block);

    std::array<uint32_t, 8> state_;
    std::array<std::byte, block_bytes> pending_;
    uint64_t num_bytes_ = 0;
};

class HmacSha256 {
  public:
    explicit HmacSha256(std::span<const std::byte> key);
    void update(std::span<const std::byte> bytes) { inner_.update(bytes); }
    Digest finish();  // once

  private:
    Sha256 inner_;
    Sha256 outer_;
};

// Takes as long for a first byte that differs as for none, so that a stranger cannot guess a proof byte by byte.
bool equal_in_constant_time(std::span<const std::byte> left, std::span<const std::byte> right);

}  // namespace antiphon::m2n

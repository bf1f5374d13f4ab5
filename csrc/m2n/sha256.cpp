#include "m2n/sha256.h"

#include <algorithm>
#include <bit>
#include <cstring>

namespace antiphon::m2n {

namespace {

using Wide = unsigned __int128;

constexpr std::array<uint32_t, 64> first_primes() {
    std::array<uint32_t, 64> found{};
    size_t count = 0;
    for (uint32_t candidate = 2; count < found.size(); ++candidate) {
        bool prime = true;
        for (size_t i = 0; i < count; ++i) prime = prime && candidate % found[i] != 0;
        if (prime) found[count++] = candidate;
    }
    return found;
}

// The first 32 bits behind the point of the square (power 2) or cube (power 3) root: the largest x with
// x^power <= prime * 2^(32 * power), found bit by bit. The standard's constants are defined so; no table to mistype.
constexpr uint32_t root_fraction(uint32_t prime, int power) {
    const Wide target = Wide{prime} << (32 * power);
    uint64_t root = 0;
    for (int bit = 36; bit >= 0; --bit) {
        const uint64_t candidate = root | uint64_t{1} << bit;
        const Wide square = Wide{candidate} * candidate;
        if (power == 2 ? square <= target : square <= target / candidate) root = candidate;
    }
    return static_cast<uint32_t>(root);
}

constexpr std::array<uint32_t, 64> primes = first_primes();

constexpr std::array<uint32_t, 64> round_constants() {
    std::array<uint32_t, 64> constants{};
    for (size_t i = 0; i < constants.size(); ++i) constants[i] = root_fraction(primes[i], 3);
    return constants;
}

constexpr std::array<uint32_t, 8> initial_state() {
    std::array<uint32_t, 8> state{};
    for (size_t i = 0; i < state.size(); ++i) state[i] = root_fraction(primes[i], 2);
    return state;
}

constexpr std::array<uint32_t, 64> round_constant = round_constants();
constexpr std::array<uint32_t, 8> start = initial_state();

uint32_t load_big_endian(const std::byte* at) {
    return static_cast<uint32_t>(at[0]) << 24 | static_cast<uint32_t>(at[1]) << 16 | static_cast<uint32_t>(at[2]) << 8 |
           static_cast<uint32_t>(at[3]);
}

}  // namespace

Sha256::Sha256() : state_(start), pending_{} {}

void Sha256::mix(const std::byte* block) {
    using std::rotr;
    std::array<uint32_t, 64> schedule;
    for (size_t t = 0; t < 16; ++t) schedule[t] = load_big_endian(block + 4 * t);
    for (size_t t = 16; t < 64; ++t) {
        const uint32_t early = schedule[t - 15];
        const uint32_t late = schedule[t - 2];
        schedule[t] = schedule[t - 16] + (rotr(early, 7) ^ rotr(early, 18) ^ early >> 3) + schedule[t - 7] +
                      (rotr(late, 17) ^ rotr(late, 19) ^ late >> 10);
    }
    // a..h as in the standard, section 6.2.2.
    auto [a, b, c, d, e, f, g, h] = state_;
    for (size_t t = 0; t < 64; ++t) {
        const uint32_t chosen = (e & f) ^ (~e & g);
        const uint32_t majority = (a & b) ^ (a & c) ^ (b & c);
        const uint32_t first = h + (rotr(e, 6) ^ rotr(e, 11) ^ rotr(e, 25)) + chosen + round_constant[t] + schedule[t];
        const uint32_t second = (rotr(a, 2) ^ rotr(a, 13) ^ rotr(a, 22)) + majority;
        h = g;
        g = f;
        f = e;
        e = d + first;
        d = c;
        c = b;
        b = a;
        a = first + second;
    }
    const std::array<uint32_t, 8> mixed = {a, b, c, d, e, f, g, h};
    for (size_t i = 0; i < state_.size(); ++i) state_[i] += mixed[i];
}

void Sha256::update(std::span<const std::byte> bytes) {
    while (!bytes.empty()) {
        const size_t filled = num_bytes_ % block_bytes;
        const size_t taken = std::min(block_bytes - filled, bytes.size());
        std::memcpy(pending_.data() + filled, bytes.data(), taken);
        num_bytes_ += taken;
        bytes = bytes.subspan(taken);
        if (num_bytes_ % block_bytes == 0) mix(pending_.data());
    }
}

Digest Sha256::finish() {
    const uint64_t num_bits = num_bytes_ * 8;
    // A one bit, zeros up to eight bytes before the end of a block, then the length in bits.
    std::array<std::byte, block_bytes> padding{};
    padding[0] = std::byte{0x80};
    const size_t filled = num_bytes_ % block_bytes;
    update(std::span(padding).first(filled < 56 ? 56 - filled : 120 - filled));
    std::array<std::byte, 8> length;
    for (int i = 0; i < 8; ++i) length[i] = static_cast<std::byte>(num_bits >> (56 - 8 * i));
    update(length);
    Digest digest;
    for (size_t i = 0; i < digest.size(); ++i) digest[i] = static_cast<std::byte>(state_[i / 4] >> (24 - 8 * (i % 4)));
    return digest;
}

HmacSha256::HmacSha256(std::span<const std::byte> key) {
    std::array<std::byte, Sha256::block_bytes> padded{};
    Digest shortened;
    if (key.size() > padded.size()) {
        Sha256 hash;
        hash.update(key);
        shortened = hash.finish();
        key = shortened;
    }
    std::copy(key.begin(), key.end(), padded.begin());
    std::array<std::byte, Sha256::block_bytes> masked;
    std::transform(padded.begin(), padded.end(), masked.begin(), [](std::byte b) { return b ^ std::byte{0x36}; });
    inner_.update(masked);
    std::transform(padded.begin(), padded.end(), masked.begin(), [](std::byte b) { return b ^ std::byte{0x5c}; });
    outer_.update(masked);
}

Digest HmacSha256::finish() {
    outer_.update(inner_.finish());
    return outer_.finish();
}

bool equal_in_constant_time(std::span<const std::byte> left, std::span<const std::byte> right) {
    if (left.size() != right.size()) return false;
    // volatile: the compiler must not notice that it could stop at the first difference.
    volatile uint8_t difference = 0;
    for (size_t i = 0; i < left.size(); ++i) {
        difference = static_cast<uint8_t>(difference | static_cast<uint8_t>(left[i] ^ right[i]));
    }
    return difference == 0;
}

}  // namespace antiphon::m2n

// Little-endian bytes: a writer that appends, a reader that checks every length before it believes it.
//
// The reader throws Error(invalid) at the first byte that is missing, so that decoders need no checks of their own;
// structs are never copied whole, because padding and byte order would become part of the protocol.
#pragma once

#include <concepts>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "m2n/types.h"

namespace antiphon::m2n {

using Bytes = std::span<const std::byte>;

inline Bytes bytes_of(std::string_view text) { return std::as_bytes(std::span(text.data(), text.size())); }

class ByteWriter {
  public:
    explicit ByteWriter(std::vector<std::byte>& out) : out_(out) {}

    void u8(uint8_t value) { put(value, 1); }
    void u16(uint16_t value) { put(value, 2); }
    void u32(uint32_t value) { put(value, 4); }
    // Each in as many bytes as its type has.
    template <std::unsigned_integral... T>
    void numbers(T... values) {
        (put(values, sizeof(values)), ...);
    }
    void raw(Bytes bytes) { out_.insert(out_.end(), bytes.begin(), bytes.end()); }

  private:
    void put(uint64_t value, size_t num_bytes) {
        for (size_t i = 0; i < num_bytes; ++i) out_.push_back(static_cast<std::byte>(value >> (8 * i)));
    }

    std::vector<std::byte>& out_;
};

class ByteReader {
  public:
    // `what`: named in errors, "hello"; must outlive the reader.
    ByteReader(Bytes bytes, const char* what) : bytes_(bytes), what_(what) {}

    uint8_t u8() { return static_cast<uint8_t>(get(1)); }
    uint16_t u16() { return static_cast<uint16_t>(get(2)); }
    uint32_t u32() { return static_cast<uint32_t>(get(4)); }
    template <std::unsigned_integral... T>
    void numbers(T&... values) {
        ((values = static_cast<T>(get(sizeof(T)))), ...);
    }

    Bytes raw(size_t num_bytes) {
        if (num_bytes > bytes_.size() - at_) {
            throw_invalid(what_, " ends early: ", num_bytes, " bytes announced, ", bytes_.size() - at_, " left");
        }
        const Bytes part = bytes_.subspan(at_, num_bytes);
        at_ += num_bytes;
        return part;
    }

    Bytes rest() const { return bytes_.subspan(at_); }

    // Bytes that were not asked for mean that the two sides disagree about the format.
    void expect_end() const {
        if (at_ == bytes_.size()) return;
        throw_invalid(what_, " has ", bytes_.size() - at_, " bytes too many");
    }

  private:
    uint64_t get(size_t num_bytes) {
        uint64_t value = 0;
        const Bytes part = raw(num_bytes);
        for (size_t i = 0; i < num_bytes; ++i) value |= static_cast<uint64_t>(part[i]) << (8 * i);
        return value;
    }

    Bytes bytes_;
    const char* what_;
    size_t at_ = 0;
};

}  // namespace antiphon::m2n

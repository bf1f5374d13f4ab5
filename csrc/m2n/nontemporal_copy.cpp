#include "m2n/nontemporal_copy.h"

#include <algorithm>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <map>
#include <system_error>

#if defined(__SSE2__)
#include <emmintrin.h>
#endif

namespace antiphon::m2n {

#if defined(__SSE2__)

namespace {

constexpr size_t line_bytes = 64;
constexpr size_t ahead_bytes = 1024;  // how early a source's line is asked for, also to pass the caches

void copy_line(std::byte* to, const std::byte* from) {
    __m128i parts[4];
    for (int i = 0; i < 4; ++i) parts[i] = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from) + i);
    for (int i = 0; i < 4; ++i) _mm_stream_si128(reinterpret_cast<__m128i*>(to) + i, parts[i]);
}

}  // namespace

void nontemporal_copy(std::byte* to, const std::byte* from, size_t num_bytes) {
    const size_t into_line = reinterpret_cast<uintptr_t>(to) % line_bytes;
    const size_t head_bytes = std::min((line_bytes - into_line) % line_bytes, num_bytes);
    std::memcpy(to, from, head_bytes);
    size_t at = head_bytes;
    for (; at + ahead_bytes + line_bytes <= num_bytes; at += line_bytes) {
        _mm_prefetch(reinterpret_cast<const char*>(from + at + ahead_bytes), _MM_HINT_NTA);
        copy_line(to + at, from + at);
    }
    for (; at + line_bytes <= num_bytes; at += line_bytes) copy_line(to + at, from + at);
    std::memcpy(to + at, from + at, num_bytes - at);
    _mm_sfence();  // non-temporal stores are not ordered with others
}

#else

void nontemporal_copy(std::byte* to, const std::byte* from, size_t num_bytes) { std::memcpy(to, from, num_bytes); }

#endif

namespace {

// A file of one line; empty if it cannot be read.
std::string line_of(const std::filesystem::path& path) {
    std::string line;
    std::ifstream file(path);
    std::getline(file, line);
    return line;
}

// "32768K", "1M"; 0 for anything else.
uint64_t parse_size(const std::string& text) {
    uint64_t number = 0;
    size_t digits = 0;
    for (; digits < text.size() && digits < 12 && text[digits] >= '0' && text[digits] <= '9'; ++digits) {
        number = 10 * number + static_cast<uint64_t>(text[digits] - '0');
    }
    const std::string unit = text.substr(digits);
    if (digits == 0) return 0;
    if (unit.empty()) return number;
    if (unit == "K") return number << 10;
    if (unit == "M") return number << 20;
    return 0;
}

// What a folder holds, or as much as can be read of it.
std::vector<std::filesystem::path> entries_of(const std::filesystem::path& folder) {
    namespace fs = std::filesystem;
    std::vector<fs::path> found;
    std::error_code failed;
    for (fs::directory_iterator entry(folder, failed), end; !failed && entry != end; entry.increment(failed)) {
        found.push_back(entry->path());
    }
    return found;
}

bool is_processor(const std::string& name) {
    return name.size() > 3 && name.starts_with("cpu") && name.find_first_not_of("0123456789", 3) == std::string::npos;
}

}  // namespace

uint64_t last_level_cache_bytes(const std::string& processors) {
    namespace fs = std::filesystem;
    std::map<std::string, uint64_t> bytes_by_sharers;
    for (const fs::path& processor : entries_of(processors)) {
        if (!is_processor(processor.filename())) continue;
        std::string deepest_level;
        fs::path last;
        for (const fs::path& cache : entries_of(processor / "cache")) {
            const std::string level = line_of(cache / "level");  // one digit
            if (level <= deepest_level) continue;
            deepest_level = level;
            last = cache;
        }
        if (!last.empty()) bytes_by_sharers[line_of(last / "shared_cpu_list")] = parse_size(line_of(last / "size"));
    }
    uint64_t total = 0;
    for (const auto& [sharers, bytes] : bytes_by_sharers) total += bytes;
    return total;
}

ColdSlots::ColdSlots(const PairSpec& spec, uint64_t cache_bytes, uint64_t& sent_bytes)
    : cold_after_bytes_(cache_bytes == 0 ? never : cache_bytes / 4 * 3 / (uint64_t{2} * std::max(spec.sources, 1u))),
      sent_bytes_(sent_bytes),
      written_at_(spec.slots, never) {}

bool ColdSlots::write(SlotId slot, uint64_t length) {
    const uint64_t before = written_at_[slot];
    const bool is_cold = before != never && sent_bytes_ - before >= cold_after_bytes_;
    written_at_[slot] = sent_bytes_;
    sent_bytes_ += length;
    return is_cold && length >= least_bytes;
}

}  // namespace antiphon::m2n

// Copies past the caches: the same bytes as memcpy, and only for slots that the caches have lost.
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>

#include "harness.h"
#include "m2n/nontemporal_copy.h"

namespace antiphon::m2n::test {

namespace {

constexpr uint64_t mib = 1 << 20;

// Any place and length, also ones without a whole line; what lies around stays as it was.
void nontemporal_is_memcpy(const Backend&) {
    std::mt19937_64 random(8);
    constexpr size_t longest = 6000, guard = 70;
    std::vector<std::byte> source(longest + guard), target(longest + 2 * guard), expected(target.size());
    for (int round = 0; round < 3000; ++round) {
        for (std::byte& byte : source) byte = static_cast<std::byte>(random());
        for (std::byte& byte : target) byte = static_cast<std::byte>(random());
        expected = target;
        const size_t from = random() % guard, to = random() % guard + 1;
        const size_t length = random() % (round % 2 == 0 ? longest : 130);
        std::memcpy(expected.data() + to, source.data() + from, length);
        nontemporal_copy(target.data() + to, source.data() + from, length);
        CHECK(target == expected);
    }
}

void slots_are_cold_after_their_caches_worth(const Backend&) {
    // 32 MiB, a quarter for others: 24 MiB of sources and slots, 12 of messages, of which each of 3 sources sends 4.
    const PairSpec spec{.source = 0, .slots = 2, .slot_bytes = mib, .epoch = 1, .sources = 3};
    uint64_t sent = 0;
    ColdSlots slots(spec, 32 * mib, sent), others(spec, 32 * mib, sent);
    CHECK(!slots.write(0, mib) && !slots.write(1, mib));  // never written: nobody knows
    CHECK(!slots.write(0, mib));                          // 2 MiB ago
    CHECK(!others.write(0, mib));
    CHECK(!slots.write(0, mib));  // 2 MiB ago, one of them another link's
    CHECK(slots.write(1, mib));   // 4 MiB ago
    CHECK(!slots.write(1, mib));
    sent += 4 * mib;
    CHECK(!slots.write(0, ColdSlots::least_bytes - 1));  // too short to be worth it
    sent += 4 * mib;
    CHECK(slots.write(0, ColdSlots::least_bytes));

    ColdSlots unknown(spec, 0, sent);
    for (int i = 0; i < 3; ++i) CHECK(!unknown.write(0, uint64_t{1} << 40));
}

// A machine's folder of processors, and how many bytes of last-level caches it tells of.
struct Machine {
    Machine() {
        char name[] = "/tmp/antiphon-caches-XXXXXX";
        CHECK(::mkdtemp(name) != nullptr);
        folder = name;
    }
    ~Machine() { std::filesystem::remove_all(folder); }
    Machine(const Machine&) = delete;
    Machine& operator=(const Machine&) = delete;

    void add(const std::string& cpu, int index, const std::string& level, const std::string& sharers,
             const std::string& size) {
        const std::filesystem::path cache = folder / cpu / "cache" / ("index" + std::to_string(index));
        std::filesystem::create_directories(cache);
        std::ofstream(cache / "level") << level << "\n";
        std::ofstream(cache / "shared_cpu_list") << sharers << "\n";
        std::ofstream(cache / "size") << size << "\n";
    }
    uint64_t bytes() const { return last_level_cache_bytes(folder); }

    std::filesystem::path folder;
};

void last_level_caches_are_added_up(const Backend&) {
    Machine machine;
    CHECK(machine.bytes() == 0 && last_level_cache_bytes(machine.folder / "none") == 0);
    for (const std::string cpu : {"cpu0", "cpu1"}) {
        machine.add(cpu, 0, "1", cpu.substr(3), "32K");
        machine.add(cpu, 2, "2", cpu.substr(3), "512K");
    }
    CHECK(machine.bytes() == mib);  // no third level: each core's second
    machine.add("cpu0", 3, "3", "0-1", "32768K");
    machine.add("cpu1", 3, "3", "0-1", "32768K");
    CHECK(machine.bytes() == 32 * mib);  // once, though two share it
    machine.add("cpu12", 3, "3", "12", "16M");
    machine.add("cpufreq", 3, "3", "13", "16M");  // no processor
    machine.add("cpu", 3, "3", "14", "16M");
    CHECK(machine.bytes() == 48 * mib);
    for (const std::string size : {"", "K", "16Q", "-1K", "99999999999999999999"}) {
        machine.add("cpu12", 3, "3", "12", size);
        CHECK(machine.bytes() == 32 * mib);
    }
    machine.add("cpu12", 3, "3", "12", "4096");
    CHECK(machine.bytes() == 32 * mib + 4096);
}

}  // namespace

std::vector<Case> nontemporal_cases() {
    return {{"nontemporal_is_memcpy", nontemporal_is_memcpy},
            {"slots_are_cold_after_their_caches_worth", slots_are_cold_after_their_caches_worth},
            {"last_level_caches_are_added_up", last_level_caches_are_added_up}};
}

}  // namespace antiphon::m2n::test

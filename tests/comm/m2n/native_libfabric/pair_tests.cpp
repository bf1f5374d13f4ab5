// Messages and credits between transports of one process, and waiting for them.
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <filesystem>
#include <fstream>
#include <string>
#include <thread>

#include "harness.h"
#include "tests.h"

namespace antiphon::m2n::test {

namespace {

uint64_t resident_bytes() {
    std::ifstream statm("/proc/self/statm");
    uint64_t total = 0;
    uint64_t resident = 0;
    statm >> total >> resident;
    return resident * static_cast<uint64_t>(::sysconf(_SC_PAGESIZE));
}

// How often this process's keeper threads have gone to sleep so far.
uint64_t naps_of_keepers() {
    const std::string counter = "voluntary_ctxt_switches:";
    uint64_t naps = 0;
    for (const auto& task : std::filesystem::directory_iterator("/proc/self/task")) {
        std::string name;
        std::getline(std::ifstream(task.path() / "comm") >> std::ws, name);
        if (name != "m2n-keeper") continue;
        std::ifstream status(task.path() / "status");
        for (std::string line; std::getline(status, line);) {
            if (line.starts_with(counter)) naps += std::stoull(line.substr(counter.size()));
        }
    }
    return naps;
}

}  // namespace

void payload_sizes() {
    const auto receiver = make();
    const auto sender = make();
    const PairSpec spec{5, 3, 300'001, 7};
    Ends ends = open_pair(*receiver, *sender, spec);
    uint64_t number = 0;
    std::vector<uint16_t> sequence(spec.slots, 0);
    for (const bool external : {false, true}) {
        for (const uint64_t length : {uint64_t{0}, uint64_t{1}, uint64_t{777}, uint64_t{4096}, uint64_t{65'537},
                                      spec.slot_bytes}) {
            for (SlotId slot = 0; slot < spec.slots; ++slot) {
                round_trip(ends, slot, sequence[slot] = next_sequence(sequence[slot]), ++number, length, external);
            }
        }
    }
}

// Each transport receives and sends at once. Not over `shm`, whose 2.5 crashes when two endpoints of one process make
// first contact with each other at the same time; between processes it does not (process_tests.cpp).
void both_directions() {
    if (provider == "shm") return;
    const auto left = make();
    const auto right = make();
    const PairSpec spec{1, 2, 20'000, 3};
    Ends there = open_pair(*right, *left, spec);
    Ends back = open_pair(*left, *right, spec);
    Payload payloads[2];
    for (uint16_t sequence = 1; sequence <= 50; ++sequence) {
        for (SlotId slot = 0; slot < spec.slots; ++slot) {
            post(*there.link, spec, slot, sequence, sequence, 19'999);
            post(*back.link, spec, slot, sequence, sequence + 1000, 20'000, &payloads[slot]);
        }
        uint32_t arrived = 0;
        uint32_t credits = 0;
        until({left.get(), right.get()}, [&] {
            for (Ends* ends : {&there, &back}) {
                for (const Immediate immediate : poll(*ends->landing)) {
                    const bool forth = ends == &there;
                    verify(*ends->landing, spec, immediate, forth ? sequence : sequence + 1000u,
                           forth ? 19'999 : 20'000);
                    ends->landing->release(immediate);
                    ++arrived;
                }
                credits += static_cast<uint32_t>(poll(*ends->link).size());
            }
            return arrived == 2 * spec.slots && credits == 2 * spec.slots && back.link->source_reusable(0) &&
                   back.link->source_reusable(1);
        });
    }
}

// Two senders with four links each to one receiver, in two inboxes: all numbers are used twice.
void eight_pairs() {
    const auto receiver = make();
    const auto first = make();
    const auto second = make();
    std::vector<Ends> pairs;
    for (Transport* sender : {first.get(), second.get()}) {
        for (uint32_t index = 0; index < 4; ++index) {
            const PairSpec spec{static_cast<SourceId>(index % 2), 2, 1000, 10 + index};
            pairs.push_back(open_pair(*receiver, *sender, spec));
        }
    }
    const std::vector<Transport*> all = {receiver.get(), first.get(), second.get()};
    for (uint16_t sequence = 1; sequence <= 40; ++sequence) {
        for (size_t index = 0; index < pairs.size(); ++index) {
            for (SlotId slot = 0; slot < 2; ++slot) {
                post(*pairs[index].link, pairs[index].spec, slot, sequence, 100 * index + slot, 900 + index);
            }
        }
        uint32_t credits = 0;
        until(all, [&] {
            for (size_t index = 0; index < pairs.size(); ++index) {
                Ends& ends = pairs[index];
                for (const Immediate immediate : poll(*ends.landing)) {
                    CHECK(immediate.source == ends.spec.source && immediate.sequence == sequence);
                    verify(*ends.landing, ends.spec, immediate, 100 * index + immediate.slot, 900 + index);
                    ends.landing->release(immediate);
                }
                for (const Immediate credit : poll(*ends.link)) {
                    CHECK(credit.source == ends.spec.source && credit.sequence == sequence);
                    ++credits;
                }
            }
            return credits == 2 * pairs.size();
        });
    }
}

// A hundred thousand messages: sequences wrap many times, memory does not grow.
void many_messages() {
    const auto receiver = make();
    const auto sender = make();
    const PairSpec spec{2, 8, 512, 1};
    Ends ends = open_pair(*receiver, *sender, spec);
    const uint64_t total = sanitized ? 40'000 : 100'000;
    std::vector<uint16_t> sent(spec.slots, 0);
    std::vector<uint16_t> seen(spec.slots, 0);
    std::vector<SlotId> free_slots = {0, 1, 2, 3, 4, 5, 6, 7};
    uint64_t posted = 0;
    uint64_t arrived = 0;
    uint64_t credits = 0;
    uint64_t warm_bytes = 0;
    until({receiver.get(), sender.get()}, [&] {
        while (!free_slots.empty() && posted < total) {
            const SlotId slot = free_slots.back();
            free_slots.pop_back();
            post(*ends.link, spec, slot, sent[slot] = next_sequence(sent[slot]), posted++, 8);
        }
        for (const Immediate immediate : poll(*ends.landing)) {
            seen[immediate.slot] = next_sequence(seen[immediate.slot]);
            CHECK(immediate.sequence == seen[immediate.slot]);
            ends.landing->release(immediate);
            ++arrived;
        }
        for (const Immediate credit : poll(*ends.link)) {
            CHECK(credit.sequence == sent[credit.slot]);
            free_slots.push_back(credit.slot);
            ++credits;
        }
        // The completion queue is a ring of some megabytes whose pages are touched on the first way round.
        if (warm_bytes == 0 && credits > total / 2) warm_bytes = resident_bytes();
        return credits == total;
    });
    CHECK(arrived == total && seen[0] < total / spec.slots);
    const uint64_t grown = resident_bytes() - std::min(warm_bytes, resident_bytes());
    std::printf("  grown by %llu KiB in the second half\n", static_cast<unsigned long long>(grown >> 10));
    if (!sanitized) CHECK(grown < (2u << 20));
}

// A write whose landing is gone reaches nobody: not the new incarnation, not the pair beside it.
void late_writer() {
    const auto receiver = make();
    const auto sender = make();
    const PairSpec old_spec{4, 2, 100'000, 1};
    PairSpec new_spec = old_spec;
    new_spec.incarnation = 2;
    Ends beside = open_pair(*receiver, *sender, {9, 1, 64, 5});
    Ends old = open_pair(*receiver, *sender, old_spec);
    round_trip(old, 0, 1, 1, 50'000);
    old.landing.reset();
    Ends fresh = open_pair(*receiver, *sender, new_spec);
    post(*old.link, old_spec, 0, 2, 2, 100'000);
    Payload own;
    post(*old.link, old_spec, 1, 1, 3, 100'000, &own);
    const Deadline end = Deadline::after_ns(300'000'000);
    while (!end.passed()) {
        receiver->progress();
        sender->progress();
        CHECK(poll(*fresh.landing).empty() && poll(*beside.landing).empty() && poll(*old.link).empty());
    }
    for (SlotId slot = 0; slot < 2; ++slot) {
        for (uint64_t i = 0; i < header_bytes + 100'000; ++i) CHECK(fresh.landing->slot(slot)[i] == std::byte{0});
    }
    round_trip(fresh, 1, 1, 10, 99'999);
    round_trip(beside, 0, 1, 11, 64);
    old.link.reset();
    round_trip(fresh, 0, 1, 12, 1);
}

void reconnect() {
    const auto receiver = make();
    const auto sender = make();
    Ends ends;
    for (uint32_t incarnation = 1; incarnation <= 100; ++incarnation) {
        ends.link.reset();
        ends = open_pair(*receiver, *sender, {7, 4, 10'000, incarnation});
        round_trip(ends, 3, 1, incarnation, 10'000);
        post(*ends.link, ends.spec, 2, 1, 1, 10'000);  // left lying
    }
}

void deadline_and_interrupt() {
    const auto transport = make();
    const int64_t before_ns = monotonic_ns();
    transport->block(Event::arrival, transport->prepare(Event::arrival), 1, Deadline::after_ns(60'000'000), 0);
    const int64_t waited_ns = monotonic_ns() - before_ns;
    CHECK(waited_ns >= 60'000'000 && waited_ns < 5'000'000'000);
    for (const int64_t spin_ns : {int64_t{0}, int64_t{50'000}, int64_t{1} << 62}) {
        std::atomic<bool> returned{false};
        std::thread owner([&] {
            transport->block(Event::arrival, transport->prepare(Event::arrival), 1, soon(), spin_ns);
            returned.store(true);
        });
        ::usleep(30'000);
        CHECK(!returned.load());
        const int64_t asked_ns = monotonic_ns();
        transport->interrupt();
        owner.join();
        CHECK(monotonic_ns() - asked_ns < 5'000'000'000);
    }
    transport->interrupt();  // before the wait: it ends at once
    transport->block(Event::credit, transport->prepare(Event::credit), 1, soon(), 0);
}

// A receiver asleep is woken by the last of the messages it needs; a sender asleep by its credits.
void blocked_waits() {
    const auto receiver = make();
    const auto sender = make();
    const PairSpec spec{0, 4, 200'000, 1};
    Ends ends = open_pair(*receiver, *sender, spec);
    constexpr uint16_t rounds = 30;
    std::thread receiving([&] {
        for (uint16_t round = 1; round <= rounds; ++round) {
            uint32_t arrived = 0;
            const Deadline deadline = soon();
            while (arrived < spec.slots) {
                const uint32_t prepared = receiver->prepare(Event::arrival);
                receiver->progress();
                for (const Immediate immediate : poll(*ends.landing)) {
                    verify(*ends.landing, spec, immediate, round, 200'000);
                    ends.landing->release(immediate);
                    ++arrived;
                }
                CHECK(!deadline.passed());
                if (arrived < spec.slots) {
                    receiver->block(Event::arrival, prepared, spec.slots - arrived, deadline, round % 2 * 20'000);
                }
            }
        }
    });
    for (uint16_t round = 1; round <= rounds; ++round) {
        for (SlotId slot = 0; slot < spec.slots; ++slot) post(*ends.link, spec, slot, round, round, 200'000);
        uint32_t credits = 0;
        const Deadline deadline = soon();
        for (;;) {
            const uint32_t prepared = sender->prepare(Event::credit);
            sender->progress();
            credits += static_cast<uint32_t>(poll(*ends.link).size());
            CHECK(!deadline.passed());
            if (credits == spec.slots) break;
            sender->block(Event::credit, prepared, spec.slots - credits, deadline, 0);
        }
    }
    receiving.join();
}

// A payload that is written from where it lies: its owner may sleep until it may change, long before the credit.
void payload_in_place() {
    const auto receiver = make();
    const auto sender = make();
    const PairSpec spec{0, 1, 32 << 20, 1};
    Ends ends = open_pair(*receiver, *sender, spec);
    Payload own;
    post(*ends.link, spec, 0, 1, 5, spec.slot_bytes, &own);
    std::thread receiving([&] {
        until({receiver.get()}, [&] { return !poll(*ends.landing).empty(); });
        verify(*ends.landing, spec, {0, 0, 1}, 5, spec.slot_bytes);
    });
    const Deadline deadline = soon();
    for (;;) {
        const uint32_t prepared = sender->prepare(Event::credit);
        sender->progress();
        CHECK(poll(*ends.link).empty() && !deadline.passed());
        if (ends.link->source_reusable(0)) break;
        sender->block(Event::credit, prepared, 1, deadline, 0);
    }
    // The provider may still have to send what it copied; only then may it rest.
    std::atomic<bool> received{false};
    std::thread moving([&] {
        while (!received.load()) sender->progress();
    });
    receiving.join();
    received.store(true);
    moving.join();
}

// Whom nobody writes to, and who writes to nobody, uses no processor. Then a credit still leaves by itself.
void keeper_rests() {
    const auto receiver = make();
    const auto sender = make();
    const PairSpec spec{0, 2, 50'000, 1};
    Ends ends = open_pair(*receiver, *sender, spec);
    for (uint16_t sequence = 1; sequence <= 5; ++sequence) round_trip(ends, 0, sequence, sequence, 50'000);
    const Deadline deadline = soon();
    uint64_t naps = 0;
    do {
        CHECK(!deadline.passed());
        naps = naps_of_keepers();
        ::usleep(200'000);
    } while (naps_of_keepers() != naps);
    post(*ends.link, spec, 1, 1, 6, 50'000);
    until({receiver.get(), sender.get()}, [&] { return !poll(*ends.landing).empty(); });
    ends.landing->release({spec.source, 1, 1});
    until({sender.get()}, [&] { return !poll(*ends.link).empty(); });
}

// The control thread opens and closes landings while the owner polls without a pause.
void opening_beside_a_polling_owner() {
    const auto receiver = make();
    const auto sender = make();
    std::atomic<bool> stop{false};
    std::thread owner([&] {
        while (!stop.load()) {
            receiver->block(Event::arrival, receiver->prepare(Event::arrival), 1, Deadline::after_ns(20'000'000),
                            1'000'000'000);
        }
    });
    const Blob introduction = sender->introduce();
    for (uint32_t i = 0; i < 50; ++i) {
        Blob welcome;
        const auto landing = receiver->open_landing({static_cast<SourceId>(i), 2, 1000, 1}, introduction, welcome);
        CHECK(!welcome.bytes.empty());
    }
    stop.store(true);
    owner.join();
}

// Whoever goes before the connection stands disturbs nobody.
void departed_before_the_connection_stands() {
    const PairSpec spec{3, 2, 100'000, 1};
    const auto receiver = make();
    const auto sender = make();
    for (uint32_t incarnation = 1; incarnation <= 30; ++incarnation) {
        PairSpec next = spec;
        next.incarnation = incarnation;
        Ends ends = open_pair(*receiver, *sender, next);
        if (incarnation % 3 != 0) post(*ends.link, next, 0, 1, 1, 1000);
        if (incarnation % 3 == 1) ends.landing.reset();
        if (incarnation % 3 == 2) ends.link.reset();
    }
    PairSpec last = spec;
    last.incarnation = 31;
    Ends ends = open_pair(*receiver, *sender, last);
    round_trip(ends, 0, 1, 1, spec.slot_bytes);
}

}  // namespace antiphon::m2n::test

// The parsers alone: any split of good bytes, each fault, and random bytes between guards.
#include <cstring>
#include <random>

#include "harness.h"
#include "m2n/tcp_frames.h"

namespace antiphon::m2n::test {

namespace {

const PairSpec small_spec{.source = 5, .slots = 3, .slot_bytes = 20'000, .incarnation = 9};
constexpr std::byte guard{0xA5};

// Slots between guards: whatever a parser writes outside shows.
class Guarded {
  public:
    explicit Guarded(const PairSpec& spec) : bytes_(spec.slots * slot_stride(spec.slot_bytes)) {
        memory_.assign(bytes_ + 2 * margin, guard);
    }
    std::byte* slots() { return memory_.data() + margin; }
    bool intact() const {
        for (size_t i = 0; i < margin; ++i) {
            if (memory_[i] != guard || memory_[margin + bytes_ + i] != guard) return false;
        }
        return true;
    }
    bool untouched() const {
        for (const std::byte byte : memory_) {
            if (byte != guard) return false;
        }
        return true;
    }

  private:
    static constexpr size_t margin = 4'096;
    size_t bytes_;
    std::vector<std::byte> memory_;
};

void append_frame(std::vector<std::byte>& stream, const MessageHeader& header, SourceId source) {
    const size_t begin = stream.size();
    stream.resize(begin + header_bytes + header.length);
    std::memcpy(stream.data() + begin, &header, header_bytes);
    fill_pattern({stream.data() + begin + header_bytes, header.length}, source, header.step);
}

// Feeds at most `num_bytes` as readv would; how many went in.
size_t feed(TcpFrameReader& reader, const std::byte* data, size_t num_bytes, bool& sound, std::string& fault) {
    iovec pieces[2];
    const int num_pieces = reader.targets(pieces);
    size_t fed = 0;
    for (int i = 0; i < num_pieces && fed < num_bytes; ++i) {
        CHECK(pieces[i].iov_len > 0);
        const size_t part = std::min(num_bytes - fed, pieces[i].iov_len);
        std::memcpy(pieces[i].iov_base, data + fed, part);
        fed += part;
    }
    sound = reader.advance(fed, fault);
    return fed;
}

// Frames of every length that matters, in slots in turn, cut at random places.
void splits() {
    std::mt19937_64 random(1);
    const std::vector<uint64_t> lengths = {0, 1, 63, 64, 65, 8127, 8128, 8129, 8192, 20'000, 0, 0, 3, 19'999};
    for (int round = 0; round < 200; ++round) {
        const size_t longest = round == 0 ? 1 : 1 + random() % (round % 2 == 0 ? 300 : 60'000);
        Guarded memory(small_spec);
        TcpFrameReader reader(small_spec, memory.slots());
        std::vector<std::byte> stream;
        std::vector<uint16_t> sequences(small_spec.slots, 0);
        size_t num_arrived = 0;
        for (size_t i = 0; i < lengths.size(); ++i) {
            const auto slot = static_cast<SlotId>(i % small_spec.slots);
            sequences[slot] = next_sequence(sequences[slot]);
            append_frame(stream, make_header({5, slot, sequences[slot]}, 9, i, lengths[i]), 5);
            // Up to `slots` frames may be under way; take them in once they all are.
            if (slot + 1u != small_spec.slots && i + 1 != lengths.size()) continue;
            for (size_t fed = 0; fed < stream.size();) {
                bool sound = true;
                std::string fault;
                fed += feed(reader, stream.data() + fed, std::min(longest, stream.size() - fed), sound, fault);
                if (!sound) fail(__FILE__, __LINE__, "good bytes are good", fault);
            }
            stream.clear();
            CHECK(!reader.inside_message());
            for (; reader.num_arrivals() > 0; ++num_arrived) {
                const Immediate got = reader.next_arrival();
                CHECK(got.slot == num_arrived % small_spec.slots);
                const std::byte* payload = memory.slots() + got.slot * slot_stride(20'000) + header_bytes;
                CHECK(has_pattern({payload, lengths[num_arrived]}, 5, num_arrived));
                CHECK(reader.release(got));
                CHECK(!reader.release(got));
            }
        }
        CHECK(num_arrived == lengths.size());
        CHECK(memory.intact());
    }
}

std::string fault_of(TcpFrameReader& reader, const MessageHeader& header) {
    bool sound = true;
    std::string fault;
    feed(reader, reinterpret_cast<const std::byte*>(&header), header_bytes, sound, fault);
    CHECK(!sound);
    return fault;
}

void faults() {
    const auto fresh = [](auto change, auto look) {
        Guarded memory(small_spec);
        TcpFrameReader reader(small_spec, memory.slots());
        MessageHeader header = make_header({5, 1, 1}, 9, 0, 100);
        change(header);
        look(fault_of(reader, header));
        CHECK(reader.num_arrivals() == 0);
        CHECK(memory.untouched());
    };
    fresh([](MessageHeader& header) { header.magic ^= 1; },
          [](const std::string& fault) { CHECK_WORDS(fault, "magic"); });
    fresh([](MessageHeader& header) { header.incarnation = 8; },
          [](const std::string& fault) { CHECK_WORDS(fault, "incarnation 8, this connection has 9"); });
    fresh([](MessageHeader& header) { header.length = 20'001; },
          [](const std::string& fault) { CHECK_WORDS(fault, "20001 bytes for slots of 20000"); });
    fresh([](MessageHeader& header) { header.length = UINT64_MAX; },
          [](const std::string& fault) { CHECK_WORDS(fault, "18446744073709551615 bytes"); });
    fresh([](MessageHeader& header) { header.immediate = Immediate{4, 1, 1}.pack(); },
          [](const std::string& fault) { CHECK_WORDS(fault, "of source 4, slot 1"); });
    fresh([](MessageHeader& header) { header.immediate = Immediate{5, 3, 1}.pack(); },
          [](const std::string& fault) { CHECK_WORDS(fault, "slot 3 of 3"); });
    fresh([](MessageHeader& header) { header.immediate = Immediate{5, 255, 1}.pack(); },
          [](const std::string& fault) { CHECK_WORDS(fault, "slot 255 of 3"); });
    for (const uint16_t sequence : {uint16_t{0}, uint16_t{2}, uint16_t{4095}}) {
        fresh([&](MessageHeader& header) { header.immediate = Immediate{5, 1, sequence}.pack(); },
              [](const std::string& fault) { CHECK_WORDS(fault, "expected was source 5, slot 1, sequence 1"); });
    }
    // A replay of what was delivered, then the next one for a slot that is still held.
    Guarded memory(small_spec);
    TcpFrameReader reader(small_spec, memory.slots());
    std::vector<std::byte> stream;
    append_frame(stream, make_header({5, 1, 1}, 9, 0, 10), 5);
    bool sound = false;
    std::string fault;
    CHECK(feed(reader, stream.data(), stream.size(), sound, fault) == stream.size() && sound);
    TcpFrameReader replayed = reader;
    CHECK_WORDS(fault_of(replayed, make_header({5, 1, 1}, 9, 0, 10)), "expected was source 5, slot 1, sequence 2");
    CHECK_WORDS(fault_of(reader, make_header({5, 1, 2}, 9, 0, 10)), "slot 1, which the receiver has not released");
    CHECK(!reader.release({5, 1, 2}) && !reader.release({5, 9, 1}) && !reader.release({4, 1, 1}));
    CHECK(!reader.release({5, 0, 0}));
    CHECK(reader.release({5, 1, 1}));
}

// Random bytes, and good streams with a flipped bit: no write outside, and never more messages than were sent.
void random_bytes() {
    std::mt19937_64 random(2);
    for (int round = 0; round < 3'000; ++round) {
        Guarded memory({.source = 5, .slots = 3, .slot_bytes = 500, .incarnation = 9});
        TcpFrameReader reader({.source = 5, .slots = 3, .slot_bytes = 500, .incarnation = 9}, memory.slots());
        std::vector<std::byte> stream;
        if (round % 3 == 0) {
            stream.resize(2'000);
            for (std::byte& byte : stream) byte = static_cast<std::byte>(random());
        } else {
            for (SlotId slot = 0; slot < 3; ++slot) {
                append_frame(stream, make_header({5, slot, 1}, 9, slot, random() % 501), 5);
            }
            stream[random() % stream.size()] ^= static_cast<std::byte>(1u << random() % 8);
        }
        bool sound = true;
        std::string fault;
        for (size_t fed = 0; fed < stream.size() && sound;) {
            const size_t part = std::min<size_t>(1 + random() % 700, stream.size() - fed);
            fed += feed(reader, stream.data() + fed, part, sound, fault);
        }
        CHECK(reader.num_arrivals() <= 3 && sound == fault.empty());
        CHECK(memory.intact());
    }
}

void writer() {
    Guarded memory(small_spec);
    TcpFrameWriter writer(small_spec, memory.slots());
    std::vector<std::byte> apart(1000);
    std::string fault;
    CHECK(!writer.credit({5, 0, 1}, fault));  // nothing was sent
    writer.push({5, 0, 1}, nullptr, 500);
    writer.push({5, 1, 1}, apart.data(), apart.size());
    writer.push({5, 2, 1}, apart.data(), 0);
    iovec pieces[16];
    CHECK(writer.pieces(pieces, 16) == 4);  // header and payload lie together; apart; an empty payload is no piece
    CHECK(pieces[0].iov_len == 564 && pieces[1].iov_len == 64 && pieces[2].iov_len == 1000 && pieces[3].iov_len == 64);
    CHECK(!writer.credit({5, 0, 1}, fault));  // not sent yet
    writer.advance(563);
    CHECK(writer.queued(0) && writer.pieces(pieces, 2) == 1 && pieces[0].iov_len == 1);
    writer.advance(1 + 64 + 999);
    CHECK(!writer.queued(0) && writer.queued(1) && writer.pieces(pieces, 16) == 2);
    CHECK(pieces[0].iov_base == apart.data() + 999 && pieces[0].iov_len == 1);
    fault.clear();
    CHECK(writer.credit({5, 0, 1}, fault) && fault.empty());
    CHECK(!writer.credit({5, 0, 1}, fault));  // twice
    CHECK_WORDS(fault, "source 5, slot 0, sequence 1");
    writer.advance(1 + 64);
    CHECK(writer.empty());
    const std::vector<Immediate> wrong = {{4, 1, 1}, {5, 3, 1}, {5, 1, 2}, {5, 255, 4095}};
    for (const Immediate each : wrong) CHECK(!writer.credit(each, fault));
    CHECK(writer.credit({5, 1, 1}, fault) && writer.credit({5, 2, 1}, fault));
    writer.push({5, 0, 2}, apart.data(), 10);
    writer.abandon();
    CHECK(writer.empty() && !writer.queued(0));
}

}  // namespace

std::vector<Case> frame_cases() {
    return {{"frames: any split", splits},
            {"frames: each fault", faults},
            {"frames: random bytes", random_bytes},
            {"frames: what the writer sends and whom it believes", writer}};
}

}  // namespace antiphon::m2n::test

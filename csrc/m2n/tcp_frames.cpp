#include "m2n/tcp_frames.h"

#include <algorithm>
#include <cstring>

namespace antiphon::m2n {

namespace {

// Holds several small messages, so that one read takes them all; of a large one it holds only the beginning.
constexpr size_t staging_bytes = 8192;
static_assert(staging_bytes >= header_bytes);

std::string fault_text(HeaderFault fault, const MessageHeader& header, Immediate expected, const PairSpec& spec) {
    switch (fault) {
        case HeaderFault::magic:
            return concat("a frame begins with the word ", header.magic, ", not with the magic ", header_magic);
        case HeaderFault::incarnation:
            return concat("a frame carries incarnation ", header.incarnation, ", this connection has ",
                          spec.incarnation);
        case HeaderFault::length:
            return concat("a frame announces ", header.length, " bytes for slots of ", spec.slot_bytes);
        case HeaderFault::immediate: {
            const Immediate got = Immediate::unpack(header.immediate);
            if (got.slot >= spec.slots) return concat("a frame names slot ", got.slot, " of ", spec.slots);
            return "a frame is of " + describe(got) + ", expected was " + describe(expected);
        }
        case HeaderFault::none: break;
    }
    return "no fault";
}

}  // namespace

std::string describe(Immediate immediate) {
    return concat("source ", immediate.source, ", slot ", immediate.slot, ", sequence ", immediate.sequence);
}

TcpFrameReader::TcpFrameReader(const PairSpec& spec, std::byte* memory)
    : spec_(spec),
      stride_(slot_stride(spec.slot_bytes)),
      memory_(memory),
      book_(spec.slots),
      arrived_(spec.slots),
      staging_(staging_bytes) {}

int TcpFrameReader::targets(iovec (&pieces)[2]) {
    if (missing_ == 0) {
        pieces[0] = {staging_.data() + staged_, staging_.size() - staged_};
        return 1;
    }
    // While a payload is under way nothing is staged: what was has gone into it.
    pieces[0] = {cursor_, missing_};
    pieces[1] = {staging_.data(), staging_.size()};
    return 2;
}

bool TcpFrameReader::advance(size_t num_bytes, std::string& fault) {
    if (missing_ != 0) {
        const size_t of_payload = std::min<uint64_t>(num_bytes, missing_);
        cursor_ += of_payload;
        missing_ -= of_payload;
        num_bytes -= of_payload;
        if (missing_ != 0) return true;
        finish_message();
    }
    staged_ += num_bytes;
    assert(staged_ <= staging_.size());
    return parse_staged(fault);
}

bool TcpFrameReader::parse_staged(std::string& fault) {
    size_t parsed = 0;
    while (staged_ - parsed >= header_bytes) {
        MessageHeader header;
        std::memcpy(&header, staging_.data() + parsed, header_bytes);
        if (!begin_message(header, fault)) return false;
        parsed += header_bytes;
        const size_t along = std::min<uint64_t>(missing_, staged_ - parsed);
        if (along > 0) std::memcpy(cursor_, staging_.data() + parsed, along);
        parsed += along;
        cursor_ += along;
        missing_ -= along;
        if (missing_ != 0) break;
        finish_message();
    }
    staged_ -= parsed;
    if (parsed > 0 && staged_ > 0) std::memmove(staging_.data(), staging_.data() + parsed, staged_);
    return true;
}

bool TcpFrameReader::begin_message(const MessageHeader& header, std::string& fault) {
    const Immediate claimed = Immediate::unpack(header.immediate);
    const bool known = claimed.slot < spec_.slots;
    // A slot that does not exist fails the comparison, because the expected one does.
    const SlotId slot_id = known ? claimed.slot : SlotId{0};
    const Immediate expected{spec_.source, slot_id, next_sequence(book_[slot_id].sequence)};
    const HeaderFault found = check(header, expected, spec_.incarnation, spec_.slot_bytes);
    if (found != HeaderFault::none) {
        fault = fault_text(found, header, expected, spec_);
        return false;
    }
    if (book_[slot_id].owner != Owner::sender) {
        fault = "a frame is for slot " + std::to_string(slot_id) + ", which the receiver has not released";
        return false;
    }
    book_[slot_id] = {Owner::filling, expected.sequence};
    filling_ = slot_id;
    std::memcpy(slot(slot_id), &header, header_bytes);
    cursor_ = slot(slot_id) + header_bytes;
    missing_ = header.length;
    return true;
}

void TcpFrameReader::finish_message() {
    book_[filling_].owner = Owner::receiver;
    arrived_.push({spec_.source, filling_, book_[filling_].sequence});
}

bool TcpFrameReader::release(Immediate immediate) {
    if (immediate.slot >= spec_.slots || immediate.source != spec_.source) return false;
    SlotBook& book = book_[immediate.slot];
    if (book.owner != Owner::receiver || book.sequence != immediate.sequence) return false;
    book.owner = Owner::sender;
    return true;
}

TcpFrameWriter::TcpFrameWriter(const PairSpec& spec, std::byte* memory)
    : spec_(spec), stride_(slot_stride(spec.slot_bytes)), memory_(memory), book_(spec.slots), queue_(spec.slots) {}

void TcpFrameWriter::push(Immediate immediate, const std::byte* payload, uint64_t length) {
    assert(immediate.slot < spec_.slots && book_[immediate.slot].state == State::free);
    assert(length <= spec_.slot_bytes);
    book_[immediate.slot] = {State::queued, immediate.sequence, length};
    queue_.push({immediate.slot, payload != nullptr ? payload : slot(immediate.slot) + header_bytes, length});
}

int TcpFrameWriter::pieces(iovec* pieces, int capacity) const {
    int count = 0;
    uint64_t skip = taken_;
    const auto add = [&](const std::byte* data, uint64_t length) {
        if (skip >= length) {
            skip -= length;
            return;
        }
        pieces[count++] = {const_cast<std::byte*>(data) + skip, length - skip};
        skip = 0;
    };
    for (size_t i = 0; i < queue_.size() && count + 2 <= capacity; ++i) {
        const Frame& frame = queue_[i];
        const std::byte* header = slot(frame.slot);
        if (frame.payload == header + header_bytes) {
            add(header, header_bytes + frame.length);
        } else {
            add(header, header_bytes);
            add(frame.payload, frame.length);
        }
    }
    return count;
}

std::span<const std::byte> TcpFrameWriter::rest_in_slot() const {
    if (queue_.empty()) return {};
    const Frame& front = queue_[0];
    const std::byte* header = slot(front.slot);
    if (front.payload != header + header_bytes) return {};
    return std::span(header, header_bytes + front.length).subspan(taken_);
}

void TcpFrameWriter::advance(size_t num_bytes) {
    taken_ += num_bytes;
    while (!queue_.empty() && taken_ >= header_bytes + queue_[0].length) {
        const Frame frame = queue_.pop();
        taken_ -= header_bytes + frame.length;
        book_[frame.slot].state = State::sent;
    }
}

void TcpFrameWriter::abandon() {
    while (!queue_.empty()) book_[queue_.pop().slot].state = State::sent;
    taken_ = 0;
}

bool TcpFrameWriter::credit(Immediate immediate, std::string& fault) {
    const bool ours = immediate.source == spec_.source && immediate.slot < spec_.slots;
    if (!ours || book_[immediate.slot].state != State::sent || book_[immediate.slot].sequence != immediate.sequence) {
        fault = "a credit is of " + describe(immediate) + ", which answers no message on its way";
        return false;
    }
    book_[immediate.slot].state = State::free;
    return true;
}

}  // namespace antiphon::m2n

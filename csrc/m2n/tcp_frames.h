// What travels on a TCP data connection, and its parsers. No sockets here: bytes in, bytes out, so that a test or a
// fuzzer can feed any split of any bytes.
//
// Forward: frames, each a MessageHeader and then `length` payload bytes. The payload is read straight into the slot
// that the header names; only the bytes that came along with a header pass through a small staging buffer. Backward:
// credits, each the packed immediate of a released slot, 4 bytes. Both ends are little endian, as the magic shows.
//
// The peer is not believed. A frame must carry the magic and the incarnation of this connection, the pair's source, a
// slot that is the sender's at this time, that slot's next sequence and a length that fits; a credit must answer a
// message that is on its way. Anything else is a fault in words, after which the connection is of no use: a byte stream
// that was wrong once has no place from which to go on.
//
// Rejected: predicting the next slot and reading header and payload at once. It saves one system call a message when
// the guess is right, and a wrong guess has to move bytes that may already belong to the next frame.
#pragma once

#include <sys/uio.h>

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "m2n/fixed_size.h"
#include "m2n/types.h"
#include "m2n/transport.h"

namespace antiphon::m2n {

// The receiver's half of the forward direction, and its book of who owns each slot.
class TcpFrameReader {
  public:
    TcpFrameReader(const PairSpec& spec, std::byte* memory);  // `memory`: slots * slot_stride bytes, not owned

    // Where the next bytes of the stream belong, in order: one or two pieces, never empty.
    int targets(iovec (&pieces)[2]);
    // `num_bytes` were put into the targets. False: the peer broke the rules, `fault` says which.
    bool advance(size_t num_bytes, std::string& fault);

    size_t num_arrivals() const { return arrived_.size(); }  // whole and not handed out yet
    Immediate next_arrival() { return arrived_.pop(); }

    // The slot is the sender's again. False: no such message was delivered and is still held.
    bool release(Immediate immediate);

    uint64_t missing_bytes() const { return missing_; }  // of the payload under way; 0 between messages
    bool inside_message() const { return missing_ != 0 || staged_ != 0; }

  private:
    enum class Owner : uint8_t { sender, filling, receiver };
    struct SlotBook {
        Owner owner = Owner::sender;
        uint16_t sequence = 0;  // of the last message accepted
    };

    std::byte* slot(SlotId slot) const { return memory_ + slot * stride_; }
    bool parse_staged(std::string& fault);
    bool begin_message(const MessageHeader& header, std::string& fault);
    void finish_message();

    const PairSpec spec_;
    const uint64_t stride_;
    std::byte* const memory_;
    std::vector<SlotBook> book_;
    FixedQueue<Immediate> arrived_;
    std::vector<std::byte> staging_;  // bytes of headers, and of what came along with them
    size_t staged_ = 0;
    std::byte* cursor_ = nullptr;  // where the payload under way goes on
    uint64_t missing_ = 0;
    SlotId filling_ = 0;
};

// The sender's half: frames that the kernel has not taken yet, and which messages still wait for their credit.
class TcpFrameWriter {
  public:
    TcpFrameWriter(const PairSpec& spec, std::byte* memory);  // `memory`: slots * slot_stride bytes, not owned

    std::byte* slot(SlotId slot) const { return memory_ + slot * stride_; }
    // The header lies in the slot; `payload` nullptr: behind it. The slot must be free (its credit came back).
    void push(Immediate immediate, const std::byte* payload, uint64_t length);

    bool empty() const { return queue_.empty(); }
    bool queued(SlotId slot) const { return book_[slot].state == State::queued; }
    // The next bytes to send, at most `capacity` pieces; returns how many.
    int pieces(iovec* pieces, int capacity) const;
    // What the kernel has not taken of the first frame, if it was composed in its slot, where it stays until its credit
    // is back; else nothing.
    std::span<const std::byte> rest_in_slot() const;
    void advance(size_t num_bytes);  // the kernel took this many of them
    void abandon();                  // nothing will be sent any more; no memory of the caller's is referred to

    uint64_t length(SlotId slot) const { return book_[slot].length; }  // of its last message
    // A credit from the peer. False: it answers no message that is on its way.
    bool credit(Immediate immediate, std::string& fault);

  private:
    enum class State : uint8_t { free, queued, sent };
    struct SlotBook {
        State state = State::free;
        uint16_t sequence = 0;
        uint64_t length = 0;
    };
    struct Frame {
        SlotId slot = 0;
        const std::byte* payload = nullptr;
        uint64_t length = 0;
    };

    const PairSpec spec_;
    const uint64_t stride_;
    std::byte* const memory_;
    std::vector<SlotBook> book_;
    FixedQueue<Frame> queue_;
    uint64_t taken_ = 0;  // bytes of the front frame, header included, that the kernel has
};

std::string describe(Immediate immediate);  // "source 3, slot 0, sequence 17"

}  // namespace antiphon::m2n

// Collectives of a small group of ranks, over one inbox and an outbox to every other rank.
//
// A collective is cut into chunks that fit a slot. Every rank writes its part of a chunk straight into the slots of
// those who need it and reads what it is given where it lies: over shared memory a sum is made from the peers' slots in
// place. A rank is at most one chunk ahead of what it has read, so slots never run out in a circle.
//
// All-reduce has two forms, with the same bits. Direct: each rank sends all it has to all others and each makes the
// whole sum; one wait. Shared out: rank i makes the sum of part i (reduce-scatter) and sends it to all (all-gather);
// fewer bytes, two waits. Sums are made in float32 in the order of ranks and rounded once.
//
// A step of the library is (epoch, collective, chunk). A new epoch discards all that is older. A collective that ended
// with an error leaves the group unusable until the next epoch.
//
// One thread calls; `abort` may come from any.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "m2n/bytes.h"
#include "m2n/inbox.h"
#include "m2n/outbox.h"
#include "m2n/row_scatter.h"

namespace antiphon::m2n {

class RankGroup {
  public:
    static constexpr uint32_t num_slots = 4;  // two kinds of message, one chunk ahead

    // `inbox`: its source i is rank i; the source `rank` never connects. All ranks have inboxes of the same shape.
    RankGroup(uint32_t rank, std::shared_ptr<Inbox> inbox);

    uint32_t rank() const { return rank_; }
    uint32_t size() const { return static_cast<uint32_t>(peers_.size()); }
    uint64_t bytes_sent() const { return bytes_sent_; }

    void set_peer(uint32_t rank, std::shared_ptr<Outbox> outbox);
    // Forgets what is in flight and waits until all ranks have begun `epoch`.
    void begin(uint32_t epoch, Deadline deadline);
    // Any thread. The caller interrupts the endpoint afterwards: the wait under way ends with Error(interrupted).
    void abort(uint32_t epoch);

    void barrier(Deadline deadline);
    void all_reduce(std::byte* data, uint64_t count, RowType type, Deadline deadline);
    // `counts`: elements of each rank; `in` has the sum of them, `out` this rank's.
    void reduce_scatter(const std::byte* in, std::byte* out, std::span<const uint64_t> counts, RowType type,
                        Deadline deadline);
    // Bytes of each rank; `in` has this rank's.
    void all_gather(const std::byte* in, std::byte* out, std::span<const uint64_t> bytes, Deadline deadline);
    void all_to_all(const std::byte* in, std::byte* out, std::span<const uint64_t> bytes_to,
                    std::span<const uint64_t> bytes_from, Deadline deadline);
    // Messages of one pair at a time, for collectives that do something else in between. All ranks open the same
    // exchanges in the same order; in each, a rank posts at most one message to each peer, of one slot at most. It
    // takes each of them and releases it; a slot that is not released is missing when a later message needs it.
    uint32_t open_exchange();
    void post(uint32_t exchange, uint32_t peer, std::span<const Bytes> pieces, Deadline deadline);
    Bytes take(uint32_t exchange, uint32_t peer, Deadline deadline);
    void release(uint32_t exchange, uint32_t peer);

    // `payload` of `root`, to all. A timeout before anything came leaves the group usable; once something has come, the
    // rest may take `rest_ns`.
    void broadcast(std::vector<std::byte>& payload, uint32_t root, Deadline deadline, int64_t rest_ns);

  private:
    template <class Work>
    void collective(Work&& work);
    template <class Wait>
    auto waiting(Wait&& wait);
    void check_usable() const;
    Step step_of(uint32_t number, uint64_t chunk) const;
    Step step(uint64_t chunk) const { return step_of(number_, chunk); }
    uint64_t num_chunks(uint64_t bytes) const { return (bytes + chunk_bytes_ - 1) / chunk_bytes_; }
    template <class Byte>
    std::span<Byte> chunk_of(std::span<Byte> whole, uint64_t chunk) const;
    std::byte* slot_of(uint32_t peer, Deadline deadline);
    void commit(uint32_t peer, Step step, uint64_t length, uint32_t more = 0);
    void send(uint32_t peer, uint64_t number, Bytes part, Deadline deadline, uint32_t more = 0);
    void greet(Deadline deadline);
    // Waits for message `number` from every peer of which `expected_` is not 0, and puts the payloads into `arrived_`.
    void receive(uint64_t number, Deadline deadline);
    void exchange(Deadline deadline);  // of `parts_`, into `rooms_`
    // Message `number` of every peer is a chunk of its room.
    void receive_into_rooms(uint64_t chunk, uint64_t number, Deadline deadline);
    // The sum of all ranks' segment for this one, as `parts_` says; every rank sends each other one its segment.
    void sum_chunks(uint64_t chunks, std::byte* out, RowType type, Deadline deadline);
    void shared_sum(std::byte* data, uint64_t bytes, RowType type, Deadline deadline);
    void send_chunk_of_each_part(uint64_t chunk, uint64_t number, Deadline deadline);
    // As many bytes from every peer as `own` has; with `own` they are `arrived_`, in the order of ranks.
    void receive_addends(Bytes own, uint64_t number, Deadline deadline);

    const uint32_t rank_;
    std::shared_ptr<Inbox> inbox_;
    const uint64_t chunk_bytes_;
    std::vector<std::shared_ptr<Outbox>> peers_;
    uint32_t epoch_ = 0;
    std::atomic<uint32_t> aborted_{0};
    uint32_t number_ = 0;  // of the next collective in this epoch
    bool usable_ = false;
    uint64_t bytes_sent_ = 0;

    // Scratch, by rank.
    std::vector<uint64_t> expected_;
    std::vector<const std::byte*> arrived_;
    std::vector<SourceId> sources_;
    std::vector<Bytes> parts_;
    std::vector<std::span<std::byte>> rooms_;
    std::vector<std::byte*> copies_;
};

}  // namespace antiphon::m2n

// Dispatch and combine over inboxes and outboxes: what a serving engine calls once per layer and micro-batch.
//
// Attention worker: `dispatch` scatters the rows of a micro-batch into the expert workers' slots, one message for each
// worker (an empty one costs a header, and tells that nothing comes); `combine` waits for the partial sums and adds
// them. Expert worker: `receive` returns the rows of one (layer, micro-batch) from all attention workers that take
// part, `reply` sends each its rows back. Slots are released before the reply leaves, so a dispatch that follows a
// combine finds a free slot. A call that was interrupted can be made again: a dispatch waits for all the slots that it
// needs before it sends anything, a reply knows which of its parts have left. The request to fetch an expert ahead of a
// layer rides in a dispatch's header.
//
// `next` says which steps have come whole, `collect` puts the rows of some of them together: the caller keeps the
// queue, and may compute several steps of one layer as one batch.
//
// A step of the library is (epoch of the exchange, engine step, layer, micro-batch) in one number that only grows
// with the epoch: a new epoch discards all that is older.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "m2n/inbox.h"
#include "m2n/outbox.h"
#include "m2n/row_scatter.h"

namespace antiphon::m2n {

struct BatchKey {
    uint32_t epoch = 0;
    uint64_t step = 0;  // modulo 2^28
    uint32_t layer = 0;
    uint32_t micro_batch = 0;

    Step pack() const;
    static BatchKey unpack(Step step);
    static Step first_of(uint32_t epoch);  // discard_below(this) forgets all earlier epochs
};

constexpr uint32_t max_layers = 1u << 12;
constexpr uint32_t max_micro_batches = 1u << 8;
constexpr uint32_t max_attention_workers = 64;  // participants travel as a set of bits
constexpr uint32_t max_placed_experts = 1u << 16;  // of a layer, where experts are fetched ahead
constexpr Step introduction_bit = Step{1} << 63;  // a message that carries the sender's own ticket

// When an expert worker computed, on its own monotonic clock.
struct ComputeTimes {
    int64_t start_ns = 0;
    int64_t end_ns = 0;
};

// While the slowest expert worker computed it was work, the rest of a wait was communication that nothing hid.
int64_t exposed_ns_of(int64_t started_ns, int64_t ended_ns, const std::vector<ComputeTimes>& times);

class AttentionSide {
  public:
    // `replies`: an inbox whose source f is expert worker f.
    AttentionSide(RowScatter scatter, std::shared_ptr<Inbox> replies, uint32_t num_micro_batches);

    // No outbox: the worker is gone, nothing is sent to it and no answer awaited. Only between two steps.
    void set_expert(uint32_t worker, std::shared_ptr<Outbox> outbox);
    // Where the experts of `layer` are, from the next dispatch on; `version` numbers the map and goes into the headers.
    void place(uint32_t version, uint32_t layer, ExpertSplit split);
    // `participants`: bit a is set if attention worker a has rows in this micro-batch.
    void dispatch(const BatchKey& key, uint64_t participants, const GatedRows& rows, Deadline deadline);
    // Waits for all expert workers' partial sums of the micro-batch's last dispatch; adds them into `out` of
    // num_pending(micro_batch) rows. `times`: of each worker.
    void combine(const BatchKey& key, std::byte* out, std::vector<ComputeTimes>& times, Deadline deadline);
    // Whether `combine` would not wait.
    bool is_back(const BatchKey& key);
    uint32_t num_pending(uint32_t micro_batch) const { return pending_.at(micro_batch).count; }
    // The next dispatch asks `worker` for a copy of this expert: of a later layer ahead of it, or of its own layer. At
    // most two requests ride on one message. Where the layer's rows go is `place`'s matter.
    void prefetch(uint32_t worker, uint32_t layer, uint32_t expert);
    ExpertSplit& split_of(uint32_t layer) { return scatter_.split_of(layer); }
    void forget();  // whatever was dispatched and not combined, and requests that have not left

    uint64_t bytes_sent() const { return bytes_sent_; }
    // Rows of each expert in all dispatches since the last call, one placed layer after the other.
    std::vector<uint32_t> take_counts() { return scatter_.take_counts(); }

  private:
    struct Pending {
        uint32_t count = 0;
        std::vector<std::vector<uint32_t>> rows_of;
    };
    RowScatter scatter_;
    std::shared_ptr<Inbox> replies_;
    std::vector<std::shared_ptr<Outbox>> experts_;
    std::vector<Pending> pending_;
    std::vector<SourceId> present_;  // workers that are there
    std::vector<const std::byte*> partials_;
    std::vector<std::vector<uint32_t>> prefetches_;  // by worker, as words of the next dispatch
    uint32_t placement_version_ = 0;
    uint64_t bytes_sent_ = 0;
};

// `source` will send rows of this expert, which the placement does not name here.
struct Prefetch {
    SourceId source = 0;
    uint32_t layer = 0;
    uint32_t expert = 0;
};

// Rows of one layer, of one step or of several. Pointers are valid until `reply`.
struct ReceivedBatch {
    BatchKey key;  // of its first part
    std::vector<Step> steps;  // of each part
    std::vector<SourceId> sources;
    std::vector<uint32_t> rows_per_source;
    uint32_t oldest_placement = 0;  // versions of the maps by which they were sent
    uint32_t newest_placement = 0;
    uint32_t num_rows = 0;
    const std::byte* rows = nullptr;
    const int32_t* ids = nullptr;
    const float* weights = nullptr;
    std::vector<Prefetch> prefetches;  // in the order of `sources`
    size_t num_replied = 0;            // parts whose answer has left
};

// Where a batch is put: memory of the inbox's device, or of the host.
struct BatchPlace {
    std::byte* rows = nullptr;
    int32_t* ids = nullptr;
    float* weights = nullptr;
    uint32_t max_rows = 0;
};

// A new attention worker says how to reach it.
struct Introduction {
    SourceId source = 0;
    std::vector<std::byte> ticket;
};

class ExpertSide {
  public:
    // `requests`: an inbox whose source a is attention worker a.
    ExpertSide(const RowShape& shape, std::shared_ptr<Inbox> requests);

    void set_attention(SourceId worker, std::shared_ptr<Outbox> outbox);
    // The next step of which everything is here, once, or introduction; neither at the deadline. Error(peer_lost) once
    // for each lost worker.
    struct Arrived {
        std::optional<Step> step;
        std::optional<Introduction> introduction;
    };
    Arrived next(Deadline deadline);
    // Which attention workers have sent rows of this step.
    std::vector<SourceId> sources_of(Step step);
    // The rows of these steps of one layer. None: their senders are gone, and what they sent with them.
    // `place`: they are put there; else the batch lies where it arrived, or in memory of this object.
    std::optional<ReceivedBatch> collect(std::span<const Step> steps, const BatchPlace* place = nullptr);
    // `partials`: num_rows rows in the order of `collect`. Deadline: for free slots.
    void reply(ReceivedBatch& batch, const std::byte* partials, ComputeTimes times, Deadline deadline);
    // Attention workers that a batch waits for since `age_ns` or longer, by name.
    std::vector<std::string> overdue(int64_t age_ns);

    uint64_t bytes_sent() const { return bytes_sent_; }

  private:
    BatchPlace own_place(uint32_t num_rows);
    void gather(ReceivedBatch& batch, const std::vector<const std::byte*>& payloads, const BatchPlace& place) const;

    RowShape shape_;
    std::shared_ptr<Inbox> requests_;
    std::vector<std::shared_ptr<Outbox>> attention_;
    std::vector<std::byte> rows_;  // of several sources, one after another
    std::vector<int32_t> ids_;
    std::vector<float> weights_;
    uint64_t bytes_sent_ = 0;
};

}  // namespace antiphon::m2n

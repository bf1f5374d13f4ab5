// Dispatch, combine, receive and reply in the order of a compute stream: the ends of `token_exchange` over a core.
//
// Attention: the stream fills host memory with rows and choices, `dispatch` sends them once it has; `combine` makes the
// stream wait until the sums are in host memory. Numbers of rows are the caller's, values only the core reads. Experts:
// `next` and `collect` hand the caller a batch as soon as it is here; `reply` sends the sums once the stream has made them, while
// the caller receives the next. Memory given to a call must stay as it is until the call is over.
//
// `stages`: host memory that a device reads by itself. Received rows are copied there, because a slot belongs to the
// next message once the reply has left, while the device may still be behind.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <functional>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "m2n/stream_core.h"
#include "m2n/token_exchange.h"

namespace antiphon::m2n {

class AttentionStream {
  public:
    AttentionStream(AttentionSide& side, StreamCore& core) : side_(side), core_(core) {}

    void dispatch(StreamHandle stream, const BatchKey& key, uint64_t participants, const GatedRows& rows,
                  double timeout_s);
    // `stream` waits for the sums.
    void combine(StreamHandle stream, const BatchKey& key, std::byte* out, double timeout_s);

    int64_t wait_ns() const { return wait_ns_.load(); }
    int64_t exposed_ns() const { return exposed_ns_.load(); }

  private:
    AttentionSide& side_;
    StreamCore& core_;
    std::atomic<int64_t> wait_ns_{0};
    std::atomic<int64_t> exposed_ns_{0};
};

class ExpertStream {
  public:
    struct Stage {
        std::byte* rows = nullptr;
        int32_t* ids = nullptr;
        float* weights = nullptr;
    };

    ExpertStream(ExpertSide& side, const RowShape& shape, StreamCore& core, std::vector<Stage> stages,
                 uint32_t stage_rows)
        : side_(side),
          shape_(shape),
          core_(core),
          stages_(std::move(stages)),
          stage_rows_(stage_rows),
          busy_until_(stages_.size(), 0) {}

    // As ExpertSide::next; `look` is called with what arrived, on the core's thread.
    void next(Deadline deadline, const std::function<void(const ExpertSide::Arrived&)>& look);
    // As ExpertSide::collect; the batch lies in a stage. Waits while all are in use.
    std::optional<ReceivedBatch> collect(std::span<const Step> steps);
    // `times.end_ns` 0: when the stream comes here. Returns the call's number.
    uint32_t reply(StreamHandle stream, const ReceivedBatch& batch, const std::byte* partials, ComputeTimes times,
                   double timeout_s);
    std::vector<std::string> overdue(int64_t age_ns);
    void forget() { std::fill(busy_until_.begin(), busy_until_.end(), core_nothing); }

  private:
    static constexpr uint32_t core_nothing = 0;
    void put_on_stage(ReceivedBatch& batch);

    ExpertSide& side_;
    RowShape shape_;
    StreamCore& core_;
    std::vector<Stage> stages_;
    uint32_t stage_rows_;
    std::vector<uint32_t> busy_until_;  // by stage: the reply that ends its use; 0: none has been given yet
    size_t next_stage_ = 0;
};

}  // namespace antiphon::m2n

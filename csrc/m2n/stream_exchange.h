// Dispatch, combine, receive and reply in the order of a compute stream: the ends of `token_exchange` over a core.
//
// Attention: the stream fills host memory with rows and choices, `dispatch` sends them once it has; `combine` makes the
// stream wait until the sums are in host memory. Numbers of rows are the caller's, values only the core reads. Experts:
// `next` and `collect` hand the caller a batch as soon as it is here; `reply` sends the sums once the stream has made them, while
// the caller receives the next. Memory given to a call must stay as it is until the call is over.
//
// `stages`: the device's memory, or host memory that it reads by itself. Received rows are copied there, because a slot
// belongs to the next message once the reply has left, while the device may still be behind.
//
// Calls under way refer to their end and to its memory. So the end of an object is the end of its core, which serves
// nothing else: what is under way is interrupted, what waits is dropped, and the thread has ended before the object has.
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
    ~AttentionStream() { stop(); }
    AttentionStream(const AttentionStream&) = delete;
    AttentionStream& operator=(const AttentionStream&) = delete;

    void dispatch(StreamHandle stream, const BatchKey& key, uint64_t participants, const GatedRows& rows,
                  double timeout_s);
    // `stream` waits for the sums.
    void combine(StreamHandle stream, const BatchKey& key, std::byte* out, double timeout_s);

    void stop() { core_.stop(); }

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
    ExpertStream(ExpertSide& side, StreamCore& core, std::vector<BatchPlace> stages)
        : side_(side), core_(core), stages_(std::move(stages)), busy_until_(stages_.size(), core_nothing) {}
    ~ExpertStream() { stop(); }
    ExpertStream(const ExpertStream&) = delete;
    ExpertStream& operator=(const ExpertStream&) = delete;

    // As ExpertSide::next; `look` is called with what arrived, on the core's thread.
    void next(Deadline deadline, const std::function<void(const ExpertSide::Arrived&)>& look);
    // As ExpertSide::collect; the batch lies in a stage. Waits while all are in use.
    std::optional<ReceivedBatch> collect(std::span<const Step> steps);
    // `times.end_ns` 0: when the stream comes here. Returns the call's number.
    uint32_t reply(StreamHandle stream, const ReceivedBatch& batch, const std::byte* partials, ComputeTimes times,
                   double timeout_s);
    std::vector<std::string> overdue(int64_t age_ns);
    void stop() { core_.stop(); }
    void forget() { std::fill(busy_until_.begin(), busy_until_.end(), core_nothing); }

  private:
    static constexpr uint32_t core_nothing = 0;

    ExpertSide& side_;
    StreamCore& core_;
    std::vector<BatchPlace> stages_;
    std::vector<uint32_t> busy_until_;  // by stage: the reply that ends its use; 0: none has been given yet
    size_t next_stage_ = 0;
};

}  // namespace antiphon::m2n

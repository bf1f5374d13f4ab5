// The CPU's part of calls that a compute stream makes: one thread that makes them when the stream has come there.
//
// MegaScale-Infer, section 5 and figures 6 and 7 (S sender, R receiver):
// 1. event: the stream raises `came_`, so the core knows that tensors are filled (S) or not used any more (R);
// 2. block: the stream waits for `over_`, where what comes next needs the call's result;
// 3. send or poll: the core makes the call, which composes and posts messages (S) or waits for arrivals (R);
// 4. flag: it raises `over_`, and the stream goes on.
//
// Calls are made in the order in which they were submitted, each once its gate is passed. A call that fails raises its
// flag all the same, so that no stream is left waiting. What was submitted behind it is dropped, and the error comes up
// at the next `check`, until `begin`. Nothing here depends on the device or on the submitting thread, so that thread
// may block on the device while streams wait.
//
// A stream cannot wake a thread. So the core looks for its word without a pause for a short time, then sleeps between
// looks, in naps that grow with the time already waited: a wait is found over late by a sixteenth of itself at most.
//
// Rejected: a thread for each call (the library's ends belong to one thread at a time), and making the calls from the
// submitting thread, which on a GPU runs ahead of the stream by whole layers.
//
// Over it, dispatch, combine, receive and reply of `token_exchange` are in the order of a compute stream.
//
// Attention: the stream fills host memory with rows and choices, `dispatch` sends them once it has; `combine` makes the
// stream wait until the sums are in host memory. Numbers of rows are the caller's, values only the core reads. Experts:
// `next` and `collect` hand the caller a batch as soon as it is here; `reply` sends the sums once the stream has made
// them, while the caller receives the next. Memory given to a call must stay as it is until the call is over.
//
// `stages`: the device's memory, or host memory that it reads by itself. Received rows are copied there, because a slot
// belongs to the next message once the reply has left, while the device may still be behind.
//
// Calls under way refer to their end and to its memory. So the end of an object is the end of its core, which serves
// nothing else: what is under way is interrupted, what waits is dropped, and the thread has ended before the object
// has.
#pragma once

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "m2n/stream_device.h"
#include "m2n/token_exchange.h"
#include "m2n/types.h"

namespace antiphon::m2n {

class StreamCore {
  public:
    // `interrupt`: ends the wait within a call; it is called from `abort`. `stream_timeout_ns`: how long a stream may
    // take to come to the next call.
    StreamCore(std::string name, std::shared_ptr<StreamDevice> device, std::function<void()> interrupt,
               int64_t stream_timeout_ns);
    ~StreamCore();
    StreamCore(const StreamCore&) = delete;
    StreamCore& operator=(const StreamCore&) = delete;

    // The call is made once all that is on `stream` now is done. Returns its number. Throws as `check`.
    uint32_t submit(StreamHandle stream, std::function<void()> call);
    // What is put on `stream` from now on begins once the call is over.
    void block(StreamHandle stream, uint32_t number) { device_->wait(stream, over_, number); }
    bool is_over(uint32_t number) const { return over_.reached(number); }
    // Made at once and in short tries, between calls that wait for their stream; the caller's thread waits. `call`
    // returns whether it is over; `slice` bounds one try, and one that ends before waits for the rest of it. Throws
    // what it throws, or as `check`.
    void run(std::function<bool(Deadline slice)> call);
    // Until all calls are over; false: not in time. The ends of the library are the caller's then, until `submit`.
    bool wait_idle(int64_t timeout_ns);
    // Throws the error of the first call that failed since `begin`.
    void check();

    // Any thread: calls of epochs before this one end with Error(interrupted).
    void abort(uint32_t epoch);
    // Once idle: forget errors; calls from now on belong to this epoch.
    void begin(uint32_t epoch);
    // Drop what is not over, end the thread. The ends are the caller's. For the thread that submits; again: no effect.
    void stop();

  private:
    struct Job {
        uint32_t number = 0;  // also the value of `came_` that is its gate
        std::function<void()> call;
    };
    struct Urgent {
        std::function<bool(Deadline)> call;
        std::optional<Error> error;
        bool over = false;  // set with the mutex held
    };

    struct Pace {
        bool looks = false;  // without a pause
        int64_t nap_ns = 0;
    };

    bool aborted() const { return stopping_.load() || aborted_epoch_.load() > epoch_.load(); }
    bool drops();  // calls are dropped, not made
    void serve();
    void make(const Job& job);
    bool try_urgent(Urgent& urgent, int64_t slice_ns);
    bool look_at_gate(const Job& job);
    Pace pace() const;  // while the first job's stream is waited for
    void fail(const Error& error);
    void throw_if_ended() const;

    const std::string name_;
    const std::shared_ptr<StreamDevice> device_;
    const std::function<void()> interrupt_;
    const int64_t stream_timeout_ns_;
    StreamWord came_, over_;
    std::mutex mutex_;
    std::condition_variable changed_;  // something was submitted, or is over
    std::deque<Job> jobs_;             // a job stays here until it is over
    Urgent* urgent_ = nullptr;
    std::optional<Error> error_;
    uint32_t num_submitted_ = 0;
    int64_t looked_at_ns_ = 0;  // since when the first job's stream is waited for; 0: it is not
    std::atomic<uint32_t> epoch_{0};
    std::atomic<uint32_t> aborted_epoch_{0};
    std::atomic<bool> stopping_{false};
    bool ended_ = false;  // the thread will look at nothing more
    std::thread thread_;
};

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

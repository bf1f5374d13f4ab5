#include "m2n/stream_core.h"

#include <algorithm>
#include <chrono>
#include <utility>

#include "base/wait_word.h"

namespace antiphon::m2n {

namespace {

constexpr int64_t long_slice_ns = 200'000'000;  // only the peers are waited for
constexpr int64_t busy_look_ns = 100'000;       // a stream is looked for this long before naps begin
constexpr int64_t shortest_nap_ns = 20'000;
constexpr int64_t longest_nap_ns = 1'000'000;
constexpr int64_t waits_a_nap = 16;

void sleep_ns(int64_t duration_ns) {
    if (duration_ns > 0) std::this_thread::sleep_for(std::chrono::nanoseconds(duration_ns));
}

}  // namespace

StreamCore::StreamCore(std::string name, std::shared_ptr<StreamDevice> device, std::function<void()> interrupt,
                       int64_t stream_timeout_ns)
    : name_(std::move(name)),
      device_(std::move(device)),
      interrupt_(std::move(interrupt)),
      stream_timeout_ns_(stream_timeout_ns),
      came_(device_->new_word()),
      over_(device_->new_word()),
      thread_([this] { serve(); }) {}

StreamCore::~StreamCore() { stop(); }

uint32_t StreamCore::submit(StreamHandle stream, std::function<void()> call) {
    check();
    std::unique_lock lock(mutex_);
    throw_if_ended();
    const uint32_t number = ++num_submitted_;
    jobs_.push_back({number, std::move(call)});
    lock.unlock();
    device_->signal(stream, came_, number);
    changed_.notify_all();
    return number;
}

void StreamCore::run(std::function<bool(Deadline)> call) {
    check();
    Urgent urgent{std::move(call), {}, false};
    std::unique_lock lock(mutex_);
    throw_if_ended();
    urgent_ = &urgent;
    changed_.notify_all();
    changed_.wait(lock, [&] { return urgent.over; });
    if (urgent.error) throw Error(*urgent.error);
}

bool StreamCore::wait_idle(int64_t timeout_ns) {
    std::unique_lock lock(mutex_);
    return changed_.wait_for(lock, std::chrono::nanoseconds(timeout_ns), [&] { return jobs_.empty(); });
}

void StreamCore::check() {
    const std::lock_guard lock(mutex_);
    if (error_) throw Error(*error_);
    if (stopping_.load()) throw Error(Code::interrupted, name_ + ": it was closed");
}

// With the mutex held: what is handed over after that would be waited for in vain.
void StreamCore::throw_if_ended() const {
    if (ended_) throw Error(Code::interrupted, name_ + ": it was closed");
}

void StreamCore::abort(uint32_t epoch) {
    uint32_t before = aborted_epoch_.load();
    while (before < epoch && !aborted_epoch_.compare_exchange_weak(before, epoch)) continue;
    interrupt_();
}

void StreamCore::begin(uint32_t epoch) {
    const std::lock_guard lock(mutex_);
    error_.reset();
    epoch_.store(epoch);
}

void StreamCore::stop() {
    if (!thread_.joinable()) return;
    stopping_.store(true);
    interrupt_();
    {
        const std::lock_guard lock(mutex_);
        changed_.notify_all();
    }
    thread_.join();
}

// --- the thread

void StreamCore::serve() {
    std::unique_lock lock(mutex_);
    for (;;) {
        changed_.wait(lock, [&] { return stopping_.load() || !jobs_.empty() || urgent_ != nullptr; });
        if (jobs_.empty() && urgent_ == nullptr) {
            ended_ = true;
            return;
        }
        const bool has_job = !jobs_.empty();
        Urgent* const urgent = urgent_;
        const Job* const first = has_job ? &jobs_.front() : nullptr;  // a deque's front stays where it is
        lock.unlock();
        if (has_job && look_at_gate(*first)) {
            make(*first);
            lock.lock();
            const uint32_t number = jobs_.front().number;
            jobs_.pop_front();
            looked_at_ns_ = 0;
            over_.raise(number);  // last: who sees it sees the rest
            changed_.notify_all();
            continue;
        }
        const Pace rests = has_job ? pace() : Pace{false, long_slice_ns};
        bool is_over = false;
        if (urgent != nullptr) {
            is_over = try_urgent(*urgent, rests.nap_ns);
        } else if (rests.looks) {
            std::this_thread::yield();
        } else {
            sleep_ns(rests.nap_ns);
        }
        lock.lock();
        if (is_over) {  // only now: its caller may wake for any reason, and takes it away when it is over
            urgent->over = true;
            urgent_ = nullptr;
            changed_.notify_all();
        }
    }
}

bool StreamCore::drops() {
    const std::lock_guard lock(mutex_);
    return error_.has_value();
}

// Whether the job's turn has come: its stream is there, or it is to be dropped.
bool StreamCore::look_at_gate(const Job& job) {
    if (came_.reached(job.number) || aborted() || drops()) return true;
    const int64_t now_ns = monotonic_ns();
    if (looked_at_ns_ == 0) looked_at_ns_ = now_ns;
    if (now_ns - looked_at_ns_ < stream_timeout_ns_) return false;
    fail(Error(Code::timeout, name_ + ": the device did not come to call " + std::to_string(job.number) + " after " +
                                  std::to_string(stream_timeout_ns_ / 1'000'000'000) + " s",
               {std::string(device_->name())}));
    return true;
}

StreamCore::Pace StreamCore::pace() const {
    const int64_t waited_ns = monotonic_ns() - looked_at_ns_;
    return {waited_ns < busy_look_ns, std::clamp(waited_ns / waits_a_nap, shortest_nap_ns, longest_nap_ns)};
}

void StreamCore::make(const Job& job) {
    while (!drops()) {
        try {
            if (aborted()) throw Error(Code::interrupted, name_ + ": the step was given up");
            job.call();
            return;
        } catch (const Error& error) {
            if (error.code == Code::interrupted && !aborted()) continue;  // of an epoch that has passed
            fail(error);
        } catch (const std::exception& error) {
            fail(Error(Code::system, name_ + ": " + error.what()));
        }
    }
}

// Whether it is over.
bool StreamCore::try_urgent(Urgent& urgent, int64_t slice_ns) {
    const Deadline slice = Deadline::after_ns(slice_ns);
    try {
        if (aborted()) throw Error(Code::interrupted, name_ + ": the step was given up");
        if (urgent.call(slice)) return true;
        sleep_ns(std::min(slice.left_ns(), longest_nap_ns));
        return false;
    } catch (const Error& error) {
        if (error.code == Code::interrupted && !aborted()) return false;
        urgent.error = error;
    } catch (const std::exception& error) {
        urgent.error = Error(Code::system, name_ + ": " + error.what());
    }
    return true;
}

void StreamCore::fail(const Error& error) {
    const std::lock_guard lock(mutex_);
    if (!error_) error_ = error;
}

// --- the ends of an exchange

namespace {

Deadline within_s(double timeout_s) { return Deadline::after_ns(static_cast<int64_t>(timeout_s * 1e9)); }

// `wait(deadline)`; a timeout's message says how long was waited.
template <class Wait>
void patiently(double timeout_s, Wait&& wait) {
    try {
        wait(within_s(timeout_s));
    } catch (const Error& error) {
        throw with_patience(error, timeout_s);
    }
}

}  // namespace

void AttentionStream::dispatch(StreamHandle stream, const BatchKey& key, uint64_t participants, const GatedRows& rows,
                               double timeout_s) {
    core_.submit(stream, [this, key, participants, rows, timeout_s] {
        patiently(timeout_s, [&](Deadline deadline) { side_.dispatch(key, participants, rows, deadline); });
    });
}

void AttentionStream::combine(StreamHandle stream, const BatchKey& key, std::byte* out, double timeout_s) {
    const uint32_t number = core_.submit(stream, [this, key, out, timeout_s] {
        const int64_t started_ns = monotonic_ns();
        std::vector<ComputeTimes> times;
        patiently(timeout_s, [&](Deadline deadline) { side_.combine(key, out, times, deadline); });
        const int64_t ended_ns = monotonic_ns();
        wait_ns_.fetch_add(ended_ns - started_ns);
        exposed_ns_.fetch_add(exposed_ns_of(started_ns, ended_ns, times));
    });
    core_.block(stream, number);
}

void ExpertStream::next(Deadline deadline, const std::function<void(const ExpertSide::Arrived&)>& look) {
    core_.run([&](Deadline slice) {
        const auto arrived = side_.next(Deadline::after_ns(std::min(slice.left_ns(), deadline.left_ns())));
        const bool is_something = arrived.step || arrived.introduction;
        if (!is_something && !deadline.passed()) return false;
        look(arrived);
        return true;
    });
}

std::optional<ReceivedBatch> ExpertStream::collect(std::span<const Step> steps) {
    std::optional<ReceivedBatch> batch;
    core_.run([&](Deadline) {
        const uint32_t last_use = busy_until_[next_stage_];
        if (last_use != core_nothing && !core_.is_over(last_use)) return false;
        batch = side_.collect(steps, &stages_[next_stage_]);
        return true;
    });
    return batch;
}

uint32_t ExpertStream::reply(StreamHandle stream, const ReceivedBatch& batch, const std::byte* partials,
                             ComputeTimes times, double timeout_s) {
    auto call = [this, batch = ReceivedBatch(batch), partials, times, timeout_s]() mutable {
        ComputeTimes computed = times;
        if (computed.end_ns == 0) computed.end_ns = monotonic_ns();
        patiently(timeout_s, [&](Deadline deadline) { side_.reply(batch, partials, computed, deadline); });
    };
    const uint32_t number = core_.submit(stream, std::move(call));
    busy_until_[next_stage_] = number;
    next_stage_ = (next_stage_ + 1) % stages_.size();
    return number;
}

std::vector<std::string> ExpertStream::overdue(int64_t age_ns) {
    std::vector<std::string> names;
    core_.run([&](Deadline) {
        names = side_.overdue(age_ns);
        return true;
    });
    return names;
}

}  // namespace antiphon::m2n

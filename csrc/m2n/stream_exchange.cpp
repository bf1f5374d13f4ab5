#include "m2n/stream_exchange.h"

#include <algorithm>
#include <utility>

namespace antiphon::m2n {

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
    const uint32_t number = core_.submit(stream, [this, batch = ReceivedBatch(batch), partials, times, timeout_s]() mutable {
        ComputeTimes computed = times;
        if (computed.end_ns == 0) computed.end_ns = monotonic_ns();
        patiently(timeout_s, [&](Deadline deadline) { side_.reply(batch, partials, computed, deadline); });
    });
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

#include "m2n/expert_split.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <string>
#include <utility>

#include "m2n/types.h"

namespace antiphon::m2n {

namespace {

constexpr int max_rounds = 12;
constexpr double settled = 1e-3;  // of the mean load
constexpr double never = std::numeric_limits<double>::infinity();

}  // namespace

ExpertSplit::ExpertSplit(uint32_t num_workers, const std::vector<std::vector<int32_t>>& owners,
                         std::vector<double> speeds, uint32_t knee)
    : num_workers_(num_workers), knee_(knee), speeds_(std::move(speeds)), loads_(num_workers) {
    if (num_workers == 0) throw_invalid("experts on 0 workers: there must be at least 1");
    if (speeds_.empty()) speeds_.assign(num_workers, 1.0);
    if (speeds_.size() != num_workers) {
        throw_invalid(speeds_.size(), " speeds for ", num_workers, " workers");
    }
    for (const double speed : speeds_) {
        if (speed > 0 && speed != never) continue;
        throw_invalid("a worker's speed is ", speed, ": give more than 0");
    }
    if (knee == 0) throw_invalid("a knee of 0 rows: it must be at least 1");
    size_t most = 0;
    first_.push_back(0);
    for (const auto& workers : owners) {
        const auto expert = static_cast<uint32_t>(first_.size() - 1);
        if (workers.empty()) throw_invalid("expert ", expert, " is placed on no worker");
        for (const int32_t worker : workers) {
            if (worker < 0 || static_cast<uint32_t>(worker) >= num_workers) {
                throw_invalid("expert ", expert, " is placed on worker ", worker, " of ", num_workers);
            }
            owners_.push_back(worker);
        }
        if (workers.size() > 1) copied_.push_back(expert);
        most = std::max(most, workers.size());
        first_.push_back(static_cast<uint32_t>(owners_.size()));
    }
    parts_.resize(owners_.size());
    rows_.resize(owners_.size());
    order_.reserve(copied_.size());
    for (auto* each : {&base_, &speed_, &least_, &times_, &poured_}) each->resize(most);
    kept_.resize(most);
    by_time_.resize(most);
}

double ExpertSplit::cost(double rows) const { return rows > 0 ? std::max(rows, double(knee_)) : 0.0; }

std::span<const uint32_t> ExpertSplit::split(std::span<const uint32_t> counts) {
    if (counts.size() != num_experts()) {
        throw_invalid(counts.size(), " counts for ", num_experts(), " experts");
    }
    counts_ = counts;
    place_single();
    order_ = copied_;
    std::ranges::sort(order_, [&](uint32_t a, uint32_t b) {
        return counts[a] != counts[b] ? counts[a] > counts[b] : a < b;
    });
    const auto is_small = [&](uint32_t expert) { return counts[expert] < 2 * knee_; };
    const auto small = std::ranges::find_if(order_, is_small);  // and all behind it
    for (auto expert = order_.begin(); expert != small; ++expert) pour(*expert, counts[*expert]);
    for (auto expert = small; expert != order_.end(); ++expert) place_whole(*expert, counts[*expert]);
    double sum = 0;
    for (const double load : loads_) sum += load;
    const double enough = settled * (sum / num_workers_);
    for (int round = 1; round < max_rounds; ++round) {
        double moved = 0;
        for (auto expert = order_.begin(); expert != small; ++expert) {
            moved = std::max(moved, pour(*expert, counts[*expert]));
        }
        if (!(moved > enough)) break;
    }
    for (auto expert = order_.begin(); expert != small; ++expert) make_whole(*expert, counts[*expert]);
    std::ranges::transform(parts_, rows_.begin(), [](double part) { return static_cast<uint32_t>(part); });
    return rows_;
}

std::vector<WantedCopy> ExpertSplit::wanted_copies(std::span<const uint32_t> counts, std::span<const bool> open) {
    if (open.size() != num_workers_) {
        throw_invalid(open.size(), " flags for ", num_workers_, " workers");
    }
    split(counts);
    parts_of_.resize(num_workers_);
    for (auto& parts : parts_of_) parts.clear();
    std::vector<double> times(num_workers_, 0.0);  // rows until all are counted
    for (uint32_t expert = 0; expert < num_experts(); ++expert) {
        for (uint32_t at = first_[expert]; at < first_[expert + 1]; ++at) {
            if (rows_[at] == 0) continue;
            parts_of_[owners_[at]].push_back({expert, double(rows_[at])});
            times[owners_[at]] += cost(rows_[at]);
        }
    }
    double sum_speeds = 0;
    for (uint32_t worker = 0; worker < num_workers_; ++worker) {
        times[worker] /= speeds_[worker];
        sum_speeds += speeds_[worker];
    }
    const double before = *std::ranges::max_element(times);
    std::vector<bool> is_open(open.begin(), open.end());
    std::vector<WantedCopy> wanted;
    while (true) {
        const auto fullest = static_cast<uint32_t>(std::ranges::max_element(times) - times.begin());
        uint32_t taker = fullest;
        for (uint32_t worker = 0; worker < num_workers_; ++worker) {
            if (is_open[worker] && times[worker] < times[taker]) taker = worker;
        }
        Part* part = taker == fullest ? nullptr : largest_part(fullest, taker);
        if (part == nullptr) break;
        const double speed = speeds_[fullest], taker_speed = speeds_[taker];
        const double equal = std::floor((times[fullest] - times[taker]) / (1 / speed + 1 / taker_speed));
        const double rows = part->rows <= equal ? part->rows : std::min(equal, part->rows - knee_);
        if (rows < knee_) break;
        const uint32_t expert = part->expert;
        part->rows -= rows;
        parts_of_[taker].push_back({expert, rows});
        times[fullest] -= rows / speed;
        times[taker] += rows / taker_speed;
        is_open[taker] = false;
        wanted.push_back({expert, taker, 0});
    }
    const double gain = (before - *std::ranges::max_element(times)) * (sum_speeds / num_workers_);
    if (gain < knee_) return {};
    for (WantedCopy& each : wanted) each.gain = gain / double(wanted.size());
    return wanted;
}

ExpertSplit::Part* ExpertSplit::largest_part(uint32_t giver, uint32_t taker) {
    Part* largest = nullptr;
    for (Part& part : parts_of_[giver]) {
        if (part.rows == 0 || holds(taker, part.expert)) continue;
        const auto is_larger = [&](const Part& than) {
            return part.rows != than.rows ? part.rows > than.rows : part.expert < than.expert;
        };
        if (largest == nullptr || is_larger(*largest)) largest = &part;
    }
    return largest;
}

bool ExpertSplit::holds(uint32_t worker, uint32_t expert) const {
    return std::ranges::find(owners(expert), static_cast<int32_t>(worker)) != owners(expert).end();
}

void ExpertSplit::place_single() {
    std::ranges::fill(loads_, 0.0);
    std::ranges::fill(parts_, 0.0);
    for (uint32_t expert = 0; expert < num_experts(); ++expert) {
        if (first_[expert + 1] - first_[expert] != 1) continue;
        const uint32_t at = first_[expert];
        parts_[at] = counts_[expert];
        loads_[owners_[at]] += cost(counts_[expert]);
    }
}

void ExpertSplit::place_whole(uint32_t expert, double rows) {
    if (rows == 0) return;
    uint32_t best = first_[expert];
    double soonest = never;
    for (uint32_t at = first_[expert]; at < first_[expert + 1]; ++at) {
        const double time = (loads_[owners_[at]] + cost(rows)) / speeds_[owners_[at]];
        if (time < soonest) {
            soonest = time;
            best = at;
        }
    }
    parts_[best] = rows;
    loads_[owners_[best]] += cost(rows);
}

void ExpertSplit::to_level(double rows, uint32_t count) {
    for (uint32_t i = 0; i < count; ++i) {  // insertion keeps equal times in order
        times_[i] = base_[i] / speed_[i];
        uint32_t at = i;
        for (; at > 0 && times_[by_time_[at - 1]] > times_[i]; --at) by_time_[at] = by_time_[at - 1];
        by_time_[at] = i;
    }
    double level = 0, sum_base = 0, sum_speeds = 0;
    bool is_filled = false;
    for (uint32_t n = 0; n < count; ++n) {
        const uint32_t i = by_time_[n];
        sum_base += base_[i];
        sum_speeds += speed_[i];
        const double next = (rows + sum_base) / sum_speeds;
        if (!(times_[i] < next)) break;
        level = next;
        is_filled = true;
    }
    for (uint32_t i = 0; i < count; ++i) {
        poured_[i] = is_filled ? std::max(level * speed_[i] - base_[i], 0.0) : 0.0;
    }
}

double ExpertSplit::pour(uint32_t expert, double rows) {
    const uint32_t first = first_[expert], count = first_[expert + 1] - first;
    for (uint32_t i = 0; i < count; ++i) {
        const int32_t worker = owners_[first + i];
        base_[i] = loads_[worker] - parts_[first + i];
        speed_[i] = speeds_[worker];
    }
    to_level(rows, count);
    double moved = 0;
    for (uint32_t i = 0; i < count; ++i) {
        moved = std::max(moved, std::abs(poured_[i] - parts_[first + i]));
        parts_[first + i] = poured_[i];
        loads_[owners_[first + i]] = base_[i] + poured_[i];
    }
    return moved;
}

void ExpertSplit::make_whole(uint32_t expert, double rows) {
    const uint32_t first = first_[expert], count = first_[expert + 1] - first;
    double* parts = parts_.data() + first;
    const auto larger = [&](uint32_t a, uint32_t b) { return parts[a] != parts[b] ? parts[a] > parts[b] : a < b; };
    for (uint32_t i = 0; i < count; ++i) by_time_[i] = i;
    std::sort(by_time_.begin(), by_time_.begin() + count, larger);
    const uint32_t most = std::min(count, static_cast<uint32_t>(rows) / knee_);
    uint32_t num_kept = 0;
    for (uint32_t n = 0; n < count; ++n) {
        const uint32_t i = by_time_[n];
        if (n == 0 || (n < most && parts[i] >= knee_ / 2.0)) {
            kept_[num_kept++] = i;
        } else {
            loads_[owners_[first + i]] -= parts[i];
            parts[i] = 0;
        }
    }
    std::sort(kept_.begin(), kept_.begin() + num_kept);
    for (uint32_t n = 0; n < num_kept; ++n) {
        const int32_t worker = owners_[first + kept_[n]];
        least_[n] = loads_[worker] - parts[kept_[n]];  // without this expert
        base_[n] = least_[n] + knee_;
        speed_[n] = speeds_[worker];
    }
    to_level(rows - double(num_kept) * knee_, num_kept);
    double missing = rows;
    for (uint32_t n = 0; n < num_kept; ++n) {
        poured_[n] = knee_ + std::floor(poured_[n]);
        missing -= poured_[n];
    }
    for (; missing > 0; missing -= 1) {
        uint32_t best = 0;
        for (uint32_t n = 1; n < num_kept; ++n) {
            if ((least_[n] + poured_[n] + 1) / speed_[n] < (least_[best] + poured_[best] + 1) / speed_[best]) best = n;
        }
        poured_[best] += 1;
    }
    for (uint32_t n = 0; n < num_kept; ++n) {
        parts[kept_[n]] = poured_[n];
        loads_[owners_[first + kept_[n]]] = least_[n] + poured_[n];
    }
}

}  // namespace antiphon::m2n

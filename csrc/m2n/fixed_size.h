// Containers of a size fixed once, which allocate nothing later: what is on its way in a pair is bounded by its slots.
#pragma once

#include <array>
#include <bit>
#include <cassert>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "m2n/types.h"

namespace antiphon::m2n {

// First in, first out.
template <class T>
class FixedQueue {
  public:
    explicit FixedQueue(size_t capacity) : items_(capacity) {}

    size_t size() const { return size_; }
    bool empty() const { return size_ == 0; }
    bool full() const { return size_ == items_.size(); }
    const T& operator[](size_t index) const { return items_[(first_ + index) % items_.size()]; }
    void push(const T& item) {
        assert(!full());
        items_[(first_ + size_) % items_.size()] = item;
        ++size_;
    }
    T pop() {
        assert(!empty());
        const T item = items_[first_];
        first_ = (first_ + 1) % items_.size();
        --size_;
        return item;
    }

  private:
    std::vector<T> items_;
    size_t first_ = 0;
    size_t size_ = 0;
};

// Durations by powers of two: bucket i counts those of [2^i, 2^(i+1)) ns. One writer.
class Histogram {
  public:
    static constexpr size_t num_buckets = 40;  // the last holds everything above nine minutes

    void add(int64_t duration_ns) {
        const auto value = static_cast<uint64_t>(duration_ns > 1 ? duration_ns : 1);
        const size_t bucket = static_cast<size_t>(std::bit_width(value)) - 1;
        ++counts_[bucket < num_buckets ? bucket : num_buckets - 1];
    }
    const std::array<uint64_t, num_buckets>& counts() const { return counts_; }

  private:
    std::array<uint64_t, num_buckets> counts_{};
};

constexpr uint32_t no_place = ~uint32_t{0};

struct StepEntry {
    Step step = 0;
    uint32_t count = 0;         // messages here; 0: the entry is empty
    uint32_t participants = 0;  // as the first message that names them says; 0: unknown
    uint32_t first = no_place;
    uint64_t announcement = 0;  // its number in the queue of complete steps; 0: not in it
    bool handed_out = false;    // by wait_complete
    int64_t first_arrival_ns = 0;
};

// Which messages of which step are here, by open addressing. Messages are named by their place (source * slots + slot);
// those of one step form a list through `next`.
class StepTable {
  public:
    // At most `max_entries` steps at a time: every step here holds at least one slot.
    explicit StepTable(uint32_t max_entries) : entries_(std::bit_ceil(size_t{2} * max_entries)) {}

    StepEntry* find(Step step) {
        for (size_t i = home(step); entries_[i].count != 0; i = next(i)) {
            if (entries_[i].step == step) return &entries_[i];
        }
        return nullptr;
    }

    // The entry of `step`, made if there is none; the caller adds a message at once, so `count` becomes at least 1.
    StepEntry& find_or_add(Step step, int64_t now_ns) {
        size_t i = home(step);
        for (; entries_[i].count != 0; i = next(i)) {
            if (entries_[i].step == step) return entries_[i];
        }
        entries_[i] = StepEntry{};
        entries_[i].step = step;
        entries_[i].first_arrival_ns = now_ns;
        return entries_[i];
    }

    // Removes an entry whose `count` the caller has brought to 0, closing the gap so that searches still work.
    void erase(StepEntry& entry) {
        assert(entry.count == 0);
        size_t hole = static_cast<size_t>(&entry - entries_.data());
        for (size_t i = next(hole); entries_[i].count != 0; i = next(i)) {
            const size_t distance_to_home = (i - home(entries_[i].step)) & mask();
            const size_t distance_to_hole = (i - hole) & mask();
            if (distance_to_home < distance_to_hole) continue;
            entries_[hole] = entries_[i];
            entries_[i].count = 0;
            hole = i;
        }
    }

    template <class Visit>
    void for_each(Visit&& visit) {
        for (StepEntry& entry : entries_) {
            if (entry.count != 0) visit(entry);
        }
    }

  private:
    size_t mask() const { return entries_.size() - 1; }
    size_t next(size_t i) const { return (i + 1) & mask(); }
    size_t home(Step step) const { return (step * 0x9E3779B97F4A7C15u >> 32) & mask(); }

    std::vector<StepEntry> entries_;
};

}  // namespace antiphon::m2n

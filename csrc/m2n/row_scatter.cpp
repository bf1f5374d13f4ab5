#include "m2n/row_scatter.h"

#include <algorithm>
#include <cstring>
#include <functional>
#include <string>
#include <utility>

#include "m2n/types.h"

namespace antiphon::m2n {

RowScatter::RowScatter(const RowShape& shape, uint32_t num_workers) : shape_(shape), num_workers_(num_workers) {}

void RowScatter::place(uint32_t layer, ExpertSplit split) {
    if (split.num_workers() != num_workers_) {
        throw_invalid("a placement on ", split.num_workers(), " workers: there are ", num_workers_);
    }
    if (layer >= splits_.size()) {
        splits_.resize(layer + 1);
        totals_.resize(layer + 1);
    }
    totals_[layer].resize(split.num_experts());
    splits_[layer] = std::move(split);
}

ExpertSplit& RowScatter::split_of(uint32_t layer) {
    if (layer >= splits_.size() || !splits_[layer]) {
        throw_invalid("the experts of layer ", layer, " are placed nowhere");
    }
    return *splits_[layer];
}

void RowScatter::plan(uint32_t layer, const int32_t* ids, uint32_t count,
                      std::vector<std::vector<uint32_t>>& rows_of) {
    ExpertSplit& split = split_of(layer);
    this->count(layer, ids, count);
    if (split.has_copies()) {
        const auto rows = split.split(counts_);
        left_.assign(rows.begin(), rows.end());
    }
    rows_of.resize(num_workers_);
    for (auto& rows : rows_of) rows.clear();
    worker_of_.resize(std::max(worker_of_.size(), size_t{count} * shape_.top_k));
    for (uint32_t row = 0; row < count; ++row) {
        const int32_t* chosen = ids + size_t{row} * shape_.top_k;
        int32_t* workers = worker_of_.data() + size_t{row} * shape_.top_k;
        for (uint32_t k = 0; k < shape_.top_k; ++k) {
            const auto owners = split.owners(static_cast<uint32_t>(chosen[k]));
            workers[k] = owners.size() == 1 ? owners[0] : -1;
        }
        if (split.has_copies()) choose_copies(split, left_, chosen, row);
        for (uint32_t k = 0; k < shape_.top_k; ++k) {
            auto& rows = rows_of[static_cast<uint32_t>(workers[k])];
            if (rows.empty() || rows.back() != row) rows.push_back(row);
        }
    }
}

void RowScatter::count(uint32_t layer, const int32_t* ids, uint32_t count) {
    const ExpertSplit& split = *splits_[layer];
    counts_.assign(split.num_experts(), 0);
    for (size_t choice = 0; choice < size_t{count} * shape_.top_k; ++choice) {
        const int32_t id = ids[choice];
        if (id < 0 || static_cast<uint32_t>(id) >= split.num_experts()) {
            throw_invalid("row ", choice / shape_.top_k, " chose expert ", id, ": the placement has ",
                          split.num_experts());
        }
        ++counts_[static_cast<uint32_t>(id)];
    }
    std::ranges::transform(totals_[layer], counts_, totals_[layer].begin(), std::plus{});
}

std::vector<uint32_t> RowScatter::take_counts() {
    std::vector<uint32_t> taken;
    for (auto& of_layer : totals_) {
        taken.insert(taken.end(), of_layer.begin(), of_layer.end());
        std::ranges::fill(of_layer, 0);
    }
    return taken;
}

// Among the copies that still take rows: one on a worker that the row visits anyway, else the one that takes most.
void RowScatter::choose_copies(const ExpertSplit& split, std::span<uint32_t> left, const int32_t* ids, uint32_t row) {
    int32_t* workers = worker_of_.data() + size_t{row} * shape_.top_k;
    const int32_t* end = workers + shape_.top_k;
    const auto visits = [&](int32_t worker) { return std::find(workers, workers + shape_.top_k, worker) != end; };
    for (uint32_t k = 0; k < shape_.top_k; ++k) {
        if (workers[k] >= 0) continue;
        const auto expert = static_cast<uint32_t>(ids[k]);
        const auto owners = split.owners(expert);
        uint32_t* takes = left.data() + split.first(expert);
        size_t best = 0;
        for (size_t copy = 0; copy < owners.size(); ++copy) {
            if (takes[copy] == 0) continue;
            const bool here = visits(owners[copy]);
            const bool best_here = takes[best] > 0 && visits(owners[best]);
            const bool takes_more = takes[copy] > takes[best];
            if (takes[best] == 0 || (here && !best_here) || (here == best_here && takes_more)) best = copy;
        }
        --takes[best];
        workers[k] = owners[best];
    }
}

void RowScatter::write(const GatedRows& gated, uint32_t worker, std::span<const uint32_t> rows,
                       std::byte* payload) const {
    const auto num_rows = static_cast<uint32_t>(rows.size());
    const uint32_t top_k = shape_.top_k;
    const uint64_t row_bytes = shape_.row_bytes();
    auto* ids = reinterpret_cast<int32_t*>(payload);
    auto* weights = reinterpret_cast<float*>(payload + shape_.weights_offset(num_rows));
    std::byte* to = payload + shape_.rows_offset(num_rows);
    for (const uint32_t row : rows) {
        const int32_t* from_ids = gated.ids + size_t{row} * top_k;
        const int32_t* workers = worker_of_.data() + size_t{row} * top_k;
        for (uint32_t k = 0; k < top_k; ++k) *ids++ = workers[k] == static_cast<int32_t>(worker) ? from_ids[k] : -1;
        std::memcpy(weights, gated.weights + size_t{row} * top_k, top_k * sizeof(float));
        weights += top_k;
        std::memcpy(to, gated.rows + row * gated.stride_bytes, row_bytes);
        to += row_bytes;
    }
}

namespace {

constexpr uint64_t block = 1024;  // elements whose sum stays in the first cache

// As many elements as `sum` has, from `partial` on; `first`: in place of what is there.
template <class Type>
void add_row(std::span<float> sum, const std::byte* partial, bool first) {
    const auto* values = reinterpret_cast<const typename Type::Stored*>(partial);
    if (first) {
        for (size_t k = 0; k < sum.size(); ++k) sum[k] = Type::widen(values[k]);
    } else {
        for (size_t k = 0; k < sum.size(); ++k) sum[k] += Type::widen(values[k]);
    }
}

template <class Type>
void round_row(std::span<const float> sum, std::byte* to) {
    auto* values = reinterpret_cast<typename Type::Stored*>(to);
    for (size_t k = 0; k < sum.size(); ++k) values[k] = Type::narrow(sum[k]);
}

template <class Type>
void sum_all(std::span<const std::byte* const> addends, uint64_t count, std::byte* out,
             std::span<std::byte* const> copies) {
    constexpr uint64_t width = sizeof(typename Type::Stored);
    float total[block];
    for (uint64_t begin = 0; begin < count; begin += block) {
        const std::span<float> sum(total, std::min(block, count - begin));
        const uint64_t offset = begin * width;
        for (size_t i = 0; i < addends.size(); ++i) add_row<Type>(sum, addends[i] + offset, i == 0);
        round_row<Type>(sum, out + offset);
        for (std::byte* copy : copies) std::memcpy(copy + offset, out + offset, sum.size() * width);
    }
}

template <class Type>
void add_all(const RowShape& shape, const std::vector<std::vector<uint32_t>>& rows_of,
             std::span<const std::byte* const> partials, uint32_t count, std::byte* out) {
    const uint64_t row_bytes = shape.row_bytes();
    std::vector<float> sum(shape.hidden);
    std::vector<size_t> next(rows_of.size(), 0);
    for (uint32_t row = 0; row < count; ++row) {
        std::byte* to = out + row * row_bytes;
        const std::byte* only = nullptr;
        uint32_t found = 0;
        for (size_t worker = 0; worker < rows_of.size(); ++worker) {
            const auto& rows = rows_of[worker];
            if (next[worker] == rows.size() || rows[next[worker]] != row) continue;
            const std::byte* partial = partials[worker] + next[worker]++ * row_bytes;
            if (found == 0) {
                only = partial;
            } else {
                if (found == 1) add_row<Type>(sum, only, true);
                add_row<Type>(sum, partial, false);
            }
            ++found;
        }
        if (found == 0) {
            std::memset(to, 0, row_bytes);
        } else if (found == 1) {
            std::memcpy(to, only, row_bytes);
        } else {
            round_row<Type>(sum, to);
        }
    }
}

}  // namespace

void sum_rows(RowType type, std::span<const std::byte* const> addends, uint64_t count, std::byte* out,
              std::span<std::byte* const> copies) {
    switch (type) {
        case RowType::bf16: return sum_all<Bf16>(addends, count, out, copies);
        case RowType::fp16: return sum_all<Fp16>(addends, count, out, copies);
        case RowType::fp32: return sum_all<Fp32>(addends, count, out, copies);
    }
}

void add_partials(const RowShape& shape, const std::vector<std::vector<uint32_t>>& rows_of,
                  std::span<const std::byte* const> partials, uint32_t count, std::byte* out) {
    switch (shape.type) {
        case RowType::bf16: return add_all<Bf16>(shape, rows_of, partials, count, out);
        case RowType::fp16: return add_all<Fp16>(shape, rows_of, partials, count, out);
        case RowType::fp32: return add_all<Fp32>(shape, rows_of, partials, count, out);
    }
}

}  // namespace antiphon::m2n

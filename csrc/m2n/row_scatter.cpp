#include "m2n/row_scatter.h"

#include <cstring>
#include <string>
#include <utility>

#include "m2n/error.h"

namespace antiphon::m2n {

RowScatter::RowScatter(const RowShape& shape, uint32_t num_workers, uint32_t num_experts, std::vector<int32_t> owner_of)
    : shape_(shape), num_workers_(num_workers), num_experts_(num_experts), owner_of_(std::move(owner_of)) {
    if (num_experts == 0 || owner_of_.empty() || owner_of_.size() % num_experts != 0) {
        throw Error(Code::invalid, "a placement of " + std::to_string(owner_of_.size()) + " entries for " +
                                       std::to_string(num_experts) + " experts");
    }
    num_turns_ = static_cast<uint32_t>(owner_of_.size() / num_experts);
    for (const int32_t owner : owner_of_) {
        if (owner >= 0 && static_cast<uint32_t>(owner) < num_workers) continue;
        throw Error(Code::invalid, "an expert is placed on worker " + std::to_string(owner) + " of " +
                                       std::to_string(num_workers));
    }
}

void RowScatter::plan(const int32_t* ids, uint32_t count, std::vector<std::vector<uint32_t>>& rows_of) const {
    rows_of.resize(num_workers_);
    for (auto& rows : rows_of) rows.clear();
    for (uint32_t row = 0; row < count; ++row) {
        for (uint32_t k = 0; k < shape_.top_k; ++k) {
            const int32_t id = ids[size_t{row} * shape_.top_k + k];
            if (id < 0 || static_cast<uint32_t>(id) >= num_experts_) {
                throw Error(Code::invalid, "row " + std::to_string(row) + " chose expert " + std::to_string(id) +
                                               ": the placement has " + std::to_string(num_experts_));
            }
            auto& rows = rows_of[owner(row, id)];
            if (rows.empty() || rows.back() != row) rows.push_back(row);
        }
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
        for (uint32_t k = 0; k < top_k; ++k) {
            *ids++ = owner(row, from_ids[k]) == static_cast<int32_t>(worker) ? from_ids[k] : -1;
        }
        std::memcpy(weights, gated.weights + size_t{row} * top_k, top_k * sizeof(float));
        weights += top_k;
        std::memcpy(to, gated.rows + row * gated.stride_bytes, row_bytes);
        to += row_bytes;
    }
}

namespace {

template <class Type>
void add_row(float* sum, const std::byte* partial, uint32_t hidden, bool first) {
    const auto* values = reinterpret_cast<const typename Type::Stored*>(partial);
    if (first) {
        for (uint32_t h = 0; h < hidden; ++h) sum[h] = Type::widen(values[h]);
    } else {
        for (uint32_t h = 0; h < hidden; ++h) sum[h] += Type::widen(values[h]);
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
                if (found == 1) add_row<Type>(sum.data(), only, shape.hidden, true);
                add_row<Type>(sum.data(), partial, shape.hidden, false);
            }
            ++found;
        }
        if (found == 0) {
            std::memset(to, 0, row_bytes);
        } else if (found == 1) {
            std::memcpy(to, only, row_bytes);
        } else {
            auto* values = reinterpret_cast<typename Type::Stored*>(to);
            for (uint32_t h = 0; h < shape.hidden; ++h) values[h] = Type::narrow(sum[h]);
        }
    }
}

}  // namespace

void add_partials(const RowShape& shape, const std::vector<std::vector<uint32_t>>& rows_of,
                  std::span<const std::byte* const> partials, uint32_t count, std::byte* out) {
    switch (shape.type) {
        case RowType::bf16: return add_all<Bf16>(shape, rows_of, partials, count, out);
        case RowType::fp16: return add_all<Fp16>(shape, rows_of, partials, count, out);
        case RowType::fp32: return add_all<Fp32>(shape, rows_of, partials, count, out);
    }
}

}  // namespace antiphon::m2n

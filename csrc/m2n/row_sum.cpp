#include "m2n/row_sum.h"

#include <algorithm>
#include <cstring>

namespace antiphon::m2n {

namespace {

constexpr uint64_t block = 1024;  // elements whose sum stays in the first cache

template <class Type>
void sum(std::span<const std::byte* const> addends, uint64_t count, std::byte* out,
         std::span<std::byte* const> copies) {
    using Stored = typename Type::Stored;
    float total[block];
    for (uint64_t begin = 0; begin < count; begin += block) {
        const uint64_t length = std::min(block, count - begin);
        const uint64_t offset = begin * sizeof(Stored);
        for (size_t i = 0; i < addends.size(); ++i) {
            const auto* values = reinterpret_cast<const Stored*>(addends[i] + offset);
            if (i == 0) {
                for (uint64_t k = 0; k < length; ++k) total[k] = Type::widen(values[k]);
            } else {
                for (uint64_t k = 0; k < length; ++k) total[k] += Type::widen(values[k]);
            }
        }
        auto* values = reinterpret_cast<Stored*>(out + offset);
        for (uint64_t k = 0; k < length; ++k) values[k] = Type::narrow(total[k]);
        for (std::byte* copy : copies) std::memcpy(copy + offset, values, length * sizeof(Stored));
    }
}

}  // namespace

void sum_rows(RowType type, std::span<const std::byte* const> addends, uint64_t count, std::byte* out,
              std::span<std::byte* const> copies) {
    switch (type) {
        case RowType::bf16: return sum<Bf16>(addends, count, out, copies);
        case RowType::fp16: return sum<Fp16>(addends, count, out, copies);
        case RowType::fp32: return sum<Fp32>(addends, count, out, copies);
    }
}

}  // namespace antiphon::m2n

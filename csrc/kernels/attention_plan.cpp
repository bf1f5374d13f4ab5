#include "kernels/attention_plan.h"

#include <algorithm>

namespace antiphon::kernels {

namespace {
constexpr int64_t rows_per_item = 48;

int64_t cost(const AttentionItem& item) { return item.num_keys * item.num_queries; }
}

AttentionPlan plan_attention(const AttentionCall& call) {
    const int64_t group = call.num_heads / call.cache.num_kv_heads;
    const int64_t queries_per_item = larger(1, rows_per_item / group);
    const int32_t* starts = call.batch.query_starts;
    int64_t num_items = 0;
    for (int64_t s = 0; s < call.batch.num_sequences; ++s) {
        num_items += divide_up(starts[s + 1] - starts[s], queries_per_item) * call.cache.num_kv_heads;
    }
    auto* items = Scratch::get<AttentionItem>(ScratchUse::plan, static_cast<size_t>(num_items));
    AttentionItem* item = items;
    for (int64_t s = 0; s < call.batch.num_sequences; ++s) {
        const int64_t num_queries = starts[s + 1] - starts[s];
        const int64_t before = call.batch.context_lens[s] - num_queries;
        for (int64_t first = 0; first < num_queries; first += queries_per_item) {
            const int64_t count = smaller(queries_per_item, num_queries - first);
            for (int64_t head = 0; head < call.cache.num_kv_heads; ++head) {
                *item++ = {static_cast<int32_t>(s), static_cast<int32_t>(head), static_cast<int32_t>(first),
                           static_cast<int32_t>(count), before + first + count};
            }
        }
    }
    std::sort(items, items + num_items, [](const AttentionItem& a, const AttentionItem& b) {
        if (cost(a) != cost(b)) return cost(a) > cost(b);
        if (a.sequence != b.sequence) return a.sequence < b.sequence;
        if (a.first_query != b.first_query) return a.first_query < b.first_query;
        return a.kv_head < b.kv_head;
    });
    return {items, num_items};
}

}  // namespace antiphon::kernels

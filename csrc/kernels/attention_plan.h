// Cuts a batch's attention into independent items and puts the heaviest first.
#pragma once

#include "kernels/operations.h"

namespace antiphon::kernels {

// Rows of one sequence and one KV head: all query heads of the group for `num_queries` consecutive tokens.
struct AttentionItem {
    int32_t sequence;
    int32_t kv_head;
    int32_t first_query;
    int32_t num_queries;
    int64_t num_keys;  // visible to the item's last row
};

struct AttentionPlan {
    const AttentionItem* items;
    int64_t num_items;
};

// The plan lives in the caller's scratch until its next call.
AttentionPlan plan_attention(const AttentionCall& call);

}  // namespace antiphon::kernels

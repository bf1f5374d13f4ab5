#include "m2n/token_exchange.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <utility>

#include "m2n/types.h"

namespace antiphon::m2n {

namespace {

// User words of a dispatch message, and of a reply.
enum : size_t { num_rows_word = 0, participants_word = 1, placement_word = 3, first_prefetch_word = 4 };
constexpr size_t max_prefetches = 2;  // of one message: for a layer ahead and for its own
enum : size_t { times_word = 0 };

// A request for an expert as a word; 0 is none.
constexpr uint32_t prefetch_bit = 1u << 31, expert_bits = 16;

constexpr uint32_t step_bits = 28, layer_bits = 12, micro_batch_bits = 8;
constexpr uint32_t epoch_shift = step_bits + layer_bits + micro_batch_bits;
constexpr uint32_t epoch_mask = 0x7FFF;

uint64_t low_bits(uint64_t value, uint32_t bits) { return value & ((uint64_t{1} << bits) - 1); }

uint32_t count_bits(uint64_t set) { return static_cast<uint32_t>(__builtin_popcountll(set)); }

// Messages are composed in the slot, so it must be large enough before the first one.
void check_slots(const Outbox& outbox, uint64_t largest_message) {
    if (outbox.spec().slot_bytes >= largest_message) return;
    throw_invalid("the slots of ", outbox.peer(), " hold ", outbox.spec().slot_bytes, " bytes, the largest message is ",
                  largest_message, ": give both ends the same shape");
}

}  // namespace

Step BatchKey::pack() const {
    return uint64_t{epoch & epoch_mask} << epoch_shift | low_bits(step, step_bits) << (layer_bits + micro_batch_bits) |
           uint64_t{layer} << micro_batch_bits | micro_batch;
}

BatchKey BatchKey::unpack(Step packed) {
    return {static_cast<uint32_t>(packed >> epoch_shift),
            low_bits(packed >> (layer_bits + micro_batch_bits), step_bits),
            static_cast<uint32_t>(low_bits(packed >> micro_batch_bits, layer_bits)),
            static_cast<uint32_t>(low_bits(packed, micro_batch_bits))};
}

Step BatchKey::first_of(uint32_t epoch) { return uint64_t{epoch & epoch_mask} << epoch_shift; }

int64_t exposed_ns_of(int64_t started_ns, int64_t ended_ns, const std::vector<ComputeTimes>& times) {
    int64_t computing_ns = 0;
    for (const ComputeTimes& each : times) {
        const int64_t overlap_ns = std::min(ended_ns, each.end_ns) - std::max(started_ns, each.start_ns);
        computing_ns = std::max(computing_ns, overlap_ns);
    }
    return ended_ns - started_ns - computing_ns;
}

// --- attention ---

AttentionSide::AttentionSide(RowScatter scatter, std::shared_ptr<Inbox> replies, uint32_t num_micro_batches)
    : scatter_(std::move(scatter)),
      replies_(std::move(replies)),
      experts_(scatter_.num_workers()),
      pending_(num_micro_batches),
      prefetches_(scatter_.num_workers()) {
    if (num_micro_batches > max_micro_batches) {
        throw_invalid(num_micro_batches, " micro-batches: a step number has room for ", max_micro_batches);
    }
    for (Pending& pending : pending_) pending.rows_of.resize(scatter_.num_workers());
}

void AttentionSide::set_expert(uint32_t worker, std::shared_ptr<Outbox> outbox) {
    if (outbox != nullptr) check_slots(*outbox, scatter_.shape().dispatch_bytes(scatter_.shape().max_rows));
    experts_.at(worker) = std::move(outbox);
    present_.clear();
    for (uint32_t each = 0; each < experts_.size(); ++each) {
        if (experts_[each] != nullptr) present_.push_back(static_cast<SourceId>(each));
    }
}

void AttentionSide::place(uint32_t version, uint32_t layer, ExpertSplit split) {
    scatter_.place(layer, std::move(split));
    placement_version_ = version;
}

void AttentionSide::prefetch(uint32_t worker, uint32_t layer, uint32_t expert) {
    std::vector<uint32_t>& words = prefetches_.at(worker);
    if (layer >= max_layers || expert >= max_placed_experts || words.size() == max_prefetches) {
        throw_invalid("expert ", expert, " of layer ", layer, " cannot be asked for: a header has room for ",
                      max_prefetches, " of ", max_placed_experts, " experts");
    }
    words.push_back(prefetch_bit | layer << expert_bits | expert);
}

void AttentionSide::forget() {
    for (auto& words : prefetches_) words.clear();
    for (Pending& pending : pending_) pending.count = 0;
}

void AttentionSide::dispatch(const BatchKey& key, uint64_t participants, const GatedRows& rows, Deadline deadline) {
    const RowShape& shape = scatter_.shape();
    if (rows.count > shape.max_rows) {
        throw_invalid(rows.count, " rows in one micro-batch: the exchange was made for ", shape.max_rows);
    }
    if (key.layer >= max_layers) {
        throw_invalid("layer ", key.layer, ": a step number has room for ", max_layers);
    }
    Pending& pending = pending_.at(key.micro_batch);
    scatter_.plan(key.layer, rows.ids, rows.count, pending.rows_of);
    pending.count = rows.count;
    for (size_t worker = 0; worker < experts_.size(); ++worker) {
        if (experts_[worker] != nullptr) {
            experts_[worker]->slot(deadline);
        } else if (!pending.rows_of[worker].empty()) {
            throw_invalid("no connection to expert worker ", worker, ": set_expert first");
        }
    }
    MessageLabel label;
    label.step = key.pack();
    label.participants = count_bits(participants);
    std::memcpy(&label.user[participants_word], &participants, sizeof(participants));
    label.user[placement_word] = placement_version_;
    for (const SourceId worker : present_) {
        const auto num_rows = static_cast<uint32_t>(pending.rows_of[worker].size());
        label.user[num_rows_word] = num_rows;
        std::vector<uint32_t>& words = prefetches_[worker];
        for (size_t i = 0; i < max_prefetches; ++i) {
            label.user[first_prefetch_word + i] = i < words.size() ? words[i] : 0;
        }
        words.clear();
        Outbox& outbox = *experts_[worker];
        scatter_.write(rows, worker, pending.rows_of[worker], outbox.slot(deadline));
        const uint64_t length = num_rows == 0 ? 0 : shape.dispatch_bytes(num_rows);
        outbox.commit(label, length);
        bytes_sent_ += num_rows * (shape.row_bytes() + uint64_t{8} * shape.top_k);  // without the padding
    }
}

void AttentionSide::combine(const BatchKey& key, std::byte* out, std::vector<ComputeTimes>& times, Deadline deadline) {
    const Step step = key.pack();
    const Pending& pending = pending_.at(key.micro_batch);
    replies_->wait(step, {0, present_}, deadline);
    partials_.assign(experts_.size(), nullptr);
    times.assign(experts_.size(), {});
    replies_->for_each(step, [&](const MessageHeader& header, SourceId worker, const std::byte* payload) {
        if (header.length != scatter_.shape().combine_bytes(static_cast<uint32_t>(pending.rows_of[worker].size()))) {
            throw_invalid(replies_->name_of(worker), " returned ", header.length, " bytes for ",
                          pending.rows_of[worker].size(), " rows");
        }
        partials_[worker] = payload;
        std::memcpy(static_cast<void*>(&times[worker]), &header.user[times_word], sizeof(ComputeTimes));
    });
    add_partials(scatter_.shape(), pending.rows_of, partials_, pending.count, out);
    replies_->release(step);
}

bool AttentionSide::is_back(const BatchKey& key) { return replies_->is_here(key.pack(), {0, present_}); }

// --- experts ---

ExpertSide::ExpertSide(const RowShape& shape, std::shared_ptr<Inbox> requests)
    : shape_(shape), requests_(std::move(requests)), attention_(requests_->spec().sources) {}

void ExpertSide::set_attention(SourceId worker, std::shared_ptr<Outbox> outbox) {
    check_slots(*outbox, shape_.combine_bytes(shape_.max_rows));
    attention_.at(worker) = std::move(outbox);
}

ExpertSide::Arrived ExpertSide::next(Deadline deadline) {
    const std::optional<Step> step = requests_->wait_complete(deadline);
    if (!step) return {};
    if ((*step & introduction_bit) == 0) return {*step, std::nullopt};
    Introduction introduction;
    requests_->for_each(*step, [&](const MessageHeader& header, SourceId source, const std::byte* payload) {
        introduction.source = source;
        introduction.ticket.resize(header.length);
        requests_->copy(introduction.ticket.data(), payload, header.length);
    });
    requests_->finish_copies();
    requests_->release(*step);
    return {std::nullopt, std::move(introduction)};
}

std::vector<SourceId> ExpertSide::sources_of(Step step) {
    std::vector<SourceId> sources;
    requests_->for_each(step, [&](const MessageHeader&, SourceId source, const std::byte*) {
        sources.push_back(source);
    });
    return sources;
}

std::optional<ReceivedBatch> ExpertSide::collect(std::span<const Step> steps, const BatchPlace* place) {
    struct Part {
        Step step;
        SourceId source;
        uint32_t num_rows;
        uint32_t placement;
        std::array<uint32_t, max_prefetches> prefetches;
        const std::byte* payload;
    };
    std::vector<Part> parts;
    for (const Step step : steps) {
        requests_->for_each(step, [&](const MessageHeader& header, SourceId source, const std::byte* payload) {
            const uint32_t num_rows = header.user[num_rows_word];
            const uint64_t expected = num_rows == 0 ? 0 : shape_.dispatch_bytes(num_rows);
            if (num_rows > shape_.max_rows || header.length != expected) {
                throw_invalid(requests_->name_of(source), " sent ", header.length, " bytes for ", num_rows, " rows");
            }
            Part part{step, source, num_rows, header.user[placement_word], {}, payload};
            std::copy_n(&header.user[first_prefetch_word], max_prefetches, part.prefetches.begin());
            parts.push_back(part);
        });
    }
    if (parts.empty()) return std::nullopt;
    std::ranges::sort(parts, {}, [](const Part& part) { return std::pair(part.source, part.step); });
    ReceivedBatch batch;
    batch.key = BatchKey::unpack(parts.front().step);
    const auto [oldest, newest] = std::ranges::minmax_element(parts, {}, &Part::placement);
    batch.oldest_placement = oldest->placement;
    batch.newest_placement = newest->placement;
    std::vector<const std::byte*> payloads;
    for (const Part& part : parts) {
        batch.steps.push_back(part.step);
        batch.sources.push_back(part.source);
        batch.rows_per_source.push_back(part.num_rows);
        batch.num_rows += part.num_rows;
        payloads.push_back(part.payload);
        for (const uint32_t word : part.prefetches) {
            if ((word & prefetch_bit) == 0) continue;
            const uint32_t expert = word & (max_placed_experts - 1);
            batch.prefetches.push_back({part.source, (word & ~prefetch_bit) >> expert_bits, expert});
        }
    }
    if (place == nullptr && payloads.size() == 1) {  // its slot is the batch
        const std::byte* payload = payloads[0];
        batch.ids = reinterpret_cast<const int32_t*>(payload);
        batch.weights = reinterpret_cast<const float*>(payload + shape_.weights_offset(batch.num_rows));
        batch.rows = payload + shape_.rows_offset(batch.num_rows);
        return batch;
    }
    gather(batch, payloads, place != nullptr ? *place : own_place(batch.num_rows));
    return batch;
}

BatchPlace ExpertSide::own_place(uint32_t num_rows) {
    rows_.resize(std::max(rows_.size(), size_t{num_rows} * shape_.row_bytes()));
    ids_.resize(std::max(ids_.size(), size_t{num_rows} * shape_.top_k));
    weights_.resize(ids_.size());
    return {rows_.data(), ids_.data(), weights_.data(), num_rows};
}

// The rows of all sources, one after another.
void ExpertSide::gather(ReceivedBatch& batch, const std::vector<const std::byte*>& payloads,
                        const BatchPlace& place) const {
    if (batch.num_rows > place.max_rows) {
        throw_invalid("a batch of ", batch.num_rows, " rows: there is room for ", place.max_rows);
    }
    size_t first = 0;
    for (size_t i = 0; i < payloads.size(); ++i) {
        const uint32_t count = batch.rows_per_source[i];
        const size_t table_bytes = size_t{count} * shape_.top_k * 4;
        if (count == 0) continue;
        requests_->copy(place.ids + first * shape_.top_k, payloads[i], table_bytes);
        requests_->copy(place.weights + first * shape_.top_k, payloads[i] + shape_.weights_offset(count), table_bytes);
        requests_->copy(place.rows + first * shape_.row_bytes(), payloads[i] + shape_.rows_offset(count),
                        count * shape_.row_bytes());
        first += count;
    }
    requests_->finish_copies();
    batch.ids = place.ids;
    batch.weights = place.weights;
    batch.rows = place.rows;
}

void ExpertSide::reply(ReceivedBatch& batch, const std::byte* partials, ComputeTimes times, Deadline deadline) {
    for (const SourceId source : batch.sources) {
        if (attention_[source] == nullptr) {
            throw_invalid(requests_->name_of(source), " sent rows before it introduced itself");
        }
    }
    for (size_t i = 0; i < batch.num_replied; ++i) partials += shape_.combine_bytes(batch.rows_per_source[i]);
    for (; batch.num_replied < batch.sources.size(); ++batch.num_replied) {
        const size_t i = batch.num_replied;
        const SourceId source = batch.sources[i];
        MessageLabel label;
        label.step = batch.steps[i];
        std::memcpy(&label.user[times_word], &times, sizeof(times));
        const uint64_t length = shape_.combine_bytes(batch.rows_per_source[i]);
        // Copied before the release: the partial sums may lie where the rows were received.
        std::byte* slot = attention_[source]->slot(deadline);
        if (length > 0) std::memcpy(slot, partials, length);  // no rows may have no address
        requests_->release(label.step, source);
        attention_[source]->commit(label, length);
        partials += length;
        bytes_sent_ += length;
    }
}

std::vector<std::string> ExpertSide::overdue(int64_t age_ns) {
    std::vector<std::string> names;
    for (const Inbox::Incomplete& incomplete : requests_->incomplete()) {
        if (incomplete.age_ns < age_ns) continue;
        uint64_t participants = 0;
        uint64_t arrived = 0;
        requests_->for_each(incomplete.step, [&](const MessageHeader& header, SourceId source, const std::byte*) {
            std::memcpy(&participants, &header.user[participants_word], sizeof(participants));
            arrived |= uint64_t{1} << source;
        });
        for (uint32_t source = 0; source < requests_->spec().sources && source < max_attention_workers; ++source) {
            if (((participants & ~arrived) >> source & 1) == 0) continue;
            names.push_back(requests_->name_of(static_cast<SourceId>(source)));
        }
    }
    return names;
}

}  // namespace antiphon::m2n

// Dispatch and combine: several attention and expert workers, each result compared with the plain sum, under interrupts.
#include <atomic>
#include <cmath>
#include <cstring>
#include <latch>

#include "harness.h"
#include "m2n/token_exchange.h"

namespace antiphon::m2n::test {

namespace {

constexpr uint32_t num_attention = 2, num_workers = 3, num_experts = 5, num_micro_batches = 2, num_layers = 3;
constexpr uint64_t num_steps = 60;
constexpr uint32_t top_k = 2;
const RowShape shape{7, top_k, 6, RowType::fp32};

const std::vector<std::vector<int32_t>> owners{{0, 1}, {1}, {2}, {0, 2}, {2}};

struct Batch {
    uint32_t count = 0;
    std::vector<float> rows, weights;
    std::vector<int32_t> ids;
};

Batch make_batch(uint64_t seed) {
    std::mt19937_64 random(seed);
    Batch batch;
    batch.count = static_cast<uint32_t>(random() % (shape.max_rows + 1));
    for (uint32_t i = 0; i < batch.count * shape.hidden; ++i) batch.rows.push_back(static_cast<float>(random() % 100));
    for (uint32_t row = 0; row < batch.count; ++row) {
        const auto first = static_cast<int32_t>(random() % num_experts);
        batch.ids.insert(batch.ids.end(), {first, static_cast<int32_t>((first + 1 + random() % 4) % num_experts)});
        for (uint32_t k = 0; k < top_k; ++k) batch.weights.push_back(static_cast<float>(random() % 8));
    }
    return batch;
}

// What an expert makes of a row.
float expert_of(float value, int32_t id) { return value * static_cast<float>(id + 1); }

void check_sum(const Batch& batch, const std::vector<float>& sum) {
    for (uint32_t row = 0; row < batch.count; ++row) {
        for (uint32_t h = 0; h < shape.hidden; ++h) {
            float expected = 0;
            for (uint32_t k = 0; k < top_k; ++k) {
                expected += batch.weights[row * top_k + k] *
                            expert_of(batch.rows[row * shape.hidden + h], batch.ids[row * top_k + k]);
            }
            CHECK(sum[row * shape.hidden + h] == expected);  // small integers: exact in any order
        }
    }
}

class Exchange {
  public:
    explicit Exchange(const Backend& backend) {
        for (uint32_t f = 0; f < num_workers; ++f) {
            experts_.push_back(std::make_unique<Receiver>(backend, "experts", num_attention, num_micro_batches + 1,
                                                          shape.dispatch_bytes(shape.max_rows)));
        }
        for (uint32_t a = 0; a < num_attention; ++a) {
            attention_.push_back(std::make_unique<Receiver>(backend, "attention", num_workers, num_micro_batches + 1,
                                                            shape.combine_bytes(shape.max_rows)));
        }
    }

    void attend(uint32_t me) {
        AttentionSide side(RowScatter(shape, num_workers), attention_[me]->inbox, num_micro_batches);
        for (uint32_t layer = 0; layer < num_layers; ++layer) {
            side.place(1, layer, ExpertSplit(num_workers, owners, {}, 1));
        }
        for (uint32_t f = 0; f < num_workers; ++f) {
            side.set_expert(f, attention_[me]->endpoint->connect(experts_[f]->ticket, static_cast<SourceId>(me), soon()));
        }
        for (uint64_t step = 0; step < num_steps; ++step) {
            for (uint32_t layer = 0; layer < num_layers; ++layer) run_layer(side, me, step, layer);
        }
        busy.fetch_sub(1);
        over_.arrive_and_wait();
    }

    void serve(uint32_t me) {
        ExpertSide side(shape, experts_[me]->inbox);
        for (uint32_t a = 0; a < num_attention; ++a) {
            side.set_attention(static_cast<SourceId>(a),
                               experts_[me]->endpoint->connect(attention_[a]->ticket, static_cast<SourceId>(me), soon()));
        }
        for (uint64_t served = 0; served < num_steps * num_layers * num_micro_batches; ++served) {
            const auto arrived = persistently([&] { return side.next(soon()); });
            CHECK(arrived.step.has_value());
            auto batch = side.collect({{*arrived.step}});
            CHECK(batch.has_value() && batch->sources.size() == num_attention);
            answer(side, *batch);
        }
        over_.arrive_and_wait();
    }

    void disturb() {
        while (busy.load() > 0) {
            for (const auto& each : experts_) each->endpoint->interrupt();
            for (const auto& each : attention_) each->endpoint->interrupt();
            std::this_thread::yield();
        }
    }

    std::atomic<uint32_t> busy{num_attention};

  private:
    void run_layer(AttentionSide& side, uint32_t me, uint64_t step, uint32_t layer) {
        Batch batches[num_micro_batches];
        for (uint32_t i = 0; i < num_micro_batches; ++i) {
            batches[i] = make_batch(key_of(me * 100 + i, step, layer));
            const Batch& batch = batches[i];
            const GatedRows gated{reinterpret_cast<const std::byte*>(batch.rows.data()), shape.row_bytes(),
                                  batch.ids.data(), batch.weights.data(), batch.count};
            persistently([&] { side.dispatch({1, step, layer, i}, (1u << num_attention) - 1, gated, soon()); });
        }
        for (uint32_t i = 0; i < num_micro_batches; ++i) {
            std::vector<float> sum(batches[i].count * shape.hidden);
            std::vector<ComputeTimes> times;
            persistently([&] {
                side.combine({1, step, layer, i}, reinterpret_cast<std::byte*>(sum.data()), times, soon());
            });
            CHECK(times.size() == num_workers && times[1].start_ns == 5 && times[1].end_ns == 6);
            check_sum(batches[i], sum);
        }
    }

    static void answer(ExpertSide& side, ReceivedBatch& batch) {
        std::vector<float> rows(size_t{batch.num_rows} * shape.hidden), partials(rows.size());
        if (!rows.empty()) std::memcpy(rows.data(), batch.rows, rows.size() * sizeof(float));
        for (uint32_t row = 0; row < batch.num_rows; ++row) {
            for (uint32_t k = 0; k < top_k; ++k) {
                const int32_t id = batch.ids[row * top_k + k];
                if (id < 0) continue;
                for (uint32_t h = 0; h < shape.hidden; ++h) {
                    const size_t at = row * shape.hidden + h;
                    partials[at] += batch.weights[row * top_k + k] * expert_of(rows[at], id);
                }
            }
        }
        persistently(
            [&] { side.reply(batch, reinterpret_cast<const std::byte*>(partials.data()), {5, 6}, soon()); });
    }

    std::vector<std::unique_ptr<Receiver>> experts_, attention_;
    std::latch over_{num_attention + num_workers};
};

void dispatch_and_combine(const Backend& backend) {
    Exchange exchange(backend);
    Crew crew;
    for (uint32_t f = 0; f < num_workers; ++f) crew.start([&, f] { exchange.serve(f); });
    for (uint32_t a = 0; a < num_attention; ++a) crew.start([&, a] { exchange.attend(a); });
    crew.start([&] { exchange.disturb(); });
}

}  // namespace

std::vector<Case> exchange_cases() { return {{"dispatch_and_combine", dispatch_and_combine}}; }

}  // namespace antiphon::m2n::test

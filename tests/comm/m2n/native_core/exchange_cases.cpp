// Dispatch and combine: several attention and expert workers, each result compared with the plain sum, under interrupts;
// as calls, and in the order of streams that run later than what is put on them.
#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstring>
#include <latch>

#include "harness.h"
#include "late_device.h"
#include "m2n/stream_core.h"
#include "m2n/token_exchange.h"

namespace antiphon::m2n::test {

namespace {

constexpr uint32_t num_attention = 2, num_workers = 3, num_experts = 5, num_micro_batches = 2, num_layers = 3;
constexpr uint64_t num_steps = 60;
constexpr uint64_t num_batches = num_steps * num_layers * num_micro_batches;
constexpr double patience_s = 60;
constexpr int64_t patience_ns = 60'000 * millisecond_ns;
constexpr uint32_t top_k = 2;
const RowShape shape{7, top_k, 6, RowType::fp32};
const uint32_t most_rows = num_attention * shape.max_rows;  // of a batch

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
    Exchange(const Backend& backend, bool in_streams) : in_streams_(in_streams) {
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
        if (in_streams_) {
            attend_in_stream(side, me);
        } else {
            for (uint64_t step = 0; step < num_steps; ++step) {
                for (uint32_t layer = 0; layer < num_layers; ++layer) run_layer(side, me, step, layer);
            }
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
        if (in_streams_) serve_in_stream(side, me);
        for (uint64_t served = 0; !in_streams_ && served < num_batches; ++served) {
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

    // All of it is on the stream before much of it has happened: memory of a micro-batch is filled anew behind its sums.
    void attend_in_stream(AttentionSide& side, uint32_t me) {
        struct Stage {
            std::vector<float> rows = std::vector<float>(shape.max_rows * shape.hidden), sums = rows;
            std::vector<int32_t> ids = std::vector<int32_t>(shape.max_rows * top_k);
            std::vector<float> weights = std::vector<float>(shape.max_rows * top_k);
        } stages[num_micro_batches];
        LateStream stream;
        Endpoint& endpoint = *attention_[me]->endpoint;
        StreamCore core("attention", std::make_shared<LateDevice>(), [&] { endpoint.interrupt(); }, patience_ns);
        AttentionStream calls(side, core);
        core.begin(1);
        const StreamHandle handle = stream.handle();
        for (uint64_t step = 0; step < num_steps; ++step) {
            for (uint32_t layer = 0; layer < num_layers; ++layer) {
                std::shared_ptr<const Batch> batches[num_micro_batches];
                for (uint32_t i = 0; i < num_micro_batches; ++i) {
                    const auto batch = batches[i] =
                        std::make_shared<const Batch>(make_batch(key_of(me * 100 + i, step, layer)));
                    Stage* const stage = &stages[i];
                    stream.put([batch, stage] {
                        std::copy(batch->rows.begin(), batch->rows.end(), stage->rows.begin());
                        std::copy(batch->ids.begin(), batch->ids.end(), stage->ids.begin());
                        std::copy(batch->weights.begin(), batch->weights.end(), stage->weights.begin());
                    });
                    const GatedRows gated{reinterpret_cast<const std::byte*>(stage->rows.data()), shape.row_bytes(),
                                          stage->ids.data(), stage->weights.data(), batch->count};
                    calls.dispatch(handle, {1, step, layer, i}, (1u << num_attention) - 1, gated, patience_s);
                }
                for (uint32_t i = 0; i < num_micro_batches; ++i) {
                    Stage* const stage = &stages[i];
                    calls.combine(handle, {1, step, layer, i}, reinterpret_cast<std::byte*>(stage->sums.data()),
                                  patience_s);
                    stream.put([batch = batches[i], stage] { check_sum(*batch, stage->sums); });
                }
            }
        }
        stream.finish();
        core.check();
        CHECK(calls.wait_ns() > 0);
    }

    void serve_in_stream(ExpertSide& side, uint32_t me) {
        constexpr uint32_t num_stages = 3;
        struct Stage {
            std::vector<float> rows = std::vector<float>(most_rows * shape.hidden), partials = rows;
            std::vector<int32_t> ids = std::vector<int32_t>(most_rows * top_k);
            std::vector<float> weights = std::vector<float>(most_rows * top_k);
        } stages[num_stages];
        std::vector<BatchPlace> places;
        for (Stage& stage : stages) {
            places.push_back({reinterpret_cast<std::byte*>(stage.rows.data()), stage.ids.data(), stage.weights.data(),
                              most_rows});
        }
        LateStream stream;
        Endpoint& endpoint = *experts_[me]->endpoint;
        StreamCore core("experts", std::make_shared<LateDevice>(), [&] { endpoint.interrupt(); }, patience_ns);
        ExpertStream calls(side, core, places);
        core.begin(1);
        for (uint64_t served = 0; served < num_batches; ++served) {
            std::optional<Step> step;
            calls.next(soon(), [&](const ExpertSide::Arrived& arrived) { step = arrived.step; });
            CHECK(step.has_value());
            const auto batch = calls.collect({{*step}});
            CHECK(batch.has_value() && batch->sources.size() == num_attention);
            std::vector<float>* const partials = &stages[served % num_stages].partials;
            stream.put([batch = *batch, partials] { compute(batch, *partials); });
            calls.reply(stream.handle(), *batch, reinterpret_cast<const std::byte*>(partials->data()), {5, 6},
                        patience_s);
        }
        CHECK(core.wait_idle(patience_ns));
        core.check();
    }

    static void answer(ExpertSide& side, ReceivedBatch& batch) {
        std::vector<float> partials(size_t{batch.num_rows} * shape.hidden);
        compute(batch, partials);
        persistently(
            [&] { side.reply(batch, reinterpret_cast<const std::byte*>(partials.data()), {5, 6}, soon()); });
    }

    static void compute(const ReceivedBatch& batch, std::vector<float>& partials) {
        std::vector<float> rows(size_t{batch.num_rows} * shape.hidden);
        std::fill(partials.begin(), partials.end(), 0.0f);
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
    }

    const bool in_streams_;
    std::vector<std::unique_ptr<Receiver>> experts_, attention_;
    std::latch over_{num_attention + num_workers};
};

void run_all(const Backend& backend, bool in_streams) {
    Exchange exchange(backend, in_streams);
    Crew crew;
    for (uint32_t f = 0; f < num_workers; ++f) crew.start([&, f] { exchange.serve(f); });
    for (uint32_t a = 0; a < num_attention; ++a) crew.start([&, a] { exchange.attend(a); });
    crew.start([&] { exchange.disturb(); });
}

void dispatch_and_combine(const Backend& backend) { run_all(backend, false); }
void dispatch_and_combine_in_streams(const Backend& backend) { run_all(backend, true); }

}  // namespace

std::vector<Case> exchange_cases() {
    return {{"dispatch_and_combine", dispatch_and_combine},
            {"dispatch_and_combine_in_streams", dispatch_and_combine_in_streams}};
}

}  // namespace antiphon::m2n::test

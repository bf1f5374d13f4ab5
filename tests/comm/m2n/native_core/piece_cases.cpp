// The parts alone: the table of steps against std::map, the scatter against a plain loop, the bell against lost wakes,
// and what a waiter learns from spinning.
#include <array>
#include <atomic>
#include <cstring>
#include <limits>
#include <map>

#include "harness.h"
#include "m2n/waiting.h"
#include "m2n/row_scatter.h"
#include "m2n/fixed_size.h"

namespace antiphon::m2n::test {

namespace {

void table_is_a_map(const Backend&) {
    std::mt19937_64 random(5);
    for (const uint32_t capacity : {1u, 2u, 5u, 64u}) {
        StepTable table(capacity);
        std::map<Step, uint32_t> model;
        for (int i = 0; i < 30'000; ++i) {
            // Few different steps, some of them far apart, so that homes collide and chains wrap around.
            const Step step = random() % (3 * capacity) << (random() % 2 * 40);
            StepEntry* found = table.find(step);
            CHECK((found != nullptr) == model.contains(step));
            if (found != nullptr) CHECK(found->step == step && found->count == model[step]);
            if (random() % 2 == 0 && (found != nullptr || model.size() < capacity)) {
                StepEntry& entry = table.find_or_add(step, 1);
                if (found == nullptr) CHECK(entry.count == 0 && entry.announcement == 0 && !entry.handed_out);
                model[step] = ++entry.count;
            } else if (found != nullptr) {
                found->count = 0;
                table.erase(*found);
                model.erase(step);
            }
        }
        size_t visited = 0;
        table.for_each([&](const StepEntry& entry) {
            CHECK(model.at(entry.step) == entry.count);
            ++visited;
        });
        CHECK(visited == model.size());
    }
}

// Rows of a stride beyond their width, exactly as much memory as is allowed to be touched.
void scatter_is_a_loop(const Backend&) {
    std::mt19937_64 random(6);
    for (int round = 0; round < 300; ++round) {
        const RowType type = std::array{RowType::bf16, RowType::fp16, RowType::fp32}[random() % 3];
        const RowShape shape{static_cast<uint32_t>(1 + random() % 70), static_cast<uint32_t>(1 + random() % 4), 20, type};
        const auto num_workers = static_cast<uint32_t>(1 + random() % 4);
        const auto num_experts = static_cast<uint32_t>(shape.top_k + random() % 5);
        std::vector<std::vector<int32_t>> owners(num_experts);
        for (auto& workers : owners) {
            const auto first = random() % num_workers, num_copies = 1 + random() % num_workers;
            for (uint64_t copy = 0; copy < num_copies; ++copy) {
                workers.push_back(static_cast<int32_t>((first + copy) % num_workers));
            }
        }
        RowScatter scatter(shape, num_workers);
        ExpertSplit split(num_workers, owners, {}, 1);
        scatter.place(3, split);
        const auto count = static_cast<uint32_t>(random() % 20);
        const uint64_t stride = shape.row_bytes() + random() % 3 * 16;
        std::vector<std::byte> rows(count == 0 ? 0 : (count - 1) * stride + shape.row_bytes());
        for (std::byte& byte : rows) byte = static_cast<std::byte>(random());
        std::vector<int32_t> ids(size_t{count} * shape.top_k);
        for (int32_t& id : ids) id = static_cast<int32_t>(random() % num_experts);
        std::vector<float> weights(ids.size());
        for (float& weight : weights) weight = static_cast<float>(random() % 1000);
        std::vector<std::vector<uint32_t>> rows_of;
        scatter.plan(3, ids.data(), count, rows_of);
        CHECK(rows_of.size() == num_workers);
        std::vector<uint32_t> counts(num_experts), served(size_t{num_experts} * num_workers);
        for (const int32_t id : ids) ++counts[static_cast<size_t>(id)];
        const auto quotas = split.split(counts);
        for (uint32_t worker = 0; worker < num_workers; ++worker) {
            const auto num_rows = static_cast<uint32_t>(rows_of[worker].size());
            std::vector<std::byte> payload(shape.dispatch_bytes(num_rows));
            scatter.write({rows.data(), stride, ids.data(), weights.data(), count}, worker, rows_of[worker],
                          payload.data());
            uint32_t at = 0;
            for (uint32_t row = 0; row < count; ++row) {
                if (at == num_rows || rows_of[worker][at] != row) continue;
                std::vector<int32_t> kept(shape.top_k);
                const size_t table = size_t{at} * shape.top_k * 4, width = size_t{shape.top_k} * 4;
                std::memcpy(kept.data(), payload.data() + table, width);
                uint32_t here = 0;
                for (uint32_t k = 0; k < shape.top_k; ++k) {
                    const int32_t id = ids[row * shape.top_k + k];
                    CHECK(kept[k] == -1 || kept[k] == id);
                    if (kept[k] != id) continue;
                    ++served[static_cast<size_t>(id) * num_workers + worker];
                    ++here;
                }
                CHECK(here > 0);
                CHECK(std::memcmp(payload.data() + shape.weights_offset(num_rows) + table,
                                  weights.data() + row * shape.top_k, width) == 0);
                CHECK(std::memcmp(payload.data() + shape.rows_offset(num_rows) + at * shape.row_bytes(),
                                  rows.data() + row * stride, shape.row_bytes()) == 0);
                ++at;
            }
            CHECK(at == num_rows);
        }
        for (uint32_t expert = 0; expert < num_experts; ++expert) {  // every choice is served once, as the split says
            for (size_t copy = 0; copy < owners[expert].size(); ++copy) {
                const auto worker = static_cast<uint32_t>(owners[expert][copy]);
                CHECK(served[expert * num_workers + worker] == quotas[split.first(expert) + copy]);
            }
        }
    }
    RowScatter scatter({4, 1, 2, RowType::fp32}, 1);
    std::vector<std::vector<uint32_t>> rows_of;
    const int32_t first = 0;
    CHECK_ERROR(Code::invalid, "layer 1 are placed nowhere", scatter.plan(1, &first, 1, rows_of));
    scatter.place(1, ExpertSplit(1, {{0}, {0}}, {}, 1));
    for (const int32_t bad : {-1, 2}) CHECK_ERROR(Code::invalid, "chose expert", scatter.plan(1, &bad, 1, rows_of));
    CHECK_ERROR(Code::invalid, "placed on worker 1 of 1", ExpertSplit(1, {{0}, {1}}, {}, 1));
    CHECK_ERROR(Code::invalid, "on 2 workers: there are 1", scatter.place(0, ExpertSplit(2, {{0}, {1}}, {}, 1)));
}

// The waiter is woken by the last of the events it waits for, and never sleeps through it.
void bell_wakes(const Backend&) {
    for (const int64_t spin_ns : {int64_t{0}, int64_t{5'000}}) {
        Bell bell{};
        Bell answer{};
        std::atomic<bool> cancelled{false};
        constexpr uint32_t num_rounds = 3000, per_round = 4;
        Crew crew;
        for (int ringer = 0; ringer < 2; ++ringer) {
            crew.start([&] {
                for (uint32_t round = 0; round < num_rounds; ++round) {
                    for (uint32_t i = 0; i < per_round / 2; ++i) ring(bell);
                    while (static_cast<int32_t>(answer.count.load() - round - 1) < 0) {
                        wait(answer, round, 1, cancelled, within_ms(50), spin_ns);
                    }
                }
            });
        }
        for (uint32_t round = 0; round < num_rounds; ++round) {
            const int64_t start_ns = monotonic_ns();
            wait(bell, round * per_round, per_round, cancelled, soon(), spin_ns);
            CHECK(bell.count.load() == (round + 1) * per_round);
            CHECK(monotonic_ns() - start_ns < 900 * millisecond_ns);  // a lost wake costs a second
            ring_always(answer);  // two wait
        }
    }
    Bell bell{};
    const std::atomic<bool> cancelled{true};
    wait(bell, 0, 1, cancelled, soon(), 0);
    const std::atomic<bool> not_cancelled{false};
    const int64_t start_ns = monotonic_ns();
    wait(bell, 0, 1, not_cancelled, within_ms(20), 1'000'000'000);
    CHECK(monotonic_ns() - start_ns >= 20 * millisecond_ns);
}

// How many waits sleep at once, if every wait that may spin does so in vain.
uint32_t skipped_after_vain_spin(SpinExperience& experience) {
    {
        Spin spin(1, soon(), experience);
        while (spin.again()) {
        }
    }
    return experience.num_to_skip;
}

void spinning_is_learnt(const Backend&) {
    constexpr int64_t long_ns = 3'600'000'000'000;
    SpinExperience experience;
    std::vector<uint32_t> skipped;
    for (int i = 0; i < 9; ++i) {
        experience.num_to_skip = 0;
        skipped.push_back(skipped_after_vain_spin(experience));
    }
    CHECK((skipped == std::vector<uint32_t>{1, 2, 4, 8, 16, 32, 64, 64, 64}));
    {
        Spin spin(1, soon(), experience);
        CHECK(!spin.again());  // skipped
    }
    CHECK(experience.num_to_skip == 63);
    {
        const Spin spin(long_ns, Deadline::after_ns(0), experience);  // nothing came before the deadline
    }
    CHECK(experience.num_to_skip == 62);
    {
        Spin spin(long_ns, soon(), experience);  // so short that spinning would have caught it
        CHECK(!spin.again());
    }
    CHECK(experience.num_to_skip == 0 && experience.in_vain == 0);

    experience = {.num_to_skip = 2, .in_vain = 0, .core_is_wanted = true};
    for (const uint32_t left : {1u, 0u}) {
        {
            Spin spin(long_ns, soon(), experience);
            CHECK(!spin.again());
        }
        CHECK(experience.num_to_skip == left);  // a short wait is no reason to take the core again
    }
    {
        Spin spin(long_ns, soon(), experience);
        spin.again();
    }
    CHECK(experience.num_to_skip == 0 || experience.core_is_wanted);  // unless somebody took a time slice just then

    experience = {.num_to_skip = 5};
    Spin none(0, soon(), experience);
    Spin endless(std::numeric_limits<int64_t>::max(), Deadline::after_ns(long_ns), experience);
    CHECK(!none.again() && endless.again() && endless.again());
    CHECK(experience.num_to_skip == 5);
}

void waiting_suits_the_machine(const Backend&) {
    CHECK(choose_waiting("auto", 2, Cores{4}, 7).waiting == Waiting::poll);
    CHECK(choose_waiting("auto", 3, Cores{4}, 7).waiting == Waiting::spin);
    CHECK(choose_waiting("auto", 3, Cores{4}, 7).spin_ns == 7);
    CHECK(choose_waiting("auto", 8, Cores{4}, 7).waiting == Waiting::spin);
    CHECK(choose_waiting("auto", 9, Cores{4}, 7).waiting == Waiting::block);
    CHECK(choose_waiting("auto", 0, Cores{2}, 7).waiting == Waiting::block);
    CHECK(choose_waiting("auto", 0, Cores{4}, 7).waiting == Waiting::spin);
    CHECK(choose_waiting("block", 1, Cores{64}, 7).spin_ns == 0);
    CHECK_ERROR(Code::invalid, "must be auto, poll, spin or block", choose_waiting("", 1, Cores{1}, 0));
    constexpr bool quota = true;  // what spins eats the time of what computes
    CHECK(choose_waiting("auto", 2, Cores{8, quota}, 7).waiting == Waiting::spin);
    CHECK(choose_waiting("auto", 4, Cores{4, quota}, 7).waiting == Waiting::spin);
    CHECK(choose_waiting("auto", 5, Cores{4, quota}, 7).waiting == Waiting::block);
    CHECK(choose_waiting("auto", 0, Cores{3, quota}, 7).waiting == Waiting::block);
    CHECK(choose_waiting("poll", 9, Cores{1, quota}, 7).waiting == Waiting::poll);  // asked for
}

}  // namespace

std::vector<Case> piece_cases() {
    return {{"table_is_a_map", table_is_a_map},
            {"scatter_is_a_loop", scatter_is_a_loop},
            {"bell_wakes", bell_wakes},
            {"spinning_is_learnt", spinning_is_learnt},
            {"waiting_suits_the_machine", waiting_suits_the_machine}};
}

}  // namespace antiphon::m2n::test

// The core that makes a stream's calls: order, failures, interrupts and ends, over streams that run in their own threads.
#include <atomic>
#include <utility>

#include "harness.h"
#include "late_device.h"
#include "m2n/stream_core.h"

namespace antiphon::m2n::test {

// --- the device

LateStream::LateStream() : thread_([this] { serve(); }) {}

LateStream::~LateStream() {
    {
        const std::lock_guard lock(mutex_);
        ends_ = true, holds_ = false;
    }
    changed_.notify_all();
    thread_.join();
}

void LateStream::put(std::function<void()> work) {
    {
        const std::lock_guard lock(mutex_);
        work_.push_back(std::move(work));
    }
    changed_.notify_all();
}

void LateStream::hold(bool on) {
    {
        const std::lock_guard lock(mutex_);
        holds_ = on;
    }
    changed_.notify_all();
}

void LateStream::finish() {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [&] { return work_.empty(); });
}

void LateStream::serve() {
    std::unique_lock lock(mutex_);
    for (;;) {
        changed_.wait(lock, [&] { return !holds_ && (ends_ || !work_.empty()); });
        if (work_.empty()) return;
        std::function<void()>& next = work_.front();  // a deque's front stays where it is
        lock.unlock();
        next();
        lock.lock();
        work_.pop_front();
        changed_.notify_all();
    }
}

StreamWord LateDevice::new_word() {
    const std::lock_guard lock(mutex_);
    words_.push_back(std::make_unique<Word>());
    return {&words_.back()->value, 0};
}

void LateDevice::signal(StreamHandle stream, const StreamWord& word, uint32_t value) {
    reinterpret_cast<LateStream*>(stream)->put([word, value] { word.raise(value); });
}

void LateDevice::wait(StreamHandle stream, const StreamWord& word, uint32_t value) {
    reinterpret_cast<LateStream*>(stream)->put([word, value] {
        while (!word.wait(value, 100 * millisecond_ns, 0)) continue;  // the core raises it, whatever happens
    });
}

namespace {

constexpr int64_t patience_ns = 60'000 * millisecond_ns;

// A core with a stream. The core ends first.
struct Streamed {
    explicit Streamed(std::shared_ptr<StreamDevice> of, int64_t stream_timeout_ns = patience_ns)
        : device(std::move(of)), core("end", device, [this] { interrupted.store(true); }, stream_timeout_ns) {}

    // A call that lasts until it is interrupted.
    std::function<void()> endless() {
        return [this] {
            while (!interrupted.exchange(false)) sleep_for_ms(1);
            throw Error(Code::interrupted, "interrupted");
        };
    }
    void rest() { CHECK(core.wait_idle(patience_ns)); }

    std::shared_ptr<StreamDevice> device;
    std::atomic<bool> interrupted{false};
    LateStream stream;
    StreamCore core;
};

// What the stream writes the call reads, what the call writes the stream reads: plain memory, ordered by the words.
void calls_are_in_the_order_of_the_stream(const Backend&) {
    Streamed end(std::make_shared<LateDevice>());
    constexpr int num_calls = 3000;
    int in = -1, out = -1;
    for (int i = 0; i < num_calls; ++i) {
        end.stream.put([&, i] { in = i; });
        const uint32_t number = end.core.submit(end.stream.handle(), [&, i] {
            CHECK(in == i);
            out = 2 * i;
        });
        end.core.block(end.stream.handle(), number);
        end.stream.put([&, i, number] {
            CHECK(out == 2 * i);
            CHECK(end.core.is_over(number));
        });
    }
    end.stream.finish();
    CHECK(out == 2 * (num_calls - 1));
}

void what_was_submitted_behind_a_failure_is_dropped(const Backend&) {
    Streamed end(std::make_shared<LateDevice>());
    for (uint32_t epoch = 1; epoch < 50; ++epoch) {
        int num_made = 0;
        end.stream.hold(true);
        for (int i = 0; i < 5; ++i) {
            const uint32_t number = end.core.submit(end.stream.handle(), [&, i] {
                if (i == 2) throw Error(Code::timeout, "the peer is late");
                ++num_made;
            });
            end.core.block(end.stream.handle(), number);
        }
        end.stream.hold(false);
        end.stream.finish();  // each flag was raised all the same
        end.rest();
        CHECK(num_made == 2);
        CHECK_ERROR(Code::timeout, "the peer is late", end.core.check());
        CHECK_ERROR(Code::timeout, "the peer is late", end.core.submit(end.stream.handle(), [] {}));
        end.core.begin(epoch);
        end.core.check();
    }
}

void a_new_epoch_ends_what_is_under_way(const Backend&) {
    Streamed end(std::make_shared<LateDevice>());
    for (uint32_t epoch = 1; epoch < 50; ++epoch) {
        {
            Crew crew;
            const uint32_t number = end.core.submit(end.stream.handle(), end.endless());
            end.core.block(end.stream.handle(), number);
            crew.start([&] { end.core.abort(epoch); });
        }
        end.stream.finish();
        end.rest();
        CHECK_ERROR(Code::interrupted, "", end.core.check());
        end.interrupted.store(false);
        end.core.begin(epoch);
        int value = 0;
        end.core.block(end.stream.handle(), end.core.submit(end.stream.handle(), [&] { value = 7; }));
        end.stream.finish();
        CHECK(value == 7);
    }
}

// While a call waits for its stream, those that need none are made.
void calls_without_a_stream_pass_those_that_wait(const Backend&) {
    Streamed end(std::make_shared<LateDevice>());
    int value = 0, tries = 0;
    end.stream.hold(true);
    for (int i = 0; i < 20; ++i) end.core.submit(end.stream.handle(), [&] { ++value; });
    for (int i = 0; i < 20; ++i) {
        end.core.run([&](Deadline) {
            CHECK(value == 0);
            return ++tries % 3 == 0;
        });
    }
    CHECK(tries == 60);
    CHECK_ERROR(Code::no_credit, "no slot", end.core.run([](Deadline) -> bool { throw Error(Code::no_credit, "no slot"); }));
    end.stream.hold(false);
    end.rest();
    CHECK(value == 20);
}

void a_stream_that_does_not_come_is_named(const Backend&) {
    Streamed end(std::make_shared<LateDevice>(), 30 * millisecond_ns);
    end.stream.hold(true);
    bool made = false;
    end.core.block(end.stream.handle(), end.core.submit(end.stream.handle(), [&] { made = true; }));
    end.rest();
    CHECK_ERROR(Code::timeout, "end: the device did not come to call 1", end.core.check());
    CHECK(!made);
}

// Ends that are dropped with calls that wait for their stream, for a peer, or that nothing has looked at.
void ends_that_are_dropped(const Backend&) {
    const auto device = std::make_shared<LateDevice>();
    for (int turn = 0; turn < 60; ++turn) {
        auto end = std::make_unique<Streamed>(device);
        end->stream.hold(turn % 3 == 0);
        for (int i = 0; i < turn % 4; ++i) {
            end->core.block(end->stream.handle(), end->core.submit(end->stream.handle(), [] {}));
        }
        if (turn % 2 == 0) end->core.block(end->stream.handle(), end->core.submit(end->stream.handle(), end->endless()));
        if (turn % 5 == 0) end->core.stop();
        end.reset();
    }
}

void cores_side_by_side(const Backend&) {
    const auto device = std::make_shared<LateDevice>();
    std::atomic<int> total{0};
    {
        Crew crew;
        for (int me = 0; me < 4; ++me) {
            crew.start([&] {
                Streamed end(device);
                int mine = 0;
                for (int i = 0; i < 300; ++i) {
                    end.core.block(end.stream.handle(), end.core.submit(end.stream.handle(), [&] { ++mine; }));
                }
                end.stream.finish();
                total += mine;
            });
        }
    }
    CHECK(total == 1200);
}

}  // namespace

std::vector<Case> stream_cases() {
    return {
        {"calls_are_in_the_order_of_the_stream", calls_are_in_the_order_of_the_stream},
        {"what_was_submitted_behind_a_failure_is_dropped", what_was_submitted_behind_a_failure_is_dropped},
        {"a_new_epoch_ends_what_is_under_way", a_new_epoch_ends_what_is_under_way},
        {"calls_without_a_stream_pass_those_that_wait", calls_without_a_stream_pass_those_that_wait},
        {"a_stream_that_does_not_come_is_named", a_stream_that_does_not_come_is_named},
        {"ends_that_are_dropped", ends_that_are_dropped},
        {"cores_side_by_side", cores_side_by_side},
    };
}

}  // namespace antiphon::m2n::test

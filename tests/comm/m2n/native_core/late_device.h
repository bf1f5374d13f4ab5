// A device whose streams run in threads of their own, later than what is put on them, as a GPU's do. Words are plain
// memory; what the device computes between two words is a function of the test's.
#pragma once

#include <condition_variable>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "m2n/stream_device.h"
#include "m2n/types.h"

namespace antiphon::m2n::test {

class LateStream {
  public:
    LateStream();
    ~LateStream();  // once all that was put on it is done
    void put(std::function<void()> work);
    void hold(bool on);  // it comes to nothing until it is let go
    void finish();       // waits until all is done
    StreamHandle handle() { return reinterpret_cast<StreamHandle>(this); }

  private:
    void serve();

    std::mutex mutex_;
    std::condition_variable changed_;
    std::deque<std::function<void()>> work_;  // what is done stays in front until it is over
    bool holds_ = false, ends_ = false;
    std::thread thread_;
};

class LateDevice final : public StreamDevice {
  public:
    const char* name() const override { return "late"; }
    StreamWord new_word() override;
    void signal(StreamHandle stream, const StreamWord& word, uint32_t value) override;
    void wait(StreamHandle stream, const StreamWord& word, uint32_t value) override;
    bool needs_flush() const override { return false; }
    void flush_writes() override {}
    std::string why_not_written() const override { return "its memory is the host's"; }
    int ordinal() const override { return 0; }
    std::shared_ptr<std::byte> allocate(size_t) override { throw Error(Code::invalid, why_not_written()); }
    void copy(void*, const void*, size_t) override { throw Error(Code::invalid, why_not_written()); }
    void finish_copies() override {}

  private:
    struct alignas(64) Word {
        uint32_t value = 0;
    };
    std::mutex mutex_;
    std::vector<std::unique_ptr<Word>> words_;
};

}  // namespace antiphon::m2n::test

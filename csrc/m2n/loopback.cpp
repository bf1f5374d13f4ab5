// The back-end within one process: endpoints in threads of it, or several in one thread. It exists for tests and
// simulation, and it can be malicious within the rules: with a seed it delivers late, a few at a time and shuffled.
//
// Both ends of a pair share one block of memory, and the sender finds the receiver's block by a random token in a
// table of the process: the welcome is bytes, and bytes cannot carry a reference.
#include <algorithm>
#include <map>
#include <memory>
#include <mutex>
#include <random>
#include <thread>
#include <utility>

#include "base/huge_buffer.h"
#include "m2n/control.h"
#include "m2n/pair_memory.h"
#include "m2n/transport.h"
#include "m2n/types.h"

namespace antiphon::m2n {

namespace {

struct Shared {
    HugeBuffer buffer;
    PairMemory memory;
    std::shared_ptr<Bells> sender;
    std::shared_ptr<Bells> receiver;
};

using Token = std::vector<std::byte>;

// Things of this process that the other end will ask for by token.
template <class T>
class Exchange {
  public:
    Token offer(std::shared_ptr<T> value) {
        Token token(token_bytes);
        fill_random(token);
        const std::lock_guard lock(mutex_);
        offered_[token] = std::move(value);
        return token;
    }
    std::shared_ptr<T> take(const Token& token) {
        const std::lock_guard lock(mutex_);
        const auto found = offered_.find(token);
        if (found == offered_.end()) throw Error(Code::refused, "loopback: the peer is not in this process");
        std::shared_ptr<T> value = std::move(found->second);
        offered_.erase(found);
        return value;
    }

  private:
    std::mutex mutex_;
    std::map<Token, std::shared_ptr<T>> offered_;
};

template <class T>
Exchange<T>& offered() {
    static Exchange<T> exchange;
    return exchange;
}

// An end that holds back and reorders what it polled, when it has a seed.
template <class End>
class Shuffled final : public End {
  public:
    Shuffled(const std::shared_ptr<Shared>& shared, Bell& rung, uint64_t seed)
        : End(shared->memory, rung, shared), enabled_(seed != 0), random_(seed) {}

    bool poll(ImmediateSink& sink, std::string& reason) override {
        End::poll(sink, reason);
        if (!enabled_) return true;
        held_.insert(held_.end(), sink.begin(), sink.end());
        sink.clear();
        std::shuffle(held_.begin(), held_.end(), random_);
        for (size_t left = held_.size(); left > 0; --left) {
            if (random_() % 2 != 0) continue;
            sink.push_back(held_.back());
            held_.pop_back();
        }
        return true;
    }

  private:
    bool enabled_;
    std::mt19937_64 random_;
    ImmediateSink held_;
};

class Loopback final : public MemoryTransport {
  public:
    explicit Loopback(uint64_t seed) : bells_(std::make_shared<Bells>()), seed_(seed) {}

    const char* name() const override { return "loopback"; }

    Blob introduce() override { return {offered<Bells>().offer(bells_), {}}; }

    std::shared_ptr<Landing> open_landing(const PairSpec& spec, const Blob& introduction, Blob& welcome) override {
        auto shared = std::make_shared<Shared>();
        shared->buffer = HugeBuffer(PairMemory::bytes(spec));
        shared->memory = PairMemory(reinterpret_cast<std::byte*>(shared->buffer.data()), spec);
        shared->sender = offered<Bells>().take(introduction.bytes);
        shared->receiver = bells_;
        welcome.bytes = offered<Shared>().offer(shared);
        return std::make_shared<Shuffled<MemoryLanding>>(shared, shared->sender->of(Event::credit),
                                                         seed_ == 0 ? 0 : seed_ + spec.source);
    }

    std::shared_ptr<Link> open_link(const PairSpec& spec, Blob& welcome, const std::string&, uint16_t,
                                    Deadline) override {
        const std::shared_ptr<Shared> shared = offered<Shared>().take(welcome.bytes);
        return std::make_shared<Shuffled<MemoryLink>>(shared, shared->receiver->of(Event::arrival),
                                                      seed_ == 0 ? 0 : seed_ + ~spec.source);
    }

    void block(Event event, uint32_t prepared, uint32_t needed, Deadline deadline, int64_t spin_ns,
               EndId end) override {
        // With a seed something may be held back: only asking again brings it forward.
        if (seed_ != 0) return std::this_thread::yield();
        MemoryTransport::block(event, prepared, needed, deadline, spin_ns, end);
    }

  private:
    Bells& own() override { return *bells_; }

    std::shared_ptr<Bells> bells_;
    uint64_t seed_;
};

}  // namespace

std::shared_ptr<Transport> make_loopback(const TransportOptions& options) {
    return std::make_shared<Loopback>(options.shuffle_seed);
}

}  // namespace antiphon::m2n

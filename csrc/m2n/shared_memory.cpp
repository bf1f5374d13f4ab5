// The back-end for processes of one machine: the sender writes straight into the receiver's slots.
//
// Every pair has a memory file of its own, made by the receiver and handed over through the control connection; a
// source that comes back gets a new one, so a late write of its former incarnation lands where nobody reads. Each
// endpoint has one more file with two bells, for arrivals and for credits, that its peers ring.
#include <atomic>
#include <cstring>
#include <memory>
#include <utility>

#include "m2n/bell.h"
#include "m2n/error.h"
#include "m2n/mapped_file.h"
#include "m2n/pair_memory.h"
#include "m2n/transports.h"

namespace antiphon::m2n {

namespace {

struct BellPage {
    Bell bells[2];  // by Event

    Bell& of(Event event) { return bells[static_cast<size_t>(event)]; }
};
constexpr uint64_t bell_file_bytes = 4096;
static_assert(sizeof(BellPage) <= bell_file_bytes);

BellPage& bells_in(const MappedFile& file) { return *reinterpret_cast<BellPage*>(file.data()); }

class SharedLanding final : public Landing {
  public:
    SharedLanding(const PairSpec& spec, MappedFile memory, MappedFile sender_bells)
        : file_(std::move(memory)),
          sender_bells_(std::move(sender_bells)),
          memory_(file_.data(), spec),
          arrivals_(spec.slots) {}

    const std::byte* slot(SlotId slot) const override { return memory_.slot(slot); }

    bool poll(ImmediateSink& sink, std::string&) override {
        arrivals_.read(sink, [&](SlotId slot) -> std::atomic<uint32_t>& { return memory_.arrived(slot); });
        return true;
    }

    void release(Immediate immediate) override {
        memory_.released(immediate.slot).store(immediate.pack(), std::memory_order_release);
        ring(bells_in(sender_bells_).of(Event::credit));
    }

  private:
    MappedFile file_;
    MappedFile sender_bells_;
    PairMemory memory_;
    WordReader arrivals_;
};

class SharedLink final : public Link {
  public:
    SharedLink(const PairSpec& spec, MappedFile memory, MappedFile receiver_bells)
        : file_(std::move(memory)),
          receiver_bells_(std::move(receiver_bells)),
          memory_(file_.data(), spec),
          credits_(spec.slots) {}

    std::byte* slot(SlotId slot) override { return memory_.slot(slot); }

    void post(Immediate immediate, const MessageHeader& header, const std::byte* payload) override {
        std::byte* slot = memory_.slot(immediate.slot);
        if (payload != nullptr && header.length > 0) std::memcpy(slot + header_bytes, payload, header.length);
        std::memcpy(slot, &header, header_bytes);
        memory_.arrived(immediate.slot).store(immediate.pack(), std::memory_order_release);
        ring(bells_in(receiver_bells_).of(Event::arrival));
    }

    bool source_reusable(SlotId) override { return true; }

    bool poll(ImmediateSink& sink, std::string&) override {
        credits_.read(sink, [&](SlotId slot) -> std::atomic<uint32_t>& { return memory_.released(slot); });
        return true;
    }

  private:
    MappedFile file_;
    MappedFile receiver_bells_;
    PairMemory memory_;
    WordReader credits_;
};

class SharedMemory final : public Transport {
  public:
    SharedMemory() : bells_(MappedFile::create(bell_file_bytes)) {}

    const char* name() const override { return "shm"; }
    bool same_host_only() const override { return true; }

    Blob introduce() override {
        Blob blob;
        blob.descriptors.push_back(bells_.duplicate());
        return blob;
    }

    std::unique_ptr<Landing> open_landing(const PairSpec& spec, const Blob& introduction, Blob& welcome) override {
        if (introduction.descriptors.size() != 1) throw Error(Code::refused, "shm: the sender named no bells");
        FileDescriptor sender_bells(fcntl_duplicate(introduction.descriptors[0]));
        MappedFile memory = MappedFile::create(PairMemory::bytes(spec));
        welcome.descriptors.push_back(memory.duplicate());
        welcome.descriptors.push_back(bells_.duplicate());
        return std::make_unique<SharedLanding>(spec, std::move(memory),
                                               MappedFile::adopt(std::move(sender_bells), bell_file_bytes));
    }

    std::unique_ptr<Link> open_link(const PairSpec& spec, Blob& welcome, const std::string&, uint16_t,
                                    Deadline) override {
        if (welcome.descriptors.size() != 2) throw Error(Code::refused, "shm: the receiver named no memory");
        MappedFile memory = MappedFile::adopt(std::move(welcome.descriptors[0]), PairMemory::bytes(spec));
        MappedFile bells = MappedFile::adopt(std::move(welcome.descriptors[1]), bell_file_bytes);
        return std::make_unique<SharedLink>(spec, std::move(memory), std::move(bells));
    }

    bool adopt(FileDescriptor&, std::span<const std::byte>) override { return false; }
    void progress() override {}

    uint32_t prepare(Event event) override { return own().of(event).count.load(); }

    void block(Event event, uint32_t prepared, uint32_t needed, Deadline deadline, int64_t spin_ns, EndId) override {
        wait(own().of(event), prepared, needed, interrupted_, deadline, spin_ns);
        interrupted_.store(false);
    }

    void interrupt() override {
        interrupted_.store(true);
        ring_always(own().of(Event::arrival));
        ring_always(own().of(Event::credit));
    }

  private:
    static int fcntl_duplicate(const FileDescriptor& descriptor) {
        const int copy = ::dup(descriptor.get());
        if (copy < 0) throw_errno("dup of the sender's bells");
        return copy;
    }
    BellPage& own() { return bells_in(bells_); }

    MappedFile bells_;
    std::atomic<bool> interrupted_{false};
};

}  // namespace

std::unique_ptr<Transport> make_shared_memory(const TransportOptions&) { return std::make_unique<SharedMemory>(); }

}  // namespace antiphon::m2n

// The back-end for processes of one machine: the sender writes straight into the receiver's slots.
//
// Every pair has a memory file of its own, made by the receiver and handed over through the control connection; a
// source that comes back gets a new one, so a late write of its former incarnation lands where it is not read. Each
// endpoint has one more file with two bells, for arrivals and for credits, that its peers ring.
#include <memory>
#include <utility>

#include "m2n/error.h"
#include "m2n/mapped_file.h"
#include "m2n/pair_memory.h"
#include "m2n/transport.h"

namespace antiphon::m2n {

namespace {

constexpr uint64_t bell_file_bytes = 4096;
static_assert(sizeof(Bells) <= bell_file_bytes);

Bells& bells_in(const MappedFile& file) { return *reinterpret_cast<Bells*>(file.data()); }

// The files of one pair that an end maps: its memory, and the bells of the other end.
struct PairFiles {
    MappedFile memory;
    MappedFile bells;
};

class SharedMemory final : public MemoryTransport {
  public:
    SharedMemory() : bells_(MappedFile::create(bell_file_bytes)) {}

    const char* name() const override { return "shm"; }

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
        const auto files = std::make_shared<PairFiles>(
            PairFiles{std::move(memory), MappedFile::adopt(std::move(sender_bells), bell_file_bytes)});
        return std::make_unique<MemoryLanding>(PairMemory(files->memory.data(), spec),
                                               bells_in(files->bells).of(Event::credit), files);
    }

    std::unique_ptr<Link> open_link(const PairSpec& spec, Blob& welcome, const std::string&, uint16_t,
                                    Deadline) override {
        if (welcome.descriptors.size() != 2) throw Error(Code::refused, "shm: the receiver named no memory");
        MappedFile memory = MappedFile::adopt(std::move(welcome.descriptors[0]), PairMemory::bytes(spec));
        MappedFile bells = MappedFile::adopt(std::move(welcome.descriptors[1]), bell_file_bytes);
        const auto files = std::make_shared<PairFiles>(PairFiles{std::move(memory), std::move(bells)});
        return std::make_unique<MemoryLink>(PairMemory(files->memory.data(), spec),
                                            bells_in(files->bells).of(Event::arrival), files);
    }

  private:
    static int fcntl_duplicate(const FileDescriptor& descriptor) {
        const int copy = ::dup(descriptor.get());
        if (copy < 0) throw_errno("dup of the sender's bells");
        return copy;
    }
    Bells& own() override { return bells_in(bells_); }

    MappedFile bells_;
};

}  // namespace

std::unique_ptr<Transport> make_shared_memory(const TransportOptions&) { return std::make_unique<SharedMemory>(); }

}  // namespace antiphon::m2n

// The back-end for processes of one machine: the sender writes straight into the receiver's slots.
//
// Every pair has a memory file of its own, made by the receiver and handed over through the control connection; a
// source that comes back gets a new one, so a late write of its former incarnation lands where it is not read. Each
// endpoint has one more file with two bells, for arrivals and for credits, that its peers ring.
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <memory>
#include <string>
#include <utility>

#include "m2n/pair_memory.h"
#include "m2n/transport.h"

namespace antiphon::m2n {

FileDescriptor duplicate(const FileDescriptor& descriptor, const char* what) {
    FileDescriptor copy(fcntl(descriptor.get(), F_DUPFD_CLOEXEC, 0));
    if (!copy) throw_errno(std::string("dup of ") + what);
    return copy;
}

MappedFile::MappedFile(FileDescriptor descriptor, uint64_t bytes) : descriptor_(std::move(descriptor)) {
    void* mapping = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, descriptor_.get(), 0);
    if (mapping == MAP_FAILED) throw_errno("mmap of " + std::to_string(bytes) + " shared bytes");
    data_ = std::unique_ptr<std::byte, Unmap>(static_cast<std::byte*>(mapping), {bytes});
}

MappedFile MappedFile::create(uint64_t bytes) {
    FileDescriptor descriptor(memfd_create("antiphon-m2n", MFD_CLOEXEC | MFD_ALLOW_SEALING));
    if (!descriptor) throw_errno("memfd_create");
    if (ftruncate(descriptor.get(), static_cast<off_t>(bytes)) != 0) {
        throw_errno("reserving " + std::to_string(bytes) + " shared bytes");
    }
    if (fcntl(descriptor.get(), F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL) != 0) {
        throw_errno("sealing a memory file");
    }
    return MappedFile(std::move(descriptor), bytes);
}

MappedFile MappedFile::adopt(FileDescriptor descriptor, uint64_t bytes) {
    struct stat status {};
    if (!descriptor || fstat(descriptor.get(), &status) != 0) {
        throw Error(Code::refused, "the peer sent no memory file");
    }
    const int present = fcntl(descriptor.get(), F_GET_SEALS);
    if (present < 0 || (present & (F_SEAL_SHRINK | F_SEAL_GROW)) != (F_SEAL_SHRINK | F_SEAL_GROW)) {
        throw Error(Code::refused, "the peer's memory file is not sealed against resizing");
    }
    if (status.st_size < 0 || static_cast<uint64_t>(status.st_size) != bytes) {
        throw Error(Code::refused, concat("the peer's memory file has ", status.st_size, " bytes, not ", bytes));
    }
    return MappedFile(std::move(descriptor), bytes);
}

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
        blob.descriptors.push_back(duplicate(bells_.descriptor(), "a memory file"));
        return blob;
    }

    std::shared_ptr<Landing> open_landing(const PairSpec& spec, const Blob& introduction, Blob& welcome) override {
        if (introduction.descriptors.size() != 1) throw Error(Code::refused, "shm: the sender named no bells");
        FileDescriptor sender_bells = duplicate(introduction.descriptors[0], "the sender's bells");
        MappedFile memory = MappedFile::create(PairMemory::bytes(spec));
        welcome.descriptors.push_back(duplicate(memory.descriptor(), "a memory file"));
        welcome.descriptors.push_back(duplicate(bells_.descriptor(), "a memory file"));
        const auto files = std::make_shared<PairFiles>(
            PairFiles{std::move(memory), MappedFile::adopt(std::move(sender_bells), bell_file_bytes)});
        return std::make_shared<MemoryLanding>(PairMemory(files->memory.data(), spec),
                                               bells_in(files->bells).of(Event::credit), files);
    }

    std::shared_ptr<Link> open_link(const PairSpec& spec, Blob& welcome, const std::string&, uint16_t,
                                    Deadline) override {
        if (welcome.descriptors.size() != 2) throw Error(Code::refused, "shm: the receiver named no memory");
        MappedFile memory = MappedFile::adopt(std::move(welcome.descriptors[0]), PairMemory::bytes(spec));
        MappedFile bells = MappedFile::adopt(std::move(welcome.descriptors[1]), bell_file_bytes);
        const auto files = std::make_shared<PairFiles>(PairFiles{std::move(memory), std::move(bells)});
        return std::make_shared<MemoryLink>(PairMemory(files->memory.data(), spec),
                                            bells_in(files->bells).of(Event::arrival), files);
    }

  private:
    Bells& own() override { return bells_in(bells_); }

    MappedFile bells_;
};

}  // namespace

std::shared_ptr<Transport> make_shared_memory(const TransportOptions&) { return std::make_shared<SharedMemory>(); }

}  // namespace antiphon::m2n

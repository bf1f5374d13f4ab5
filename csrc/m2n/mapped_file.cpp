#include "m2n/mapped_file.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <string>
#include <utility>

#include "m2n/error.h"

namespace antiphon::m2n {

namespace {
constexpr int seals = F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL;
}

MappedFile::MappedFile(FileDescriptor descriptor, uint64_t bytes) : descriptor_(std::move(descriptor)), bytes_(bytes) {
    void* mapping = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, descriptor_.get(), 0);
    if (mapping == MAP_FAILED) throw_errno("mmap of " + std::to_string(bytes) + " shared bytes");
    data_ = static_cast<std::byte*>(mapping);
}

MappedFile MappedFile::create(uint64_t bytes) {
    FileDescriptor descriptor(memfd_create("antiphon-m2n", MFD_CLOEXEC | MFD_ALLOW_SEALING));
    if (!descriptor) throw_errno("memfd_create");
    if (ftruncate(descriptor.get(), static_cast<off_t>(bytes)) != 0) {
        throw_errno("reserving " + std::to_string(bytes) + " shared bytes");
    }
    if (fcntl(descriptor.get(), F_ADD_SEALS, seals) != 0) throw_errno("sealing a memory file");
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
        throw Error(Code::refused, "the peer's memory file has " + std::to_string(status.st_size) + " bytes, not " +
                                       std::to_string(bytes));
    }
    return MappedFile(std::move(descriptor), bytes);
}

MappedFile::~MappedFile() {
    if (data_ != nullptr) munmap(data_, bytes_);
}

MappedFile::MappedFile(MappedFile&& other) noexcept
    : descriptor_(std::move(other.descriptor_)),
      data_(std::exchange(other.data_, nullptr)),
      bytes_(std::exchange(other.bytes_, 0)) {}

MappedFile& MappedFile::operator=(MappedFile&& other) noexcept {
    std::swap(descriptor_, other.descriptor_);
    std::swap(data_, other.data_);
    std::swap(bytes_, other.bytes_);
    return *this;
}

FileDescriptor MappedFile::duplicate() const {
    FileDescriptor copy(fcntl(descriptor_.get(), F_DUPFD_CLOEXEC, 0));
    if (!copy) throw_errno("dup of a memory file");
    return copy;
}

}  // namespace antiphon::m2n

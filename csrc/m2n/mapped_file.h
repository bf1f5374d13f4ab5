// An anonymous memory file and its mapping. The file has no name that could collide or leak, and goes away with the
// last process that holds it, however that one dies. Sealed against resizing, so that a peer cannot pull the memory
// away under a reader.
#pragma once

#include <cstddef>
#include <cstdint>

#include "m2n/file_descriptor.h"

namespace antiphon::m2n {

class MappedFile {
  public:
    MappedFile() = default;
    static MappedFile create(uint64_t bytes);  // zero-filled; pages are used once written
    // A file from a peer: Error(refused) unless it is a sealed memory file of exactly the expected size.
    static MappedFile adopt(FileDescriptor descriptor, uint64_t bytes);
    ~MappedFile();
    MappedFile(MappedFile&& other) noexcept;
    MappedFile& operator=(MappedFile&& other) noexcept;
    MappedFile(const MappedFile&) = delete;
    MappedFile& operator=(const MappedFile&) = delete;

    std::byte* data() const { return data_; }
    FileDescriptor duplicate() const;  // to hand to a peer

  private:
    MappedFile(FileDescriptor descriptor, uint64_t bytes);

    FileDescriptor descriptor_;
    std::byte* data_ = nullptr;
    uint64_t bytes_ = 0;
};

}  // namespace antiphon::m2n

// Zero-filled memory from the system, aligned to 2 MiB where that allows huge pages. Pages are touched lazily.
#pragma once

#include <cstddef>
#include <memory>

namespace antiphon {

struct Unmap {
    size_t num_bytes = 0;
    void operator()(void* mapping) const;
};

class HugeBuffer {
  public:
    HugeBuffer() = default;
    explicit HugeBuffer(size_t num_bytes);  // throws std::bad_alloc

    char* data() const { return data_.get(); }
    size_t size() const { return data_ ? data_.get_deleter().num_bytes : 0; }

  private:
    std::unique_ptr<char, Unmap> data_;
};

}  // namespace antiphon

// Zero-filled memory from the system, aligned to 2 MiB where that allows huge pages. Pages are touched lazily.
#pragma once

#include <cstddef>

namespace antiphon {

class HugeBuffer {
  public:
    HugeBuffer() = default;
    explicit HugeBuffer(size_t num_bytes);  // throws std::bad_alloc
    ~HugeBuffer();
    HugeBuffer(HugeBuffer&& other) noexcept;
    HugeBuffer& operator=(HugeBuffer&& other) noexcept;
    HugeBuffer(const HugeBuffer&) = delete;
    HugeBuffer& operator=(const HugeBuffer&) = delete;

    char* data() const { return data_; }
    size_t size() const { return size_; }

  private:
    char* data_ = nullptr;
    size_t size_ = 0;
};

}  // namespace antiphon

// First in, first out, of a size fixed once: what is on its way in a pair is bounded by its slots.
#pragma once

#include <cassert>
#include <cstddef>
#include <vector>

namespace antiphon::m2n {

// A queue that never allocates after its construction.
template <class T>
class FixedQueue {
  public:
    explicit FixedQueue(size_t capacity) : items_(capacity) {}

    size_t size() const { return size_; }
    bool empty() const { return size_ == 0; }
    bool full() const { return size_ == items_.size(); }
    const T& operator[](size_t index) const { return items_[(first_ + index) % items_.size()]; }
    void push(const T& item) {
        assert(!full());
        items_[(first_ + size_) % items_.size()] = item;
        ++size_;
    }
    T pop() {
        assert(!empty());
        const T item = items_[first_];
        first_ = (first_ + 1) % items_.size();
        --size_;
        return item;
    }

  private:
    std::vector<T> items_;
    size_t first_ = 0;
    size_t size_ = 0;
};

}  // namespace antiphon::m2n

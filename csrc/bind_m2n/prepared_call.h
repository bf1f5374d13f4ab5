// A call of a loop: its arguments were converted, checked and kept before, all but the step.
//
// Where processes outnumber cores, what a process touches between two sleeps has left the caches when it wakes. A list
// of eight numbers is nine objects to fetch from memory, a function written around the call is a dozen more.
#pragma once

#include <cstdint>
#include <functional>
#include <utility>

namespace antiphon::bind {

class PreparedCall {
  public:
    explicit PreparedCall(std::function<void(uint64_t)> run) : run_(std::move(run)) {}
    void operator()(uint64_t step) { run_(step); }

  private:
    std::function<void(uint64_t)> run_;
};

}  // namespace antiphon::bind

// Every call that Python makes of a kernel, as a value: made at once, or noted and made again.
//
// A decode step is the same calls on the same buffers every time; only the number of rows changes. A CallList keeps them,
// so a step costs one call from Python instead of some hundred. Nothing is computed while calls are noted.
// Rejected: a native copy of the layers' order. Each family's layer would be written twice.
#pragma once

#include <variant>
#include <vector>

#include "kernels/operations.h"

namespace antiphon::kernels {

// A place in a list; when it is reached, the time is taken.
struct TimeMark {};

struct KernelCall {
    ElementType type = ElementType::fp32;
    std::variant<LinearCall, RmsNormCall, GroupedFfnCall, RotateCall, AttentionCall, GateCall, ArgmaxCall, ChooseCall,
                 TimeMark>
        call;

    void make(ThreadPool& pool) const;
    // Only for calls that have as many rows as the batch, one for each sequence.
    void set_num_rows(int64_t num_rows);
};

class CallList {
  public:
    // Calls of this thread go into the list from now on, until `end`.
    void begin();
    static void end();

    void mark();
    size_t num_calls() const { return calls_.size(); }

    // Makes all calls with this many rows. `times_ns`: the start and then every mark, of the monotonic clock.
    void run(int64_t num_rows, int64_t* times_ns);

  private:
    friend void perform(ElementType type, decltype(KernelCall::call) call);
    std::vector<KernelCall> calls_;
};

// Whether this thread notes calls: buffers have no values yet.
bool is_noting();

// Makes a call, or notes it where this thread notes calls.
void perform(ElementType type, decltype(KernelCall::call) call);

// What kernels have taken since the process began, as the threads that called them saw it. Only while it `counts`.
struct KernelTime {
    static KernelTime& instance();

    bool counts = false;
    int64_t processor_ns = 0;
    int64_t elapsed_ns = 0;
    int64_t num_calls = 0;  // from Python
};

}  // namespace antiphon::kernels

#include "kernels/calls.h"

#include <time.h>

#include "kernels/isa.h"

namespace antiphon::kernels {

namespace {

thread_local CallList* noting = nullptr;

int64_t clock_ns(clockid_t clock) {
    timespec now{};
    clock_gettime(clock, &now);
    return int64_t{now.tv_sec} * 1'000'000'000 + now.tv_nsec;
}

// Counts from its construction to its end.
class Counted {
  public:
    Counted() : counts_(KernelTime::instance().counts) {
        if (!counts_) return;
        elapsed_ns_ = clock_ns(CLOCK_MONOTONIC);
        processor_ns_ = clock_ns(CLOCK_THREAD_CPUTIME_ID);
    }
    ~Counted() {
        if (!counts_) return;
        KernelTime& time = KernelTime::instance();
        __atomic_fetch_add(&time.processor_ns, clock_ns(CLOCK_THREAD_CPUTIME_ID) - processor_ns_, __ATOMIC_RELAXED);
        __atomic_fetch_add(&time.elapsed_ns, clock_ns(CLOCK_MONOTONIC) - elapsed_ns_, __ATOMIC_RELAXED);
        __atomic_fetch_add(&time.num_calls, 1, __ATOMIC_RELAXED);
    }
    Counted(const Counted&) = delete;
    Counted& operator=(const Counted&) = delete;

  private:
    bool counts_;
    int64_t elapsed_ns_ = 0;
    int64_t processor_ns_ = 0;
};

struct Maker {
    const ElementKernels& own;
    ThreadPool& pool;

    void operator()(const LinearCall& call) const { own.linear(call, pool); }
    void operator()(const RmsNormCall& call) const { own.rms_norm(call, pool); }
    void operator()(const GroupedFfnCall& call) const { own.grouped_ffn(call, pool); }
    void operator()(const RotateCall& call) const { own.rotate_and_store(call, pool); }
    void operator()(const AttentionCall& call) const { own.paged_attention(call, pool); }
    void operator()(const GateCall& call) const { own.gate(call, pool); }
    void operator()(const ArgmaxCall& call) const { kernels().argmax(call, pool); }
    void operator()(const ChooseCall& call) const { kernels().choose(call, pool); }
    void operator()(const TimeMark&) const {}
};

struct RowSetter {
    int64_t num_rows;

    void operator()(LinearCall& call) const { call.x.count = call.residual.count = num_rows; }
    void operator()(RmsNormCall& call) const { call.x.count = call.delta.count = num_rows; }
    void operator()(GroupedFfnCall& call) const { call.x.count = num_rows; }
    void operator()(RotateCall& call) const { call.qkv.count = call.batch.num_sequences = num_rows; }
    void operator()(AttentionCall& call) const { call.batch.num_sequences = num_rows; }
    void operator()(GateCall& call) const { call.logits.x.count = num_rows; }
    void operator()(ArgmaxCall& call) const { call.num_rows = num_rows; }
    void operator()(ChooseCall& call) const { call.num_rows = num_rows; }
    void operator()(TimeMark&) const {}
};

}  // namespace

void KernelCall::make(ThreadPool& pool) const { std::visit(Maker{kernels().of(type), pool}, call); }

void KernelCall::set_num_rows(int64_t num_rows) { std::visit(RowSetter{num_rows}, call); }

void CallList::begin() { noting = this; }

void CallList::end() { noting = nullptr; }

void CallList::mark() { calls_.push_back({ElementType::fp32, TimeMark{}}); }

void CallList::run(int64_t num_rows, int64_t* times_ns) {
    const Counted counted;
    ThreadPool& pool = ThreadPool::instance();
    *times_ns++ = clock_ns(CLOCK_MONOTONIC);
    for (KernelCall& call : calls_) {
        call.set_num_rows(num_rows);
        call.make(pool);
        if (std::holds_alternative<TimeMark>(call.call)) *times_ns++ = clock_ns(CLOCK_MONOTONIC);
    }
}

bool is_noting() { return noting != nullptr; }

void perform(ElementType type, decltype(KernelCall::call) call) {
    if (noting != nullptr) {
        noting->calls_.push_back({type, std::move(call)});
        return;
    }
    const Counted counted;
    KernelCall{type, std::move(call)}.make(ThreadPool::instance());
}

KernelTime& KernelTime::instance() {
    static KernelTime time;
    return time;
}

}  // namespace antiphon::kernels

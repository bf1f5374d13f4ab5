#include "m2n/stream_device.h"

#include <dlfcn.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cstring>
#include <mutex>
#include <vector>

#include "base/wait_word.h"
#include "m2n/types.h"

namespace antiphon::m2n {

bool StreamWord::reached(uint32_t value) const { return load_u32(host) - value < 1u << 31; }

void StreamWord::raise(uint32_t value) const { store_wake_u32(host, value); }

bool StreamWord::wait(uint32_t value, int64_t timeout_ns, int64_t spin_ns) const {
    const Deadline deadline = Deadline::after_ns(timeout_ns);
    for (;;) {
        const uint32_t seen = load_u32(host);
        if (seen - value < 1u << 31) return true;
        const int64_t left_ns = deadline.left_ns();
        if (left_ns == 0) return false;
        wait_u32(host, seen, left_ns, spin_ns);
    }
}

namespace {

// Pages of words, a cache line each: raising one does not disturb who waits for another.
class WordPages {
  public:
    ~WordPages() {
        for (std::byte* page : pages_) ::munmap(page, page_bytes());
    }
    // `is_new`: the word is the first of its page.
    uint32_t* next(bool& is_new) {
        is_new = pages_.empty() || used_ == page_bytes();
        if (is_new) {
            void* page = ::mmap(nullptr, page_bytes(), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
            if (page == MAP_FAILED) throw_errno("mmap of a page of words");
            pages_.push_back(static_cast<std::byte*>(page));
            used_ = 0;
        }
        std::byte* word = pages_.back() + used_;
        used_ += line_bytes;
        return reinterpret_cast<uint32_t*>(word);
    }
    std::byte* last() const { return pages_.back(); }
    const std::vector<std::byte*>& all() const { return pages_; }
    static size_t page_bytes() { return static_cast<size_t>(::sysconf(_SC_PAGESIZE)); }

  private:
    static constexpr size_t line_bytes = 64;
    std::vector<std::byte*> pages_;
    size_t used_ = 0;
};

class CpuDevice final : public StreamDevice {
  public:
    const char* name() const override { return "cpu"; }
    StreamWord new_word() override {
        bool is_new = false;
        return {pages_.next(is_new), 0};
    }
    void signal(StreamHandle, const StreamWord& word, uint32_t value) override { word.raise(value); }
    void wait(StreamHandle, const StreamWord& word, uint32_t value) override {
        constexpr int64_t look_ns = 1'000'000'000;
        while (!word.wait(value, look_ns, 0)) continue;  // the core raises it at its deadlines, whatever happens
    }
    bool needs_flush() const override { return false; }
    void flush_writes() override {}
    std::string why_not_written() const override { return "a CPU computes in host memory"; }
    int ordinal() const override { return 0; }
    std::shared_ptr<std::byte> allocate(size_t) override { throw_invalid(why_not_written()); }
    void copy(void* to, const void* from, size_t num_bytes) override { std::memcpy(to, from, num_bytes); }
    void finish_copies() override {}

  private:
    WordPages pages_;
};

// The few calls of CUDA's driver. Names end as in the driver's table, types are those of cuda.h.
struct Driver {
    using Result = int;

    explicit Driver(const std::string& name) : library(open(name)) {}

    struct Symbol {
        void* address;
        template <class Function>
        operator Function*() const {
            return reinterpret_cast<Function*>(address);
        }
    };
    Symbol find(const char* name) const {
        if (void* address = ::dlsym(library, name)) return {address};
        throw_invalid("streams of a GPU: the driver lacks ", name,
                      ": it is older than CUDA 11.7, update it or use --streams off");
    }
    static void* open(const std::string& name) {
        if (void* library = ::dlopen(name.c_str(), RTLD_NOW | RTLD_LOCAL)) return library;
        throw_invalid("streams of a GPU: ", name, " cannot be opened (", ::dlerror(),
                      "): install NVIDIA's driver, or use --streams off");
    }

    void* library;
    Result (*init)(unsigned) = find("cuInit");
    Result (*current_context)(void**) = find("cuCtxGetCurrent");
    Result (*set_context)(void*) = find("cuCtxSetCurrent");
    Result (*current_device)(int*) = find("cuCtxGetDevice");
    Result (*attribute)(int*, int, int) = find("cuDeviceGetAttribute");
    Result (*register_host)(void*, size_t, unsigned) = find("cuMemHostRegister_v2");
    Result (*unregister_host)(void*) = find("cuMemHostUnregister");
    Result (*device_pointer)(uint64_t*, void*, unsigned) = find("cuMemHostGetDevicePointer_v2");
    Result (*write_value)(void*, uint64_t, uint32_t, unsigned) = find("cuStreamWriteValue32_v2");
    Result (*wait_value)(void*, uint64_t, uint32_t, unsigned) = find("cuStreamWaitValue32_v2");
    Result (*flush_writes)(int, int) = find("cuFlushGPUDirectRDMAWrites");
    Result (*synchronize)() = find("cuCtxSynchronize");
    Result (*allocate)(uint64_t*, size_t) = find("cuMemAlloc_v2");
    Result (*free)(uint64_t) = find("cuMemFree_v2");
    Result (*set_pointer_attribute)(const void*, int, uint64_t) = find("cuPointerSetAttribute");
    Result (*create_stream)(void**, unsigned) = find("cuStreamCreate");
    Result (*destroy_stream)(void*) = find("cuStreamDestroy_v2");
    Result (*copy)(uint64_t, uint64_t, size_t, void*) = find("cuMemcpyAsync");
    Result (*finish)(void*) = find("cuStreamSynchronize");
};

class CudaDevice final : public StreamDevice {
  public:
    explicit CudaDevice(const std::string& library) : driver_(library) {
        call("cuInit", driver_.init(0));
        call("cuCtxGetCurrent", driver_.current_context(&context_));
        if (context_ == nullptr) {
            throw_invalid("streams of a GPU: this thread has no context; use the device first");
        }
        call("cuCtxGetDevice", driver_.current_device(&ordinal_));
        takes_writes_ = attribute(direct_supported) != 0;
        needs_flush_ = attribute(writes_ordering) < ordered_for_owner;
        can_flush_ = (attribute(flush_options) & flush_by_host) != 0;
        constexpr unsigned non_blocking = 1;  // else it would wait for what is on the default stream
        call("cuStreamCreate", driver_.create_stream(&copies_, non_blocking));
    }
    // A stream that was let go of may not have come to its words yet: their pages stay until it has.
    ~CudaDevice() override {
        driver_.set_context(context_);
        driver_.synchronize();
        driver_.destroy_stream(copies_);
        for (std::byte* page : pages_.all()) driver_.unregister_host(page);
        ::dlclose(driver_.library);
    }

    const char* name() const override { return "cuda"; }

    StreamWord new_word() override {
        bool is_new = false;
        uint32_t* word = pages_.next(is_new);
        if (is_new) {
            constexpr unsigned portable = 1, mapped = 2;
            call("cuMemHostRegister",
                 driver_.register_host(pages_.last(), WordPages::page_bytes(), portable | mapped));
        }
        uint64_t device = 0;
        call("cuMemHostGetDevicePointer", driver_.device_pointer(&device, word, 0));
        return {word, device};
    }

    void signal(StreamHandle stream, const StreamWord& word, uint32_t value) override {
        constexpr unsigned with_fence = 0;  // what the stream wrote before is seen by who sees the word
        call("cuStreamWriteValue32",
             driver_.write_value(reinterpret_cast<void*>(stream), word.device, value, with_fence));
    }
    void wait(StreamHandle stream, const StreamWord& word, uint32_t value) override {
        constexpr unsigned at_least = 0;
        call("cuStreamWaitValue32", driver_.wait_value(reinterpret_cast<void*>(stream), word.device, value, at_least));
    }

    bool needs_flush() const override { return needs_flush_; }
    void flush_writes() override {
        if (!can_flush_) throw_invalid(why_not_written(), ": stage messages in host memory");
        enter();
        constexpr int current_context = 0, to_all_devices = 200;
        call("cuFlushGPUDirectRDMAWrites", driver_.flush_writes(current_context, to_all_devices));
    }

    std::string why_not_written() const override {
        if (!takes_writes_) return "this GPU takes no writes of network cards (GPUDirect RDMA)";
        if (needs_flush_ && !can_flush_) return "this GPU's driver cannot flush writes of a network card";
        return {};
    }
    int ordinal() const override { return ordinal_; }

    std::shared_ptr<std::byte> allocate(size_t num_bytes) override {
        enter();
        uint64_t address = 0;
        call("cuMemAlloc", driver_.allocate(&address, num_bytes));
        std::shared_ptr<std::byte> memory(reinterpret_cast<std::byte*>(address), [this](std::byte* freed) {
            driver_.set_context(context_);
            driver_.free(reinterpret_cast<uint64_t>(freed));
        });
        constexpr int sync_memops = 6;  // the driver's own copies of it are in order with a card's writes
        const uint32_t on = 1;
        call("cuPointerSetAttribute", driver_.set_pointer_attribute(&on, sync_memops, address));
        return memory;
    }
    void copy(void* to, const void* from, size_t num_bytes) override {
        if (num_bytes == 0) return;
        enter();
        call("cuMemcpyAsync", driver_.copy(reinterpret_cast<uint64_t>(to), reinterpret_cast<uint64_t>(from), num_bytes,
                                           copies_));
    }
    void finish_copies() override {
        enter();
        call("cuStreamSynchronize", driver_.finish(copies_));
    }

  private:
    // CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_...
    static constexpr int direct_supported = 116, flush_options = 117, writes_ordering = 118;
    static constexpr int flush_by_host = 1, ordered_for_owner = 100;

    static void call(const char* name, Driver::Result result) {
        if (result != 0) {
            throw Error(Code::system, concat(name, " failed with CUDA error ", result));
        }
    }
    int attribute(int which) const {
        int value = 0;
        call("cuDeviceGetAttribute", driver_.attribute(&value, which, ordinal_));
        return value;
    }
    void enter() const { call("cuCtxSetCurrent", driver_.set_context(context_)); }

    const Driver driver_;
    void* context_ = nullptr;
    WordPages pages_;
    void* copies_ = nullptr;  // a stream of its own
    int ordinal_ = 0;
    bool takes_writes_ = false;
    bool needs_flush_ = true;
    bool can_flush_ = false;
};

}  // namespace

std::shared_ptr<StreamDevice> make_stream_device(const std::string& kind, const std::string& library) {
    if (kind == "cpu") return std::make_shared<CpuDevice>();
    if (kind == "cuda") return std::make_shared<CudaDevice>(library.empty() ? "libcuda.so.1" : library);
    throw_invalid("streams of ", kind, ": they can be those of cpu or cuda");
}

}  // namespace antiphon::m2n

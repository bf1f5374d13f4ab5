// What stream-ordered calls need of the device whose stream it is: words that both the stream and the CPU see, and
// memory of the device's that network cards write to (GPUDirect RDMA).
//
// A stream runs what is put on it in order, on its own time. `signal` puts "raise this word" on it, so the CPU learns
// that all before is done; `wait` puts "stop until the word has reached this value". Neither makes the caller wait on a
// GPU. On a CPU the thread that computes is the stream: what is put on it happens at once, and `wait` blocks.
//
// CUDA's driver is opened at run time (`cuStreamWriteValue32`, `cuStreamWaitValue32`): nothing is linked, and machines
// without it run the rest. Rejected: events that the CPU queries (a call of the driver for each look, where a word is a
// load), callbacks of the stream (they run on a thread that may not call the driver), and a kernel that spins on the
// word (it takes a multiprocessor from the computation).
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>

namespace antiphon::m2n {

using StreamHandle = uintptr_t;  // a CUstream; on a CPU not used

// 32 bits that count upwards and wrap; comparisons are cyclic, as the driver's.
struct StreamWord {
    uint32_t* host = nullptr;
    uint64_t device = 0;  // where the device finds it

    bool reached(uint32_t value) const;
    void raise(uint32_t value) const;  // a release store that wakes who waits
    // False: it was not reached in time.
    bool wait(uint32_t value, int64_t timeout_ns, int64_t spin_ns) const;
};

class StreamDevice {
  public:
    virtual ~StreamDevice() = default;
    virtual const char* name() const = 0;
    // A word at 0, valid as long as the device object.
    virtual StreamWord new_word() = 0;
    // From the thread that puts work on the stream, with the device's context.
    virtual void signal(StreamHandle stream, const StreamWord& word, uint32_t value) = 0;
    virtual void wait(StreamHandle stream, const StreamWord& word, uint32_t value) = 0;
    // Whether what a network card wrote into the device's memory may be hidden from the device until `flush_writes`.
    virtual bool needs_flush() const = 0;
    // Any thread: what peers wrote into the device's memory before is seen by the device's later work (GPUDirect).
    virtual void flush_writes() = 0;

    // Why a network card cannot write into the device's memory, as far as the device is concerned; empty: it can.
    virtual std::string why_not_written() const = 0;
    virtual int ordinal() const = 0;  // as the driver counts devices
    // Memory of the device's own for peers to write to. Any thread; valid no longer than the device object.
    virtual std::shared_ptr<std::byte> allocate(size_t num_bytes) = 0;
    // Any thread: between host memory and the device's, beside the streams. Done when `finish_copies` has returned.
    virtual void copy(void* to, const void* from, size_t num_bytes) = 0;
    virtual void finish_copies() = 0;
};

// "cpu", or "cuda" with the driver's library (empty: libcuda.so.1) and the calling thread's present context.
// Error(invalid) if there is no driver, or one that lacks a call.
std::shared_ptr<StreamDevice> make_stream_device(const std::string& kind, const std::string& library);

}  // namespace antiphon::m2n

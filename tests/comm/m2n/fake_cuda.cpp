// A driver of CUDA without a device: its streams do everything at once, in the calling thread. What a network card
// writes into the device's memory (`fake_remote_write`) stays hidden until it is flushed.
#include <atomic>
#include <cstdint>
#include <cstring>
#include <mutex>
#include <sched.h>
#include <vector>

namespace {

struct Write {
    std::byte* target;
    std::vector<std::byte> bytes;
};

std::mutex mutex;
std::vector<Write> hidden;
std::atomic<int> counts[4];  // registered pages, values written, waits, flushes
int context = 0;

}  // namespace

extern "C" {

int cuInit(unsigned) { return 0; }
int cuCtxGetCurrent(void** out) { return *out = &context, 0; }
int cuCtxSetCurrent(void* given) { return given == &context ? 0 : 201; }
int cuCtxGetDevice(int* device) { return *device = 0; }
int cuDeviceGetAttribute(int* value, int which, int) {
    *value = which == 117 ? 1 : 0;  // can flush; writes are in no order
    return which == 117 || which == 118 ? 0 : 1;
}
int cuMemHostRegister_v2(void*, size_t, unsigned) { return ++counts[0], 0; }
int cuMemHostUnregister(void*) { return --counts[0], 0; }
int cuMemHostGetDevicePointer_v2(uint64_t* out, void* host, unsigned) {
    *out = reinterpret_cast<uint64_t>(host);
    return 0;
}
int cuStreamWriteValue32_v2(void*, uint64_t address, uint32_t value, unsigned) {
    ++counts[1];
    __atomic_store_n(reinterpret_cast<uint32_t*>(address), value, __ATOMIC_RELEASE);
    return 0;
}
int cuStreamWaitValue32_v2(void*, uint64_t address, uint32_t value, unsigned) {
    ++counts[2];
    while (__atomic_load_n(reinterpret_cast<uint32_t*>(address), __ATOMIC_ACQUIRE) - value >= 1u << 31) sched_yield();
    return 0;
}
int cuFlushGPUDirectRDMAWrites(int, int) {
    const std::lock_guard lock(mutex);
    for (const Write& write : hidden) std::memcpy(write.target, write.bytes.data(), write.bytes.size());
    hidden.clear();
    return ++counts[3], 0;
}

void fake_remote_write(void* target, const void* source, size_t size) {
    const std::lock_guard lock(mutex);
    const auto* bytes = static_cast<const std::byte*>(source);
    hidden.push_back({static_cast<std::byte*>(target), {bytes, bytes + size}});
}
int fake_count(int which) { return counts[which]; }
}

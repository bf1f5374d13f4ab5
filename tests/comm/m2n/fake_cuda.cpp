// A driver of CUDA without a device, and a network card that writes into its memory.
//
// The streams do everything at once, in the calling thread. The card is libfabric, entered through this library: memory
// that is registered as CUDA's gets a shadow, peers write to the shadow, and a flush copies it over. So the device's
// memory shows no write before a flush.
#include <dlfcn.h>
#include <sched.h>

#include <atomic>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <mutex>
#include <utility>
#include <vector>

#if defined(ANTIPHON_HAVE_LIBFABRIC)
#include <rdma/fabric.h>
#include <rdma/fi_domain.h>
#include <rdma/fi_endpoint.h>
#endif

namespace {

struct Shadow {
    std::byte* memory;
    std::vector<std::byte> written;
};

std::mutex mutex;
std::vector<Shadow> shadows;  // they stay: peers may write late
enum Count { pages, values, waits, flushes, allocations, copies, num_counts };
std::atomic<int> counts[num_counts];
int context = 0, stream = 0;
bool holds = false;  // the stream comes to no write
std::vector<std::pair<uint64_t, uint32_t>> held;

void store(uint64_t address, uint32_t value) {
    __atomic_store_n(reinterpret_cast<uint32_t*>(address), value, __ATOMIC_RELEASE);
}

int ordering = 0;      // of a card's writes; 100: as the device reads
int can_receive = 1;   // GPUDirect RDMA

}  // namespace

extern "C" {

int cuInit(unsigned) { return 0; }
int cuCtxGetCurrent(void** out) { return *out = &context, 0; }
int cuCtxSetCurrent(void* given) { return given == &context ? 0 : 201; }
int cuCtxGetDevice(int* device) { return *device = 0; }
int cuCtxSynchronize() { return 0; }
int cuDeviceGetAttribute(int* value, int which, int) {
    if (which < 116 || which > 118) return 1;
    *value = which == 116 ? can_receive : which == 117 ? 1 : ordering;  // 117: it can flush
    return 0;
}
int cuMemHostRegister_v2(void*, size_t, unsigned) { return ++counts[pages], 0; }
int cuMemHostUnregister(void*) { return --counts[pages], 0; }
int cuMemHostGetDevicePointer_v2(uint64_t* out, void* host, unsigned) {
    *out = reinterpret_cast<uint64_t>(host);
    return 0;
}
int cuStreamWriteValue32_v2(void*, uint64_t address, uint32_t value, unsigned) {
    ++counts[values];
    const std::lock_guard lock(mutex);
    if (holds) {
        held.emplace_back(address, value);
    } else {
        store(address, value);
    }
    return 0;
}
int cuStreamWaitValue32_v2(void*, uint64_t address, uint32_t value, unsigned) {
    ++counts[waits];
    while (__atomic_load_n(reinterpret_cast<uint32_t*>(address), __ATOMIC_ACQUIRE) - value >= 1u << 31) sched_yield();
    return 0;
}
int cuMemAlloc_v2(uint64_t* out, size_t size) {
    *out = reinterpret_cast<uint64_t>(std::calloc(1, size));
    return ++counts[allocations], *out == 0 ? 2 : 0;
}
int cuMemFree_v2(uint64_t address) {
    const std::lock_guard lock(mutex);
    auto* memory = reinterpret_cast<std::byte*>(address);
    for (Shadow& shadow : shadows) {
        if (shadow.memory == memory) shadow.memory = nullptr;
    }
    std::free(memory);
    return --counts[allocations], 0;
}
int cuPointerSetAttribute(const void*, int which, uint64_t) { return which == 6 ? 0 : 1; }
int cuStreamCreate(void** out, unsigned flags) { return *out = &stream, flags == 1 ? 0 : 1; }
int cuStreamDestroy_v2(void*) { return 0; }
int cuMemcpyAsync(uint64_t to, uint64_t from, size_t size, void* on) {
    std::memcpy(reinterpret_cast<void*>(to), reinterpret_cast<const void*>(from), size);
    return ++counts[copies], on == &stream ? 0 : 400;
}
int cuStreamSynchronize(void*) { return 0; }
int cuFlushGPUDirectRDMAWrites(int, int) {
    const std::lock_guard lock(mutex);
    for (const Shadow& shadow : shadows) {
        if (shadow.memory != nullptr) std::memcpy(shadow.memory, shadow.written.data(), shadow.written.size());
    }
    return ++counts[flushes], 0;
}

void fake_hold(int on) {
    const std::lock_guard lock(mutex);
    holds = on != 0;
    for (const auto& [address, value] : held) store(address, value);
    held.clear();
}
int fake_count(int which) { return counts[which]; }
void fake_device(int takes_writes, int writes_ordering) { can_receive = takes_writes, ordering = writes_ordering; }

#if defined(ANTIPHON_HAVE_LIBFABRIC)

}  // extern "C"

namespace {

template <class Function>
Function real(const char* name, Function) {
    static void* const library = dlopen(std::getenv("FAKE_CARD_OVER"), RTLD_NOW | RTLD_LOCAL | RTLD_NODELETE);
    return reinterpret_cast<Function>(dlsym(library, name));
}

// Tables of the real objects' calls, with some of ours in their place.
template <class Table>
Table* copied(Table* table) {
    return new Table(*table);
}
fi_ops_fabric* fabric_calls = nullptr;
fi_ops_domain* domain_calls = nullptr;
fi_ops_mr* memory_calls = nullptr;

struct WithoutDevices {  // the real provider knows no devices
    explicit WithoutDevices(fi_info* info) : info_(info), caps_(info->caps) { info_->caps &= ~FI_HMEM; }
    ~WithoutDevices() { info_->caps = caps_; }
    fi_info* info_;
    uint64_t caps_;
};

int register_memory(fid* domain, const fi_mr_attr* given, uint64_t flags, fid_mr** region) {
    fi_mr_attr attributes = *given;
    iovec place = *given->mr_iov;
    if (attributes.iface == FI_HMEM_CUDA) {
        const std::lock_guard lock(mutex);
        shadows.push_back({static_cast<std::byte*>(place.iov_base), std::vector<std::byte>(place.iov_len)});
        place.iov_base = shadows.back().written.data();  // stays where it is when the list grows
        attributes.mr_iov = &place;
        attributes.iface = FI_HMEM_SYSTEM;
    }
    return memory_calls->regattr(domain, &attributes, flags, region);
}

int open_endpoint(fid_domain* domain, fi_info* info, fid_ep** endpoint, void* given) {
    const WithoutDevices without(info);
    return domain_calls->endpoint(domain, info, endpoint, given);
}

int open_domain(fid_fabric* fabric, fi_info* info, fid_domain** domain, void* given) {
    const WithoutDevices without(info);
    const int result = fabric_calls->domain(fabric, info, domain, given);
    if (result != 0) return result;
    domain_calls = (*domain)->ops;
    (*domain)->ops = copied((*domain)->ops);
    (*domain)->ops->endpoint = open_endpoint;
    memory_calls = (*domain)->mr;
    (*domain)->mr = copied((*domain)->mr);
    (*domain)->mr->regattr = register_memory;
    return 0;
}

}  // namespace

extern "C" {

uint32_t fi_version() { return real("fi_version", &fi_version)(); }
const char* fi_strerror(int error) { return real("fi_strerror", &fi_strerror)(error); }
void fi_freeinfo(fi_info* info) { real("fi_freeinfo", &fi_freeinfo)(info); }
fi_info* fi_dupinfo(const fi_info* info) { return real("fi_dupinfo", &fi_dupinfo)(info); }
int fi_getinfo(uint32_t version, const char* node, const char* service, uint64_t flags, const fi_info* hints,
               fi_info** found) {
    const int result = real("fi_getinfo", &fi_getinfo)(version, node, service, flags, hints, found);
    for (fi_info* each = result == 0 ? *found : nullptr; each != nullptr; each = each->next) each->caps |= FI_HMEM;
    return result;
}
int fi_fabric(fi_fabric_attr* attributes, fid_fabric** fabric, void* given) {
    const int result = real("fi_fabric", &fi_fabric)(attributes, fabric, given);
    if (result != 0) return result;
    fabric_calls = (*fabric)->ops;
    (*fabric)->ops = copied((*fabric)->ops);
    (*fabric)->ops->domain = open_domain;
    return 0;
}

#endif
}

// The thread that looks after writes under way while the owner of a transport is busy with something else.
//
// It earns its place because libfabric moves bytes only while a thread looks: without it a credit or a message waits as
// long as its owner computes, and its peer with it.
//
// It comes every 2 ms while the owner does not look himself, less and less often while he does, and parks half a second
// after the last write if nothing is known to be under way: an idle process does not wake up. Of writes without a
// completion, as credits are where the provider copies them at once, nothing is known: one that a provider still holds
// after that time leaves with the owner's next look.
//
// One transport's libfabric objects: a domain with one completion queue, one address vector and two endpoints.
//
// Messages and credits have an endpoint each, so that a credit never queues behind bulk data on the same connection and
// can have a traffic class of its own (MegaScale-Infer, section 5). Both report to one queue: a single descriptor to
// sleep on, a single call to look. Tags tell what a completion belongs to.
//
// Nothing here locks; the caller holds one mutex around every call.
//
// What two libfabric ends tell each other through the control connection, as bytes.
//
// A write's completion carries 32 bits and nothing that says from whom, and source numbers are unique only within one
// inbox, while one transport serves several inboxes and many links that all send as the same source. So the 12 bits
// that are the source elsewhere are a *tag* here: a number that the end which will receive the completion hands out
// for one pair (the receiver for messages, the sender for credits) and translates back. No tag is used again before all
// others have been, so a late write of a closed pair leads nowhere. Rejected: an endpoint for each inbox, which costs
// connections and does not tell credits apart; guessing from headers, which cannot be right for two of one number.
#pragma once

#if defined(ANTIPHON_HAVE_LIBFABRIC)

#include <rdma/fabric.h>
#include <rdma/fi_domain.h>
#include <rdma/fi_endpoint.h>

#include <atomic>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "m2n/bytes.h"
#include "m2n/libfabric_library.h"
#include "m2n/stream_device.h"

namespace antiphon::m2n {

using PairTag = uint16_t;
constexpr uint32_t num_tags = 1u << 12;

// Where the other end can be written to. `protocol`: two providers understand each other if it is the same.
struct LibfabricPeer {
    std::string provider;
    uint32_t protocol = 0;
    std::vector<std::byte> data_address;    // of the endpoint that carries messages
    std::vector<std::byte> credit_address;  // of the endpoint that carries credits
};

struct LibfabricIntroduction {  // sender to receiver
    LibfabricPeer peer;
    PairTag tag = 0;    // for credits
    uint64_t nonce = 0;  // echoed in the welcome, which finds its introduction by it
    uint64_t credit_base = 0;  // where a credit is written, and the key to it
    uint64_t credit_key = 0;
};

struct LibfabricWelcome {  // receiver to sender
    LibfabricPeer peer;
    PairTag tag = 0;  // for messages
    PairTag introduced_tag = 0;
    uint64_t nonce = 0;
    uint64_t slots_base = 0;  // of slot 0, as the provider wants remote addresses; and the key to all slots
    uint64_t slots_key = 0;
    uint64_t slots_bytes = 0;  // of all slots together, so that both ends compute the same stride
};

std::vector<std::byte> encode(const LibfabricIntroduction& introduction);
std::vector<std::byte> encode(const LibfabricWelcome& welcome);
LibfabricIntroduction decode_introduction(Bytes bytes);  // Error(invalid): not what the other side must send
LibfabricWelcome decode_welcome(Bytes bytes);

class LibfabricKeeper {
  public:
    struct Found {
        bool owner_looks = false;  // he did since the last visit, or is about to
        bool active = false;       // something is under way, or was handed in since the last visit
    };

    // `visit` looks, unless the owner does. Called from the thread, one at a time.
    explicit LibfabricKeeper(std::function<Found()> visit);
    ~LibfabricKeeper();  // waits for the visit under way

    // After a write was handed in. No system call, unless the thread has parked.
    void note_write() {
        if (parked_.load()) wake();
    }

  private:
    void run();
    bool wait_for_turn();  // false: stop
    void wake();

    const std::function<Found()> visit_;
    int64_t tick_ns_;
    int64_t idle_ns_ = 0;
    std::mutex mutex_;
    std::condition_variable wake_;
    std::atomic<bool> parked_{false};
    bool stopping_ = false;
    std::thread thread_;  // last: it uses all of the above
};

enum class Lane { data = 0, credit = 1 };

// What a credit's write carries: it is not read, but not every provider is known to deliver an empty write.
constexpr size_t credit_payload_bytes = 4;

struct FidCloser {
    template <class T>
    void operator()(T* object) const {
        fi_close(&object->fid);
    }
};
template <class T>
using Fid = std::unique_ptr<T, FidCloser>;

// Registered memory; the registration ends with the object, the memory is the caller's.
struct MemoryRegion {
    Fid<fid_mr> registration;
    uint64_t remote_base = 0;  // what a peer adds its offset to: 0, or the address where the provider wants addresses

    void* descriptor() const { return fi_mr_desc(registration.get()); }
    uint64_t key() const { return fi_mr_key(registration.get()); }
};

class LibfabricDomain {
  public:
    // Completions that may be unread at once. The queue is fatally broken by one more, so opening a pair reserves
    // what its credits allow.
    static constexpr uint32_t queue_entries = 1u << 15;

    explicit LibfabricDomain(const TransportOptions& options);
    LibfabricDomain(const LibfabricDomain&) = delete;
    LibfabricDomain& operator=(const LibfabricDomain&) = delete;

    const LibfabricLibrary& library() const { return library_; }
    const fi_info& info() const { return *info_; }
    std::string provider() const { return info_->fabric_attr->prov_name; }
    const LibfabricPeer& own_peer() const { return own_peer_; }
    fid_ep* endpoint(Lane lane) const { return endpoints_[static_cast<size_t>(lane)].get(); }
    fid_cq* queue() const { return queue_.get(); }
    bool posts_receives() const { return (info_->mode & FI_RX_CQ_DATA) != 0; }

    // -1 where the provider cannot be waited for by descriptor.
    int wait_descriptor() const { return wait_descriptor_; }
    bool may_sleep() const;  // false: look at the queue first

    // `access`: FI_WRITE for what we write from, FI_REMOTE_WRITE for what peers write to. `lane`: the endpoint that
    // will use it. `device`: whose memory it is (FI_HMEM_CUDA); none: the host's. Error(system): the registration
    // failed.
    MemoryRegion register_memory(void* memory, uint64_t num_bytes, uint64_t access, Lane lane,
                                 const StreamDevice* device = nullptr);
    bool takes_device_memory() const { return (info_->caps & FI_HMEM) != 0; }

    // Counted: several pairs share a peer's endpoint. Error(refused): not an address of this provider.
    fi_addr_t acquire_address(Bytes address, const std::string& of_provider, uint32_t of_protocol);
    void release_address(fi_addr_t address);

    // Writes that the provider has taken and will report the end of.
    void note_started() { ++under_way_; }
    void note_ended() { --under_way_; }
    uint64_t under_way() const { return under_way_; }

    // Before anything that in-flight writes refer to goes away.
    void close_endpoints();

  private:
    void open_queue();
    void open_endpoint(Lane lane, int traffic_class);
    std::vector<std::byte> name_of(fid_ep* endpoint) const;
    void check(int64_t result, const char* call) const;

    struct KnownAddress {
        fi_addr_t address = FI_ADDR_UNSPEC;
        uint32_t users = 0;
    };

    LibfabricLibrary library_;
    FabricInfo info_;
    Fid<fid_fabric> fabric_;
    Fid<fid_domain> domain_;
    Fid<fid_av> addresses_;
    Fid<fid_cq> queue_;
    int wait_descriptor_ = -1;
    FabricInfo lane_info_[2];
    Fid<fid_ep> endpoints_[2];
    LibfabricPeer own_peer_;
    std::map<std::vector<std::byte>, KnownAddress> known_;
    uint64_t under_way_ = 0;
};

}  // namespace antiphon::m2n

#endif

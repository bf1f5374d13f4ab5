// All pairs of one libfabric transport: tags, completions, progress, sleep.
//
// Progress is manual: bytes move only while a thread looks at the completion queue, on the sending side too.
// `progress`, a fruitless second `poll` and `block` look. Between them a keeper thread does (libfabric_domain.h): a
// credit must reach its sender even if the owner, having released the slot, turns to something else for long. One mutex
// guards everything, because the control thread opens landings while the owner looks; it is free nearly always, and
// no thread sleeps while holding it.
//
// Closing a pair does not end its registration at once: on connections a write with an unknown key ends the connection,
// and with it the other pairs of the same two processes. So a closed landing lies in wait for a while, under its own
// key and tag, without pages, and swallows what was still under way. A new incarnation has other memory, another key
// and another tag from the start; nothing of the old one can reach it.
#pragma once

#if defined(ANTIPHON_HAVE_LIBFABRIC)

#include <rdma/fi_eq.h>

#include <atomic>
#include <deque>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "m2n/libfabric_domain.h"
#include "m2n/libfabric_pair.h"
#include "m2n/types.h"

namespace antiphon::m2n {

class LibfabricFabric final : public Transport, public std::enable_shared_from_this<LibfabricFabric> {
  public:
    explicit LibfabricFabric(const TransportOptions& options);
    ~LibfabricFabric() override;
    LibfabricFabric(const LibfabricFabric&) = delete;
    LibfabricFabric& operator=(const LibfabricFabric&) = delete;

    const char* name() const override { return name_.c_str(); }
    bool same_host_only() const override { return core_provider(domain_.provider()) == "shm"; }
    std::string why_staged(const std::shared_ptr<StreamDevice>& device) override;  // any thread; it tries

    Blob introduce() override;
    std::shared_ptr<Landing> open_landing(const PairSpec& spec, const Blob& introduction, Blob& welcome) override;
    std::shared_ptr<Link> open_link(const PairSpec& spec, Blob& welcome, const std::string& host, uint16_t port,
                                    Deadline deadline) override;
    bool adopt(FileDescriptor&, std::span<const std::byte>) override { return false; }

    void progress() override;
    uint32_t prepare(Event event) override { return counts_[static_cast<size_t>(event)].load(); }
    void block(Event event, uint32_t prepared, uint32_t needed, Deadline deadline, int64_t spin_ns,
               EndId awaited = any_end) override;
    void interrupt() override;

    // For the ends of pairs: any thread closes one, the owner calls the others.
    void close(LibfabricPair& pair);
    void submit(LibfabricPair& pair, SlotId slot, uint16_t sequence, uint64_t num_bytes,
                const std::byte* payload = nullptr);
    bool source_reusable(const LibfabricPair& pair, SlotId slot);
    bool poll(LibfabricPair& pair, ImmediateSink& sink, std::string& reason);

  private:
    struct Entry {  // what a tag leads to
        std::unique_ptr<LibfabricPair> pair;
        bool open = false;        // false with a pair: closed, and waiting for the last of it
        bool stalled = false;     // is in `stalled_`
        bool heard = false;       // something came in, so the connection stands
        uint64_t nonce = 0;       // of an introduction that has not been answered yet
        uint64_t polled_at = 0;   // `looks_` when it was last polled
        int64_t closed_at_ns = 0;
    };
    struct Receive {  // a posted receive, which some providers consume for each completion
        fi_context2 context{};
        Lane lane = Lane::data;
    };
    class Visit;  // a lock that the owner makes room for

    // Any thread. A pair lives until `close`.
    LibfabricIntroduction make_introduction();
    LibfabricPair& make_receiver(const PairSpec& spec, const LibfabricIntroduction& introduction,
                                 LibfabricWelcome& welcome);
    LibfabricPair& make_sender(const PairSpec& spec, const LibfabricWelcome& welcome);

    PairTag next_free_tag();
    LibfabricPair& adopt(PairTag tag, std::unique_ptr<LibfabricPair> pair);
    std::unique_ptr<LibfabricPair> make_pair(PairRole role, const PairSpec& spec, PairTag tag);
    void look();
    void take_in(const fi_cq_data_entry& completion);
    void take_written(PairWrite& write);
    bool take_error();
    void break_all(const std::string& reason);
    void note_stalled(LibfabricPair& pair);
    void flush_stalled();
    void reap();
    void post_receives();
    void post(Receive& receive);
    int64_t longest_sleep() const;
    bool take_interrupt();
    void sleep(int64_t longest_ns, bool by_descriptor);
    LibfabricKeeper::Found visit_for_keeper();

    mutable std::mutex mutex_;
    std::atomic<uint32_t> visitors_{0};
    LibfabricDomain domain_;
    const std::string name_;  // "libfabric:tcp"
    bool layered_;  // the provider is one on top of another: "verbs;ofi_rxm"
    alignas(64) std::byte mailbox_[64] = {};  // credits are written from its first half, and by peers to the second
    MemoryRegion mailbox_region_;
    std::vector<Entry> tags_;
    uint32_t last_tag_;
    std::vector<LibfabricPair*> stalled_;
    std::vector<PairTag> closed_;
    std::deque<HugeBuffer> hollow_;  // memory of closed landings: addresses without pages
    uint32_t reserved_entries_ = 0;
    uint64_t looks_ = 1;
    int64_t next_reap_ns_ = 0;
    bool alarm_ = false;  // a pair broke: a blocked thread must look
    uint32_t unheard_ = 0;           // open pairs of which nothing has come in yet
    int64_t connecting_until_ns_ = 0;  // after which they are taken to be silent, not about to connect
    uint32_t receives_wanted_[2] = {0, 0};
    uint32_t receives_posted_[2] = {0, 0};
    std::deque<Receive> receives_;
    std::vector<Receive*> idle_receives_;

    std::atomic<uint32_t> counts_[2] = {0, 0};  // by Event
    std::atomic<bool> interrupted_{false};
    FileDescriptor wake_;

    uint64_t submitted_ = 0;                 // writes handed in
    std::atomic<bool> owner_blocks_{false};  // then the owner looks, and the keeper must not take its wake-ups
    uint64_t seen_looks_ = 0;                // by the keeper
    uint64_t seen_submitted_ = 0;
    std::unique_ptr<LibfabricKeeper> keeper_;  // last: it uses all of the above
};

}  // namespace antiphon::m2n

#endif

// The back-end over libfabric: every message is one RDMA write with remote completion data (`fi_writedata`), on
// InfiniBand, RoCE and EFA, and on TCP and shared memory where there is no such card.
//
// A message is composed in registered memory at the sender and written to the same slot of registered memory at the
// receiver; the 32 bits beside it say what arrived. A credit is a write of four bytes the other way. A payload outside
// the slot is written from where it lies if the provider needs no registration for that (tcp), else copied into the
// slot: the interface has no call to register it. This file is the glue between Transport and LibfabricFabric.
#include "m2n/transport.h"

#if defined(ANTIPHON_HAVE_LIBFABRIC)

#include <cstring>
#include <memory>
#include <utility>

#include "m2n/libfabric_fabric.h"

namespace antiphon::m2n {

namespace {

class LibfabricLanding final : public Landing {
  public:
    LibfabricLanding(std::shared_ptr<LibfabricFabric> fabric, LibfabricPair& pair)
        : fabric_(std::move(fabric)),
          pair_(pair),
          device_(pair.spec().device),
          headers_(device_ == nullptr ? 0 : pair.spec().slots * header_bytes) {}
    ~LibfabricLanding() override { fabric_->close(pair_); }

    const std::byte* slot(SlotId slot) const override { return pair_.slot(slot); }
    const std::byte* header(SlotId slot) const override {
        return device_ == nullptr ? pair_.slot(slot) : headers_.data() + slot * header_bytes;
    }
    bool poll(ImmediateSink& sink, std::string& reason) override {
        const size_t before = sink.size();
        const bool sound = fabric_->poll(pair_, sink, reason);
        if (device_ != nullptr && sink.size() > before) show(std::span(sink).subspan(before));
        return sound;
    }
    void release(Immediate immediate) override { fabric_->submit(pair_, immediate.slot, immediate.sequence, 0); }

  private:
    // The receiver's flush (MegaScale-Infer, section 5): what has arrived in the device's memory becomes visible there,
    // then its headers here.
    void show(std::span<const Immediate> arrived) {
        if (device_->needs_flush()) device_->flush_writes();
        for (const Immediate each : arrived) {
            device_->copy(headers_.data() + each.slot * header_bytes, pair_.slot(each.slot), header_bytes);
        }
        device_->finish_copies();
    }

    std::shared_ptr<LibfabricFabric> fabric_;
    LibfabricPair& pair_;
    std::shared_ptr<StreamDevice> device_;
    std::vector<std::byte> headers_;  // of slots in its memory
};

class LibfabricLink final : public Link {
  public:
    LibfabricLink(std::shared_ptr<LibfabricFabric> fabric, LibfabricPair& pair)
        : fabric_(std::move(fabric)), pair_(pair) {}
    ~LibfabricLink() override { fabric_->close(pair_); }

    std::byte* slot(SlotId slot) override { return pair_.slot(slot); }

    void post(Immediate immediate, const MessageHeader& header, const std::byte* payload) override {
        std::byte* slot = pair_.slot(immediate.slot);
        std::memcpy(slot, &header, header_bytes);
        const bool in_place = payload != nullptr && pair_.gathers(header.length);
        if (payload != nullptr && !in_place && header.length > 0) {
            std::memcpy(slot + header_bytes, payload, header.length);
        }
        fabric_->submit(pair_, immediate.slot, immediate.sequence, header_bytes + header.length,
                        in_place ? payload : nullptr);
    }

    bool source_reusable(SlotId slot) override { return fabric_->source_reusable(pair_, slot); }
    bool poll(ImmediateSink& sink, std::string& reason) override { return fabric_->poll(pair_, sink, reason); }

  private:
    std::shared_ptr<LibfabricFabric> fabric_;
    LibfabricPair& pair_;
};

class LibfabricTransport final : public Transport {
  public:
    explicit LibfabricTransport(const TransportOptions& options)
        : fabric_(std::make_shared<LibfabricFabric>(options)), name_("libfabric:" + fabric_->provider()) {}

    const char* name() const override { return name_.c_str(); }
    bool same_host_only() const override { return fabric_->same_host_only(); }
    std::string why_staged(const std::shared_ptr<StreamDevice>& device) override { return fabric_->why_staged(device); }

    Blob introduce() override {
        Blob blob;
        blob.bytes = encode(fabric_->introduce());
        return blob;
    }

    std::unique_ptr<Landing> open_landing(const PairSpec& spec, const Blob& introduction, Blob& welcome) override {
        LibfabricWelcome answer;
        LibfabricPair& pair = fabric_->open_landing(spec, decode_introduction(introduction.bytes), answer);
        auto landing = std::make_unique<LibfabricLanding>(fabric_, pair);
        welcome.bytes = encode(answer);
        return landing;
    }

    std::unique_ptr<Link> open_link(const PairSpec& spec, Blob& welcome, const std::string&, uint16_t,
                                    Deadline) override {
        LibfabricPair& pair = fabric_->open_link(spec, decode_welcome(welcome.bytes));
        return std::make_unique<LibfabricLink>(fabric_, pair);
    }

    bool adopt(FileDescriptor&, std::span<const std::byte>) override { return false; }
    void progress() override { fabric_->progress(); }
    uint32_t prepare(Event event) override { return fabric_->prepare(event); }
    void block(Event event, uint32_t prepared, uint32_t needed, Deadline deadline, int64_t spin_ns, EndId) override {
        fabric_->block(event, prepared, needed, deadline, spin_ns);
    }
    void interrupt() override { fabric_->interrupt(); }

  private:
    std::shared_ptr<LibfabricFabric> fabric_;
    std::string name_;
};

}  // namespace

std::unique_ptr<Transport> make_libfabric(const TransportOptions& options) {
    return std::make_unique<LibfabricTransport>(options);
}

}  // namespace antiphon::m2n

#else

#include "m2n/error.h"

namespace antiphon::m2n {

std::unique_ptr<Transport> make_libfabric(const TransportOptions&) {
    throw Error(Code::invalid,
                "built without libfabric's headers: install them (libfabric-dev, libfabric-devel) and build again with "
                "pip install . or make clean setup");
}

}  // namespace antiphon::m2n

#endif

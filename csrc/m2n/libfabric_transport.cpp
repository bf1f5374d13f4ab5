// The back-end over libfabric: every message is one RDMA write with remote completion data (`fi_writedata`), on
// InfiniBand, RoCE and EFA, and on TCP and shared memory where there is no such card.
//
// A message is composed in registered memory at the sender and written to the same slot of registered memory at the
// receiver; the 32 bits beside it say what arrived. A credit is a write of four bytes the other way. A payload outside
// the slot is written from where it lies if the provider needs no registration for that (tcp), else copied into the
// slot: the interface has no call to register it. This file has the two ends of a pair.
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

}  // namespace

Blob LibfabricFabric::introduce() { return {encode(make_introduction()), {}}; }

std::shared_ptr<Landing> LibfabricFabric::open_landing(const PairSpec& spec, const Blob& introduction, Blob& welcome) {
    LibfabricWelcome answer;
    LibfabricPair& pair = make_receiver(spec, decode_introduction(introduction.bytes), answer);
    auto landing = std::make_shared<LibfabricLanding>(shared_from_this(), pair);
    welcome.bytes = encode(answer);
    return landing;
}

std::shared_ptr<Link> LibfabricFabric::open_link(const PairSpec& spec, Blob& welcome, const std::string&, uint16_t,
                                                 Deadline) {
    return std::make_shared<LibfabricLink>(shared_from_this(), make_sender(spec, decode_welcome(welcome.bytes)));
}

std::shared_ptr<Transport> make_libfabric(const TransportOptions& options) {
    return std::make_shared<LibfabricFabric>(options);
}

}  // namespace antiphon::m2n

#else

#include "m2n/types.h"

namespace antiphon::m2n {

std::shared_ptr<Transport> make_libfabric(const TransportOptions&) {
    throw_invalid(
        "built without libfabric's headers: install them (libfabric-dev, libfabric-devel) and build again with pip "
        "install . or make clean setup");
}

}  // namespace antiphon::m2n

#endif

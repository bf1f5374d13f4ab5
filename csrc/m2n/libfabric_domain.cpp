#include "m2n/libfabric_domain.h"

#if defined(ANTIPHON_HAVE_LIBFABRIC)

#include <netinet/in.h>
#include <pthread.h>
#include <rdma/fi_cm.h>
#include <signal.h>
#include <sys/uio.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <utility>

#include "m2n/types.h"

namespace antiphon::m2n {

namespace {

constexpr int64_t shortest_tick_ns = 2'000'000;
constexpr int64_t longest_tick_ns = 16'000'000;
constexpr int64_t idle_before_parking_ns = 500'000'000;

}  // namespace

LibfabricKeeper::LibfabricKeeper(std::function<Found()> visit)
    : visit_(std::move(visit)), tick_ns_(shortest_tick_ns), thread_([this] { run(); }) {}

LibfabricKeeper::~LibfabricKeeper() {
    {
        const std::lock_guard lock(mutex_);
        stopping_ = true;
    }
    wake_.notify_all();
    thread_.join();
}

void LibfabricKeeper::wake() {
    {
        const std::lock_guard lock(mutex_);
        parked_.store(false);
    }
    wake_.notify_all();
}

bool LibfabricKeeper::wait_for_turn() {
    std::unique_lock lock(mutex_);
    if (idle_ns_ < idle_before_parking_ns) {
        wake_.wait_for(lock, std::chrono::nanoseconds(tick_ns_), [this] { return stopping_; });
    } else if (parked_.exchange(true)) {
        // Not at the first time: a write handed in before the flag could be seen is found by one more visit.
        wake_.wait(lock, [this] { return stopping_ || !parked_.load(); });
        tick_ns_ = shortest_tick_ns;
        idle_ns_ = 0;
    }
    return !stopping_;
}

void LibfabricKeeper::run() {
    sigset_t all;
    sigfillset(&all);
    pthread_sigmask(SIG_BLOCK, &all, nullptr);
    pthread_setname_np(pthread_self(), "m2n-keeper");
    while (wait_for_turn()) {
        const Found found = visit_();
        tick_ns_ = found.owner_looks ? std::min(2 * tick_ns_, longest_tick_ns) : shortest_tick_ns;
        idle_ns_ = found.active ? 0 : idle_ns_ + tick_ns_;
        if (found.active) parked_.store(false);
    }
}

namespace {

uint64_t random_key(size_t key_bytes) {
    const uint64_t word = random_value<uint64_t>();
    return key_bytes < sizeof(word) ? word & ((uint64_t{1} << (8 * key_bytes)) - 1) : word;
}

bool is_wildcard(const std::vector<std::byte>& address, uint32_t format) {
    if (format == FI_SOCKADDR_IN && address.size() >= sizeof(sockaddr_in)) {
        sockaddr_in inet{};
        std::memcpy(&inet, address.data(), sizeof(inet));
        return inet.sin_addr.s_addr == INADDR_ANY;
    }
    if (format == FI_SOCKADDR_IN6 && address.size() >= sizeof(sockaddr_in6)) {
        sockaddr_in6 inet{};
        std::memcpy(&inet, address.data(), sizeof(inet));
        return std::memcmp(&inet.sin6_addr, &in6addr_any, sizeof(in6addr_any)) == 0;
    }
    return false;
}

}  // namespace

LibfabricDomain::LibfabricDomain(const TransportOptions& options)
    : library_(open_libfabric(options.library)), info_(choose_provider(library_, options)) {
    if (!options.congestion.empty()) {
        throw_invalid("libfabric: congestion control \"", options.congestion,
                      "\" cannot be set, its providers have no such option: use the transport tcp");
    }
    fid_fabric* fabric = nullptr;
    check(library_.fabric(info_->fabric_attr, &fabric, nullptr), "fi_fabric");
    fabric_.reset(fabric);
    fid_domain* domain = nullptr;
    check(fi_domain(fabric, info_.get(), &domain, nullptr), "fi_domain");
    domain_.reset(domain);
    fi_av_attr attributes{};
    attributes.type = FI_AV_TABLE;
    fid_av* addresses = nullptr;
    check(fi_av_open(domain, &attributes, &addresses, nullptr), "fi_av_open");
    addresses_.reset(addresses);
    open_queue();
    open_endpoint(Lane::data, options.data_traffic_class);
    open_endpoint(Lane::credit, options.credit_traffic_class);
    own_peer_.provider = provider();
    own_peer_.protocol = info_->ep_attr->protocol;
    own_peer_.data_address = name_of(endpoint(Lane::data));
    own_peer_.credit_address = name_of(endpoint(Lane::credit));
    if (is_wildcard(own_peer_.data_address, info_->addr_format)) {
        throw_invalid("libfabric: host is '", options.host,
                      "', which no peer can reach: name an address of this machine");
    }
}

void LibfabricDomain::check(int64_t result, const char* call) const {
    if (result >= 0) return;
    throw Error(Code::system, concat("libfabric ", call, " (provider ", provider(), "): ", library_.words_for(result)));
}

void LibfabricDomain::open_queue() {
    fi_cq_attr attributes{};
    attributes.size = queue_entries;
    attributes.format = FI_CQ_FORMAT_DATA;
    attributes.wait_obj = FI_WAIT_FD;
    fid_cq* queue = nullptr;
    if (fi_cq_open(domain_.get(), &attributes, &queue, nullptr) == 0) {
        queue_.reset(queue);
        int descriptor = -1;
        if (fi_control(&queue->fid, FI_GETWAIT, &descriptor) == 0) wait_descriptor_ = descriptor;
        return;
    }
    attributes.size = queue_entries;
    attributes.wait_obj = FI_WAIT_NONE;
    check(fi_cq_open(domain_.get(), &attributes, &queue, nullptr), "fi_cq_open");
    queue_.reset(queue);
}

void LibfabricDomain::open_endpoint(Lane lane, int traffic_class) {
    const auto index = static_cast<size_t>(lane);
    lane_info_[index] = copy_info(library_, *info_);
    if (traffic_class >= 0) lane_info_[index]->tx_attr->tclass = static_cast<uint32_t>(traffic_class);
    fid_ep* endpoint = nullptr;
    check(fi_endpoint(domain_.get(), lane_info_[index].get(), &endpoint, nullptr), "fi_endpoint");
    endpoints_[index].reset(endpoint);
    check(fi_ep_bind(endpoint, &queue_->fid, FI_TRANSMIT | FI_RECV), "fi_ep_bind (completion queue)");
    check(fi_ep_bind(endpoint, &addresses_->fid, 0), "fi_ep_bind (address vector)");
    check(fi_enable(endpoint), "fi_enable");
}

std::vector<std::byte> LibfabricDomain::name_of(fid_ep* endpoint) const {
    std::vector<std::byte> name(FI_NAME_MAX);
    size_t size = name.size();
    int result = fi_getname(&endpoint->fid, name.data(), &size);
    if (result == -FI_ETOOSMALL) {
        name.resize(size);
        result = fi_getname(&endpoint->fid, name.data(), &size);
    }
    check(result, "fi_getname");
    name.resize(size);
    return name;
}

bool LibfabricDomain::may_sleep() const {
    fid* object = &queue_->fid;
    return wait_descriptor_ >= 0 && fi_trywait(fabric_.get(), &object, 1) == 0;
}

MemoryRegion LibfabricDomain::register_memory(void* memory, uint64_t num_bytes, uint64_t access, Lane lane,
                                              const StreamDevice* device) {
    const iovec place{memory, num_bytes};
    fi_mr_attr attributes{};
    attributes.mr_iov = &place;
    attributes.iov_count = 1;
    attributes.access = access;
    attributes.iface = device == nullptr ? FI_HMEM_SYSTEM : FI_HMEM_CUDA;
    if (device != nullptr) attributes.device.cuda = device->ordinal();
    fid_mr* region = nullptr;
    int result = 0;
    for (int attempt = 0; attempt < 4; ++attempt) {  // a random key may be taken
        attributes.requested_key =
            (info_->domain_attr->mr_mode & FI_MR_PROV_KEY) != 0 ? 0 : random_key(info_->domain_attr->mr_key_size);
        result = fi_mr_regattr(domain_.get(), &attributes, 0, &region);
        if (result != -FI_ENOKEY) break;
    }
    if (result != 0) {
        throw Error(Code::system, concat("libfabric fi_mr_regattr (provider ", provider(), ") of ", num_bytes,
                                         " bytes: ", library_.words_for(result),
                                         "; where the card pins memory, raise the limit (ulimit -l)"));
    }
    MemoryRegion registered;
    registered.registration.reset(region);
    if ((info_->domain_attr->mr_mode & FI_MR_ENDPOINT) != 0) {
        check(fi_mr_bind(region, &endpoint(lane)->fid, 0), "fi_mr_bind");
        check(fi_mr_enable(region), "fi_mr_enable");
    }
    const bool by_address = (info_->domain_attr->mr_mode & FI_MR_VIRT_ADDR) != 0;
    registered.remote_base = by_address ? reinterpret_cast<uint64_t>(memory) : 0;
    return registered;
}

fi_addr_t LibfabricDomain::acquire_address(Bytes address, const std::string& of_provider, uint32_t of_protocol) {
    if (of_protocol != own_peer_.protocol) {
        throw Error(Code::refused, "libfabric: the peer uses provider " + of_provider + ", this end " + provider() +
                                       ": give both the same provider");
    }
    // Only text says where it ends; of everything else the provider reads as many bytes as its own addresses have.
    const bool is_text = info_->addr_format == FI_ADDR_STR;
    const bool whole = is_text ? !address.empty() && address.back() == std::byte{0}
                               : address.size() == own_peer_.data_address.size();
    if (!whole) {
        throw Error(Code::refused, concat("libfabric: the peer's address of ", address.size(),
                                          " bytes is none of provider ", provider(), ", whose have ",
                                          own_peer_.data_address.size(), ": use IPv4 or IPv6 on both sides"));
    }
    KnownAddress& known = known_[{address.begin(), address.end()}];
    if (known.users == 0) {
        const int inserted = fi_av_insert(addresses_.get(), address.data(), 1, &known.address, 0, nullptr);
        if (inserted != 1) {
            known_.erase({address.begin(), address.end()});
            throw Error(Code::system, "libfabric fi_av_insert (provider " + provider() + "): " +
                                          (inserted < 0 ? library_.words_for(inserted) : "the address is refused"));
        }
    }
    ++known.users;
    return known.address;
}

void LibfabricDomain::release_address(fi_addr_t address) {
    for (auto entry = known_.begin(); entry != known_.end(); ++entry) {
        if (entry->second.address != address || --entry->second.users > 0) continue;
        fi_av_remove(addresses_.get(), &address, 1, 0);
        known_.erase(entry);
        return;
    }
}

void LibfabricDomain::close_endpoints() {
    for (Fid<fid_ep>& endpoint : endpoints_) endpoint.reset();
}

namespace {

constexpr uint32_t introduction_magic = 0x3249464C;  // "LFI2", little endian
constexpr uint32_t welcome_magic = 0x3257464C;       // "LFW2"
constexpr size_t longest_provider = 64;
constexpr size_t longest_address = 512;

void put_counted(ByteWriter& writer, Bytes bytes) {
    writer.u16(static_cast<uint16_t>(bytes.size()));
    writer.raw(bytes);
}

std::vector<std::byte> take_counted(ByteReader& reader, const char* what, size_t limit) {
    const size_t size = reader.u16();
    if (size == 0 || size > limit) {
        throw_invalid("libfabric: the peer's ", what, " has ", size, " bytes: it must have 1 to ", limit);
    }
    const Bytes bytes = reader.raw(size);
    return {bytes.begin(), bytes.end()};
}

void put_peer(ByteWriter& writer, const LibfabricPeer& peer) {
    put_counted(writer, bytes_of(peer.provider));
    writer.u32(peer.protocol);
    put_counted(writer, peer.data_address);
    put_counted(writer, peer.credit_address);
}

LibfabricPeer take_peer(ByteReader& reader) {
    LibfabricPeer peer;
    for (const std::byte byte : take_counted(reader, "provider", longest_provider)) {
        const char letter = static_cast<char>(byte);
        peer.provider += letter >= ' ' && letter <= '~' ? letter : '?';  // it ends up in errors
    }
    peer.protocol = reader.u32();
    peer.data_address = take_counted(reader, "data address", longest_address);
    peer.credit_address = take_counted(reader, "credit address", longest_address);
    return peer;
}

void expect_magic(ByteReader& reader, uint32_t magic, const char* what) {
    if (reader.u32() == magic) return;
    throw_invalid("libfabric: what the peer sent is not ", what,
                  " of this version: run the same version of Antiphon on both sides");
}

void check_tag(PairTag tag) {
    if (tag < num_tags) return;
    throw_invalid("libfabric: the peer's tag is ", tag, ": it must be below ", num_tags);
}

}  // namespace

std::vector<std::byte> encode(const LibfabricIntroduction& introduction) {
    std::vector<std::byte> bytes;
    ByteWriter writer(bytes);
    writer.u32(introduction_magic);
    put_peer(writer, introduction.peer);
    writer.numbers(introduction.tag, introduction.nonce, introduction.credit_base, introduction.credit_key);
    return bytes;
}

std::vector<std::byte> encode(const LibfabricWelcome& welcome) {
    std::vector<std::byte> bytes;
    ByteWriter writer(bytes);
    writer.u32(welcome_magic);
    put_peer(writer, welcome.peer);
    writer.numbers(welcome.tag, welcome.introduced_tag, welcome.nonce, welcome.slots_base, welcome.slots_key,
                   welcome.slots_bytes);
    return bytes;
}

LibfabricIntroduction decode_introduction(Bytes bytes) {
    ByteReader reader(bytes, "libfabric introduction");
    expect_magic(reader, introduction_magic, "an introduction");
    LibfabricIntroduction introduction;
    introduction.peer = take_peer(reader);
    reader.numbers(introduction.tag, introduction.nonce, introduction.credit_base, introduction.credit_key);
    reader.expect_end();
    check_tag(introduction.tag);
    return introduction;
}

LibfabricWelcome decode_welcome(Bytes bytes) {
    ByteReader reader(bytes, "libfabric welcome");
    expect_magic(reader, welcome_magic, "a welcome");
    LibfabricWelcome welcome;
    welcome.peer = take_peer(reader);
    reader.numbers(welcome.tag, welcome.introduced_tag, welcome.nonce, welcome.slots_base, welcome.slots_key,
                   welcome.slots_bytes);
    reader.expect_end();
    check_tag(welcome.tag);
    check_tag(welcome.introduced_tag);
    return welcome;
}

}  // namespace antiphon::m2n

#endif

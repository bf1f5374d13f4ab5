#include "m2n/libfabric_info.h"

#include "m2n/libfabric_library.h"
#include "m2n/types.h"

#if defined(ANTIPHON_HAVE_LIBFABRIC)

#include <rdma/fi_domain.h>
#include <rdma/fi_eq.h>

#include <algorithm>

#include "m2n/libfabric_domain.h"

namespace antiphon::m2n {

namespace {

const char* note_for(const std::string& name) {
    const std::string core = core_provider(name);
    if (core == "efa") {
        return "credit_traffic_class FI_TC_LOW_LATENCY asks the card for its low-latency service; congestion is the "
               "card's affair; with FI_EFA_ENABLE_SHM_TRANSFER=0 it can be waited for by descriptor";
    }
    if (core == "verbs") {
        return "traffic classes are not passed on: service level and DSCP are the connection manager's "
               "(cma_roce_tos); on RoCE set priority flow control or ECN on card and switch";
    }
    if (connects_over_tcp(name)) {
        return "data_traffic_class FI_TC_BULK_DATA lets small segments be gathered, other classes change nothing; "
               "congestion control is the system's (net.ipv4.tcp_congestion_control), and bbr paces many connections "
               "at once: the transport tcp takes cubic instead";
    }
    if (core == "tcp" || core == "net") return "one layer more than plain tcp, and slower";
    if (core == "shm") return "one machine only; cannot be waited for by descriptor: prefer --transport shm";
    return "not tested by this project";
}

bool waits_by_descriptor(const LibfabricLibrary& library, fi_info& info) {
    fid_fabric* fabric = nullptr;
    if (library.fabric(info.fabric_attr, &fabric, nullptr) != 0) return false;
    const Fid<fid_fabric> owned_fabric(fabric);
    fid_domain* domain = nullptr;
    if (fi_domain(fabric, &info, &domain, nullptr) != 0) return false;
    const Fid<fid_domain> owned_domain(domain);
    fi_cq_attr attributes{};
    attributes.format = FI_CQ_FORMAT_DATA;
    attributes.wait_obj = FI_WAIT_FD;
    fid_cq* queue = nullptr;
    if (fi_cq_open(domain, &attributes, &queue, nullptr) != 0) return false;
    const Fid<fid_cq> owned_queue(queue);
    int descriptor = -1;
    return fi_control(&queue->fid, FI_GETWAIT, &descriptor) == 0 && descriptor >= 0;
}

std::string or_empty(const char* text) { return text == nullptr ? "" : text; }

bool takes_device_memory(const LibfabricLibrary& library, const std::string& name, bool posts_receives) {
    const FabricInfo list = query_providers(library, {name, "", posts_receives, true});
    for (const fi_info* info = list.get(); info != nullptr; info = info->next) {
        if (or_empty(info->fabric_attr->prov_name) == name && (info->caps & FI_HMEM) != 0) return true;
    }
    return false;
}

LibfabricProviderInfo describe(const LibfabricLibrary& library, fi_info& info) {
    LibfabricProviderInfo provider;
    provider.name = or_empty(info.fabric_attr->prov_name);
    provider.fabric = or_empty(info.fabric_attr->name);
    provider.domain = or_empty(info.domain_attr->name);
    provider.waits_by_descriptor = waits_by_descriptor(library, info);
    provider.posts_receives = (info.mode & FI_RX_CQ_DATA) != 0;
    provider.device_memory = takes_device_memory(library, provider.name, provider.posts_receives);
    provider.completion_data_bytes = static_cast<uint32_t>(info.domain_attr->cq_data_size);
    provider.largest_write_bytes = info.ep_attr->max_msg_size;
    if (info.nic != nullptr && info.nic->link_attr != nullptr) {
        provider.link_bits_per_s = info.nic->link_attr->speed;
    }
    provider.note = note_for(provider.name);
    return provider;
}

void add_providers(LibfabricInfo& result, const LibfabricLibrary& library) {
    const FabricInfo list = query_providers(library, {"", "", true, false});
    for (fi_info* info = list.get(); info != nullptr; info = info->next) {
        const std::string name = or_empty(info->fabric_attr->prov_name);
        const std::string domain = or_empty(info->domain_attr->name);
        const bool known = std::ranges::any_of(result.providers, [&](const LibfabricProviderInfo& other) {
            return other.name == name && other.domain == domain;  // one entry a device, not one an address
        });
        if (known || core_provider(name) == "sockets" || info->domain_attr->cq_data_size < 4) continue;
        result.providers.push_back(describe(library, *info));
    }
}

}  // namespace

LibfabricInfo libfabric_info(const TransportOptions& options) {
    LibfabricInfo result;
    result.built = true;
    result.headers_version = std::to_string(FI_MAJOR_VERSION) + "." + std::to_string(FI_MINOR_VERSION);
    try {
        const LibfabricLibrary library = open_libfabric(options.library);
        result.library = library.path;
        result.version = library.version_text();
        add_providers(result, library);
        result.chosen = choose_provider(library, options)->fabric_attr->prov_name;
    } catch (const Error& error) {
        result.problem = error.what();
    }
    return result;
}

}  // namespace antiphon::m2n

#else

namespace antiphon::m2n {

LibfabricInfo libfabric_info(const TransportOptions& options) {
    LibfabricInfo result;
    try {
        result.problem = make_libfabric(options)->name();  // throws: it says what this build lacks
    } catch (const Error& error) {
        result.problem = error.what();
    }
    try {
        const LibfabricLibrary library = open_libfabric(options.library);
        result.library = library.path;
        result.version = library.version_text();
    } catch (const Error&) {
        // No library either. The back-end is what has to come first.
    }
    return result;
}

}  // namespace antiphon::m2n

#endif

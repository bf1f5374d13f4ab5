#include "m2n/libfabric_provider.h"

#if defined(ANTIPHON_HAVE_LIBFABRIC)

#include <rdma/fi_domain.h>
#include <rdma/fi_endpoint.h>

#include <array>
#include <cstring>
#include <vector>

#include "m2n/error.h"

namespace antiphon::m2n {

namespace {

constexpr std::array<const char*, 3> preferred_providers = {"efa", "verbs", "tcp"};
constexpr size_t least_completion_bytes = 4;

// Providers whose addresses are not IP addresses pick their own; a host would only confuse them.
bool binds_to_host(const std::string& name) {
    const std::string core = core_provider(name);
    return core == "tcp" || core == "verbs" || core == "net";
}

FabricInfo make_hints(const LibfabricLibrary& library, const ProviderWish& wish) {
    FabricInfo hints(library.dupinfo(nullptr), {library.freeinfo});
    if (!hints) throw Error(Code::system, "libfabric: no memory for hints");
    hints->caps = FI_MSG | FI_RMA | FI_WRITE | FI_REMOTE_WRITE;
    hints->mode = FI_CONTEXT | FI_CONTEXT2;
    if (wish.posts_receives) hints->mode |= FI_RX_CQ_DATA;
    hints->ep_attr->type = FI_EP_RDM;
    // One mutex of ours guards every call, so the provider may leave out its own locks.
    hints->domain_attr->threading = FI_THREAD_DOMAIN;
    hints->domain_attr->control_progress = FI_PROGRESS_MANUAL;
    hints->domain_attr->data_progress = FI_PROGRESS_MANUAL;
    hints->domain_attr->resource_mgmt = FI_RM_ENABLED;  // a full queue must say EAGAIN, not lose
    hints->domain_attr->mr_mode =
        FI_MR_LOCAL | FI_MR_VIRT_ADDR | FI_MR_ALLOCATED | FI_MR_PROV_KEY | FI_MR_ENDPOINT;
    if (wish.device_memory) {
        hints->caps |= FI_HMEM;
        hints->domain_attr->mr_mode |= FI_MR_HMEM;
    }
    if (!wish.name.empty()) hints->fabric_attr->prov_name = ::strdup(wish.name.c_str());  // freed with the hints
    return hints;
}

bool fits(const fi_info& info) {
    const char* name = info.fabric_attr->prov_name;
    return name != nullptr && info.domain_attr->cq_data_size >= least_completion_bytes &&
           core_provider(name) != "sockets";
}

// The exact name before one with a layer on top: "tcp" before "tcp;ofi_rxm", which is slower.
const fi_info* best_of(const fi_info* list, const std::string& name) {
    const fi_info* layered = nullptr;
    for (const fi_info* info = list; info != nullptr; info = info->next) {
        if (!fits(*info)) continue;
        const std::string found = info->fabric_attr->prov_name;
        if (found == name) return info;
        if (layered == nullptr && core_provider(found) == core_provider(name)) layered = info;
    }
    return layered;
}

FabricInfo choose_named(const LibfabricLibrary& library, const std::string& name, const std::string& host,
                        bool layered) {
    // A provider that needs no posted receives is taken if there is one: it has less to do for each message.
    for (const bool posts_receives : {false, true}) {
        const ProviderWish wish{name, binds_to_host(name) ? host : "", posts_receives, false};
        const FabricInfo list = query_providers(library, wish);
        const fi_info* best = best_of(list.get(), name);
        if (best == nullptr || (!layered && best->fabric_attr->prov_name != name)) continue;
        // With device memory where it costs host memory nothing: registered memory goes to the card in any case.
        const std::string core = core_provider(name);
        if (core == "efa" || core == "verbs") {
            const FabricInfo on_devices = query_providers(library, {name, wish.host, posts_receives, true});
            const fi_info* better = best_of(on_devices.get(), name);
            if (better != nullptr) return copy_info(library, *better);
        }
        return copy_info(library, *best);
    }
    return nullptr;
}

FabricInfo choose(const LibfabricLibrary& library, const std::string& name, const std::string& host) {
    if (name == "tcp") {
        // Before 1.18 the datagrams of today's tcp were a provider of their own, `net`: the same bytes on the wire, and
        // faster than tcp below ofi_rxm.
        for (const char* native : {"tcp", "net"}) {
            FabricInfo info = choose_named(library, native, host, false);
            if (info) return info;
        }
    }
    return choose_named(library, name, host, true);
}

std::string names_of(const LibfabricLibrary& library) {
    const FabricInfo list = query_providers(library, {"", "", true, false});
    std::vector<std::string> names;
    for (const fi_info* info = list.get(); info != nullptr; info = info->next) {
        if (!fits(*info)) continue;
        const std::string name = info->fabric_attr->prov_name;
        if (names.empty() || names.back() != name) names.push_back(name);
    }
    std::string text;
    for (const std::string& name : names) text += (text.empty() ? "" : ", ") + name;
    return text.empty() ? "none" : text;
}

}  // namespace

std::string core_provider(const std::string& name) { return name.substr(0, name.find(';')); }

bool connects_over_tcp(const std::string& name) { return name == "tcp" || name == "net"; }

FabricInfo copy_info(const LibfabricLibrary& library, const fi_info& info) {
    FabricInfo copy(library.dupinfo(&info), {library.freeinfo});
    if (!copy) throw Error(Code::system, "libfabric: no memory for a provider's description");
    return copy;
}

FabricInfo query_providers(const LibfabricLibrary& library, const ProviderWish& wish) {
    const FabricInfo hints = make_hints(library, wish);
    const char* node = wish.host.empty() ? nullptr : wish.host.c_str();
    fi_info* found = nullptr;
    const int result =
        library.getinfo(library.api_version(), node, nullptr, node == nullptr ? 0 : FI_SOURCE, hints.get(), &found);
    return FabricInfo(result == 0 ? found : nullptr, {library.freeinfo});
}

FabricInfo choose_provider(const LibfabricLibrary& library, const TransportOptions& options) {
    if (core_provider(options.provider) == "sockets") {
        throw Error(Code::invalid, "libfabric provider is sockets: its writes with completion data hang, use tcp");
    }
    if (core_provider(options.provider) == "shm" && library.version < FI_VERSION(2, 0)) {
        throw Error(Code::invalid, "libfabric provider is shm, of version " + library.version_text() +
                                       ": before 2.0 a peer that is killed leaves a lock behind and hangs all others; "
                                       "use the transport shm, or a newer libfabric");
    }
    std::vector<std::string> names;
    if (options.provider.empty()) {
        names.assign(preferred_providers.begin(), preferred_providers.end());
    } else {
        names.push_back(options.provider);
    }
    for (const std::string& name : names) {
        FabricInfo info = choose(library, name, options.host);
        if (info) return info;
    }
    const std::string wanted = options.provider.empty() ? "efa, verbs or tcp" : options.provider;
    throw Error(Code::invalid, "libfabric " + library.version_text() + " (" + library.path + ") has no provider " +
                                   wanted + " that writes with completion data from host '" + options.host +
                                   "'; providers that do: " + names_of(library));
}

}  // namespace antiphon::m2n

#endif

#include "m2n/libfabric_library.h"

#include <dlfcn.h>
#include <glob.h>
#include <sys/stat.h>

#include <algorithm>
#include <array>
#include <cstdlib>
#include <cstring>
#include <utility>
#include <vector>

#if defined(ANTIPHON_HAVE_LIBFABRIC)
#include <rdma/fi_domain.h>
#include <rdma/fi_endpoint.h>
#endif

#include "m2n/types.h"

namespace antiphon::m2n {

namespace {

constexpr const char* soname = "libfabric.so.1";
constexpr uint32_t make_version(uint32_t major, uint32_t minor) { return major << 16 | minor; }
constexpr uint32_t oldest_version = make_version(1, 17);
constexpr uint32_t wanted_version = make_version(1, 18);

std::string text_of(uint32_t version) {
    return std::to_string(version >> 16) + "." + std::to_string(version & 0xFFFF);
}

std::string environment(const char* name) {
    const char* value = std::getenv(name);
    return value == nullptr ? "" : value;
}

std::string in_folder(const std::string& path) {
    struct stat status {};
    if (::stat(path.c_str(), &status) == 0 && S_ISDIR(status.st_mode)) return path + "/" + soname;
    return path;
}

// Newest first where a vendor keeps several versions side by side.
void add_matches(std::vector<std::string>& found, const char* pattern) {
    glob_t matches{};
    if (::glob(pattern, 0, nullptr, &matches) == 0) {
        for (size_t i = matches.gl_pathc; i > 0; --i) found.emplace_back(matches.gl_pathv[i - 1]);
    }
    ::globfree(&matches);
}

template <class Function>
bool find(void* handle, const char* name, Function& function) {
    function = reinterpret_cast<Function>(::dlsym(handle, name));
    return function != nullptr;
}

// Returns why not, or nothing.
std::string try_open(const std::string& path, LibfabricLibrary& library) {
    void* handle = ::dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL | RTLD_NODELETE);
    if (handle == nullptr) {
        const char* reason = ::dlerror();
        return reason == nullptr ? path + ": cannot be opened" : reason;
    }
    uint32_t (*version)() = nullptr;
    const bool complete = find(handle, "fi_version", version) && find(handle, "fi_getinfo", library.getinfo) &&
                          find(handle, "fi_freeinfo", library.freeinfo) &&
                          find(handle, "fi_dupinfo", library.dupinfo) && find(handle, "fi_fabric", library.fabric) &&
                          find(handle, "fi_strerror", library.strerror);
    if (!complete) return path + ": lacks functions of libfabric";
    library.version = version();
    if (library.version < oldest_version) {
        return path + ": version " + text_of(library.version) + ", at least " + text_of(oldest_version) + " is needed";
    }
    Dl_info where{};
    const bool known = ::dladdr(reinterpret_cast<void*>(library.getinfo), &where) != 0 && where.dli_fname != nullptr;
    library.path = known ? where.dli_fname : path;
    return {};
}

// The files that a search tries, globs resolved.
std::vector<std::string> candidates_of_search() {
    const std::string named = environment("ANTIPHON_LIBFABRIC");
    if (!named.empty()) return {in_folder(named)};
    std::vector<std::string> found;
    for (const char* pattern :
         {"/opt/amazon/efa/lib64/libfabric.so.1", "/opt/amazon/efa/lib/libfabric.so.1",
          "/opt/cray/libfabric/*/lib64/libfabric.so.1", "/opt/mellanox/*/lib*/libfabric.so.1",
          "/opt/libfabric/lib*/libfabric.so.1"}) {
        add_matches(found, pattern);
    }
    found.emplace_back(soname);  // what the dynamic linker finds
    const std::string packaged = environment("ANTIPHON_LIBFABRIC_PACKAGED");
    if (!packaged.empty()) found.push_back(in_folder(packaged));
    return found;
}

}  // namespace

uint32_t LibfabricLibrary::api_version() const { return std::min(version, wanted_version); }

std::string LibfabricLibrary::version_text() const { return text_of(version); }

std::string LibfabricLibrary::words_for(int64_t error) const {
    const int code = static_cast<int>(error < 0 ? -error : error);
    const char* words = strerror(code);
    return words == nullptr ? "error " + std::to_string(code) : words;
}

LibfabricLibrary open_libfabric(const std::string& path) {
    const std::vector<std::string> candidates =
        path.empty() ? candidates_of_search() : std::vector<std::string>{in_folder(path)};
    std::string reasons;
    for (const std::string& candidate : candidates) {
        LibfabricLibrary library;
        const std::string reason = try_open(candidate, library);
        if (reason.empty()) return library;
        reasons += (reasons.empty() ? "" : "; ") + reason;
    }
    throw_invalid("library libfabric.so.1 not found (", reasons,
                  "): install libfabric (libfabric1), name it with ANTIPHON_LIBFABRIC=/path/to/libfabric.so.1, or "
                  "fetch a copy into a checkout with bash scripts/fetch_libfabric.sh .venv/libfabric");
}

#if defined(ANTIPHON_HAVE_LIBFABRIC)

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
        throw_invalid("libfabric provider is sockets: its writes with completion data hang, use tcp");
    }
    if (core_provider(options.provider) == "shm" && library.version < FI_VERSION(2, 0)) {
        throw_invalid("libfabric provider is shm, of version ", library.version_text(),
                      ": before 2.0 a peer that is killed leaves a lock behind and hangs all others; use the transport "
                      "shm, or a newer libfabric");
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
    throw_invalid("libfabric ", library.version_text(), " (", library.path, ") has no provider ", wanted,
                  " that writes with completion data from host '", options.host,
                  "'; providers that do: ", names_of(library));
}

#endif

}  // namespace antiphon::m2n

#include "m2n/libfabric_library.h"

#include <dlfcn.h>
#include <glob.h>
#include <sys/stat.h>

#include <algorithm>
#include <cstdlib>
#include <utility>

#include "m2n/error.h"

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

}  // namespace

uint32_t LibfabricLibrary::api_version() const { return std::min(version, wanted_version); }

std::string LibfabricLibrary::version_text() const { return text_of(version); }

std::string LibfabricLibrary::words_for(int64_t error) const {
    const int code = static_cast<int>(error < 0 ? -error : error);
    const char* words = strerror(code);
    return words == nullptr ? "error " + std::to_string(code) : words;
}

std::vector<std::string> libfabric_candidates() {
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

LibfabricLibrary open_libfabric(const std::string& path) {
    const std::vector<std::string> candidates =
        path.empty() ? libfabric_candidates() : std::vector<std::string>{in_folder(path)};
    std::string reasons;
    for (const std::string& candidate : candidates) {
        LibfabricLibrary library;
        const std::string reason = try_open(candidate, library);
        if (reason.empty()) return library;
        reasons += (reasons.empty() ? "" : "; ") + reason;
    }
    throw Error(Code::invalid, "library libfabric.so.1 not found (" + reasons +
                                   "): install libfabric (libfabric1), name it with "
                                   "ANTIPHON_LIBFABRIC=/path/to/libfabric.so.1, or fetch a copy into a checkout with "
                                   "bash scripts/fetch_libfabric.sh .venv/libfabric");
}

}  // namespace antiphon::m2n

// Tests of the M2N library's core, for the sanitizers: endpoints in threads of one process, over every back-end that has
// no dependency.
//
//     native_core [PART]    runs the cases whose name contains PART

#include <cstdio>
#include <cstring>
#include <string>

#include "harness.h"

namespace {

using namespace antiphon::m2n::test;

constexpr Backend backends[] = {{"shm", "shm"}, {"tcp", "tcp"}, {"loopback", "loopback"}, {"shuffled", "loopback", 20}};

int num_run = 0;

void run(const Case& test, const Backend& backend, const std::string& name, const std::string& part) {
    if (name.find(part) == std::string::npos) return;
    const int64_t start_ns = antiphon::monotonic_ns();
    std::printf("%s\n", name.c_str());
    std::fflush(stdout);
    test.run(backend);
    std::printf("ok %s %lld ms\n", name.c_str(),
                static_cast<long long>((antiphon::monotonic_ns() - start_ns) / millisecond_ns));
    ++num_run;
}

}  // namespace

int main(int count, char** arguments) {
    const std::string part = count > 1 ? arguments[1] : "";
    for (const auto& cases : {piece_cases(), stream_cases(), rogue_cases()}) {
        for (const Case& test : cases) run(test, backends[0], test.name, part);
    }
    for (const auto& cases : {flood_cases(), life_cases(), exchange_cases()}) {
        for (const Case& test : cases) {
            for (const Backend& backend : backends) {
                run(test, backend, std::string(test.name) + "[" + backend.name + "]", part);
            }
        }
    }
    std::printf("%d cases, all ok\n", num_run);
    return num_run > 0 ? 0 : 1;
}

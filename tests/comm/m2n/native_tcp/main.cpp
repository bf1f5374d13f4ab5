// Tests of the tcp back-end, without Python and without the rest of the library. Prints each case; exit code 1 at the
// first that fails. Usage: native_tcp [WORDS], to run the cases whose name contains WORDS.
#include <csignal>
#include <cstring>

#include "harness.h"

int main(int num_arguments, char** arguments) {
    using namespace antiphon;
    using namespace antiphon::m2n::test;
    std::signal(SIGPIPE, SIG_IGN);  // as in Python
    const char* wanted = num_arguments > 1 ? arguments[1] : "";
    for (const auto& cases : {frame_cases(), pair_cases(), wait_cases(), fault_cases(), splice_cases()}) {
        for (const Case& each : cases) {
            if (std::strstr(each.name, wanted) == nullptr) continue;
            std::printf("%s ... ", each.name);
            std::fflush(stdout);
            const int64_t start = monotonic_ns();
            each.run();
            std::printf("ok, %lld ms\n", static_cast<long long>((monotonic_ns() - start) / 1'000'000));
        }
    }
    std::printf("all ok\n");
    return 0;
}

// Tests of the libfabric back-end: PROGRAM PROVIDER [TEST...]. Exit 77: there is no such library or provider.
#include <cstdio>

#include "harness.h"
#include "tests.h"

namespace antiphon::m2n::test {

namespace {

struct Test {
    const char* name;
    void (*run)();
};

constexpr Test tests[] = {
    {"payload_sizes", payload_sizes},
    {"both_directions", both_directions},
    {"eight_pairs", eight_pairs},
    {"many_messages", many_messages},
    {"late_writer", late_writer},
    {"reconnect", reconnect},
    {"deadline_and_interrupt", deadline_and_interrupt},
    {"blocked_waits", blocked_waits},
    {"payload_in_place", payload_in_place},
    {"keeper_rests", keeper_rests},
    {"opening_beside_a_polling_owner", opening_beside_a_polling_owner},
    {"departed_before_the_connection_stands", departed_before_the_connection_stands},
    {"refusals", refusals},
    {"mangled_bytes", mangled_bytes},
    {"choices", choices},
    {"information", information},
    {"two_processes", two_processes},
    {"two_processes_both_directions", two_processes_both_directions},
    {"killed_sender", killed_sender},
    {"killed_receiver", killed_receiver},
};

}  // namespace

std::string provider;

std::shared_ptr<Transport> make() { return make_libfabric(options_for(provider)); }

int run(int argc, char** argv) {
    if (argc == 3 && std::string(argv[2]).starts_with("--")) return run_as_child(argv[2]);
    try {
        make();
    } catch (const Error& error) {
        std::printf("%s\n", error.what());
        return 77;
    }
    for (const Test& test : tests) {
        bool wanted = argc == 2;
        for (int i = 2; i < argc; ++i) wanted = wanted || test.name == std::string(argv[i]);
        if (!wanted) continue;
        const int64_t before_ns = monotonic_ns();
        test.run();
        std::printf("ok %s (%.2f s)\n", test.name, static_cast<double>(monotonic_ns() - before_ns) * 1e-9);
        std::fflush(stdout);
    }
    return 0;
}

}  // namespace antiphon::m2n::test

int main(int argc, char** argv) {
    if (argc < 2) {
        std::fprintf(stderr, "usage: %s PROVIDER [TEST...]\n", argv[0]);
        return 2;
    }
    antiphon::m2n::test::provider = argv[1];
    return antiphon::m2n::test::run(argc, argv);
}

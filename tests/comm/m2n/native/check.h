// A test program's frame: named tests, checks that say what they compared, and waiting with a limit.
#pragma once

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <sstream>
#include <stdexcept>
#include <string>
#include <string_view>
#include <thread>
#include <vector>

#include "base/wait_word.h"
#include "m2n/types.h"

namespace antiphon::m2n::test {

struct Failure : std::runtime_error {
    using std::runtime_error::runtime_error;
};

[[noreturn]] inline void fail(const char* file, int line, const std::string& words) {
    throw Failure(std::string(file) + ":" + std::to_string(line) + ": " + words);
}

#define CHECK(condition) \
    if (!(condition)) ::antiphon::m2n::test::fail(__FILE__, __LINE__, "not true: " #condition)

#define CHECK_EQUAL(left, right)                                                                                     \
    do {                                                                                                             \
        const auto left_value = (left);                                                                              \
        const auto right_value = (right);                                                                            \
        if (!(left_value == right_value)) {                                                                          \
            std::ostringstream words;                                                                                \
            words << #left " = " << left_value << ", expected " << right_value;                                      \
            ::antiphon::m2n::test::fail(__FILE__, __LINE__, words.str());                                            \
        }                                                                                                            \
    } while (false)

// `run` must throw Error(code) with `words` in its message.
template <class Run>
Error expect_error(Code code, std::string_view words, const Run& run) {
    try {
        run();
    } catch (const Error& error) {
        if (error.code != code) throw Failure("wrong code, words: " + std::string(error.what()));
        if (std::string_view(error.what()).find(words) == std::string_view::npos) {
            throw Failure("wrong words: " + std::string(error.what()) + "\nexpected: " + std::string(words));
        }
        return error;
    }
    throw Failure("no error, expected: " + std::string(words));
}

// Polls until `ready`; nanoseconds it took, or a failure after the limit.
template <class Ready>
int64_t wait_until(const char* what, const Ready& ready, int64_t limit_ms = 20'000) {
    const int64_t begin = monotonic_ns();
    while (!ready()) {
        if (monotonic_ns() - begin > limit_ms * 1'000'000) throw Failure(std::string("waited in vain: ") + what);
        std::this_thread::sleep_for(std::chrono::microseconds(100));
    }
    return monotonic_ns() - begin;
}

struct Test {
    const char* name;
    std::function<void()> run;
};

inline int run_all(const std::vector<Test>& tests) {
    int num_failed = 0;
    for (const Test& test : tests) {
        try {
            test.run();
            std::printf("ok %s\n", test.name);
        } catch (const std::exception& error) {
            std::printf("FAILED %s: %s\n", test.name, error.what());
            ++num_failed;
        }
        std::fflush(stdout);
    }
    return num_failed == 0 ? EXIT_SUCCESS : EXIT_FAILURE;
}

}  // namespace antiphon::m2n::test

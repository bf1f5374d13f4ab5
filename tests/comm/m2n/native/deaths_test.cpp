// A hundred peers die, one after the other; each death is noticed by its hanging up, not by its silence, most within
// 100 ms (a machine may stand still for longer), and nobody else notices.
//
// Peers are processes of their own. They are forked by a nursery that was itself forked before any thread was started:
// a process with threads must not fork.
#include <signal.h>
#include <sys/prctl.h>
#include <sys/wait.h>

#include <algorithm>
#include <memory>
#include <vector>

#include "peers.h"

using namespace antiphon;
using namespace antiphon::m2n;
using namespace antiphon::m2n::test;

namespace {

constexpr int num_deaths = 100;

struct Birth {
    char unix_name[108] = {};
    uint16_t port = 0;
    bool local = false;
    bool kill_itself = false;  // _exit a moment after it was welcomed, instead of waiting for a signal
};

[[noreturn]] void live(const Birth& birth) {
    try {
        Recorder record;
        ControlOptions options = client_options();
        options.name = std::to_string(getpid());
        Control control(options, record);
        Hello hello = hello_of();
        hello.name = options.name;
        control.connect({birth.unix_name, "127.0.0.1", birth.port}, "expert[1]", birth.local, hello, in_ms(10'000));
        if (birth.kill_itself) _exit(0);
        while (true) pause();
    } catch (const std::exception& error) {
        std::fprintf(stderr, "a peer failed: %s\n", error.what());
        _exit(1);
    }
}

[[noreturn]] void run_nursery(int orders) {
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    signal(SIGCHLD, SIG_IGN);  // the kernel buries them
    Birth birth;
    while (read(orders, &birth, sizeof(birth)) == static_cast<ssize_t>(sizeof(birth))) {
        if (fork() != 0) continue;
        prctl(PR_SET_PDEATHSIG, SIGKILL);
        close(orders);
        live(birth);
    }
    _exit(0);
}

int nursery = -1;

// Has a peer born and waits until it is welcomed; its process.
pid_t give_birth(const Control& server, Recorder& record, bool local, bool kill_itself, size_t num_welcomed) {
    Birth birth;
    server.address().unix_name.copy(birth.unix_name, sizeof(birth.unix_name) - 1);
    birth.port = server.address().port;
    birth.local = local;
    birth.kill_itself = kill_itself;
    CHECK(write(nursery, &birth, sizeof(birth)) == static_cast<ssize_t>(sizeof(birth)));
    wait_until("a peer is welcomed", [&] { return record.num_welcomed() > num_welcomed; });
    const std::lock_guard lock(record.mutex);
    return static_cast<pid_t>(std::stoi(record.names.rbegin()->second));
}

void deaths() {
    Recorder record, survivor_record;
    Control server(server_options(), record);
    Control survivor(client_options(), survivor_record);
    for (const bool local : {true, false}) {
        survivor.connect(server.address(), "expert[1]", local, hello_of(), in_ms(5000));
    }
    std::vector<int64_t> notices_ns;
    for (int i = 0; i < num_deaths; ++i) {
        const bool kill_itself = i % 5 == 4;
        const size_t num_gone = static_cast<size_t>(i);
        const pid_t peer = give_birth(server, record, i % 2 == 0, kill_itself, num_gone + 2);
        if (kill_itself) {
            CHECK_EQUAL(record.wait_gone(num_gone).reason, "hung up");
            continue;
        }
        CHECK_EQUAL(record.num_gone(), num_gone);
        const int64_t begin = monotonic_ns();
        CHECK(kill(peer, SIGKILL) == 0);
        const Recorder::Gone gone = record.wait_gone(num_gone);
        notices_ns.push_back(gone.when_ns - begin);
        CHECK_EQUAL(gone.reason, "hung up");
        CHECK_EQUAL(record.names.at(gone.connection), std::to_string(peer));
    }
    std::ranges::sort(notices_ns);
    const int64_t median_ns = notices_ns[notices_ns.size() / 2];
    std::printf("notice: median %.1f ms, slowest %.1f ms\n", static_cast<double>(median_ns) * 1e-6,
                static_cast<double>(notices_ns.back()) * 1e-6);
    CHECK(median_ns < 100'000'000);
    CHECK_EQUAL(server.counters()->gone.load(), static_cast<uint64_t>(num_deaths));
    CHECK_EQUAL(survivor_record.num_gone(), 0u);
}

}  // namespace

int main() {
    int orders[2];
    if (pipe(orders) != 0) return EXIT_FAILURE;
    const pid_t nurse = fork();
    if (nurse == 0) {
        close(orders[1]);
        run_nursery(orders[0]);
    }
    close(orders[0]);
    nursery = orders[1];
    const int status = run_all({{"deaths", deaths}});
    close(nursery);
    waitpid(nurse, nullptr, 0);
    return status;
}

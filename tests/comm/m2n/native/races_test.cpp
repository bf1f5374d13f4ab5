// hang_up, deaths, closing and connecting at the same time, for ThreadSanitizer: no on_gone after hang_up returned, one
// at most per connection, no deadlock.
#include <atomic>
#include <memory>
#include <random>
#include <set>
#include <thread>

#include "peers.h"

using namespace antiphon;
using namespace antiphon::m2n;
using namespace antiphon::m2n::test;

namespace {

// Remembers which connections were hung up on, and what came although it was not to come.
class Watcher : public Recorder {
  public:
    void on_gone(ConnectionId connection, const std::string& reason) override {
        const std::lock_guard lock(mutex);
        if (forgotten.contains(connection)) ++num_late;
        if (!seen.insert(connection).second) ++num_twice;
        gone.push_back({connection, reason, monotonic_ns()});
    }

    // Not under the lock: on_gone, which hang_up waits for, needs it.
    void forget(Control& control, ConnectionId connection) {
        control.hang_up(connection);
        const std::lock_guard lock(mutex);
        forgotten.insert(connection);
    }

    std::set<ConnectionId> forgotten, seen;
    int num_late = 0;
    int num_twice = 0;
};

void check_quiet(Watcher& watcher) {
    const std::lock_guard lock(watcher.mutex);
    CHECK_EQUAL(watcher.num_late, 0);
    CHECK_EQUAL(watcher.num_twice, 0);
}

// Both ends hang up on each other's connections at the same moment.
void both_hang_up() {
    Watcher server_watcher, client_watcher;
    Control server(server_options(), server_watcher);
    Control client(client_options(), client_watcher);
    std::mt19937 random(2);
    for (int i = 0; i < 150; ++i) {
        const bool local = i % 2 == 0;
        const ConnectionId mine =
            client.connect(server.address(), "expert[1]", local, hello_of(), in_ms(10'000)).first;
        ConnectionId theirs = 0;
        {
            const std::lock_guard lock(server_watcher.mutex);
            theirs = server_watcher.names.rbegin()->first;
        }
        const auto pause = std::chrono::microseconds(random() % 60);
        std::thread other([&] {
            std::this_thread::sleep_for(pause);
            server_watcher.forget(server, theirs);
        });
        client_watcher.forget(client, mine);
        other.join();
    }
    check_quiet(server_watcher);
    check_quiet(client_watcher);
}

// Several threads connect and hang up; strangers come and go between them; callbacks hang up on others.
void many_threads() {
    Watcher server_watcher, client_watcher;
    Control server(server_options(), server_watcher);
    Control client(client_options(), client_watcher);
    server_watcher.during_hello = [&](ConnectionId connection, const Hello&) {
        if (connection % 7 == 0) server.hang_up(connection - 3);
    };
    std::atomic<int> num_failed{0};
    std::vector<std::thread> threads;
    for (int number = 0; number < 4; ++number) {
        threads.emplace_back([&, number] {
            for (int i = 0; i < 40; ++i) {
                try {
                    if (number == 3) {
                        Stranger stranger(server.address(), i % 2 == 0);
                        stranger.say(attach_greeting(to_bytes("not the token")));
                        continue;
                    }
                    const auto [connection, welcome] =
                        client.connect(server.address(), "expert[1]", i % 2 == 0, hello_of(), in_ms(20'000));
                    if (i % 4 != 3) client_watcher.forget(client, connection);
                } catch (const std::exception& error) {
                    std::printf("thread %d: %s\n", number, error.what());
                    ++num_failed;
                }
            }
        });
    }
    for (std::thread& thread : threads) thread.join();
    CHECK_EQUAL(num_failed.load(), 0);
    check_quiet(server_watcher);
    check_quiet(client_watcher);
}

// An endpoint closes while its peers hang up and new ones knock.
void closing() {
    for (int i = 0; i < 30; ++i) {
        Watcher server_watcher, client_watcher, other_watcher;
        auto server = std::make_unique<Control>(server_options(), server_watcher);
        Control client(client_options(), client_watcher);
        std::vector<ConnectionId> connections;
        for (int k = 0; k < 4; ++k) {
            connections.push_back(
                client.connect(server->address(), "expert[1]", k % 2 == 0, hello_of(), in_ms(10'000)).first);
        }
        // Without TCP, where it would knock on until the deadline.
        const Address address{server->address().unix_name, "", 0};
        std::atomic<int> num_wrong{0};
        std::thread hangs_up([&] {
            for (const ConnectionId connection : connections) client_watcher.forget(client, connection);
        });
        std::thread knocks([&] {
            Control other(client_options(), other_watcher);
            for (int k = 0; k < 5; ++k) {
                try {
                    other.connect(address, "expert[1]", true, hello_of(), in_ms(10'000));
                } catch (const Error& error) {
                    if (error.code != Code::refused) ++num_wrong;
                }
            }
        });
        std::this_thread::sleep_for(std::chrono::microseconds(i * 50));
        server.reset();
        hangs_up.join();
        knocks.join();
        CHECK_EQUAL(num_wrong.load(), 0);
        check_quiet(client_watcher);
        check_quiet(other_watcher);
    }
}

// hang_up waits for the on_gone of its own connection, and for no other.
void waits_for_its_own_only() {
    struct Slow : Recorder {
        void on_gone(ConnectionId connection, const std::string& reason) override {
            entered = true;
            wait_until("let go", [&] { return let_go.load(); });
            Recorder::on_gone(connection, reason);
        }
        std::atomic<bool> entered{false}, let_go{false};
    };
    Slow slow;
    Recorder server_record;
    auto server = std::make_unique<Control>(server_options(), server_record);
    Control client(client_options(), slow);
    const ConnectionId first = client.connect(server->address(), "expert[1]", true, hello_of(), in_ms(5000)).first;
    Recorder other_record;
    Control other(server_options(), other_record);
    const ConnectionId second = client.connect(other.address(), "expert[1]", true, hello_of(), in_ms(5000)).first;
    server.reset();
    wait_until("on_gone runs", [&] { return slow.entered.load(); });
    client.hang_up(second);  // returns although on_gone of the first still runs
    std::atomic<bool> returned{false};
    std::thread waits([&] {
        client.hang_up(first);
        returned = true;
    });
    std::this_thread::sleep_for(std::chrono::milliseconds(50));
    CHECK(!returned.load());
    slow.let_go = true;
    waits.join();
    CHECK_EQUAL(slow.num_gone(), 1u);
}

}  // namespace

int main() {
    return run_all({{"both_hang_up", both_hang_up},
                    {"many_threads", many_threads},
                    {"closing", closing},
                    {"waits_for_its_own_only", waits_for_its_own_only}});
}

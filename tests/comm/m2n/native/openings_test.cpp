// Peers that mean well: openings over both kinds of socket, secrets, refusals, goodbyes, and connections that fail.
#include <sys/mman.h>
#include <sys/resource.h>

#include <filesystem>
#include <fstream>
#include <memory>
#include <thread>

#include "peers.h"

using namespace antiphon;
using namespace antiphon::m2n;
using namespace antiphon::m2n::test;

namespace {

FileDescriptor file_with(std::string_view text) {
    FileDescriptor file(memfd_create("test", MFD_CLOEXEC));
    CHECK(write(file.get(), text.data(), text.size()) == static_cast<ssize_t>(text.size()));
    return file;
}

std::string content_of(const FileDescriptor& file) {
    char text[64];
    const ssize_t length = pread(file.get(), text, sizeof(text), 0);
    return {text, static_cast<size_t>(std::max<ssize_t>(length, 0))};
}

void opening(bool local, const std::string& host = "127.0.0.1") {
    Recorder server_record, client_record;
    ControlOptions options = server_options();
    options.host = host;
    Control server(options, server_record);
    Control client(client_options(), client_record);
    // The largest blob, both ways: more than a socket takes at once.
    const Hello hello = hello_of(std::string(max_blob_bytes, 'b'));
    const auto [connection, welcome] = client.connect(server.address(), "expert[1]", local, hello, in_ms(5000));
    CHECK_EQUAL(welcome.incarnation, 7u);
    CHECK_EQUAL(welcome.slots, 4u);
    CHECK_EQUAL(welcome.slot_bytes, 4096u);
    CHECK_EQUAL(welcome.name, "expert[1]");
    CHECK(welcome.blob.bytes == hello.introduction.bytes);
    CHECK_EQUAL(server_record.names.size(), 1u);
    CHECK_EQUAL(server_record.names.begin()->second, "attention[3]");
    CHECK_EQUAL(server.counters()->accepted.load(), 1u);
    CHECK_EQUAL(server.counters()->rejected.load(), 0u);

    client.hang_up(connection);
    CHECK_EQUAL(server_record.wait_gone().reason, "closed its endpoint");
    CHECK_EQUAL(server.counters()->gone.load(), 1u);
    CHECK_EQUAL(client_record.num_gone(), 0u);
}

void opening_unix() { opening(true); }
void opening_tcp() { opening(false); }

void opening_ipv6() {
    try {
        listen_tcp("::1", 0);
    } catch (const Error& error) {
        std::printf("opening_ipv6: this machine has none: %s\n", error.what());
        return;
    }
    opening(false, "::1");
    opening(false, "localhost");  // a name, and the ticket carries numbers
}

void descriptors_both_ways() {
    Recorder server_record, client_record;
    Control server(server_options(), server_record);
    Control client(client_options(), client_record);
    Hello hello = hello_of();
    for (size_t i = 0; i < max_descriptors_per_message; ++i) {
        hello.introduction.descriptors.push_back(file_with("file " + std::to_string(i)));
    }
    const auto [connection, welcome] = client.connect(server.address(), "expert[1]", true, hello, in_ms(5000));
    CHECK_EQUAL(welcome.blob.descriptors.size(), max_descriptors_per_message);
    for (size_t i = 0; i < max_descriptors_per_message; ++i) {
        CHECK_EQUAL(content_of(welcome.blob.descriptors[i]), "file " + std::to_string(i));
    }
    expect_error(Code::invalid, "Unix socket only", [&] {
        client.connect(server.address(), "expert[1]", false, hello, in_ms(5000));
    });
    hello.introduction.descriptors.push_back(file_with("one too many"));
    expect_error(Code::invalid, "9 descriptors: the limit is 8", [&] {
        client.connect(server.address(), "expert[1]", true, hello, in_ms(5000));
    });
}

void wrong_secret(bool local) {
    Recorder server_record, client_record;
    Control server(server_options(), server_record);
    for (const char* secret : {"", "open sesam", "open sesame "}) {
        ControlOptions options = client_options();
        options.secret = secret;
        Control client(options, client_record);
        const Error error = expect_error(
            Code::refused, "expert[1] refused: attention[3] does not know the secret",
            [&] { client.connect(server.address(), "expert[1]", local, hello_of(), in_ms(5000)); });
        CHECK_EQUAL(error.peers.at(0), "expert[1]");
    }
    CHECK_EQUAL(server.counters()->rejected.load(), 3u);
    CHECK_EQUAL(server.counters()->accepted.load(), 0u);
    CHECK_EQUAL(server_record.num_welcomed(), 0u);
    CHECK_EQUAL(server_record.num_gone(), 0u);
}

void wrong_secret_unix() { wrong_secret(true); }
void wrong_secret_tcp() { wrong_secret(false); }

// Accepts one connection on a name of its own and answers as `play` likes.
class Impostor {
  public:
    template <class Play>
    explicit Impostor(Play play)
        : address_{"antiphon-test-impostor-" + std::to_string(getpid()), "", 0},
          listener_(listen_abstract(address_.unix_name)),
          thread_([this, play] {
              wait_ready(listener_.get(), POLLIN, in_ms(5000));
              const FileDescriptor socket = accept_socket(listener_.get());
              play(socket.get());
          }) {}
    ~Impostor() { thread_.join(); }
    const Address& address() const { return address_; }

    static Frame hear(int socket, FrameType type) {
        FrameReader reader({type});
        while (true) {
            wait_ready(socket, POLLIN, in_ms(5000));
            const int64_t received = receive_some(socket, reader.space());
            CHECK(received > 0);
            if (reader.filled(static_cast<size_t>(received))) return reader.take();
        }
    }

  private:
    Address address_;
    FileDescriptor listener_;
    std::thread thread_;
};

void server_without_the_secret() {
    const Impostor impostor([](int socket) {
        const std::string guess = "a guess";
        ServerOpening opening(guess, true, random_nonce());
        const Frame hello = Impostor::hear(socket, FrameType::hello);
        std::vector<FileDescriptor> none;
        opening.take(hello, none);
        send_some(socket, opening.challenge());
        Impostor::hear(socket, FrameType::proof);
        send_some(socket, opening.welcome({1, 1, 1, "expert[1]", {}}));
        wait_ready(socket, POLLIN, in_ms(5000));
    });
    Recorder record;
    Control client(client_options(), record);
    expect_error(Code::refused, "expert[1] does not know the secret",
                 [&] { client.connect(impostor.address(), "expert[1]", true, hello_of(), in_ms(5000)); });
}

void server_speaks_nonsense() {
    const Impostor impostor([](int socket) {
        Impostor::hear(socket, FrameType::hello);
        send_some(socket, encode_frame(FrameType::welcome));
        wait_ready(socket, POLLIN, in_ms(5000));
    });
    Recorder record;
    Control client(client_options(), record);
    expect_error(Code::refused, "expert[1] sent nonsense: a welcome frame",
                 [&] { client.connect(impostor.address(), "expert[1]", true, hello_of(), in_ms(5000)); });
}

void server_hangs_up() {
    const Impostor impostor([](int socket) { Impostor::hear(socket, FrameType::hello); });
    Recorder record;
    Control client(client_options(), record);
    expect_error(Code::refused, "expert[1] hung up",
                 [&] { client.connect(impostor.address(), "expert[1]", true, hello_of(), in_ms(5000)); });
}

void server_is_silent() {
    const Impostor impostor([](int socket) { wait_ready(socket, POLLRDHUP, in_ms(5000)); });
    Recorder record;
    Control client(client_options(), record);
    const Error error = expect_error(Code::timeout, "expert[1] did not answer", [&] {
        client.connect(impostor.address(), "expert[1]", true, hello_of(), in_ms(100));
    });
    CHECK_EQUAL(error.peers.at(0), "expert[1]");
}

void refusals() {
    Recorder server_record, client_record;
    Control server(server_options(), server_record);
    Control client(client_options(), client_record);
    Hello stranger = hello_of();
    stranger.inbox = 9;
    for (const bool local : {true, false}) {
        const Error error = expect_error(Code::refused, "expert[1] refused: has no inbox 9", [&] {
            client.connect(server.address(), "expert[1]", local, stranger, in_ms(5000));
        });
        CHECK_EQUAL(error.reason, "has no inbox 9");
    }
    server_record.during_hello = [](ConnectionId, const Hello&) { throw std::runtime_error("out of luck"); };
    expect_error(Code::refused, "expert[1] refused: out of luck",
                 [&] { client.connect(server.address(), "expert[1]", true, hello_of(), in_ms(5000)); });
    server_record.during_hello = [](ConnectionId, const Hello&) { throw 5; };
    expect_error(Code::refused, "no known reason",
                 [&] { client.connect(server.address(), "expert[1]", true, hello_of(), in_ms(5000)); });
    CHECK_EQUAL(server.counters()->rejected.load(), 0u);  // they all proved themselves
    CHECK_EQUAL(server_record.num_gone(), 0u);
    const Hello invalid{Recorder::known_inbox, 3, std::string(200, 'x'), {}};
    expect_error(Code::invalid, "200 bytes: the limit is 128",
                 [&] { client.connect(server.address(), "expert[1]", true, invalid, in_ms(5000)); });
}

void endpoint_closes() {
    for (const bool local : {true, false}) {
        Recorder server_record, client_record;
        auto server = std::make_unique<Control>(server_options(), server_record);
        Control client(client_options(), client_record);
        const auto [connection, welcome] =
            client.connect(server->address(), "expert[1]", local, hello_of(), in_ms(5000));
        server.reset();
        const Recorder::Gone gone = client_record.wait_gone();
        CHECK_EQUAL(gone.connection, connection);
        CHECK_EQUAL(gone.reason, "closed its endpoint");
        CHECK_EQUAL(client_record.num_gone(), 1u);
        CHECK_EQUAL(server_record.num_gone(), 0u);
    }
}

void hang_up_from_callbacks() {
    Recorder server_record, client_record;
    Control server(server_options(), server_record);
    Control client(client_options(), client_record);
    server_record.during_hello = [&](ConnectionId connection, const Hello&) { server.hang_up(connection); };
    for (const bool local : {true, false}) {
        client.connect(server.address(), "expert[1]", local, hello_of(), in_ms(5000));
    }
    CHECK_EQUAL(client_record.wait_gone(1).reason, "closed its endpoint");
    CHECK_EQUAL(server_record.num_gone(), 0u);
    server.hang_up(987654);  // never heard of: nothing happens
}

void connections_to_nobody() {
    Recorder record;
    Control client(client_options(), record);
    Address stale{"antiphon-m2n-nobody", "", 0};
    const auto try_it = [&](const Address& address, bool local, int64_t ms) {
        return [&client, address, local, ms] {
            client.connect(address, "expert[1]", local, hello_of(), in_ms(ms));
        };
    };
    expect_error(Code::refused, "expert[1] is not there any more", try_it(stale, true, 1000));
    expect_error(Code::invalid, "expert[1] listens on its own machine only", try_it(stale, false, 1000));
    expect_error(Code::invalid, "'some.host' is not an IPv4 or IPv6 address",
                 try_it({"", "some.host", 1}, false, 1000));
    // A port that was free a moment ago.
    uint16_t port = 0;
    {
        const FileDescriptor listener = listen_tcp("127.0.0.1", 0);
        port = bound_port(listener.get());
    }
    const Error error = expect_error(Code::timeout, "no connection to expert[1] at 127.0.0.1 port",
                                     try_it({"", "127.0.0.1", port}, false, 100));
    CHECK_EQUAL(error.peers.at(0), "expert[1]");

    // Nobody on the Unix socket, but somebody on TCP: another network namespace of the same machine.
    Recorder server_record;
    Control server(server_options(), server_record);
    Address both = server.address();
    both.unix_name = stale.unix_name;
    client.connect(both, "expert[1]", true, hello_of(), in_ms(5000));
    CHECK_EQUAL(server_record.num_welcomed(), 1u);
}

void server_comes_later() {
    uint16_t port = 0;
    {
        const FileDescriptor listener = listen_tcp("127.0.0.1", 0);
        port = bound_port(listener.get());
    }
    Recorder client_record, server_record;
    Control client(client_options(), client_record);
    std::unique_ptr<Control> server;
    std::thread later([&] {
        std::this_thread::sleep_for(std::chrono::milliseconds(150));
        ControlOptions options = server_options();
        options.port = port;
        server = std::make_unique<Control>(options, server_record);
    });
    client.connect({"", "127.0.0.1", port}, "expert[1]", false, hello_of(), in_ms(10'000));
    later.join();
    CHECK_EQUAL(server_record.num_welcomed(), 1u);
}

void invalid_options() {
    Recorder record;
    const auto with = [&](auto change) {
        ControlOptions options = server_options();
        change(options);
        return [options, &record] { Control control(options, record); };
    };
    expect_error(Code::invalid, "heartbeat_ns is 0", with([](ControlOptions& o) { o.heartbeat_ns = 0; }));
    expect_error(Code::invalid, "longer than heartbeat_ns", with([](ControlOptions& o) { o.dead_after_ns = 1; }));
    expect_error(Code::invalid, "not printable", with([](ControlOptions& o) { o.name = "a\nb"; }));
    expect_error(Code::invalid, "'no.such.host.invalid' is not the name",
                 with([](ControlOptions& o) { o.host = "no.such.host.invalid"; }));
    expect_error(Code::system, "bind to 192.0.2.1 port 0", with([](ControlOptions& o) { o.host = "192.0.2.1"; }));
    const FileDescriptor listener = listen_tcp("127.0.0.1", 0);
    const uint16_t taken = bound_port(listener.get());
    expect_error(Code::system, "in use", with([taken](ControlOptions& o) { o.port = taken; }));
}

// The signal mask of the thread named so, or nothing.
std::string blocked_signals(const std::string& thread_name) {
    for (const auto& task : std::filesystem::directory_iterator("/proc/self/task")) {
        std::ifstream comm(task.path() / "comm"), status(task.path() / "status");
        std::string name, line;
        if (!std::getline(comm, name) || name != thread_name) continue;
        while (std::getline(status, line)) {
            if (line.starts_with("SigBlk:")) return line.substr(line.find_first_not_of(" \t", 7));
        }
    }
    return {};
}

void thread_manners() {
    Recorder record;
    Control control(server_options(), record);
    wait_until("the thread has its name", [] { return !blocked_signals("m2n-control").empty(); });
    // All but SIGKILL and SIGSTOP, which cannot be blocked, and the two that glibc keeps for itself.
    CHECK_EQUAL(blocked_signals("m2n-control"), "fffffffe7ffbfeff");
}

void out_of_descriptors() {
    Recorder record;
    Control server(server_options(), record);
    Stranger early(server.address(), true);
    wait_until("the first is accepted", [&] { return early.say(encode_frame(FrameType::hello)); });
    early.hear_out();  // an empty hello is nonsense

    rlimit before{};
    getrlimit(RLIMIT_NOFILE, &before);
    // One more file may be opened, and the stranger takes it.
    const rlimit tight{static_cast<rlim_t>(FileDescriptor(dup(0)).get() + 1), before.rlim_max};
    setrlimit(RLIMIT_NOFILE, &tight);
    Stranger waiting(server.address(), true);
    std::this_thread::sleep_for(std::chrono::milliseconds(250));
    CHECK_EQUAL(server.counters()->rejected.load(), 1u);
    setrlimit(RLIMIT_NOFILE, &before);
    waiting.say(encode_frame(FrameType::hello));
    waiting.hear_out();
    CHECK_EQUAL(server.counters()->rejected.load(), 2u);
}

}  // namespace

int main() {
    return run_all({{"opening_unix", opening_unix},
                    {"opening_tcp", opening_tcp},
                    {"opening_ipv6", opening_ipv6},
                    {"descriptors_both_ways", descriptors_both_ways},
                    {"wrong_secret_unix", wrong_secret_unix},
                    {"wrong_secret_tcp", wrong_secret_tcp},
                    {"server_without_the_secret", server_without_the_secret},
                    {"server_speaks_nonsense", server_speaks_nonsense},
                    {"server_hangs_up", server_hangs_up},
                    {"server_is_silent", server_is_silent},
                    {"refusals", refusals},
                    {"endpoint_closes", endpoint_closes},
                    {"hang_up_from_callbacks", hang_up_from_callbacks},
                    {"connections_to_nobody", connections_to_nobody},
                    {"server_comes_later", server_comes_later},
                    {"invalid_options", invalid_options},
                    {"thread_manners", thread_manners},
                    {"out_of_descriptors", out_of_descriptors}});
}

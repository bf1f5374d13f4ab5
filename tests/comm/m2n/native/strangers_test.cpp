// Strangers and peers that misbehave, data connections that attach, and the ways in which a peer can be gone.
#include <linux/filter.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/syscall.h>

#include <filesystem>
#include <memory>
#include <random>
#include <thread>

#include "peers.h"

using namespace antiphon;
using namespace antiphon::m2n;
using namespace antiphon::m2n::test;

namespace {

const std::string secret = "open sesame";

// A raw connection that went through the whole opening; keeps what it said.
struct RawPeer : Stranger {
    RawPeer(const Address& address, bool unix_socket) : Stranger(address, unix_socket) {
        ClientOpening opening(secret, hello_of(), unix_socket, random_nonce());
        said_hello = opening.hello();
        say(said_hello);
        said_proof = opening.answer(hear(FrameType::challenge));
        say(said_proof);
        std::vector<FileDescriptor> none;
        opening.accept(hear(FrameType::welcome), none);
    }
    std::vector<std::byte> said_hello;
    std::vector<std::byte> said_proof;
};

size_t num_open_files() {
    const std::filesystem::directory_iterator files("/proc/self/fd");
    return static_cast<size_t>(std::distance(begin(files), end(files)));
}

// A server with one honest peer, who must notice nothing of what strangers do.
struct Scene {
    explicit Scene(ControlOptions options = server_options())
        : server(options, server_record), client(client_options(), client_record) {
        connection = client.connect(server.address(), "expert[1]", true, hello_of(), in_ms(5000)).first;
    }

    // Exactly one more connection was rejected; the honest peer lives and another one is welcome.
    void check_only_rejected(uint64_t num_rejected) {
        wait_until("rejected", [&] { return server.counters()->rejected.load() >= num_rejected; });
        CHECK_EQUAL(server.counters()->rejected.load(), num_rejected);
        CHECK_EQUAL(server.counters()->gone.load(), 0u);
        CHECK_EQUAL(server_record.num_gone(), 0u);
        CHECK_EQUAL(client_record.num_gone(), 0u);
        CHECK_EQUAL(server_record.num_welcomed(), server.counters()->accepted.load());
    }

    Recorder server_record, client_record;
    Control server;
    Control client;
    ConnectionId connection = 0;
};

void strangers_are_rejected() {
    Scene scene;
    const std::vector<std::byte> hello = encode_frame(
        FrameType::hello, write_hello({Recorder::known_inbox, 3, "attention[3]", {}}, random_nonce()));
    std::vector<std::byte> oversized = encode_frame(FrameType::hello);
    oversized[10] = std::byte{1};  // 65,536 bytes
    std::vector<std::byte> bad_source = hello;
    bad_source[frame_header_bytes + 9] = std::byte{0x10};  // 4,096 and above
    std::vector<std::byte> proof_first = encode_frame(FrameType::proof, std::vector<std::byte>(100));
    const std::vector<std::pair<const char*, std::vector<std::byte>>> openings = {
        {"garbage", to_bytes("\x7f\x45\x4c\x46 these are not the frames")},
        {"http", to_bytes("GET / HTTP/1.1\r\nHost: localhost\r\n\r\n")},
        {"oversized", oversized},
        {"empty hello", encode_frame(FrameType::hello)},
        {"bad source", bad_source},
        {"proof first", proof_first},
        {"welcome first", encode_frame(FrameType::welcome)},
        {"heartbeat first", encode_frame(FrameType::heartbeat)},
        {"goodbye first", encode_frame(FrameType::goodbye)},
        {"empty attach", encode_frame(FrameType::attach)},
    };
    uint64_t num_rejected = 0;
    for (const bool unix_socket : {true, false}) {
        for (const auto& [name, bytes] : openings) {
            Stranger stranger(scene.server.address(), unix_socket);
            stranger.say(bytes);
            CHECK(stranger.hear_out().empty());
            scene.check_only_rejected(++num_rejected);
        }
        // Cut off at any place, then gone.
        for (const size_t length : {size_t{0}, size_t{1}, frame_header_bytes, hello.size() - 1}) {
            Stranger stranger(scene.server.address(), unix_socket);
            stranger.say(Bytes(hello).first(length));
            stranger.stop_talking();
            CHECK(stranger.hear_out().empty());
            scene.check_only_rejected(++num_rejected);
        }
        // A second hello instead of the proof.
        Stranger twice(scene.server.address(), unix_socket);
        twice.say(hello);
        twice.hear(FrameType::challenge);
        twice.say(hello);
        CHECK(twice.hear_out().empty());
        scene.check_only_rejected(++num_rejected);
    }
}

// Many at once, with frames that are almost right.
void storm() {
    Scene scene;
    std::mt19937 random(3);
    constexpr uint64_t num_strangers = 200;
    std::vector<std::unique_ptr<Stranger>> strangers;
    for (uint64_t i = 0; i < num_strangers; ++i) {
        std::vector<std::byte> bytes = encode_frame(
            FrameType::hello, write_hello({Recorder::known_inbox, 3, "attention[3]", {}}, random_nonce()));
        for (int k = 0; k < 3; ++k) bytes[random() % bytes.size()] = static_cast<std::byte>(random());
        bytes.resize(random() % bytes.size());
        strangers.push_back(std::make_unique<Stranger>(scene.server.address(), i % 2 == 0));
        strangers.back()->say(bytes);
        strangers.back()->stop_talking();
    }
    for (auto& stranger : strangers) stranger->hear_out();
    scene.check_only_rejected(num_strangers);
}

// Runs as user nobody: credentials are a thread's own as far as the kernel is concerned.
template <class Run>
void as_nobody(const Run& run) {
    std::thread thread([&run] {
        if (syscall(SYS_setresuid, -1, 65534, -1) == 0) run();
    });
    thread.join();
}

void other_users() {
    if (geteuid() != 0) {
        std::printf("other_users: needs root to become somebody else\n");
        return;
    }
    Scene scene;
    std::string words;
    as_nobody([&] {
        Stranger stranger(scene.server.address(), true);
        words = decode_refusal(stranger.hear(FrameType::refusal).body);
    });
    CHECK_EQUAL(words, "serves peers of its own user only");
    scene.check_only_rejected(1);

    const Address squatted{"antiphon-test-squatter-" + std::to_string(getpid()), "", 0};
    FileDescriptor squatter;
    as_nobody([&] { squatter = listen_abstract(squatted.unix_name); });
    expect_error(Code::refused, "another user listens there", [&] {
        scene.client.connect(squatted, "expert[1]", true, hello_of(), in_ms(5000));
    });
}

void recordings_are_rejected() {
    Scene scene;
    uint64_t num_rejected = 0;
    std::vector<std::unique_ptr<RawPeer>> recorded;
    for (const bool unix_socket : {true, false}) {
        const RawPeer& honest = *recorded.emplace_back(std::make_unique<RawPeer>(scene.server.address(), unix_socket));
        Stranger replay(scene.server.address(), unix_socket);
        replay.say(honest.said_hello);
        replay.hear(FrameType::challenge);
        replay.say(honest.said_proof);
        const Frame refusal = replay.hear(FrameType::refusal);
        CHECK_EQUAL(decode_refusal(refusal.body), "attention[3] does not know the secret");
        replay.hear_out();
        scene.check_only_rejected(++num_rejected);
    }
}

void changed_proofs_are_rejected() {
    Scene scene;
    const Hello hello = hello_of();
    uint64_t num_rejected = 0;
    // One bit anywhere: in the proof, in the blob's length, in the blob, in the number of descriptors.
    for (const size_t at : {0u, 31u, 32u, 37u, 44u}) {
        Stranger stranger(scene.server.address(), true);
        ClientOpening opening(secret, hello, true, random_nonce());
        stranger.say(opening.hello());
        std::vector<std::byte> proof = opening.answer(stranger.hear(FrameType::challenge));
        proof[frame_header_bytes + at] ^= std::byte{1};
        stranger.say(proof);
        stranger.hear(FrameType::refusal);
        scene.check_only_rejected(++num_rejected);
    }
}

void silence_is_rejected() {
    ControlOptions options = server_options();
    options.handshake_ns = 300'000'000;
    Scene scene(options);
    uint64_t num_rejected = 0;
    for (const bool unix_socket : {true, false}) {
        const int64_t begin = monotonic_ns();
        Stranger silent(scene.server.address(), unix_socket);
        Stranger slow(scene.server.address(), unix_socket);
        const std::vector<std::byte> hello = encode_frame(FrameType::hello, std::vector<std::byte>(100));
        for (int i = 0; i < 20; ++i) {
            slow.say(Bytes(hello).subspan(static_cast<size_t>(i), 1));
            std::this_thread::sleep_for(std::chrono::milliseconds(5));
        }
        CHECK(silent.hear_out().empty());
        CHECK(slow.hear_out().empty());
        CHECK(monotonic_ns() - begin >= 300'000'000);
        CHECK(monotonic_ns() - begin < 5'000'000'000);
        num_rejected += 2;
        scene.check_only_rejected(num_rejected);
    }
}

void strangers_make_room_and_peers_do_not() {
    ControlOptions options = server_options();
    options.max_connections = 3;
    Scene scene(options);
    std::vector<std::unique_ptr<Stranger>> strangers;
    for (int i = 0; i < 2; ++i) strangers.push_back(std::make_unique<Stranger>(scene.server.address(), i == 0));
    // Both must be in before the next one comes.
    for (auto& stranger : strangers) {
        stranger->say(encode_frame(FrameType::hello, write_hello({42, 1, "x", {}}, random_nonce())));
        stranger->hear(FrameType::challenge);
    }
    for (const bool local : {true, false}) {
        scene.client.connect(scene.server.address(), "expert[1]", local, hello_of(), in_ms(5000));
    }
    scene.check_only_rejected(2);
    for (const bool local : {true, false}) {
        expect_error(Code::refused, "expert[1] refused: has 3 connections, its limit", [&] {
            scene.client.connect(scene.server.address(), "expert[1]", local, hello_of(), in_ms(5000));
        });
    }
    scene.check_only_rejected(4);
}

void a_peer_gets_in_beside_any_number_of_strangers() {
    Scene scene;
    std::vector<std::unique_ptr<Stranger>> strangers;
    for (int i = 0; i < 600; ++i) {  // more than twice as many as have room
        strangers.push_back(std::make_unique<Stranger>(scene.server.address(), i % 2 == 0));
    }
    for (const bool local : {true, false}) {
        scene.client.connect(scene.server.address(), "expert[1]", local, hello_of(), in_ms(5000));
    }
    wait_until("the oldest made room", [&] { return scene.server.counters()->rejected.load() >= 340; });
    CHECK_EQUAL(scene.server.counters()->gone.load(), 0u);
    CHECK_EQUAL(scene.server_record.num_welcomed(), 3u);
}

void unwanted_descriptors() {
    Scene scene;
    const size_t before = num_open_files();
    {
        std::vector<FileDescriptor> files;
        for (size_t i = 0; i < max_descriptors_per_message; ++i) files.emplace_back(memfd_create("x", MFD_CLOEXEC));
        const std::vector<std::byte> hello =
            encode_frame(FrameType::hello, write_hello({42, 1, "x", {}}, random_nonce()));
        Stranger with_hello(scene.server.address(), true);
        with_hello.say(hello, files);
        with_hello.hear_out();
        scene.check_only_rejected(1);

        // Eight with every byte: never more are held than one message may bring.
        Stranger flood(scene.server.address(), true);
        for (size_t i = 0; i + 1 < hello.size(); ++i) {
            if (!flood.say(Bytes(hello).subspan(i, 1), files)) break;
        }
        flood.hear_out();
        scene.check_only_rejected(2);

        RawPeer peer(scene.server.address(), true);
        peer.say(encode_frame(FrameType::heartbeat), files);
        peer.hear_out();
        CHECK_EQUAL(scene.server_record.wait_gone().reason, "sent nonsense: descriptors that were not asked for");
    }
    wait_until("all files closed", [&] { return num_open_files() == before; });
}

void attach() {
    Scene scene;
    const auto token = to_bytes(Recorder::known_token);
    uint64_t num_rejected = 0;
    for (const bool unix_socket : {true, false}) {
        // Token and data in one write: all data must be left for who takes the connection.
        std::vector<std::byte> stream = attach_greeting(token);
        const std::vector<std::byte> data = to_bytes("data, and more data");
        stream.insert(stream.end(), data.begin(), data.end());
        Stranger connection(scene.server.address(), unix_socket);
        connection.say(stream);
        FileDescriptor taken;
        wait_until("attached", [&] {
            const std::lock_guard lock(scene.server_record.mutex);
            if (scene.server_record.attached.empty()) return false;
            taken = std::move(scene.server_record.attached.back());
            scene.server_record.attached.clear();
            return true;
        });
        std::byte heard[64];
        CHECK_EQUAL(receive_some(taken.get(), heard), static_cast<int64_t>(data.size()));
        CHECK(std::equal(data.begin(), data.end(), heard));
        // The control thread has let go of it: its end is nobody's news.
        CHECK_EQUAL(send_some(taken.get(), data), static_cast<int64_t>(data.size()));
        taken.reset();
        CHECK(connection.hear_out() == data);

        Stranger unknown(scene.server.address(), unix_socket);
        unknown.say(attach_greeting(to_bytes("fedcba9876543210")));
        CHECK(unknown.hear_out().empty());
        scene.check_only_rejected(++num_rejected);
    }
}

void nonsense_from_peers() {
    for (const bool unix_socket : {true, false}) {
        Scene scene;
        RawPeer peer(scene.server.address(), unix_socket);
        peer.say(encode_frame(FrameType::heartbeat));
        peer.say(peer.said_hello);
        peer.hear_out();
        CHECK_EQUAL(scene.server_record.wait_gone().reason,
                    "sent nonsense: a hello frame, not allowed at this point");
        CHECK_EQUAL(scene.server.counters()->gone.load(), 1u);
        CHECK_EQUAL(scene.server.counters()->rejected.load(), 1u);
        CHECK_EQUAL(scene.client_record.num_gone(), 0u);
    }
}

void peers_hang_up() {
    Scene scene;
    size_t num_gone = 0;
    for (const bool unix_socket : {true, false}) {
        std::make_unique<RawPeer>(scene.server.address(), unix_socket).reset();
        CHECK_EQUAL(scene.server_record.wait_gone(num_gone++).reason, "hung up");
        // A goodbye counts even if the hang-up comes with it.
        {
            RawPeer polite(scene.server.address(), unix_socket);
            polite.say(encode_frame(FrameType::goodbye));
        }
        CHECK_EQUAL(scene.server_record.wait_gone(num_gone++).reason, "closed its endpoint");
    }
    {
        RawPeer reset(scene.server.address(), false);
        const linger at_once{1, 0};
        setsockopt(reset.fd(), SOL_SOCKET, SO_LINGER, &at_once, sizeof(at_once));
    }
    CHECK_EQUAL(scene.server_record.wait_gone(num_gone++).reason, "hung up");
    CHECK_EQUAL(scene.client_record.num_gone(), 0u);
}

ControlOptions impatient() {
    ControlOptions options = server_options();
    options.heartbeat_ns = 10'000'000;
    options.dead_after_ns = 300'000'000;
    return options;
}

// A peer's machine that is switched off: its kernel, made deaf by a filter, acknowledges nothing any more.
void dead_machine(const ControlOptions& options, std::string_view reason, int64_t shortest_ms, int64_t longest_ms) {
    Scene scene(options);
    RawPeer peer(scene.server.address(), false);
    sock_filter drop_all[] = {BPF_STMT(BPF_RET | BPF_K, 0)};
    const sock_fprog program{1, drop_all};
    CHECK(setsockopt(peer.fd(), SOL_SOCKET, SO_ATTACH_FILTER, &program, sizeof(program)) == 0);
    const int64_t begin = monotonic_ns();
    CHECK_EQUAL(scene.server_record.wait_gone().reason, reason);
    const int64_t took_ms = (monotonic_ns() - begin) / 1'000'000;
    std::printf("dead machine noticed after %d ms\n", static_cast<int>(took_ms));
    CHECK(took_ms > shortest_ms);
    CHECK(took_ms < longest_ms);
    CHECK_EQUAL(scene.client_record.num_gone(), 0u);
}

void dead_machine_soon() { dead_machine(impatient(), "does not answer for 0.3 s", 250, 600); }
// Within a second by default, and a little for a loaded machine.
void dead_machine_by_default() { dead_machine(server_options(), "does not answer for 0.8 s", 700, 1200); }

// A stopped process reads nothing, but its kernel acknowledges: it is alive, however long it stays so.
void stopped_process() {
    Scene scene(impatient());
    RawPeer peer(scene.server.address(), false);
    // They end long before they could fill a buffer; one answer and they go on.
    constexpr int expected_bytes = 100 * static_cast<int>(frame_header_bytes);
    const auto unread = [&] {
        int num_bytes = 0;
        ioctl(peer.fd(), FIONREAD, &num_bytes);
        return num_bytes;
    };
    wait_until("a hundred heartbeats", [&] { return unread() >= expected_bytes; });
    std::this_thread::sleep_for(std::chrono::milliseconds(500));
    CHECK_EQUAL(unread(), expected_bytes);
    CHECK_EQUAL(scene.server_record.num_gone(), 0u);
    peer.say(encode_frame(FrameType::heartbeat));
    wait_until("more heartbeats", [&] { return unread() > expected_bytes; });
    CHECK_EQUAL(scene.server_record.num_gone(), 0u);
}

// Two idle endpoints keep each other alive for much longer than `dead_after_ns`.
void idle_peers() {
    ControlOptions options = impatient();
    Recorder server_record, client_record;
    Control server(options, server_record);
    options.name = "attention[3]";
    Control client(options, client_record);
    client.connect(server.address(), "expert[1]", false, hello_of(), in_ms(5000));
    std::this_thread::sleep_for(std::chrono::milliseconds(1500));
    CHECK_EQUAL(server_record.num_gone(), 0u);
    CHECK_EQUAL(client_record.num_gone(), 0u);
}

// Makes every socket of this process, the server's among them, take a few kilobytes at a time.
void shrink_send_buffers() {
    const int smallest = 1;
    for (int fd = 0; fd < 256; ++fd) setsockopt(fd, SOL_SOCKET, SO_SNDBUF, &smallest, sizeof(smallest));
}

// A welcome that does not fit into the socket goes out in portions; who does not read it holds a place until the
// deadline only.
void slow_readers() {
    ControlOptions options = server_options();
    options.handshake_ns = 500'000'000;
    Scene scene(options);
    scene.server_record.during_hello = [](ConnectionId, const Hello&) { shrink_send_buffers(); };
    const std::string blob(max_blob_bytes, 'b');
    const auto knock = [&](Stranger& stranger) {
        ClientOpening opening(secret, hello_of(blob), true, random_nonce());
        stranger.say(opening.hello());
        stranger.say(opening.answer(stranger.hear(FrameType::challenge)));
        return opening;
    };
    Stranger reads(scene.server.address(), true);
    const ClientOpening opening = knock(reads);
    wait_until("welcomed", [&] { return scene.server_record.num_welcomed() == 2; });
    std::this_thread::sleep_for(std::chrono::milliseconds(100));
    std::vector<FileDescriptor> none;
    CHECK_EQUAL(opening.accept(reads.hear(FrameType::welcome), none).blob.bytes.size(), max_blob_bytes);

    Stranger never_reads(scene.server.address(), true);
    knock(never_reads);
    CHECK_EQUAL(scene.server_record.wait_gone().reason, "did not read its welcome");
    CHECK_EQUAL(scene.server_record.num_gone(), 1u);
    CHECK_EQUAL(scene.client_record.num_gone(), 0u);
}

}  // namespace

int main() {
    return run_all({{"strangers_are_rejected", strangers_are_rejected},
                    {"storm", storm},
                    {"other_users", other_users},
                    {"recordings_are_rejected", recordings_are_rejected},
                    {"changed_proofs_are_rejected", changed_proofs_are_rejected},
                    {"silence_is_rejected", silence_is_rejected},
                    {"strangers_make_room_and_peers_do_not", strangers_make_room_and_peers_do_not},
                    {"a_peer_gets_in_beside_any_number_of_strangers", a_peer_gets_in_beside_any_number_of_strangers},
                    {"unwanted_descriptors", unwanted_descriptors},
                    {"attach", attach},
                    {"nonsense_from_peers", nonsense_from_peers},
                    {"peers_hang_up", peers_hang_up},
                    {"dead_machine_soon", dead_machine_soon},
                    {"dead_machine_by_default", dead_machine_by_default},
                    {"stopped_process", stopped_process},
                    {"idle_peers", idle_peers},
                    {"slow_readers", slow_readers}});
}

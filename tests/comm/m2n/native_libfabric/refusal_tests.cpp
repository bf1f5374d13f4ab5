// What the back-end turns down and with which words, and what it says of itself.
#include <random>

#include "harness.h"
#include "m2n/libfabric_domain.h"
#include "m2n/libfabric_info.h"
#include "tests.h"

namespace antiphon::m2n::test {

void refusals() {
    const auto receiver = make();
    const auto sender = make();
    const PairSpec spec{1, 2, 100, 1};
    const Blob introduction = sender->introduce();
    Blob welcome;
    const auto landing = receiver->open_landing(spec, introduction, welcome);
    PairSpec other = spec;
    other.slots = 3;
    std::string words =
        message_of(Code::refused, [&] { sender->open_link(other, welcome, "", 0, soon()); });
    CHECK(contains(words, "bytes of slots"));
    words = message_of(Code::refused, [&] { receiver->open_link(spec, welcome, "", 0, soon()); });
    CHECK(contains(words, "answers no introduction"));
    LibfabricIntroduction foreign = decode_introduction(introduction.bytes);
    foreign.peer.protocol += 1;
    foreign.peer.provider = "other";
    Blob changed;
    changed.bytes = encode(foreign);
    words = message_of(Code::refused, [&] { receiver->open_landing(spec, changed, welcome); });
    CHECK(contains(words, "the peer uses provider other"));
    foreign = decode_introduction(introduction.bytes);
    foreign.peer.credit_address.resize(3, std::byte{1});
    foreign.peer.credit_address.back() = std::byte{1};
    changed.bytes = encode(foreign);
    words = message_of(Code::refused, [&] { receiver->open_landing(spec, changed, welcome); });
    CHECK(contains(words, "the peer's address of 3 bytes"));
    std::vector<std::shared_ptr<Landing>> many;
    words = message_of(Code::invalid, [&] {
        for (;;) many.push_back(receiver->open_landing({1, 256, 64, 1}, introduction, welcome));
    });
    CHECK(contains(words, "completion queue allows 16384") && many.size() == 63);
}

// Nothing that a stranger sends in place of an introduction or a welcome does more than throw.
void mangled_bytes() {
    const auto transport = make();
    const Blob introduction = transport->introduce();
    LibfabricWelcome welcome;
    welcome.peer = decode_introduction(introduction.bytes).peer;
    const std::vector<std::byte> welcome_bytes = encode(welcome);
    std::mt19937 random(1);
    const auto attempt = [&](std::vector<std::byte> bytes, bool as_introduction) {
        try {
            if (as_introduction) {
                decode_introduction(bytes);
            } else {
                decode_welcome(bytes);
            }
        } catch (const Error& error) {
            CHECK(error.code == Code::invalid);
        }
    };
    for (const bool as_introduction : {true, false}) {
        const std::vector<std::byte>& whole = as_introduction ? introduction.bytes : welcome_bytes;
        for (size_t size = 0; size < whole.size(); ++size) {
            attempt({whole.data(), whole.data() + size}, as_introduction);
        }
        for (int i = 0; i < 20'000; ++i) {
            std::vector<std::byte> bytes = whole;
            for (int flips = 0; flips < 1 + i % 4; ++flips) bytes[random() % bytes.size()] = std::byte(random());
            attempt(bytes, as_introduction);
        }
    }
}

void choices() {
    TransportOptions options = options_for("sockets");
    CHECK(contains(message_of(Code::invalid, [&] { make_libfabric(options); }), "use tcp"));
    options = options_for("no_such_provider");
    CHECK(contains(message_of(Code::invalid, [&] { make_libfabric(options); }), "providers that do: "));
    options = options_for(provider);
    options.congestion = "reno";
    CHECK(contains(message_of(Code::invalid, [&] { make_libfabric(options); }), "use the transport tcp"));
    options = options_for(provider);
    options.library = "/no/such/libfabric.so.1";
    const std::string words = message_of(Code::invalid, [&] { make_libfabric(options); });
    CHECK(contains(words, "/no/such/libfabric.so.1") && contains(words, "fetch_libfabric.sh"));
    options = options_for(provider);
    options.data_traffic_class = FI_TC_BULK_DATA;
    options.credit_traffic_class = FI_TC_LOW_LATENCY;
    const auto receiver = make_libfabric(options);
    const auto sender = make_libfabric(options);
    Ends ends = open_pair(*receiver, *sender, {1, 1, 100, 1});
    round_trip(ends, 0, 1, 1, 100);
    const std::string name = receiver->name();
    CHECK(name == "libfabric:" + provider || (provider == "tcp" && name == "libfabric:net"));  // of 1.17
    CHECK(receiver->same_host_only() == (provider == "shm"));
    if (provider != "tcp") return;
    options.host = "0.0.0.0";
    CHECK(contains(message_of(Code::invalid, [&] { make_libfabric(options); }), "0.0.0.0"));
}

void information() {
    TransportOptions options = options_for(provider);
    const LibfabricInfo info = libfabric_info(options);
    std::printf("  %s %s, headers %s, chosen %s %s\n", info.library.c_str(), info.version.c_str(),
                info.headers_version.c_str(), info.chosen.c_str(), info.problem.c_str());
    bool found = false;
    for (const LibfabricProviderInfo& each : info.providers) {
        std::printf("  %s %s %s: descriptor %d, device memory %d, posts receives %d, data %u, largest %llu\n",
                    each.name.c_str(), each.fabric.c_str(), each.domain.c_str(), each.waits_by_descriptor,
                    each.device_memory, each.posts_receives, each.completion_data_bytes,
                    static_cast<unsigned long long>(each.largest_write_bytes));
        found = found || each.name == info.chosen;
        if (each.name == "tcp") CHECK(each.waits_by_descriptor);
        if (each.name == "shm") CHECK(!each.waits_by_descriptor);
    }
    CHECK(info.built && found && info.problem.empty());
    options.library = "/no/such/library";
    CHECK(!libfabric_info(options).problem.empty());
}

}  // namespace antiphon::m2n::test

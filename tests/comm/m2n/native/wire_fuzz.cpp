// Feeds bytes to everything that reads foreign bytes: frames, tickets, both sides of the opening.
//
// For libFuzzer: clang++ -fsanitize=fuzzer,address,undefined -DM2N_LIBFUZZER. Without it `wire_fuzz ITERATIONS [SEED]`
// mutates valid inputs at random, the same ones for the same seed. The first byte of an input chooses the target. Two
// targets sign what they were given, so that mutations also reach the code behind a proof that holds.
#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <random>
#include <string>
#include <vector>

#include "m2n/handshake.h"
#include "m2n/types.h"
#include "m2n/wire.h"

using namespace antiphon::m2n;

namespace {

enum Target : uint8_t { frames, ticket, server, client, signed_proof, signed_welcome, num_targets };

const std::string secret = "open sesame";
uint64_t num_read_to_the_end[num_targets] = {};  // inputs that were valid as a whole

Nonce fixed_nonce(uint8_t value) {
    Nonce nonce;
    nonce.fill(static_cast<std::byte>(value));
    return nonce;
}

void require(bool condition) {
    if (!condition) std::abort();
}

Hello sample_hello() {
    const Bytes blob = bytes_of("introduction");
    return {42, 3, "attention[3]", {{blob.begin(), blob.end()}, {}}};
}

Welcome sample_welcome() {
    const Bytes blob = bytes_of("keys and addresses");
    return {7, 4, 4096, "expert[1]", {{blob.begin(), blob.end()}, {}}};
}

// Calls `take` with every frame of the stream, in portions whose sizes the stream itself decides.
template <class Take>
void stream_frames(Bytes stream, FrameReader& reader, const Take& take) {
    while (!stream.empty()) {
        const std::span<std::byte> space = reader.space();
        require(!space.empty() && space.size() <= max_body_bytes);
        const size_t portion = 1 + static_cast<size_t>(stream[0]) * 17;
        const size_t length = std::min({portion, space.size(), stream.size()});
        std::copy_n(stream.begin(), length, space.begin());
        stream = stream.subspan(length);
        if (reader.filled(length)) take(reader.take());
    }
}

void fuzz_frames(Bytes input) {
    FrameReader reader({FrameType::hello, FrameType::challenge, FrameType::proof, FrameType::welcome,
                        FrameType::refusal, FrameType::heartbeat, FrameType::goodbye, FrameType::attach});
    stream_frames(input, reader, [](const Frame& frame) {
        require(frame.body.size() <= max_body_bytes);
        require(encode_frame(frame.type, frame.body).size() == frame_header_bytes + frame.body.size());
        if (frame.type == FrameType::refusal) require(decode_refusal(frame.body).size() == frame.body.size());
    });
    ++num_read_to_the_end[frames];
}

void fuzz_ticket(Bytes input) {
    const std::vector<std::byte> again = Ticket::decode(input).encode();
    require(again == std::vector<std::byte>(input.begin(), input.end()));
    ++num_read_to_the_end[ticket];
}

void fuzz_server(Bytes input) {
    ServerOpening opening(secret, true, fixed_nonce(1));
    FrameReader reader(opening.allowed());
    stream_frames(input, reader, [&](const Frame& frame) {
        std::vector<FileDescriptor> none;
        const ServerOpening::Next next = opening.take(frame, none);
        reader.allow(opening.allowed());
        if (next == ServerOpening::Next::attach) require(!opening.token().empty());
        if (next == ServerOpening::Next::ask_handler) opening.welcome(sample_welcome());
        if (next != ServerOpening::Next::send_challenge) ++num_read_to_the_end[server];
    });
}

void fuzz_client(Bytes input) {
    ClientOpening opening(secret, sample_hello(), true, fixed_nonce(2));
    FrameReader reader({FrameType::challenge, FrameType::refusal});
    stream_frames(input, reader, [&](const Frame& frame) {
        std::vector<FileDescriptor> none;
        if (frame.type == FrameType::challenge) {
            opening.answer(frame);
            reader.allow({FrameType::welcome, FrameType::refusal});
        } else if (frame.type == FrameType::welcome) {
            opening.accept(frame, none);
            ++num_read_to_the_end[client];
        }
    });
}

// A proof, and behind it `rest`.
Frame signed_frame(FrameType type, const Digest& proof, Bytes rest) {
    Frame frame{type, {proof.begin(), proof.end()}};
    frame.body.insert(frame.body.end(), rest.begin(), rest.end());
    return frame;
}

void fuzz_signed_proof(Bytes input) {
    const std::vector<std::byte> hello_body = write_hello({42, 3, "attention[3]", {}}, fixed_nonce(2));
    ServerOpening opening(secret, true, fixed_nonce(1));
    std::vector<FileDescriptor> none;
    opening.take({FrameType::hello, hello_body}, none);
    const Digest proof = prove(secret, client_label, {hello_body, fixed_nonce(1), input});
    opening.take(signed_frame(FrameType::proof, proof, input), none);
    require(opening.hello().introduction.bytes.size() <= max_blob_bytes);
    opening.welcome(sample_welcome());
    ++num_read_to_the_end[signed_proof];
}

void fuzz_signed_welcome(Bytes input) {
    const Hello hello = sample_hello();
    ClientOpening opening(secret, hello, true, fixed_nonce(2));
    const Nonce nonce = fixed_nonce(1);
    opening.answer({FrameType::challenge, {nonce.begin(), nonce.end()}});
    const std::vector<std::byte> hello_body = write_hello(hello, fixed_nonce(2));
    const std::vector<std::byte> introduction = write_introduction({hello.introduction.bytes, {}});
    const Digest proof = prove(secret, server_label, {hello_body, nonce, introduction, input});
    std::vector<FileDescriptor> none;
    const Welcome welcome = opening.accept(signed_frame(FrameType::welcome, proof, input), none);
    require(welcome.incarnation != 0 && welcome.slots >= 1 && welcome.slots <= max_slots);
    require(welcome.slot_bytes <= max_slot_bytes && welcome.name.size() <= max_name_bytes);
    ++num_read_to_the_end[signed_welcome];
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
    if (size == 0) return 0;
    const Bytes input = std::as_bytes(std::span(data, size)).subspan(1);
    try {
        switch (data[0] % num_targets) {
            case frames: fuzz_frames(input); break;
            case ticket: fuzz_ticket(input); break;
            case server: fuzz_server(input); break;
            case client: fuzz_client(input); break;
            case signed_proof: fuzz_signed_proof(input); break;
            case signed_welcome: fuzz_signed_welcome(input); break;
        }
    } catch (const Error& error) {
        require(error.code == Code::invalid || error.code == Code::refused);
    }
    return 0;
}

#ifndef M2N_LIBFUZZER

namespace {

using Input = std::vector<uint8_t>;

Input make_input(Target target, std::initializer_list<std::vector<std::byte>> parts) {
    Input input{target};
    for (const auto& part : parts) {
        for (const std::byte byte : part) input.push_back(static_cast<uint8_t>(byte));
    }
    return input;
}

// One valid input for each target and each way through it.
std::vector<Input> valid_inputs() {
    Ticket sample;
    sample.transport = "shm";
    sample.name = "expert[1]";
    sample.address = {"antiphon-m2n-1-00ff", "10.1.2.3", 4711};
    sample.host_id = "4f2d/4:26531";
    sample.inbox = 42;
    sample.sources = 8;
    sample.slots = 4;
    sample.slot_bytes = 4096;

    const Hello hello = sample_hello();
    ClientOpening client_opening(secret, hello, true, fixed_nonce(2));
    ServerOpening server_opening(secret, true, fixed_nonce(1));
    const std::vector<std::byte> said_hello = client_opening.hello();
    const auto body_of = [](const std::vector<std::byte>& frame) {
        return std::vector<std::byte>(frame.begin() + frame_header_bytes, frame.end());
    };
    std::vector<FileDescriptor> none;
    server_opening.take({FrameType::hello, body_of(said_hello)}, none);
    const std::vector<std::byte> challenge = server_opening.challenge();
    const std::vector<std::byte> proof = client_opening.answer({FrameType::challenge, body_of(challenge)});
    server_opening.take({FrameType::proof, body_of(proof)}, none);
    const std::vector<std::byte> welcome = server_opening.welcome(sample_welcome());
    const std::vector<std::byte> refusal = encode_frame(FrameType::refusal, encode_refusal("no room here"));
    return {
        make_input(frames, {encode_frame(FrameType::heartbeat), said_hello, refusal, challenge}),
        make_input(ticket, {sample.encode()}),
        make_input(server, {said_hello, proof}),
        make_input(server, {attach_greeting(std::vector<std::byte>(token_bytes, std::byte{9}))}),
        make_input(client, {challenge, welcome}),
        make_input(client, {challenge, refusal}),
        make_input(signed_proof, {write_introduction({hello.introduction.bytes, {}})}),
        make_input(signed_welcome, {write_welcome({7, 4, 4096, "expert[1]", {hello.introduction.bytes, {}}})}),
    };
}

class Mutator {
  public:
    explicit Mutator(uint64_t seed) : random_(seed) {}

    size_t below(size_t limit) { return limit == 0 ? 0 : random_() % limit; }

    void mutate(Input& input, const std::vector<Input>& inputs) {
        for (size_t i = below(5); i > 0; --i) {
            const size_t at = input.empty() ? 0 : 1 + below(input.size() - 1);  // the target stays, mostly
            if (at >= input.size()) return;
            switch (below(8)) {
                case 0: input[at] ^= static_cast<uint8_t>(1u << below(8)); break;
                case 1: input[at] = edge_values[below(std::size(edge_values))]; break;
                case 2: input.resize(at); break;
                case 3: input.erase(input.begin() + static_cast<ptrdiff_t>(at)); break;
                case 4: input.insert(input.begin() + static_cast<ptrdiff_t>(at), below(40), random_byte()); break;
                case 5: splice(input, at, inputs[below(inputs.size())]); break;
                case 6: input[0] = random_byte(); break;
                case 7:
                    for (size_t k = at; k < std::min(at + 4, input.size()); ++k) input[k] = random_byte();
                    break;
            }
        }
    }

  private:
    static constexpr uint8_t edge_values[] = {0, 1, 0x7f, 0x80, 0xff, 127, 128, 129};

    uint8_t random_byte() { return static_cast<uint8_t>(random_()); }

    void splice(Input& input, size_t at, const Input& other) {
        input.resize(at);
        input.insert(input.end(), other.begin() + static_cast<ptrdiff_t>(below(other.size())), other.end());
    }

    std::mt19937_64 random_;
};

}  // namespace

int main(int argc, char** argv) {
    const uint64_t iterations = argc > 1 ? std::strtoull(argv[1], nullptr, 10) : 100'000;
    Mutator mutator(argc > 2 ? std::strtoull(argv[2], nullptr, 10) : 1);
    const std::vector<Input> inputs = valid_inputs();
    for (const Input& input : inputs) LLVMFuzzerTestOneInput(input.data(), input.size());
    for (const uint64_t count : num_read_to_the_end) require(count > 0);  // otherwise the samples test nothing
    for (uint64_t i = 0; i < iterations; ++i) {
        Input input = inputs[mutator.below(inputs.size())];
        mutator.mutate(input, inputs);
        LLVMFuzzerTestOneInput(input.data(), input.size());
    }
    std::printf("%llu iterations; read to the end:", static_cast<unsigned long long>(iterations));
    for (const uint64_t count : num_read_to_the_end) std::printf(" %llu", static_cast<unsigned long long>(count));
    std::printf("\n");
    return EXIT_SUCCESS;
}

#endif

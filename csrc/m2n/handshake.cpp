#include "m2n/handshake.h"

#include <poll.h>

#include <cerrno>
#include <system_error>
#include <tuple>
#include <utility>

#include "m2n/socket.h"
#include "m2n/types.h"

namespace antiphon::m2n {

namespace {

constexpr size_t proof_bytes = std::tuple_size_v<Digest>;

void check_descriptors(const Blob& blob, bool allowed) {
    if (!blob.descriptors.empty() && !allowed) {
        throw_invalid(
            "descriptors can be handed over on a Unix socket only: peers of one machine and one network namespace");
    }
    if (blob.descriptors.size() > max_descriptors_per_message) {
        throw_invalid(blob.descriptors.size(), " descriptors: the limit is ", max_descriptors_per_message);
    }
}

// Fewer than announced arrive where a process may open no more files.
std::vector<FileDescriptor> take_announced(std::vector<FileDescriptor>& descriptors, size_t announced, bool allowed) {
    if (announced > 0 && !allowed) {
        throw_invalid("descriptors announced on a connection that cannot carry them");
    }
    if (descriptors.size() != announced) {
        throw_invalid(announced, " descriptors announced, ", descriptors.size(),
                      " arrived; is the limit of open files reached?");
    }
    return std::exchange(descriptors, {});
}

std::vector<std::byte> behind_proof(FrameType type, const Digest& proof, Bytes rest) {
    std::vector<std::byte> body(proof.begin(), proof.end());
    body.insert(body.end(), rest.begin(), rest.end());
    return encode_frame(type, body);
}

}  // namespace

FrameTypes ServerOpening::allowed() const {
    switch (state_) {
        case State::silent: return {FrameType::hello, FrameType::attach};
        case State::challenged: return {FrameType::proof};
        case State::proven: break;
    }
    return {};
}

ServerOpening::Next ServerOpening::take(const Frame& frame, std::vector<FileDescriptor>& descriptors) {
    if (!allowed().contains(frame.type)) throw_invalid("a frame that is not allowed at this point");
    if (frame.type == FrameType::proof) {
        check_proof(frame, descriptors);
        state_ = State::proven;
        return Next::ask_handler;
    }
    take_announced(descriptors, 0, descriptors_allowed_);
    if (frame.type == FrameType::attach) {
        if (frame.body.empty()) throw_invalid("an attach frame without a token");
        token_ = frame.body;
        state_ = State::proven;
        return Next::attach;
    }
    hello_ = read_hello(frame.body);
    hello_body_ = frame.body;
    state_ = State::challenged;
    return Next::send_challenge;
}

void ServerOpening::check_proof(const Frame& frame, std::vector<FileDescriptor>& descriptors) {
    ByteReader reader(frame.body, "the proof");
    const Bytes proof = reader.raw(proof_bytes);
    const Bytes rest = reader.rest();
    // Nothing behind the proof is looked at before the proof holds.
    if (!equal_in_constant_time(proof, prove(secret_, client_label, {hello_body_, nonce_, rest}))) {
        throw Error(Code::refused, (hello_.name.empty() ? "the peer" : hello_.name) + " does not know the secret");
    }
    size_t announced = 0;
    hello_.introduction = read_introduction(rest, announced);
    hello_.introduction.descriptors = take_announced(descriptors, announced, descriptors_allowed_);
    introduction_body_.assign(rest.begin(), rest.end());
}

std::vector<std::byte> ServerOpening::challenge() const { return encode_frame(FrameType::challenge, nonce_); }

std::vector<std::byte> ServerOpening::welcome(const Welcome& welcome) const {
    check_descriptors(welcome.blob, descriptors_allowed_);
    const std::vector<std::byte> body = write_welcome(welcome);
    const Digest proof = prove(secret_, server_label, {hello_body_, nonce_, introduction_body_, body});
    return behind_proof(FrameType::welcome, proof, body);
}

ClientOpening::ClientOpening(const std::string& secret, const Hello& hello, bool descriptors_allowed,
                             const Nonce& nonce)
    : secret_(secret),
      descriptors_allowed_(descriptors_allowed),
      hello_body_(write_hello(hello, nonce)) {
    check_descriptors(hello.introduction, descriptors_allowed);
    introduction_body_ = write_introduction(hello.introduction);
}

std::vector<std::byte> ClientOpening::hello() const { return encode_frame(FrameType::hello, hello_body_); }

std::vector<std::byte> ClientOpening::answer(const Frame& challenge) {
    server_nonce_ = decode_challenge(challenge.body);
    const Digest proof = prove(secret_, client_label, {hello_body_, server_nonce_, introduction_body_});
    return behind_proof(FrameType::proof, proof, introduction_body_);
}

Welcome ClientOpening::accept(const Frame& welcome, std::vector<FileDescriptor>& descriptors) const {
    ByteReader reader(welcome.body, "the welcome");
    const Bytes proof = reader.raw(proof_bytes);
    const Bytes rest = reader.rest();
    const Digest expected = prove(secret_, server_label, {hello_body_, server_nonce_, introduction_body_, rest});
    if (!equal_in_constant_time(proof, expected)) throw Error(Code::refused, "does not know the secret");
    size_t announced = 0;
    Welcome accepted = read_welcome(rest, announced);
    accepted.blob.descriptors = take_announced(descriptors, announced, descriptors_allowed_);
    return accepted;
}

namespace {

// Frames over a socket, each wait until the deadline at most.
class Conversation {
  public:
    Conversation(int socket, bool unix_socket, const std::string& peer_name, Deadline deadline)
        : socket_(socket), unix_socket_(unix_socket), peer_name_(peer_name), deadline_(deadline) {}

    std::vector<FileDescriptor>& descriptors() { return descriptors_; }

    // A peer that turns us down may hang up before it has read everything: its words are then waiting to be received.
    void send(Bytes bytes, std::span<const FileDescriptor> descriptors = {}) {
        while (!bytes.empty()) {
            const int64_t sent = send_some(socket_, bytes, descriptors);
            if (sent == -EPIPE || sent == -ECONNRESET) return;
            if (sent == -EAGAIN) {
                wait(POLLOUT, "read our part of");
                continue;
            }
            if (sent < 0) fail(static_cast<int>(-sent), "sendmsg");
            bytes = bytes.subspan(static_cast<size_t>(sent));
            descriptors = {};  // they left with the first byte
        }
    }

    // Turns the peer's refusal into Error(refused).
    Frame receive(FrameType expected) {
        FrameReader reader({expected, FrameType::refusal});
        while (true) {
            const int64_t received = receive_some(socket_, reader.space(), unix_socket_ ? &descriptors_ : nullptr);
            if (received == -EAGAIN) {
                wait(POLLIN, "answer");
                continue;
            }
            if (received == 0 || received == -ECONNRESET || received == -EPIPE) {
                turn_down(peer_name_ + " hung up during the opening of the connection", "hung up");
            }
            if (received < 0) fail(static_cast<int>(-received), "recvmsg");
            if (!reader.filled(static_cast<size_t>(received))) continue;
            Frame frame = reader.take();
            if (frame.type == expected) return frame;
            const std::string words = decode_refusal(frame.body);
            turn_down(peer_name_ + " refused: " + words, words);
        }
    }

    [[noreturn]] void turn_down(const std::string& message, const std::string& reason) const {
        throw Error(Code::refused, message, {peer_name_}, reason);
    }

  private:
    void wait(short events, const char* verb) {
        if (wait_ready(socket_, events, deadline_) != 0) return;
        throw Error(Code::timeout, peer_name_ + " did not " + verb + " the opening of the connection in time",
                    {peer_name_});
    }

    [[noreturn]] void fail(int error, const char* call) const {
        const std::string words = std::generic_category().message(error);
        if (error == ETIMEDOUT) {
            throw Error(Code::timeout, peer_name_ + " does not answer: " + words, {peer_name_});
        }
        throw Error(Code::system, concat(call, " to ", peer_name_, ": ", words), {peer_name_}, words);
    }

    int socket_;
    bool unix_socket_;
    const std::string& peer_name_;
    Deadline deadline_;
    std::vector<FileDescriptor> descriptors_;
};

}  // namespace

Welcome open_connection(int socket, bool unix_socket, const std::string& secret, const std::string& peer_name,
                        const Hello& hello, Deadline deadline) {
    ClientOpening opening(secret, hello, unix_socket, random_nonce());
    Conversation conversation(socket, unix_socket, peer_name, deadline);
    try {
        conversation.send(opening.hello());
        const Frame challenge = conversation.receive(FrameType::challenge);
        conversation.send(opening.answer(challenge), hello.introduction.descriptors);
        return opening.accept(conversation.receive(FrameType::welcome), conversation.descriptors());
    } catch (const Error& error) {
        // What the peer sent is its fault, not the caller's.
        if (error.code == Code::invalid) {
            conversation.turn_down(peer_name + " sent nonsense: " + error.what(), error.what());
        }
        if (error.code == Code::refused && error.peers.empty()) {
            conversation.turn_down(peer_name + " " + error.what(), error.what());
        }
        throw;
    }
}

}  // namespace antiphon::m2n

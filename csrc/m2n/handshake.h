// The opening of a control connection, both sides.
//
// `ServerOpening` and `ClientOpening` are the protocol alone: frames in, frames out, no sockets and no clock, so that
// one thread can drive thousands of half-opened connections and a fuzzer can drive one. `open_connection` runs the
// client's side over a socket with a deadline, on the calling thread.
//
// Both nonces, every field and both blobs go into the proofs: nothing of an opening can be replayed, changed or
// answered by a peer that does not know the secret. What follows is not encrypted; that is the network's task.
#pragma once

#include <cstddef>
#include <string>
#include <vector>

#include "m2n/control.h"
#include "m2n/wire.h"

namespace antiphon::m2n {

inline Nonce random_nonce() { return random_value<Nonce>(); }

class ServerOpening {
  public:
    enum class Next {
        send_challenge,
        ask_handler,  // the client proved itself: `hello` is complete
        attach,       // a data connection presents `token`
    };

    // `secret` must outlive this. `descriptors_allowed`: on Unix sockets.
    ServerOpening(const std::string& secret, bool descriptors_allowed, const Nonce& nonce)
        : secret_(secret), descriptors_allowed_(descriptors_allowed), nonce_(nonce) {}

    FrameTypes allowed() const;  // what the client may send now
    // `descriptors`: what came along so far; taken when they belong to the frame. Error(invalid): nonsense;
    // Error(refused): the proof is wrong, the message has words for the client.
    Next take(const Frame& frame, std::vector<FileDescriptor>& descriptors);

    std::vector<std::byte> challenge() const;  // a frame
    const Hello& hello() const { return hello_; }
    Bytes token() const { return token_; }
    // The frame; the blob's descriptors are the caller's to send along. Error(invalid): a field is beyond its limit.
    std::vector<std::byte> welcome(const Welcome& welcome) const;

  private:
    enum class State { silent, challenged, proven };

    void check_proof(const Frame& frame, std::vector<FileDescriptor>& descriptors);

    const std::string& secret_;
    bool descriptors_allowed_;
    Nonce nonce_;
    State state_ = State::silent;
    Hello hello_;
    std::vector<std::byte> token_;
    std::vector<std::byte> hello_body_;
    std::vector<std::byte> introduction_body_;
};

class ClientOpening {
  public:
    // `secret` must outlive this. Error(invalid): a field of `hello` is beyond its limit.
    ClientOpening(const std::string& secret, const Hello& hello, bool descriptors_allowed, const Nonce& nonce);

    std::vector<std::byte> hello() const;  // a frame
    // The proof's frame; the introduction's descriptors are the caller's to send along.
    std::vector<std::byte> answer(const Frame& challenge);
    // Error(refused): the server does not know the secret; Error(invalid): nonsense.
    Welcome accept(const Frame& welcome, std::vector<FileDescriptor>& descriptors) const;

  private:
    const std::string& secret_;
    bool descriptors_allowed_;
    std::vector<std::byte> hello_body_;
    std::vector<std::byte> introduction_body_;
    Nonce server_nonce_{};
};

// Opens a pair over a connected socket. Error: timeout, refused, invalid (see Control::connect).
Welcome open_connection(int socket, bool unix_socket, const std::string& secret, const std::string& peer_name,
                        const Hello& hello, Deadline deadline);

}  // namespace antiphon::m2n

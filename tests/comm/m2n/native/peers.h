// What the control tests are played with: a handler that keeps a record, and strangers who speak raw bytes.
#pragma once

#include <netinet/in.h>
#include <poll.h>
#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <functional>
#include <map>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "check.h"
#include "m2n/control_thread.h"
#include "m2n/handshake.h"
#include "m2n/socket.h"
#include "m2n/wire.h"

namespace antiphon::m2n::test {

inline std::vector<std::byte> to_bytes(std::string_view text) {
    const Bytes bytes = bytes_of(text);
    return {bytes.begin(), bytes.end()};
}

inline std::string to_text(Bytes bytes) { return {reinterpret_cast<const char*>(bytes.data()), bytes.size()}; }

// Everything a handler was told. Its welcome repeats the hello's introduction, descriptors included.
class Recorder : public ControlHandler {
  public:
    Welcome on_hello(ConnectionId connection, const Hello& hello) override {
        const std::lock_guard lock(mutex);
        if (hello.inbox != known_inbox) throw Error(Code::refused, "has no inbox " + std::to_string(hello.inbox));
        if (during_hello) during_hello(connection, hello);
        names[connection] = hello.name;
        Welcome welcome{7, 4, 4096, "expert[1]", {}};
        welcome.blob.bytes = hello.introduction.bytes;
        for (const FileDescriptor& descriptor : hello.introduction.descriptors) {
            welcome.blob.descriptors.emplace_back(dup(descriptor.get()));
        }
        return welcome;
    }

    bool on_attach(FileDescriptor& connection, std::span<const std::byte> token) override {
        const std::lock_guard lock(mutex);
        if (to_text(token) != known_token) return false;
        attached.push_back(std::move(connection));
        return true;
    }

    void on_gone(ConnectionId connection, const std::string& reason) override {
        const int64_t now = monotonic_ns();
        const std::lock_guard lock(mutex);
        gone.push_back({connection, reason, now});
    }

    struct Gone {
        ConnectionId connection;
        std::string reason;
        int64_t when_ns;
    };

    size_t num_gone() {
        const std::lock_guard lock(mutex);
        return gone.size();
    }
    Gone wait_gone(size_t index = 0) {
        wait_until("on_gone", [&] { return num_gone() > index; });
        const std::lock_guard lock(mutex);
        return gone.at(index);
    }
    size_t num_welcomed() {
        const std::lock_guard lock(mutex);
        return names.size();
    }

    static constexpr uint64_t known_inbox = 42;
    static constexpr std::string_view known_token = "0123456789abcdef";
    std::mutex mutex;
    std::map<ConnectionId, std::string> names;
    std::vector<FileDescriptor> attached;
    std::vector<Gone> gone;
    std::function<void(ConnectionId, const Hello&)> during_hello;
};

inline ControlOptions server_options() {
    ControlOptions options;
    options.name = "expert[1]";
    options.secret = "open sesame";
    options.host = "127.0.0.1";
    return options;
}

inline ControlOptions client_options() {
    ControlOptions options;
    options.name = "attention[3]";
    options.secret = "open sesame";
    return options;
}

inline Hello hello_of(std::string introduction = "who I am") {
    return {Recorder::known_inbox, 3, "attention[3]", {to_bytes(introduction), {}}};
}

inline Deadline in_ms(int64_t ms) { return Deadline::after_ns(ms * 1'000'000); }

// A connection without manners: sends any bytes, reads until it is hung up on.
class Stranger {
  public:
    Stranger(const Address& address, bool unix_socket) {
        const SocketAddress where =
            unix_socket ? abstract_address(address.unix_name) : numeric_address(address.host, address.port);
        if (connect_socket(where, in_ms(5000), socket_) != 0) throw Failure("a stranger could not connect");
    }

    int fd() const { return socket_.get(); }

    // False: the server has hung up already.
    bool say(Bytes bytes, std::span<const FileDescriptor> descriptors = {}) {
        while (!bytes.empty()) {
            const int64_t sent = send_some(fd(), bytes, descriptors);
            if (sent == -EAGAIN) {
                wait_ready(fd(), POLLOUT, in_ms(5000));
                continue;
            }
            if (sent < 0) return false;
            bytes = bytes.subspan(static_cast<size_t>(sent));
            descriptors = {};
        }
        return true;
    }

    Frame hear(FrameType type) {
        FrameReader reader({type});
        while (true) {
            if (wait_ready(fd(), POLLIN, in_ms(5000)) == 0) throw Failure("a stranger was not answered");
            const int64_t received = receive_some(fd(), reader.space());
            if (received <= 0) throw Failure("a stranger was hung up on");
            if (reader.filled(static_cast<size_t>(received))) return reader.take();
        }
    }

    // All that comes until the server hangs up.
    std::vector<std::byte> hear_out(int64_t limit_ms = 10'000) {
        std::vector<std::byte> heard;
        std::byte portion[4096];
        while (true) {
            if (wait_ready(fd(), POLLIN, in_ms(limit_ms)) == 0) throw Failure("a stranger was not hung up on");
            const int64_t received = receive_some(fd(), portion);
            if (received <= 0) return heard;
            heard.insert(heard.end(), portion, portion + received);
        }
    }

    void stop_talking() { shutdown(fd(), SHUT_WR); }

  private:
    FileDescriptor socket_;
};

}  // namespace antiphon::m2n::test

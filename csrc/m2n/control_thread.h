// An endpoint's control connections: opened on the calling thread, then left to a thread of its own, one epoll loop
// that serves listeners, openings, welcomed peers, a timer and orders.
//
// Only that thread touches connections and calls the handler; other threads leave orders under a mutex and ring an
// eventfd. A connection is in one of two states: opening (ServerOpening decides what may come, until a deadline) or
// welcomed (heartbeats and a goodbye may come, anything else ends it). Rejected: a thread per peer, which needs no
// state machine, but at hundreds of peers costs hundreds of stacks and wake-ups and cannot be stopped in one place.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <string>
#include <string_view>
#include <thread>
#include <unordered_map>
#include <unordered_set>
#include <utility>
#include <vector>

#include "m2n/control.h"
#include "m2n/handshake.h"
#include "m2n/socket.h"
#include "m2n/types.h"
#include "m2n/wire.h"

namespace antiphon::m2n {

class Control {
  public:
    // Binds and starts the thread. Error(system) if an address cannot be bound.
    Control(ControlOptions options, ControlHandler& handler);
    ~Control();  // says goodbye to every peer, stops the thread
    Control(const Control&) = delete;
    Control& operator=(const Control&) = delete;

    const Address& address() const { return address_; }
    std::shared_ptr<const ControlCounters> counters() const { return counters_; }

    // Opens a pair: shakes hands on the calling thread, then leaves the connection to the control thread to watch.
    // Tries the Unix socket first when `peer.unix_name` is set and `local` is true, else TCP; retries a refused TCP
    // connection until the deadline. Error: timeout (names `peer_name`), refused (the peer's words), system.
    std::pair<ConnectionId, Welcome> connect(const Address& peer, const std::string& peer_name, bool local,
                                             const Hello& hello, Deadline deadline);

    // Sends goodbye and forgets the connection; `on_gone` will not be called for it. Waits while on_gone of this very
    // connection runs, except on the control thread: do not call it under a lock that on_gone takes.
    void hang_up(ConnectionId id);

  private:
    // Why a connection is at its end.
    enum class Fate {
        alive,
        lost,         // its peer is gone
        rejected,     // nonsense, a wrong proof or silence
        turned_down,  // by the handler
        adopted,      // its socket belongs to a data connection now
    };

    struct Connection {
        Connection(ConnectionId id, FileDescriptor socket, bool unix_socket, FrameTypes allowed)
            : id(id), socket(std::move(socket)), unix_socket(unix_socket), reader(allowed) {}

        void end(Fate with, std::string why) {
            fate = with;
            reason = std::move(why);
        }

        ConnectionId id;
        FileDescriptor socket;
        bool unix_socket;
        std::unique_ptr<ServerOpening> opening;  // none: welcomed
        FrameReader reader;
        std::vector<FileDescriptor> received;    // descriptors that came with the frame being read
        std::vector<std::byte> output;           // waits for room in the socket
        std::vector<FileDescriptor> output_descriptors;
        bool announced = false;                  // the handler knows of it
        bool heartbeats = false;                 // welcomed, over TCP
        bool waits_for_room = false;             // epoll watches for it
        int send_error = 0;
        uint32_t unanswered_heartbeats = 0;
        int64_t acknowledged_at_ns = 0;          // when a look last found everything acknowledged
        Fate fate = Fate::alive;
        std::string reason;
    };

    // Keys of what epoll watches; connections count on from `first_connection_key`.
    static constexpr uint64_t bell_key = 1;
    static constexpr uint64_t timer_key = 2;
    static constexpr uint64_t unix_listener_key = 3;
    static constexpr uint64_t tcp_listener_key = 4;
    static constexpr uint64_t first_connection_key = 16;

    struct Order {
        ConnectionId id;
        std::unique_ptr<Connection> adopt;  // none: hang up
    };

    void listen();
    void start();
    // What control connections over TCP are set to.
    void prepare(int socket) const;
    // Watches a connection that was opened elsewhere, from now on.
    ConnectionId hand_over(FileDescriptor socket, bool unix_socket);
    void watch(int fd, uint64_t key) const;
    void ring() const;

    void run();
    void dispatch(uint64_t key, uint32_t events);
    bool carry_out_orders();  // false: stop
    void carry_out(Order& order);

    void arm_timer();
    void on_timer();
    void expire_openings(int64_t now);
    void send_heartbeats();
    bool is_opening(ConnectionId id) const;

    void accept_from(int listener, bool unix_socket);
    void admit(FileDescriptor socket, bool unix_socket);
    bool drop_oldest_opening();
    void listen_for(uint32_t events);  // 0: no connection is accepted

    void serve(Connection& connection, uint32_t events);
    bool receive(Connection& connection);  // false: there may be more
    void end_of_stream(Connection& connection, int error);
    void take_frame(Connection& connection);
    void challenge(Connection& connection);
    void attach(Connection& connection);
    void ask_handler(Connection& connection);
    void join_peers(Connection& connection);

    void send(Connection& connection, Bytes bytes, std::vector<FileDescriptor> descriptors = {});
    void flush(Connection& connection);
    void say_goodbye(Connection& connection);
    void reject(Connection& connection, std::string reason);
    void refuse(Connection& connection, std::string_view words);
    void bury(Connection& connection);
    void announce_gone(ConnectionId id, const std::string& reason);
    std::string words_for(int error) const;

    const ControlOptions options_;
    ControlHandler& handler_;
    Address address_;
    std::shared_ptr<ControlCounters> counters_ = std::make_shared<ControlCounters>();

    FileDescriptor epoll_;
    FileDescriptor bell_;
    FileDescriptor timer_;
    FileDescriptor unix_listener_;
    FileDescriptor tcp_listener_;

    // The thread's own.
    std::unordered_map<ConnectionId, std::unique_ptr<Connection>> connections_;
    std::deque<std::pair<int64_t, ConnectionId>> openings_;  // by deadline, which is by age too
    uint32_t num_tcp_peers_ = 0;
    int64_t next_heartbeat_ns_ = 0;
    int64_t resume_accepting_ns_ = 0;  // 0: accepting
    int64_t armed_ns_ = 0;

    std::atomic<ConnectionId> next_id_;

    std::mutex mutex_;  // guards what follows; never held while the handler runs
    std::vector<Order> orders_;
    bool stop_ = false;
    std::unordered_set<ConnectionId> hung_up_;  // orders that on_gone must already respect
    ConnectionId calling_ = 0;                  // whose on_gone is running
    std::condition_variable called_;
    std::thread::id thread_id_;

    std::thread thread_;
};

}  // namespace antiphon::m2n

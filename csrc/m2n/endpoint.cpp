#include "m2n/endpoint.h"

#include <utility>
#include <vector>

#include "m2n/types.h"

namespace antiphon::m2n {

std::vector<std::string> transport_names() {
#if defined(ANTIPHON_HAVE_LIBFABRIC)
    return {"shm", "tcp", "libfabric", "loopback"};
#else
    return {"shm", "tcp", "loopback"};
#endif
}

std::shared_ptr<Transport> make_transport(const std::string& kind, const TransportOptions& options) {
    if (kind == "loopback") return make_loopback(options);
    if (kind == "shm") return make_shared_memory(options);
    if (kind == "tcp") return make_tcp(options);
    if (kind == "libfabric") return make_libfabric(options);
    throw_invalid("transport is ", kind, ": it must be shm, tcp, libfabric or loopback");
}

namespace {

ControlOptions control_options(const EndpointOptions& options, bool same_host_only) {
    ControlOptions control;
    control.name = options.name;
    control.secret = options.secret;
    control.host = same_host_only ? "" : options.host;
    control.port = options.port;
    control.heartbeat_ns = options.heartbeat_ns;
    control.dead_after_ns = options.dead_after_ns;
    control.priority = options.transport_options.credit_priority;
    control.type_of_service = options.transport_options.credit_type_of_service;
    return control;
}

}  // namespace

Endpoint::Endpoint(EndpointOptions options)
    : options_(std::move(options)),
      policy_(choose_waiting(options_.waiting, options_.local_processes, options_.cores, options_.spin_ns)),
      interrupted_(std::make_shared<std::atomic<bool>>(false)) {
    policy_.between_sleeps = options_.between_sleeps;
    options_.transport_options.host = options_.host;
    options_.transport_options.local_processes = options_.local_processes;
    transport_ = make_transport(options_.transport, options_.transport_options);
    control_ = std::make_unique<Control>(control_options(options_, transport_->same_host_only()),
                                         static_cast<ControlHandler&>(*this));
    counters_ = control_->counters();
    line_ = std::make_shared<ControlLine>();
    line_->control = control_.get();
}

Endpoint::~Endpoint() { close(); }

void Endpoint::close() {
    const std::string reason = "this endpoint was closed";
    {
        const std::lock_guard lock(mutex_);
        if (closing_) return;
        closing_ = true;
    }
    {
        const std::lock_guard lock(line_->mutex);
        line_->control = nullptr;
    }
    control_.reset();
    for (auto& [id, open] : inboxes_) {
        for (const auto& [source, connection] : open.connections) {
            open.inbox->membership().push({connection, false, source, 0, reason, nullptr});
        }
        open.inbox->membership().close();
    }
    for (const auto& [id, weak] : ties_) {
        if (const auto tie = weak.lock()) tie->lose(reason);
    }
    transport_->interrupt();
}

std::shared_ptr<Inbox> Endpoint::make_inbox(uint32_t sources, uint32_t slots, uint64_t slot_bytes,
                                            std::vector<std::string> names, std::shared_ptr<StreamDevice> device) {
    if (control_ == nullptr) throw_invalid(options_.name, " is closed: it cannot receive");
    check_range("sources", sources, 1, max_sources);
    check_range("slots", slots, 1, max_slots);
    check_range("slot bytes", slot_bytes, 1, max_slot_bytes);
    if (!names.empty() && names.size() != sources) {
        throw_invalid(names.size(), " names for ", sources, " sources: give one for each, or none");
    }
    if (device) {
        if (const std::string reason = why_staged(device); !reason.empty()) {
            throw_invalid("messages for the memory of ", device->name(), ": ", reason);
        }
    }
    InboxSpec spec{random_value<uint64_t>(), sources, slots, slot_bytes, std::move(names), std::move(device)};
    auto inbox = std::make_shared<Inbox>(options_.name, spec, transport_, policy_, interrupted_,
                                         [line = line_](ConnectionId connection) { line->hang_up(connection); });
    const std::lock_guard lock(mutex_);
    // Incarnations begin anywhere, so that a message of an earlier process with the same name and inbox fits nowhere.
    inboxes_[spec.id] = OpenInbox{inbox, {}, random_value<Incarnation>() | 1};
    return inbox;
}

Ticket Endpoint::ticket(const Inbox& inbox) const {
    if (control_ == nullptr) throw_invalid(options_.name, " is closed: it has no tickets to give");
    const InboxSpec& spec = inbox.spec();
    if (!inboxes_.contains(spec.id)) throw_invalid("an inbox of another endpoint than ", options_.name);
    Ticket ticket;
    ticket.transport = options_.transport;
    ticket.name = options_.name;
    ticket.address = control_->address();
    ticket.host_id = host_identity();
    ticket.inbox = spec.id;
    ticket.sources = spec.sources;
    ticket.slots = spec.slots;
    ticket.slot_bytes = spec.slot_bytes;
    return ticket;
}

std::shared_ptr<Outbox> Endpoint::connect(const Ticket& ticket, SourceId source, Deadline deadline) {
    if (control_ == nullptr) throw_invalid(options_.name, " is closed: it cannot connect");
    if (ticket.transport != options_.transport) {
        throw_invalid(options_.name, " speaks ", options_.transport, ", ", ticket.name, " speaks ", ticket.transport,
                      ": give both the same transport");
    }
    const bool local = ticket.host_id == host_identity();
    if (transport_->same_host_only() && !local) {
        throw_invalid(ticket.name, " is on another machine, which ", options_.transport,
                      " does not reach: use tcp or libfabric");
    }
    Hello hello{ticket.inbox, source, options_.name, transport_->introduce()};
    auto [connection, welcome] = control_->connect(ticket.address, ticket.name, local, hello, deadline);
    try {
        check_range("slots of " + ticket.name, welcome.slots, 1, max_slots);
        check_range("slot bytes of " + ticket.name, welcome.slot_bytes, 1, max_slot_bytes);
        const PairSpec spec{source, welcome.slots, welcome.slot_bytes, welcome.incarnation, ticket.sources};
        std::shared_ptr<Link> link =
            transport_->open_link(spec, welcome.blob, ticket.address.host, ticket.address.port, deadline);
        std::shared_ptr<Tie> tie = make_tie(connection);
        return std::make_shared<Outbox>(options_.name, ticket.name, spec, std::move(link), std::move(tie), transport_,
                                        policy_, interrupted_);
    } catch (...) {
        control_->hang_up(connection);
        const std::lock_guard lock(mutex_);
        gone_early_.erase(connection);
        throw;
    }
}

std::shared_ptr<Tie> Endpoint::make_tie(ConnectionId connection) {
    auto tie = std::make_shared<Tie>([line = line_, connection] { line->hang_up(connection); });
    const std::lock_guard lock(mutex_);
    std::erase_if(ties_, [](const auto& entry) { return entry.second.expired(); });
    ties_[connection] = tie;
    if (const auto early = gone_early_.extract(connection); !early.empty()) tie->lose(early.mapped());
    return tie;
}

Welcome Endpoint::on_hello(ConnectionId connection, const Hello& hello) {
    std::shared_ptr<Inbox> inbox;
    PairSpec spec;
    {
        const std::lock_guard lock(mutex_);
        const auto found = inboxes_.find(hello.inbox);
        if (found == inboxes_.end()) throw Error(Code::refused, "has no such inbox: the ticket is of an earlier run");
        inbox = found->second.inbox;
        if (hello.source >= inbox->spec().sources) {
            throw Error(Code::refused,
                        concat("source ", hello.source, " asked for, the inbox has ", inbox->spec().sources));
        }
        spec = {hello.source, inbox->spec().slots, inbox->spec().slot_bytes, found->second.next_incarnation,
                inbox->spec().sources, inbox->spec().device};
        found->second.next_incarnation = spec.incarnation + 1 == 0 ? 1 : spec.incarnation + 1;
    }
    Welcome welcome{spec.incarnation, spec.slots, spec.slot_bytes, options_.name, {}};
    std::shared_ptr<Landing> landing = transport_->open_landing(spec, hello.introduction, welcome.blob);
    {
        const std::lock_guard lock(mutex_);
        if (closing_) throw Error(Code::refused, "is closing");
        // A peer that proved to know the secret may take a source over: it is the restarted peer, and the old one is
        // dead or cut off, even if we have not noticed yet. Not before there is room for it: a hello that fails costs
        // no peer its place.
        auto& connections = inboxes_.at(hello.inbox).connections;
        if (const auto former = connections.find(hello.source); former != connections.end()) {
            control_->hang_up(former->second);
        }
        connections[hello.source] = connection;
    }
    inbox->membership().push({connection, true, hello.source, spec.incarnation, hello.name, std::move(landing)});
    transport_->interrupt();
    return welcome;
}

bool Endpoint::on_attach(FileDescriptor& connection, std::span<const std::byte> token) {
    const bool taken = transport_->adopt(connection, token);
    if (taken) transport_->interrupt();
    return taken;
}

void Endpoint::on_gone(ConnectionId connection, const std::string& reason) {
    {
        const std::lock_guard lock(mutex_);
        bool known = false;
        for (auto& [id, open] : inboxes_) {
            for (auto it = open.connections.begin(); it != open.connections.end(); ++it) {
                if (it->second != connection) continue;
                open.inbox->membership().push({connection, false, it->first, 0, reason, nullptr});
                open.connections.erase(it);
                known = true;
                break;
            }
        }
        if (const auto found = ties_.find(connection); found != ties_.end()) {
            if (const auto tie = found->second.lock()) tie->lose(reason);
            ties_.erase(found);
        } else if (!known) {
            gone_early_[connection] = reason;
        }
    }
    transport_->interrupt();
}

void Endpoint::interrupt() {
    interrupted_->store(true);
    transport_->interrupt();
}

}  // namespace antiphon::m2n

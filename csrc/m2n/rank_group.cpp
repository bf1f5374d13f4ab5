#include "m2n/rank_group.h"

#include <algorithm>
#include <cstring>
#include <string>
#include <utility>

#include "m2n/row_scatter.h"
#include "m2n/token_exchange.h"
#include "m2n/types.h"

namespace antiphon::m2n {

namespace {

constexpr uint32_t chunk_bits = 16;
constexpr size_t more_word = 0;  // user word of a broadcast's message: 1 if another follows
// Up to here one wait less is worth the bytes that the direct form sends more; counted in bytes beyond those of two
// ranks, for which the direct form sends no more than the other.
constexpr uint64_t direct_bytes = 128 * 1024;

}  // namespace

RankGroup::RankGroup(uint32_t rank, std::shared_ptr<Inbox> inbox)
    : rank_(rank),
      inbox_(std::move(inbox)),
      chunk_bytes_(inbox_->spec().slot_bytes / 64 * 64),
      peers_(inbox_->spec().sources),
      expected_(size()),
      arrived_(size()),
      parts_(size()),
      rooms_(size()) {
    if (rank < size() && chunk_bytes_ > 0 && inbox_->spec().slots >= num_slots) return;
    throw_invalid("rank ", rank, " of ", size(), " with ", inbox_->spec().slots, " slots of ",
                  inbox_->spec().slot_bytes, " bytes: use at least ", num_slots, " slots of 64 bytes");
}

void RankGroup::set_peer(uint32_t rank, std::shared_ptr<Outbox> outbox) {
    if (outbox->spec().slot_bytes != inbox_->spec().slot_bytes || outbox->spec().slots != inbox_->spec().slots) {
        throw_invalid(outbox->peer(), " has slots of ", outbox->spec().slot_bytes, " bytes, this rank of ",
                      inbox_->spec().slot_bytes, ": give all ranks of a group the same");
    }
    peers_.at(rank) = std::move(outbox);
}

// --- epochs ---

// Runs a call that waits. An interrupt left over from an epoch that has passed is ignored.
template <class Wait>
auto RankGroup::waiting(Wait&& wait) {
    for (;;) {
        if (aborted_.load() > epoch_) {
            throw Error(Code::interrupted, concat("the epoch ", epoch_, " of the group was given up"));
        }
        try {
            return wait();
        } catch (const Error& error) {
            if (error.code != Code::interrupted) throw;
        }
    }
}

void RankGroup::begin(uint32_t epoch, Deadline deadline) {
    epoch_ = epoch;
    number_ = 0;
    usable_ = false;
    for (uint32_t peer = 0; peer < size(); ++peer) {
        if (peer != rank_ && peers_[peer] == nullptr) {
            throw_invalid("no connection to rank ", peer, ": set_peer first");
        }
    }
    inbox_->discard_below(BatchKey::first_of(epoch));
    greet(deadline);
    // A rank that was started again may be known as lost until it connects: to have lost it before is no news.
    for (bool met = sources_.empty(); !met;) {
        waiting([&] { inbox_->wait_connected({0, sources_}, deadline); });
        try {
            waiting([&] { inbox_->wait(step(0), {0, sources_}, deadline); });
            met = true;
        } catch (const Error& error) {
            if (error.code != Code::peer_lost || deadline.passed()) throw;
        }
    }
    inbox_->release(step(0));
    ++number_;
    usable_ = true;
}

void RankGroup::abort(uint32_t epoch) {
    uint32_t known = aborted_.load();
    while (known < epoch && !aborted_.compare_exchange_weak(known, epoch)) {
    }
}

void RankGroup::check_usable() const {
    if (usable_) return;
    throw_invalid("rank ", rank_, ": a collective of its group failed, or no epoch has begun: reset the group first");
}

template <class Work>
void RankGroup::collective(Work&& work) {
    check_usable();
    usable_ = false;
    work();
    ++number_;
    usable_ = true;
}

Step RankGroup::step_of(uint32_t number, uint64_t chunk) const {
    if (chunk >> chunk_bits != 0) {
        throw_invalid(chunk * chunk_bytes_, " bytes for one rank: a collective carries ",
                      (uint64_t{1} << (chunk_bits - 1)) * chunk_bytes_);
    }
    return BatchKey::first_of(epoch_) | uint64_t{number} << chunk_bits | chunk;
}

// --- messages ---

template <class Byte>
std::span<Byte> RankGroup::chunk_of(std::span<Byte> whole, uint64_t chunk) const {
    const uint64_t begin = std::min<uint64_t>(chunk * chunk_bytes_, whole.size());
    return whole.subspan(begin, std::min(chunk_bytes_, whole.size() - begin));
}

std::byte* RankGroup::slot_of(uint32_t peer, Deadline deadline) {
    return waiting([&] { return peers_[peer]->slot(deadline); });
}

void RankGroup::commit(uint32_t peer, Step step, uint64_t length, uint32_t more) {
    MessageLabel label;
    label.step = step;
    label.user[more_word] = more;
    peers_[peer]->commit(label, length);
    bytes_sent_ += length;
}

void RankGroup::send(uint32_t peer, uint64_t number, Bytes part, Deadline deadline, uint32_t more) {
    std::byte* slot = slot_of(peer, deadline);
    if (!part.empty()) std::memcpy(slot, part.data(), part.size());
    commit(peer, step(number), part.size(), more);
}

void RankGroup::receive(uint64_t number, Deadline deadline) {
    sources_.clear();
    for (uint32_t peer = 0; peer < size(); ++peer) {
        arrived_[peer] = nullptr;
        if (expected_[peer] > 0) sources_.push_back(static_cast<SourceId>(peer));
    }
    if (sources_.empty()) return;
    waiting([&] { inbox_->wait(step(number), {0, sources_}, deadline); });
    inbox_->for_each(step(number), [&](const MessageHeader& header, SourceId source, const std::byte* payload) {
        if (header.length != expected_[source]) {
            throw_invalid(inbox_->name_of(source), " sent ", header.length, " bytes where rank ", rank_, " expects ",
                          expected_[source], ": all ranks must make the same calls with sizes that fit");
        }
        arrived_[source] = payload;
    });
}

// --- collectives ---

// An empty message to every peer; `sources_` are they.
void RankGroup::greet(Deadline deadline) {
    sources_.clear();
    for (uint32_t peer = 0; peer < size(); ++peer) {
        if (peer == rank_) continue;
        send(peer, 0, {}, deadline);
        sources_.push_back(static_cast<SourceId>(peer));
    }
}

void RankGroup::barrier(Deadline deadline) {
    collective([&] {
        greet(deadline);
        if (sources_.empty()) return;
        waiting([&] { inbox_->wait(step(0), {0, sources_}, deadline); });
        inbox_->release(step(0));
    });
}

void RankGroup::exchange(Deadline deadline) {
    uint64_t chunks = 0;
    for (uint32_t peer = 0; peer < size(); ++peer) {
        if (peer == rank_) continue;
        chunks = std::max({chunks, num_chunks(parts_[peer].size()), num_chunks(rooms_[peer].size())});
    }
    for (uint64_t turn = 0; turn <= chunks; ++turn) {
        if (turn < chunks) send_chunk_of_each_part(turn, turn, deadline);
        if (turn > 0) receive_into_rooms(turn - 1, turn - 1, deadline);
    }
    const Bytes own = parts_[rank_];
    std::byte* to = rooms_[rank_].data();
    if (!own.empty() && own.data() != to) std::memcpy(to, own.data(), own.size());
}

void RankGroup::receive_into_rooms(uint64_t chunk, uint64_t number, Deadline deadline) {
    for (uint32_t peer = 0; peer < size(); ++peer) {
        expected_[peer] = peer == rank_ ? 0 : chunk_of(rooms_[peer], chunk).size();
    }
    receive(number, deadline);
    for (uint32_t peer = 0; peer < size(); ++peer) {
        if (expected_[peer] > 0) std::memcpy(chunk_of(rooms_[peer], chunk).data(), arrived_[peer], expected_[peer]);
    }
    inbox_->release(step(number));
}

void RankGroup::all_gather(const std::byte* in, std::byte* out, std::span<const uint64_t> bytes, Deadline deadline) {
    collective([&] {
        for (uint32_t peer = 0; peer < size(); ++peer) {
            parts_[peer] = {in, bytes[rank_]};
            rooms_[peer] = {out, bytes[peer]};
            out += bytes[peer];
        }
        exchange(deadline);
    });
}

void RankGroup::all_to_all(const std::byte* in, std::byte* out, std::span<const uint64_t> bytes_to,
                           std::span<const uint64_t> bytes_from, Deadline deadline) {
    collective([&] {
        for (uint32_t peer = 0; peer < size(); ++peer) {
            parts_[peer] = {in, bytes_to[peer]};
            rooms_[peer] = {out, bytes_from[peer]};
            in += bytes_to[peer];
            out += bytes_from[peer];
        }
        exchange(deadline);
    });
}

void RankGroup::send_chunk_of_each_part(uint64_t chunk, uint64_t number, Deadline deadline) {
    for (uint32_t next = 1; next < size(); ++next) {
        const uint32_t peer = (rank_ + next) % size();
        const Bytes part = chunk_of(parts_[peer], chunk);
        if (!part.empty()) send(peer, number, part, deadline);
    }
}

void RankGroup::receive_addends(Bytes own, uint64_t number, Deadline deadline) {
    for (uint32_t peer = 0; peer < size(); ++peer) expected_[peer] = peer == rank_ ? 0 : own.size();
    receive(number, deadline);
    arrived_[rank_] = own.data();
}

void RankGroup::reduce_scatter(const std::byte* in, std::byte* out, std::span<const uint64_t> counts, RowType type,
                               Deadline deadline) {
    collective([&] {
        uint64_t chunks = 0;
        for (uint32_t peer = 0; peer < size(); ++peer) {
            parts_[peer] = {in, counts[peer] * bytes_of(type)};
            in += parts_[peer].size();
            chunks = std::max(chunks, num_chunks(parts_[peer].size()));
        }
        sum_chunks(chunks, out, type, deadline);
    });
}

void RankGroup::all_reduce(std::byte* data, uint64_t count, RowType type, Deadline deadline) {
    collective([&] {
        const uint64_t bytes = count * bytes_of(type);
        if (size() == 1 || count == 0) return;
        if (bytes * (size() - 2) <= direct_bytes) {
            std::ranges::fill(parts_, Bytes{data, bytes});
            sum_chunks(num_chunks(bytes), data, type, deadline);
        } else {
            shared_sum(data, bytes, type, deadline);
        }
    });
}

void RankGroup::sum_chunks(uint64_t chunks, std::byte* out, RowType type, Deadline deadline) {
    for (uint64_t turn = 0; turn <= chunks; ++turn) {
        if (turn < chunks) send_chunk_of_each_part(turn, turn, deadline);
        if (turn == 0) continue;
        const Bytes own = chunk_of(parts_[rank_], turn - 1);
        if (own.empty()) continue;
        receive_addends(own, turn - 1, deadline);
        sum_rows(type, arrived_, own.size() / bytes_of(type), out + (turn - 1) * chunk_bytes_, {});
        inbox_->release(step(turn - 1));
    }
}

// Turn t sends chunk t of every segment to its rank, adds chunk t - 1 of this rank's segment straight into the slots of
// all, and takes in chunk t - 2 of the others' segments. Addends have even message numbers, sums odd ones.
void RankGroup::shared_sum(std::byte* data, uint64_t bytes, RowType type, Deadline deadline) {
    const uint64_t count = bytes / bytes_of(type);
    // Segments begin at multiples of a cache line.
    const uint64_t line = 64 / bytes_of(type);
    const uint64_t lines = (count + line - 1) / line;
    for (uint32_t peer = 0; peer < size(); ++peer) {
        const uint64_t begin = std::min(count, lines * peer / size() * line);
        const uint64_t end = std::min(count, lines * (peer + 1) / size() * line);
        parts_[peer] = rooms_[peer] = {data + begin * bytes_of(type), (end - begin) * bytes_of(type)};
    }
    uint64_t chunks = 0;
    for (const Bytes part : parts_) chunks = std::max(chunks, num_chunks(part.size()));
    for (uint64_t turn = 0; turn < chunks + 2; ++turn) {
        if (turn < chunks) send_chunk_of_each_part(turn, 2 * turn, deadline);
        if (turn >= 1 && turn - 1 < chunks) {
            const uint64_t chunk = turn - 1;
            if (const std::span<std::byte> own = chunk_of(rooms_[rank_], chunk); !own.empty()) {
                receive_addends(own, 2 * chunk, deadline);
                copies_.clear();
                for (uint32_t next = 1; next < size(); ++next) {
                    copies_.push_back(slot_of((rank_ + next) % size(), deadline));
                }
                sum_rows(type, arrived_, own.size() / bytes_of(type), own.data(), copies_);
                for (uint32_t next = 1; next < size(); ++next) {
                    commit((rank_ + next) % size(), step(2 * chunk + 1), own.size());
                }
                inbox_->release(step(2 * chunk));
            }
        }
        if (turn >= 2) receive_into_rooms(turn - 2, 2 * (turn - 2) + 1, deadline);
    }
}

// --- one pair at a time ---

uint32_t RankGroup::open_exchange() {
    check_usable();
    return number_++;
}

void RankGroup::post(uint32_t exchange, uint32_t peer, std::span<const Bytes> pieces, Deadline deadline) {
    check_usable();
    uint64_t length = 0;
    for (const Bytes piece : pieces) length += piece.size();
    if (length > chunk_bytes_) {
        throw_invalid(length, " bytes for ", peers_[peer]->peer(), ", whose slots hold ", chunk_bytes_,
                      ": make the group with larger slots");
    }
    usable_ = false;
    std::byte* slot = slot_of(peer, deadline);
    for (const Bytes piece : pieces) {
        if (!piece.empty()) std::memcpy(slot, piece.data(), piece.size());
        slot += piece.size();
    }
    commit(peer, step_of(exchange, 0), length);
    usable_ = true;
}

Bytes RankGroup::take(uint32_t exchange, uint32_t peer, Deadline deadline) {
    check_usable();
    usable_ = false;
    const SourceId source = static_cast<SourceId>(peer);
    const Step step = step_of(exchange, 0);
    waiting([&] { inbox_->wait(step, {0, {&source, 1}}, deadline); });
    Bytes part;
    inbox_->for_each(step, [&](const MessageHeader& header, SourceId from, const std::byte* payload) {
        if (from == source) part = {payload, header.length};
    });
    usable_ = true;
    return part;
}

void RankGroup::release(uint32_t exchange, uint32_t peer) {
    inbox_->release(step_of(exchange, 0), static_cast<SourceId>(peer));
}

// --- control messages ---

void RankGroup::broadcast(std::vector<std::byte>& payload, uint32_t root, Deadline deadline, int64_t rest_ns) {
    if (root >= size()) {
        throw_invalid("root ", root, " of a group of ", size());
    }
    if (root == rank_) {
        return collective([&] {
            const Bytes whole = payload;
            const uint64_t chunks = std::max<uint64_t>(1, num_chunks(whole.size()));
            for (uint64_t chunk = 0; chunk < chunks; ++chunk) {
                for (uint32_t peer = 0; peer < size(); ++peer) {
                    if (peer != rank_) send(peer, chunk, chunk_of(whole, chunk), deadline, chunk + 1 < chunks);
                }
            }
        });
    }
    bool idle = false;
    const auto take = [&] {
        const SourceId source = static_cast<SourceId>(root);
        payload.clear();
        for (uint64_t chunk = 0, more = 1; more != 0; ++chunk) {
            idle = chunk == 0;
            waiting([&] { inbox_->wait(step(chunk), {0, {&source, 1}}, deadline); });
            if (idle) deadline = Deadline::after_ns(rest_ns);
            idle = false;
            inbox_->for_each(step(chunk), [&](const MessageHeader& header, SourceId, const std::byte* bytes) {
                payload.insert(payload.end(), bytes, bytes + header.length);
                more = header.user[more_word];
            });
            inbox_->release(step(chunk));
        }
    };
    try {
        collective(take);
    } catch (const Error& error) {
        usable_ = usable_ || (idle && error.code == Code::timeout);
        throw;
    }
}

}  // namespace antiphon::m2n

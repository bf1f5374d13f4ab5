// Many messages: odd numbers of ends, every way to send, sequence numbers that begin again, payloads of the caller's.
#include <algorithm>
#include <cstring>
#include <latch>

#include "harness.h"

namespace antiphon::m2n::test {

namespace {

constexpr uint32_t num_senders = 3, num_receivers = 2, num_slots = 3;
constexpr uint64_t slot_bytes = 30'000;
constexpr Step num_steps = 400;

void send_step(Outbox& outbox, uint32_t source, uint32_t receiver, Step step) {
    const auto payload = content(key_of(source, receiver, step), slot_bytes);
    MessageLabel label{step, num_senders, {source, receiver}};
    if (step % 2 == 0) {
        outbox.send(label, payload.data(), payload.size(), soon());
        return;
    }
    std::byte* slot = outbox.slot(soon());
    if (!payload.empty()) std::memcpy(slot, payload.data(), payload.size());
    outbox.commit(label, payload.size());
}

void check_step(Inbox& inbox, uint32_t receiver, Step step) {
    uint32_t seen = 0;
    inbox.for_each(step, [&](const MessageHeader& header, SourceId source, const std::byte* payload) {
        CHECK(header.user[0] == source && header.user[1] == receiver && header.step == step);
        CHECK(has_content({payload, header.length}, key_of(source, receiver, step), slot_bytes));
        CHECK((seen & 1u << source) == 0);
        seen |= 1u << source;
    });
    CHECK(seen == (1u << num_senders) - 1);
}

void many_to_many(const Backend& backend) {
    std::vector<std::unique_ptr<Receiver>> receivers;
    for (uint32_t i = 0; i < num_receivers; ++i) {
        receivers.push_back(std::make_unique<Receiver>(backend, "receiver", num_senders, num_slots, slot_bytes));
    }
    std::latch received(num_receivers);
    Crew crew;
    for (uint32_t source = 0; source < num_senders; ++source) {
        crew.start([&, source] {
            const auto endpoint = make_endpoint(backend, "sender[" + std::to_string(source) + "]");
            std::vector<std::shared_ptr<Outbox>> outboxes;
            std::vector<Outbox*> pointers;
            for (const auto& receiver : receivers) {
                outboxes.push_back(endpoint->connect(receiver->ticket, static_cast<SourceId>(source), soon()));
                pointers.push_back(outboxes.back().get());
            }
            for (Step step = 0; step < num_steps; ++step) {
                for (uint32_t i = 0; i < num_receivers; ++i) send_step(*outboxes[i], source, i, step);
            }
            Outbox::wait_all_credits(pointers, soon());
            received.wait();  // an outbox that goes away is a lost source
        });
    }
    for (uint32_t i = 0; i < num_receivers; ++i) {
        crew.start([&, i] {
            Inbox& inbox = *receivers[i]->inbox;
            std::vector<Step> held;
            for (Step done = 0; done < num_steps; ++done) {
                Step step = done;
                if (i == 0) {
                    inbox.wait(step, {num_senders, {}}, soon());
                } else {
                    step = inbox.wait_complete(soon()).value();
                }
                check_step(inbox, i, step);
                held.push_back(step);
                if (held.size() < num_slots) continue;
                inbox.release(held[key_of(i, step, 0) % held.size()]);
                held.erase(held.begin() + static_cast<ptrdiff_t>(key_of(i, step, 0) % held.size()));
            }
            for (const Step step : held) inbox.release(step);
            received.count_down();
        });
    }
}

void sequences_begin_again(const Backend& backend) {
    Receiver receiver(backend, "receiver", 1, 1, 8);
    Crew crew;
    constexpr Step uses = sequence_modulus + 10;
    crew.start([&] {
        const auto endpoint = make_endpoint(backend, "sender");
        const auto outbox = endpoint->connect(receiver.ticket, 0, soon());
        for (Step step = 0; step < uses; ++step) {
            outbox->send({step, 1, {}}, reinterpret_cast<const std::byte*>(&step), sizeof(step), soon());
        }
        outbox->wait_credits(1, soon());
    });
    for (Step step = 0; step < uses; ++step) {
        receiver.inbox->wait(step, {1, {}}, soon());
        receiver.inbox->for_each(step, [&](const MessageHeader&, SourceId, const std::byte* payload) {
            CHECK(std::memcmp(payload, &step, sizeof(step)) == 0);
        });
        receiver.inbox->release(step);
    }
    CHECK(receiver.inbox->counters()[0].rejected == 0);
}

// The caller's memory is read after `send` has returned, and not after `wait_reusable` has.
void payloads_stay_where_they_are(const Backend& backend) {
    constexpr uint64_t large = 6 << 20;
    Receiver receiver(backend, "receiver", 1, 2, large);
    Crew crew;
    crew.start([&] {
        const auto endpoint = make_endpoint(backend, "sender");
        const auto outbox = endpoint->connect(receiver.ticket, 0, soon());
        for (Step step = 0; step < 4; ++step) {
            auto payload = std::make_unique<std::vector<std::byte>>(large, static_cast<std::byte>(step));
            const SlotId slot = outbox->send({step, 1, {}}, payload->data(), large, soon());
            if (step % 2 == 0) {
                outbox->wait_reusable(soon());
            } else {
                outbox->keep(slot, std::shared_ptr<std::vector<std::byte>>(std::move(payload)));
            }
        }
        outbox->wait_credits(2, soon());
    });
    for (Step step = 0; step < 4; ++step) {
        receiver.inbox->wait(step, {1, {}}, soon());
        for (const Message& message : receiver.inbox->messages(step)) {
            const auto is_right = [&](std::byte byte) { return byte == static_cast<std::byte>(step); };
            CHECK(std::all_of(message.payload, message.payload + message.length, is_right));
        }
        receiver.inbox->release(step);
    }
}

}  // namespace

std::vector<Case> flood_cases() {
    return {{"many_to_many", many_to_many},
            {"sequences_begin_again", sequences_begin_again},
            {"payloads_stay_where_they_are", payloads_stay_where_they_are}};
}

}  // namespace antiphon::m2n::test

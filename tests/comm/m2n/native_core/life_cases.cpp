// Peers that come, go, are replaced, interrupted and closed, while others are at work.
#include <atomic>
#include <cstring>
#include <latch>
#include <set>

#include "harness.h"

namespace antiphon::m2n::test {

namespace {

constexpr uint64_t slot_bytes = 5'000;
constexpr uint32_t num_slots = 2;

struct Life {
    uint32_t source;
    uint32_t number;  // of this life
};

Step step_of(const Life& life, uint32_t message) { return Step{message} << 32 | life.number << 4 | life.source; }

// False: the receiver has gone over to another incarnation.
bool send_one(Outbox& outbox, const Life& life, uint32_t message) {
    const Step step = step_of(life, message);
    const auto payload = content(step * 7919, slot_bytes);
    try {
        persistently([&] {
            outbox.send({step, 1, {life.source, life.number, message}}, payload.data(), payload.size(), soon());
        });
        if (key_of(step, 1, 2) % 2 == 0) persistently([&] { outbox.wait_reusable(soon()); });
        return true;
    } catch (const Error& error) {
        CHECK(error.code == Code::peer_lost);
        return false;
    }
}

// Lives one after the other: each ends with a dropped outbox, a closed endpoint, or a successor while it goes on.
void live(const Backend& backend, const Ticket& ticket, uint32_t source, uint32_t num_lives) {
    std::mt19937 random(source);
    auto endpoint = make_endpoint(backend, "sender[" + std::to_string(source) + "]");
    std::vector<std::pair<Life, std::shared_ptr<Outbox>>> former;
    for (uint32_t number = 0; number < num_lives; ++number) {
        const Life life{source, number};
        auto outbox = endpoint->connect(ticket, static_cast<SourceId>(source), soon());
        for (const auto& [dead, old] : former) {
            while (send_one(*old, dead, 1000)) sleep_for_ms(1);  // nobody may ever see these
        }
        former.clear();
        const uint32_t num_messages = random() % 12;
        for (uint32_t message = 0; message < num_messages; ++message) CHECK(send_one(*outbox, life, message));
        switch (random() % 3) {
            case 0: break;
            case 1:
                endpoint->close();
                CHECK_ERROR(Code::peer_lost, "this endpoint was closed", outbox->slot(within_ms(0)));
                endpoint = make_endpoint(backend, "sender[" + std::to_string(source) + "]");
                break;
            default: former.emplace_back(life, std::move(outbox)); break;
        }
    }
}

void receive_all(Inbox& inbox, const std::atomic<uint32_t>& living, uint64_t& num_messages) {
    std::vector<uint32_t> newest(inbox.spec().sources, 0);
    std::set<Step> seen;
    while (living.load() > 0) {
        try {
            const auto step = inbox.wait_complete(within_ms(20));
            if (!step) continue;
            inbox.for_each(*step, [&](const MessageHeader& header, SourceId source, const std::byte* payload) {
                const Life life{header.user[0], header.user[1]};
                CHECK(source == life.source && header.step == step_of(life, header.user[2]));
                CHECK(header.user[2] < 1000 && life.number >= newest[source] && seen.insert(*step).second);
                newest[source] = life.number;
                CHECK(has_content({payload, header.length}, *step * 7919, slot_bytes));
                ++num_messages;
            });
            inbox.release(*step);
        } catch (const Error& error) {
            CHECK(error.code == Code::peer_lost || error.code == Code::interrupted);
        }
    }
}

void comings_and_goings(const Backend& backend) {
    constexpr uint32_t num_sources = 3, num_receivers = 2, num_lives = 40;
    std::atomic<uint32_t> living{num_sources * num_receivers};
    uint64_t num_messages[num_receivers] = {};
    std::vector<std::unique_ptr<Receiver>> receivers;
    for (uint32_t i = 0; i < num_receivers; ++i) {
        receivers.push_back(std::make_unique<Receiver>(backend, "receiver", num_sources, num_slots, slot_bytes));
    }
    {
        Crew crew;
        for (uint32_t i = 0; i < num_receivers; ++i) {
            crew.start([&, i] { receive_all(*receivers[i]->inbox, living, num_messages[i]); });
            for (uint32_t source = 0; source < num_sources; ++source) {
                crew.start([&, i, source] {
                    live(backend, receivers[i]->ticket, source, num_lives);
                    living.fetch_sub(1);
                });
            }
        }
        crew.start([&] {  // somebody always disturbs
            while (living.load() > 0) {
                for (const auto& receiver : receivers) receiver->endpoint->interrupt();
                sleep_for_ms(2);
            }
        });
    }
    for (const uint64_t each : num_messages) CHECK(each > 0);
}

// Hellos, goodbyes and losses meet the end of the receiver.
void closing_among_hellos(const Backend& backend) {
    for (int round = 0; round < 24; ++round) {
        auto receiver = std::make_unique<Receiver>(backend, "receiver", 3, num_slots, slot_bytes);
        const Ticket ticket = receiver->ticket;
        Crew crew;
        for (SourceId source = 0; source < 3; ++source) {
            crew.start([&backend, ticket, source] {
                const auto endpoint = make_endpoint(backend, "sender");
                std::shared_ptr<Outbox> former;
                try {
                    for (;;) {
                        auto outbox = endpoint->connect(ticket, source, within_ms(200));
                        outbox->send({1, 1, {}}, nullptr, 0, within_ms(200));
                        former = std::move(outbox);  // the one before hangs up here
                    }
                } catch (const Error& error) {
                    CHECK(error.code != Code::invalid && error.code != Code::interrupted);
                }
            });
        }
        sleep_for_ms(1 + round % 5);
        if (round % 2 == 0) receiver->endpoint->close();
        if (round % 4 == 0) {
            try {
                receiver->inbox->wait(9, {3, {}}, soon());
                CHECK(false);
            } catch (const Error& error) {  // the one if somebody was there, else the other
                CHECK(error.code == Code::peer_lost || error.code == Code::invalid);
            }
        }
        receiver.reset();
    }
}

void ping_pong_with_interrupts(const Backend& backend) {
    constexpr Step num_turns = 2000;
    Receiver ends[2] = {{backend, "ping", 1, 1, 64}, {backend, "pong", 1, 1, 64}};
    std::atomic<uint32_t> playing{2};
    std::latch over(2);
    Crew crew;
    for (uint32_t me = 0; me < 2; ++me) {
        crew.start([&, me] {
            const auto outbox = ends[me].endpoint->connect(ends[1 - me].ticket, 0, soon());
            for (Step turn = 0; turn < num_turns; ++turn) {
                if (turn % 2 == me) {
                    persistently([&] { outbox->send({turn, 1, {}}, nullptr, 0, soon()); });
                } else {
                    persistently([&] { ends[me].inbox->wait(turn, {1, {}}, soon()); });
                    CHECK(ends[me].inbox->messages(turn).size() == 1);
                    ends[me].inbox->release(turn);
                }
            }
            persistently([&] { outbox->wait_credits(1, soon()); });
            CHECK(ends[me].inbox->counters()[0].messages == num_turns / 2);
            playing.fetch_sub(1);
            over.arrive_and_wait();
        });
    }
    crew.start([&] {
        while (playing.load() > 0) {
            for (Receiver& end : ends) end.endpoint->interrupt();
            std::this_thread::yield();
        }
    });
}

// Messages and outboxes are used after everything they came from is gone.
void what_outlives_its_endpoint(const Backend& backend) {
    std::vector<Message> messages;
    std::shared_ptr<Outbox> outbox;
    std::shared_ptr<Inbox> inbox;
    {
        Receiver receiver(backend, "receiver", 1, num_slots, slot_bytes);
        inbox = receiver.inbox;
        const auto endpoint = make_endpoint(backend, "sender");
        outbox = endpoint->connect(receiver.ticket, 0, soon());
        const auto payload = content(5, slot_bytes);
        outbox->send({1, 1, {}}, payload.data(), payload.size(), soon());
        inbox->wait(1, {1, {}}, soon());
        messages = inbox->messages(1);
        std::memset(outbox->slot(within_ms(0)), 1, slot_bytes);
    }
    CHECK_ERROR(Code::peer_lost, "", outbox->commit({2, 1, {}}, slot_bytes));
    CHECK_ERROR(Code::peer_lost, "", outbox->wait_credits(num_slots, soon()));
    CHECK_ERROR(Code::peer_lost, "", inbox->wait(3, {1, {}}, soon()));
    inbox->release(1);
    inbox.reset();
    CHECK(messages.size() == 1);
    CHECK(has_content({messages[0].payload, messages[0].length}, 5, slot_bytes));
}

}  // namespace

std::vector<Case> life_cases() {
    return {{"comings_and_goings", comings_and_goings},
            {"closing_among_hellos", closing_among_hellos},
            {"ping_pong_with_interrupts", ping_pong_with_interrupts},
            {"what_outlives_its_endpoint", what_outlives_its_endpoint}};
}

}  // namespace antiphon::m2n::test

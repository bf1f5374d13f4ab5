// Peers that know the secret and lie: in the words and headers of shared memory, in descriptors, in credits. Whatever they
// write, only they are dropped.
#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <atomic>
#include <cstring>
#include <optional>

#include "harness.h"
#include "m2n/pair_memory.h"

namespace antiphon::m2n::test {

namespace {

constexpr uint32_t num_slots = 3;
constexpr uint64_t slot_bytes = 100;

FileDescriptor duplicate(const FileDescriptor& descriptor) {
    FileDescriptor copy(::dup(descriptor.get()));
    CHECK(copy);
    return copy;
}

// One who speaks the control protocol and has the pair's memory to himself.
class Rogue : public ControlHandler {
  public:
    Rogue() : transport_(make_transport("shm", {})), control_(options(), *this) {}

    // As a sender.
    void connect(const Ticket& ticket, SourceId source) {
        Hello hello{ticket.inbox, source, "rogue", transport_->introduce()};
        auto [id, welcome] = control_.connect(ticket.address, ticket.name, true, hello, soon());
        connection_ = id;
        spec_ = {source, welcome.slots, welcome.slot_bytes, welcome.incarnation};
        file_ = MappedFile::adopt(duplicate(welcome.blob.descriptors[0]), PairMemory::bytes(spec_));
        memory_ = PairMemory(file_->data(), spec_);
        link_ = transport_->open_link(spec_, welcome.blob, "", 0, soon());
    }
    // As a receiver, with memory that the test decides.
    Ticket ticket() const {
        Ticket ticket;
        ticket.transport = "shm";
        ticket.name = "rogue";
        ticket.address = control_.address();
        ticket.host_id = host_identity();
        ticket.sources = 1;
        ticket.slots = num_slots;
        ticket.slot_bytes = slot_bytes;
        return ticket;
    }
    Welcome on_hello(ConnectionId connection, const Hello& hello) override {
        connection_ = connection;
        spec_ = {hello.source, num_slots, slot_bytes, 77};
        Welcome welcome{spec_.incarnation, spec_.slots, spec_.slot_bytes, "rogue", {}};
        landing_ = transport_->open_landing(spec_, hello.introduction, welcome.blob);
        file_ = MappedFile::adopt(duplicate(welcome.blob.descriptors[0]), PairMemory::bytes(spec_));
        memory_ = PairMemory(file_->data(), spec_);
        if (offered) welcome.blob.descriptors[0] = duplicate(offered);
        return welcome;
    }
    bool on_attach(FileDescriptor&, std::span<const std::byte>) override { return false; }
    void on_gone(ConnectionId, const std::string&) override { gone.store(true); }

    PairMemory& memory() { return memory_; }
    const PairSpec& spec() const { return spec_; }
    Link& link() { return *link_; }
    Landing& landing() { return *landing_; }
    void hang_up() { control_.hang_up(connection_); }

    MessageHeader header(Immediate immediate, uint64_t length) const {
        MessageHeader header;
        header.immediate = immediate.pack();
        header.incarnation = spec_.incarnation;
        header.step = 1;
        header.length = length;
        return header;
    }

    FileDescriptor offered;  // instead of the pair's memory
    std::atomic<bool> gone{false};

  private:
    static ControlOptions options() {
        ControlOptions options;
        options.name = "rogue";
        options.secret = "core";
        return options;
    }

    std::shared_ptr<Transport> transport_;
    ConnectionId connection_ = 0;
    PairSpec spec_;
    std::optional<MappedFile> file_;
    PairMemory memory_;
    std::shared_ptr<Link> link_;
    std::shared_ptr<Landing> landing_;
    Control control_;
};

// An honest sender beside the rogue.
struct Neighbour {
    explicit Neighbour(const Backend& backend)
        : receiver(backend, "receiver", 2, num_slots, slot_bytes),
          endpoint(make_endpoint(backend, "honest")),
          outbox(endpoint->connect(receiver.ticket, 1, soon())) {}

    void check_is_served() {
        const auto payload = content(++step, slot_bytes);
        outbox->send({step, 1, {}}, payload.data(), payload.size(), soon());
        const SourceId honest = 1;
        receiver.inbox->wait(step, {0, {&honest, 1}}, soon());
        for (const Message& message : receiver.inbox->messages(step)) {
            if (message.source == 1) CHECK(has_content({message.payload, message.length}, step, slot_bytes));
        }
        receiver.inbox->release(step);
    }

    Receiver receiver;
    std::unique_ptr<Endpoint> endpoint;
    std::shared_ptr<Outbox> outbox;
    Step step = 100;
};

void lies_in_headers(const Backend& backend) {
    Neighbour neighbour(backend);
    Inbox& inbox = *neighbour.receiver.inbox;
    struct Lie {
        const char* words;
        void (*tell)(Immediate& word, MessageHeader& header);
    };
    const Lie lies[] = {
        {"not a message header", [](Immediate&, MessageHeader& header) { header.magic ^= 1; }},
        {"another incarnation's", [](Immediate&, MessageHeader& header) { --header.incarnation; }},
        {"is not the one that came with it", [](Immediate&, MessageHeader& header) { ++header.immediate; }},
        {"more than a slot holds", [](Immediate&, MessageHeader& header) { header.length = slot_bytes + 1; }},
        {"more than a slot holds", [](Immediate&, MessageHeader& header) { header.length = ~uint64_t{0}; }},
        {"is not the one that came with it",
         [](Immediate& word, MessageHeader& header) {
             word.sequence = 2;  // was never used before
             header.immediate = word.pack();
         }},
        {"is not the one that came with it",
         [](Immediate& word, MessageHeader& header) {
             word.source = 1;  // the neighbour's
             header.immediate = word.pack();
         }},
        {"is not the one that came with it",
         [](Immediate& word, MessageHeader& header) {
             word.slot = num_slots;  // there is none
             header.immediate = word.pack();
         }},
    };
    uint64_t rejected = 0;
    for (const Lie& lie : lies) {
        Rogue rogue;
        rogue.connect(neighbour.receiver.ticket, 0);
        Immediate word{0, 0, 1};
        MessageHeader header = rogue.header(word, 10);
        lie.tell(word, header);
        std::memcpy(rogue.memory().slot(0), &header, sizeof(header));
        rogue.memory().arrived(0).store(word.pack());
        const SourceId source = 0;
        CHECK_ERROR(Code::peer_lost, lie.words, inbox.wait(1, {0, {&source, 1}}, soon()));
        CHECK_ERROR(Code::peer_lost, lie.words, inbox.wait_complete(soon()));
        CHECK(inbox.counters()[0].rejected == ++rejected);
        for (int i = 0; i < 60'000 && !rogue.gone.load(); ++i) sleep_for_ms(1);
        CHECK(rogue.gone.load());  // it was hung up on
        neighbour.check_is_served();
    }
}

void random_words_and_headers(const Backend& backend) {
    Neighbour neighbour(backend);
    Inbox& inbox = *neighbour.receiver.inbox;
    std::mt19937_64 random(3);
    for (int round = 0; round < 300; ++round) {
        Rogue rogue;
        rogue.connect(neighbour.receiver.ticket, 0);
        for (int i = 0; i < 8; ++i) {
            const auto slot = static_cast<SlotId>(random() % num_slots);
            Immediate word{0, slot, static_cast<uint16_t>(random() % 3)};
            MessageHeader header = rogue.header(word, random() % (slot_bytes + 2));
            header.step = random() % 3;
            header.participants = static_cast<uint32_t>(random() % 3);
            auto* bytes = reinterpret_cast<unsigned char*>(&header);
            if (random() % 4 == 0) bytes[random() % 40] ^= static_cast<unsigned char>(random());
            std::memcpy(rogue.memory().slot(slot), &header, sizeof(header));
            uint32_t published = word.pack();
            if (random() % 4 == 0) published = static_cast<uint32_t>(random());
            rogue.memory().arrived(slot).store(published);
            rogue.memory().released(slot).store(static_cast<uint32_t>(random()));
            try {
                if (const auto step = inbox.wait_complete(within_ms(0))) inbox.release(*step);
            } catch (const Error& error) {
                CHECK(error.code == Code::peer_lost);
            }
            for (const Message& message : inbox.messages(header.step)) CHECK(message.length <= slot_bytes);
            if (random() % 2 == 0) inbox.release(random() % 3);
        }
        neighbour.check_is_served();
    }
    inbox.discard_below(100);
    neighbour.check_is_served();
}

void forged_credits(const Backend& backend) {
    Rogue rogue;
    const auto endpoint = make_endpoint(backend, "sender");
    const auto outbox = endpoint->connect(rogue.ticket(), 0, soon());
    for (Step step = 0; step < num_slots; ++step) outbox->send({step, 1, {}}, nullptr, 0, soon());
    CHECK(outbox->credits() == 0);
    std::mt19937_64 random(4);
    for (int i = 0; i < 20'000; ++i) {
        auto word = static_cast<uint32_t>(random());
        const auto slot = static_cast<SlotId>(random() % num_slots);
        if (i % 2 == 0) word = Immediate{0, slot, static_cast<uint16_t>(word % 2 * 2)}.pack();  // nearly right
        if (Immediate::unpack(word).sequence == 1) continue;
        rogue.memory().released(slot).store(word);
        CHECK(outbox->credits() == 0);
    }
    CHECK_ERROR(Code::no_credit, "no free slot of 3", outbox->send({9, 1, {}}, nullptr, 0, within_ms(0)));
    for (SlotId slot = 0; slot < num_slots; ++slot) rogue.memory().released(slot).store(Immediate{0, slot, 1}.pack());
    CHECK(outbox->credits() == num_slots);
    rogue.memory().released(0).store(Immediate{0, 1, 1}.pack());  // twice, and by way of another slot's word
    CHECK(outbox->credits() == num_slots);
    rogue.hang_up();
    CHECK_ERROR(Code::peer_lost, "lost rogue", for (;;) outbox->send({9, 1, {}}, nullptr, 0, soon()));
}

void memory_that_is_none(const Backend& backend) {
    const PairSpec spec{0, num_slots, slot_bytes, 1};
    const auto expect = [&](const char* words, FileDescriptor descriptor) {
        Rogue rogue;
        rogue.offered = std::move(descriptor);
        const auto endpoint = make_endpoint(backend, "sender");
        CHECK_ERROR(Code::refused, words, endpoint->connect(rogue.ticket(), 0, soon()));
        for (int i = 0; i < 60'000 && !rogue.gone.load(); ++i) sleep_for_ms(1);
        CHECK(rogue.gone.load());
    };
    const auto bytes = static_cast<off_t>(PairMemory::bytes(spec));
    FileDescriptor unsealed(memfd_create("unsealed", MFD_CLOEXEC | MFD_ALLOW_SEALING));
    CHECK(ftruncate(unsealed.get(), bytes) == 0);
    expect("sealed", std::move(unsealed));
    expect("bytes, not", duplicate(MappedFile::create(PairMemory::bytes(spec) - 1).descriptor()));
    expect("bytes, not", duplicate(MappedFile::create(PairMemory::bytes(spec) + 4096).descriptor()));
    expect("", FileDescriptor(open("/dev/null", O_RDWR | O_CLOEXEC)));
}

}  // namespace

std::vector<Case> rogue_cases() {
    return {{"lies_in_headers", lies_in_headers},
            {"random_words_and_headers", random_words_and_headers},
            {"forged_credits", forged_credits},
            {"memory_that_is_none", memory_that_is_none}};
}

}  // namespace antiphon::m2n::test

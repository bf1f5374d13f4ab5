// The same between processes: the program runs itself again as the peer, and they talk over its standard streams.
#include <sys/wait.h>
#include <unistd.h>

#include <csignal>
#include <filesystem>
#include <string>

#include "harness.h"
#include "tests.h"

namespace antiphon::m2n::test {

namespace {

void write_blob(int descriptor, const std::vector<std::byte>& bytes) {
    const uint32_t size = static_cast<uint32_t>(bytes.size());
    CHECK(::write(descriptor, &size, sizeof(size)) == sizeof(size));
    CHECK(::write(descriptor, bytes.data(), bytes.size()) == static_cast<ssize_t>(bytes.size()));
}

Blob read_blob(int descriptor) {
    uint32_t size = 0;
    CHECK(::read(descriptor, &size, sizeof(size)) == sizeof(size));
    Blob blob;
    blob.bytes.resize(size);
    size_t taken = 0;
    while (taken < size) {
        const ssize_t count = ::read(descriptor, blob.bytes.data() + taken, size - taken);
        CHECK(count > 0);
        taken += static_cast<size_t>(count);
    }
    return blob;
}

const PairSpec process_spec{3, 4, 256 * 1024, 11};
constexpr uint16_t process_rounds = 50;

// The other process: sends on standard input's and output's word. `for_ever`: until it is killed.
int run_sender(bool for_ever) {
    const auto sender = make();
    write_blob(STDOUT_FILENO, sender->introduce().bytes);
    Blob welcome = read_blob(STDIN_FILENO);
    const auto link = sender->open_link(process_spec, welcome, "", 0, soon());
    std::vector<SlotId> free_slots = {0, 1, 2, 3};
    std::vector<uint16_t> sequence(process_spec.slots, 0);
    Payload payloads[process_spec.slots];
    uint64_t number = 0;
    const uint64_t total = uint64_t{process_rounds} * process_spec.slots;
    const Deadline deadline = soon();
    while (for_ever || number < total || free_slots.size() < process_spec.slots) {
        while (!free_slots.empty() && (for_ever || number < total)) {
            const SlotId slot = free_slots.back();
            free_slots.pop_back();
            sequence[slot] = next_sequence(sequence[slot]);
            post(*link, process_spec, slot, sequence[slot], number, 1 + number * 1311 % process_spec.slot_bytes,
                 number % 2 == 0 ? &payloads[slot] : nullptr);
            ++number;
        }
        const uint32_t prepared = sender->prepare(Event::credit);
        sender->progress();
        const std::vector<Immediate> credits = poll(*link);
        for (const Immediate credit : credits) {
            until({sender.get()}, [&] { return link->source_reusable(credit.slot); });
            free_slots.push_back(credit.slot);
        }
        if (deadline.passed()) return 2;
        if (credits.empty()) sender->block(Event::credit, prepared, 1, deadline, 0);
    }
    return 0;
}

// Takes what comes and returns the credits until it is killed.
int run_receiver() {
    const auto receiver = make();
    Blob welcome;
    const auto landing = receiver->open_landing(process_spec, read_blob(STDIN_FILENO), welcome);
    write_blob(STDOUT_FILENO, welcome.bytes);
    const Deadline deadline = soon();
    while (!deadline.passed()) {
        const uint32_t prepared = receiver->prepare(Event::arrival);
        receiver->progress();
        const std::vector<Immediate> arrived = poll(*landing);
        for (const Immediate immediate : arrived) landing->release(immediate);
        if (arrived.empty()) receiver->block(Event::arrival, prepared, 1, deadline, 0);
    }
    return 2;
}

struct Child {
    pid_t pid = -1;
    int to = -1;
    int from = -1;
};

Child start_child(const char* mode) {
    int down[2];
    int up[2];
    CHECK(::pipe(down) == 0 && ::pipe(up) == 0);
    const pid_t pid = ::fork();
    CHECK(pid >= 0);
    if (pid == 0) {  // only what may follow a fork with threads: no libfabric before exec
        ::dup2(down[0], STDIN_FILENO);
        ::dup2(up[1], STDOUT_FILENO);
        for (const int descriptor : {down[0], down[1], up[0], up[1]}) ::close(descriptor);
        ::execl("/proc/self/exe", "child", provider.c_str(), mode, static_cast<char*>(nullptr));
        ::_exit(127);
    }
    ::close(down[0]);
    ::close(up[1]);
    return {pid, down[1], up[0]};
}

std::shared_ptr<Landing> welcome_child(Transport& receiver, const Child& child) {
    Blob welcome;
    auto landing = receiver.open_landing(process_spec, read_blob(child.from), welcome);
    write_blob(child.to, welcome.bytes);
    return landing;
}

// Takes `count` messages as they come and returns their credits.
void receive(Transport& receiver, Landing& landing, uint64_t count) {
    const Deadline deadline = soon();
    while (count > 0) {
        const uint32_t prepared = receiver.prepare(Event::arrival);
        receiver.progress();
        const std::vector<Immediate> arrived = poll(landing);
        for (const Immediate immediate : arrived) {
            MessageHeader header;
            std::memcpy(&header, landing.slot(immediate.slot), header_bytes);
            verify(landing, process_spec, immediate, header.step, 1 + header.step * 1311 % process_spec.slot_bytes);
            landing.release(immediate);
            if (count > 0) --count;
        }
        CHECK(!deadline.passed());
        if (arrived.empty()) receiver.block(Event::arrival, prepared, 1, deadline, 0);
    }
}

// Ours and the child's messages cross; each side verifies and releases what it gets.
void exchange(Transport& transport, Landing& landing, Link& link) {
    std::vector<uint16_t> sequence(process_spec.slots, 0);
    std::vector<SlotId> free_slots = {0, 1, 2, 3};
    const uint64_t total = uint64_t{process_rounds} * process_spec.slots;
    uint64_t posted = 0;
    uint64_t arrived = 0;
    uint64_t credits = 0;
    const Deadline deadline = soon();
    while (arrived < total || credits < total) {
        while (!free_slots.empty() && posted < total) {
            const SlotId slot = free_slots.back();
            free_slots.pop_back();
            sequence[slot] = next_sequence(sequence[slot]);
            post(link, process_spec, slot, sequence[slot], posted, 100'000 + (posted + 1) % 7);
            ++posted;
        }
        const uint32_t prepared = transport.prepare(Event::arrival);
        transport.progress();
        const std::vector<Immediate> news = poll(landing);
        for (const Immediate immediate : news) {
            MessageHeader header;
            std::memcpy(&header, landing.slot(immediate.slot), header_bytes);
            verify(landing, process_spec, immediate, header.step, 100'000 + (header.step + 1) % 7);
            landing.release(immediate);
            ++arrived;
        }
        const std::vector<Immediate> back = poll(link);
        for (const Immediate credit : back) free_slots.push_back(credit.slot);
        credits += back.size();
        CHECK(!deadline.passed());
        if (!news.empty() || !back.empty()) continue;
        transport.block(Event::arrival, prepared, 1, Deadline::after_ns(1'000'000), 0);
    }
    // Credits of ours that were not written yet move only while we look.
    const Deadline parting = Deadline::after_ns(200'000'000);
    while (!parting.passed()) transport.progress();
}

int run_exchange() {
    const auto transport = make();
    write_blob(STDOUT_FILENO, transport->introduce().bytes);
    Blob welcome = read_blob(STDIN_FILENO);
    const auto link = transport->open_link(process_spec, welcome, "", 0, soon());
    const auto landing = transport->open_landing(process_spec, read_blob(STDIN_FILENO), welcome);
    write_blob(STDOUT_FILENO, welcome.bytes);
    exchange(*transport, *landing, *link);
    return 0;
}

// libfabric's shm provider leaves the files of a killed process behind, named after it.
void kill_child(const Child& child) {
    ::kill(child.pid, SIGKILL);
    int status = 0;
    CHECK(::waitpid(child.pid, &status, 0) == child.pid);
    const std::string its = std::to_string(child.pid) + ":";
    const std::filesystem::path folder = "/dev/shm";
    if (!std::filesystem::is_directory(folder)) return;
    for (const auto& entry : std::filesystem::directory_iterator(folder)) {
        if (entry.path().filename().string().starts_with(its)) std::filesystem::remove(entry.path());
    }
}

}  // namespace

int run_as_child(const std::string& mode) {
    if (mode == "--exchange") return run_exchange();
    if (mode == "--receive") return run_receiver();
    return run_sender(mode == "--send-for-ever");
}

void two_processes() {
    const auto receiver = make();
    const Child child = start_child("--send");
    const auto landing = welcome_child(*receiver, child);
    receive(*receiver, *landing, uint64_t{process_rounds} * process_spec.slots);
    // Credits that were not written yet move only while we look.
    int status = -1;
    until({receiver.get()}, [&] { return ::waitpid(child.pid, &status, WNOHANG) == child.pid; });
    CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 0);
    ::close(child.to);
    ::close(child.from);
}

void two_processes_both_directions() {
    const auto transport = make();
    const Child child = start_child("--exchange");
    const auto landing = welcome_child(*transport, child);
    write_blob(child.to, transport->introduce().bytes);
    Blob welcome = read_blob(child.from);
    const auto link = transport->open_link(process_spec, welcome, "", 0, soon());
    exchange(*transport, *landing, *link);
    int status = -1;
    until({transport.get()}, [&] { return ::waitpid(child.pid, &status, WNOHANG) == child.pid; });
    CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 0);
    ::close(child.to);
    ::close(child.from);
}

// A sender killed in the middle harms nobody; its next incarnation is served, and so is the pair beside it.
void killed_sender() {
    const auto receiver = make();
    const auto neighbour = make();
    Ends beside = open_pair(*receiver, *neighbour, {8, 1, 5000, 1});
    std::vector<std::shared_ptr<Landing>> dead;
    for (uint16_t incarnation = 1; incarnation <= 10; ++incarnation) {
        const Child child = start_child("--send-for-ever");
        auto landing = welcome_child(*receiver, child);
        receive(*receiver, *landing, 20u + incarnation * 7u);
        kill_child(child);
        round_trip(beside, 0, incarnation, incarnation, 5000);
        if (incarnation % 2 == 0) dead.push_back(std::move(landing));  // some linger
        ::close(child.to);
        ::close(child.from);
    }
    dead.clear();
    round_trip(beside, 0, 11, 11, 5000);
}

// Who sends to a dead receiver neither hangs nor fails; the pair beside it and the next incarnation work.
void killed_receiver() {
    const auto sender = make();
    const auto neighbour = make();
    Ends beside = open_pair(*neighbour, *sender, {8, 1, 5000, 1});
    for (uint16_t incarnation = 1; incarnation <= 5; ++incarnation) {
        const Child child = start_child("--receive");
        write_blob(child.to, sender->introduce().bytes);
        Blob welcome = read_blob(child.from);
        const auto link = sender->open_link(process_spec, welcome, "", 0, soon());
        post(*link, process_spec, 0, 1, 1, 200'000);
        until({sender.get()}, [&] { return !poll(*link).empty(); });
        for (SlotId slot = 1; slot < 3; ++slot) post(*link, process_spec, slot, 1, 1, 250'000);
        kill_child(child);
        post(*link, process_spec, 3, 1, 1, 250'000);
        ImmediateSink sink;
        std::string reason;
        const Deadline end = Deadline::after_ns(50'000'000);
        while (!end.passed() && link->poll(sink, reason)) sender->progress();
        round_trip(beside, 0, incarnation, incarnation, 5000);
        ::close(child.to);
        ::close(child.from);
    }
}

}  // namespace antiphon::m2n::test

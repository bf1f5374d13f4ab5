// Several outboxes of one endpoint, used together: one call from Python, and no conversion of what stays the same.
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/vector.h>

#include <string>
#include <utility>
#include <vector>

#include "bind_m2n/bind_m2n.h"
#include "bind_m2n/prepared_call.h"
#include "bind_m2n/sending.h"

namespace nb = nanobind;

namespace antiphon::bind {

namespace {

using m2n::Outbox;
using Outboxes = std::vector<std::shared_ptr<Outbox>>;

[[noreturn]] void refuse(const std::string& reason) { throw m2n::Error(m2n::Code::invalid, reason); }

class Fanout {
  public:
    explicit Fanout(Outboxes outboxes) : outboxes_(std::move(outboxes)), views_(outboxes_.size()) {
        for (size_t i = 0; i < outboxes_.size(); ++i) {
            const std::string name = "outboxes[" + std::to_string(i) + "]";
            if (outboxes_[i] == nullptr) refuse(name + " is None");
            if (!outboxes_[i]->is_of_same_endpoint(*outboxes_[0])) {
                refuse(name + " is of another endpoint than outboxes[0]");
            }
            for (size_t j = 0; j < i; ++j) {
                if (outboxes_[j] == outboxes_[i]) refuse(name + " is outboxes[" + std::to_string(j) + "] again");
            }
            pointers_.push_back(outboxes_[i].get());
        }
        posted_.reserve(outboxes_.size());
    }

    // A place of the payload for each outbox.
    struct Pieces {
        std::vector<uint64_t> offsets;
        std::vector<uint64_t> lengths;
    };

    void check_pieces(const Pieces& pieces, uint64_t payload_bytes) const {
        check_one_each("offsets", pieces.offsets.size());
        check_one_each("lengths", pieces.lengths.size());
        for (size_t i = 0; i < pointers_.size(); ++i) {
            const uint64_t offset = pieces.offsets[i], length = pieces.lengths[i];
            if (offset <= payload_bytes && length <= payload_bytes - offset) continue;
            refuse("bytes " + std::to_string(offset) + " to " + std::to_string(offset + length) + " of a payload of " +
                   std::to_string(payload_bytes));
        }
    }

    // `buffer` is `payload`'s, the pieces were checked.
    void send(const m2n::MessageLabel& label, nb::handle payload, const Buffer& buffer, const Pieces& pieces,
              double timeout_s) {
        posted_.clear();
        const auto keep = [&] {
            for (size_t i = 0; i < posted_.size(); ++i) keep_while_sending(*pointers_[i], posted_[i], payload);
        };
        try {
            within(timeout_s, [&](m2n::Deadline deadline) {
                for (size_t i = 0; i < pointers_.size(); ++i) {
                    const std::byte* piece = buffer.data() + pieces.offsets[i];
                    posted_.push_back(pointers_[i]->send(label, piece, pieces.lengths[i], deadline));
                }
            });
        } catch (...) {
            keep();  // some of it is on its way
            throw;
        }
        keep();
    }

    nb::list slots(double timeout_s) {
        std::vector<std::byte*> payloads(pointers_.size());
        within(timeout_s, [&](m2n::Deadline deadline) {
            for (size_t i = 0; i < pointers_.size(); ++i) payloads[i] = pointers_[i]->slot(deadline);
        });
        nb::list found;
        for (size_t i = 0; i < payloads.size(); ++i) found.append(view(i, payloads[i]));
        return found;
    }

    void commit(const m2n::MessageLabel& label, const std::vector<uint64_t>& lengths) {
        for (size_t i = 0; i < pointers_.size(); ++i) pointers_[i]->check_commit(lengths[i]);
        const nb::gil_scoped_release release;
        for (size_t i = 0; i < pointers_.size(); ++i) pointers_[i]->commit(label, lengths[i]);
    }

    void wait_credits(double timeout_s) {
        within(timeout_s, [&](m2n::Deadline deadline) { Outbox::wait_all_credits(pointers_, deadline); });
    }

    void check_one_each(const char* what, size_t number) const {
        if (number == pointers_.size()) return;
        refuse(std::to_string(pointers_.size()) + " outboxes and " + std::to_string(number) + " " + what +
               ": give one of each");
    }

  private:
    // A slot's array is made when the slot first comes round.
    nb::object& view(size_t index, std::byte* payload) {
        for (auto& [address, made] : views_[index]) {
            if (address == payload) return made;
        }
        views_[index].emplace_back(payload, nb::cast(view_of_slot(outboxes_[index], payload)));
        return views_[index].back().second;
    }

    const Outboxes outboxes_;
    std::vector<Outbox*> pointers_;
    std::vector<m2n::SlotId> posted_;
    std::vector<std::vector<std::pair<std::byte*, nb::object>>> views_;
};

using SharedFanout = std::shared_ptr<Fanout>;

void send(Fanout& fanout, uint64_t step, nb::handle payload, std::vector<uint64_t> offsets,
          std::vector<uint64_t> lengths, uint32_t participants, double timeout_s) {
    const Buffer buffer(payload);
    const Fanout::Pieces pieces{std::move(offsets), std::move(lengths)};
    fanout.check_pieces(pieces, buffer.size());
    fanout.send(make_label(step, {}, participants), payload, buffer, pieces, timeout_s);
}

void commit(Fanout& fanout, uint64_t step, const std::vector<uint64_t>& lengths, uint32_t participants) {
    fanout.check_one_each("lengths", lengths.size());
    fanout.commit(make_label(step, {}, participants), lengths);
}

PreparedCall prepare_send(SharedFanout fanout, nb::object payload, std::vector<uint64_t> offsets,
                          std::vector<uint64_t> lengths, uint32_t participants, double timeout_s) {
    auto buffer = std::make_shared<Buffer>(payload);
    Fanout::Pieces pieces{std::move(offsets), std::move(lengths)};
    fanout->check_pieces(pieces, buffer->size());
    deadline_after(timeout_s);  // refuses what is no timeout
    return PreparedCall([=, pieces = std::move(pieces)](uint64_t step) {
        fanout->send(make_label(step, {}, participants), payload, *buffer, pieces, timeout_s);
    });
}

PreparedCall prepare_commit(SharedFanout fanout, std::vector<uint64_t> lengths, uint32_t participants) {
    fanout->check_one_each("lengths", lengths.size());
    return PreparedCall([=, lengths = std::move(lengths)](uint64_t step) {
        fanout->commit(make_label(step, {}, participants), lengths);
    });
}

PreparedCall prepare_wait_credits(SharedFanout fanout, double timeout_s) {
    deadline_after(timeout_s);
    return PreparedCall([=](uint64_t) { fanout->wait_credits(timeout_s); });
}

}  // namespace

void bind_m2n_fanout(nb::module_& module) {
    nb::class_<Fanout>(module, "Fanout")
        .def(nb::init<Outboxes>(), nb::arg("outboxes"))
        .def("send", &send, nb::arg("step"), nb::arg("payload"), nb::arg("offsets"), nb::arg("lengths"),
             nb::arg("participants") = 0, nb::arg("timeout_s") = 0.0)
        .def("slots", &Fanout::slots, nb::arg("timeout_s") = 0.0)
        .def("commit", &commit, nb::arg("step"), nb::arg("lengths"), nb::arg("participants") = 0)
        .def("wait_credits", &Fanout::wait_credits, nb::arg("timeout_s"))
        .def("prepare_send", &prepare_send, nb::arg("payload"), nb::arg("offsets"), nb::arg("lengths"),
             nb::arg("participants") = 0, nb::arg("timeout_s") = 0.0)
        .def("prepare_commit", &prepare_commit, nb::arg("lengths"), nb::arg("participants") = 0)
        .def("prepare_wait_credits", &prepare_wait_credits, nb::arg("timeout_s"));
}

}  // namespace antiphon::bind

// Several outboxes of one endpoint, used together: one call from Python, and no conversion of what stays the same.
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/vector.h>

#include <string>
#include <utility>
#include <vector>

#include "bind_m2n/bind_m2n.h"
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

    void send(uint64_t step, nb::handle payload, const std::vector<uint64_t>& offsets,
              const std::vector<uint64_t>& lengths, uint32_t participants, double timeout_s) {
        const Buffer buffer(payload);
        check_one_each("offsets", offsets.size());
        check_one_each("lengths", lengths.size());
        for (size_t i = 0; i < pointers_.size(); ++i) {
            if (offsets[i] <= buffer.size() && lengths[i] <= buffer.size() - offsets[i]) continue;
            refuse("bytes " + std::to_string(offsets[i]) + " to " + std::to_string(offsets[i] + lengths[i]) +
                   " of a payload of " + std::to_string(buffer.size()));
        }
        const m2n::MessageLabel label = make_label(step, {}, participants);
        posted_.clear();
        const auto keep = [&] {
            for (size_t i = 0; i < posted_.size(); ++i) keep_while_sending(*pointers_[i], posted_[i], payload);
        };
        try {
            within(timeout_s, [&](m2n::Deadline deadline) {
                for (size_t i = 0; i < pointers_.size(); ++i) {
                    posted_.push_back(pointers_[i]->send(label, buffer.data() + offsets[i], lengths[i], deadline));
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

    void commit(uint64_t step, const std::vector<uint64_t>& lengths, uint32_t participants) {
        check_one_each("lengths", lengths.size());
        for (size_t i = 0; i < pointers_.size(); ++i) pointers_[i]->check_commit(lengths[i]);
        const m2n::MessageLabel label = make_label(step, {}, participants);
        const nb::gil_scoped_release release;
        for (size_t i = 0; i < pointers_.size(); ++i) pointers_[i]->commit(label, lengths[i]);
    }

    void wait_credits(double timeout_s) {
        within(timeout_s, [&](m2n::Deadline deadline) { Outbox::wait_all_credits(pointers_, deadline); });
    }

  private:
    void check_one_each(const char* what, size_t number) const {
        if (number == pointers_.size()) return;
        refuse(std::to_string(pointers_.size()) + " outboxes and " + std::to_string(number) + " " + what +
               ": give one of each");
    }

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

}  // namespace

void bind_m2n_fanout(nb::module_& module) {
    nb::class_<Fanout>(module, "Fanout")
        .def(nb::init<Outboxes>(), nb::arg("outboxes"))
        .def("send", &Fanout::send, nb::arg("step"), nb::arg("payload"), nb::arg("offsets"), nb::arg("lengths"),
             nb::arg("participants") = 0, nb::arg("timeout_s") = 0.0)
        .def("slots", &Fanout::slots, nb::arg("timeout_s") = 0.0)
        .def("commit", &Fanout::commit, nb::arg("step"), nb::arg("lengths"), nb::arg("participants") = 0)
        .def("wait_credits", &Fanout::wait_credits, nb::arg("timeout_s"));
}

}  // namespace antiphon::bind

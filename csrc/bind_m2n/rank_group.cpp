// Tensors arrive as addresses, as everywhere in the native interface; Python checks shapes and keeps them alive.
#include <nanobind/stl/pair.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include "bind_m2n/bind_m2n.h"
#include "m2n/rank_group.h"

namespace nb = nanobind;

namespace antiphon::bind {

namespace {

using m2n::RankGroup;
using Sizes = std::vector<uint64_t>;

void check(const RankGroup& group, const Sizes& sizes) {
    if (sizes.size() == group.size()) return;
    m2n::throw_invalid(sizes.size(), " sizes for a group of ", group.size(), " ranks: give one for each");
}

void check_peer(const RankGroup& group, uint32_t peer) {
    if (peer < group.size() && peer != group.rank()) return;
    m2n::throw_invalid("rank ", peer, " is no peer of rank ", group.rank(), " of ", group.size());
}

void post(RankGroup& group, uint32_t exchange, uint32_t peer,
          const std::vector<std::pair<uintptr_t, uint64_t>>& pieces, double timeout_s) {
    check_peer(group, peer);
    std::vector<m2n::Bytes> parts;
    for (const auto& [address, bytes] : pieces) parts.push_back({pointer_to<const std::byte>(address), bytes});
    within(timeout_s, [&](m2n::Deadline deadline) { group.post(exchange, peer, parts, deadline); });
}

nb::bytes broadcast(RankGroup& group, nb::handle payload, uint32_t root, double timeout_s, double rest_s) {
    std::vector<std::byte> bytes;
    if (!payload.is_none()) {
        const Buffer buffer(payload);
        bytes.assign(buffer.data(), buffer.data() + buffer.size());
    }
    const auto rest_ns = nanoseconds("a timeout", rest_s);
    within(timeout_s, [&](m2n::Deadline deadline) { group.broadcast(bytes, root, deadline, rest_ns); });
    return bytes_object(bytes);
}

}  // namespace

void bind_m2n_rank_group(nb::module_& module) {
    nb::class_<RankGroup>(module, "RankGroup")
        .def(nb::init<uint32_t, std::shared_ptr<m2n::Inbox>>(), nb::arg("rank"), nb::arg("inbox"))
        .def_prop_ro("rank", &RankGroup::rank)
        .def_prop_ro("size", &RankGroup::size)
        .def_prop_ro("bytes_sent", &RankGroup::bytes_sent)
        .def("set_peer", &RankGroup::set_peer, nb::arg("rank"), nb::arg("outbox"))
        .def("begin",
             [](RankGroup& group, uint32_t epoch, double timeout_s) {
                 within(timeout_s, [&](m2n::Deadline deadline) { group.begin(epoch, deadline); });
             },
             nb::arg("epoch"), nb::arg("timeout_s"))
        .def("abort", &RankGroup::abort, nb::arg("epoch"))
        .def("barrier",
             [](RankGroup& group, double timeout_s) {
                 within(timeout_s, [&](m2n::Deadline deadline) { group.barrier(deadline); });
             },
             nb::arg("timeout_s"))
        .def("all_reduce",
             [](RankGroup& group, uintptr_t data, uint64_t count, const std::string& type, double timeout_s) {
                 const m2n::RowType row_type = row_type_of(type);
                 within(timeout_s, [&](m2n::Deadline deadline) {
                     group.all_reduce(pointer_to<std::byte>(data), count, row_type, deadline);
                 });
             },
             nb::arg("data"), nb::arg("count"), nb::arg("dtype"), nb::arg("timeout_s"))
        .def("reduce_scatter",
             [](RankGroup& group, uintptr_t in, uintptr_t out, const Sizes& counts, const std::string& type,
                double timeout_s) {
                 check(group, counts);
                 const m2n::RowType row_type = row_type_of(type);
                 within(timeout_s, [&](m2n::Deadline deadline) {
                     group.reduce_scatter(pointer_to<const std::byte>(in), pointer_to<std::byte>(out), counts, row_type,
                                          deadline);
                 });
             },
             nb::arg("source"), nb::arg("out"), nb::arg("counts"), nb::arg("dtype"), nb::arg("timeout_s"))
        .def("all_gather",
             [](RankGroup& group, uintptr_t in, uintptr_t out, const Sizes& bytes, double timeout_s) {
                 check(group, bytes);
                 within(timeout_s, [&](m2n::Deadline deadline) {
                     group.all_gather(pointer_to<const std::byte>(in), pointer_to<std::byte>(out), bytes, deadline);
                 });
             },
             nb::arg("source"), nb::arg("out"), nb::arg("bytes"), nb::arg("timeout_s"))
        .def("all_to_all",
             [](RankGroup& group, uintptr_t in, uintptr_t out, const Sizes& bytes_to, const Sizes& bytes_from,
                double timeout_s) {
                 check(group, bytes_to);
                 check(group, bytes_from);
                 within(timeout_s, [&](m2n::Deadline deadline) {
                     group.all_to_all(pointer_to<const std::byte>(in), pointer_to<std::byte>(out), bytes_to, bytes_from,
                                      deadline);
                 });
             },
             nb::arg("source"), nb::arg("out"), nb::arg("bytes_to"), nb::arg("bytes_from"), nb::arg("timeout_s"))
        .def("open_exchange", &RankGroup::open_exchange)
        .def("post", &post, nb::arg("exchange"), nb::arg("peer"), nb::arg("pieces"), nb::arg("timeout_s"))
        .def("take",
             [](RankGroup& group, uint32_t exchange, uint32_t peer, double timeout_s) {
                 check_peer(group, peer);
                 const m2n::Bytes part = within(
                     timeout_s, [&](m2n::Deadline deadline) { return group.take(exchange, peer, deadline); });
                 return nb::make_tuple(reinterpret_cast<uintptr_t>(part.data()), part.size());
             },
             nb::arg("exchange"), nb::arg("peer"), nb::arg("timeout_s"))
        .def("release", &RankGroup::release, nb::arg("exchange"), nb::arg("peer"))
        .def("broadcast", &broadcast, nb::arg("payload").none(), nb::arg("root"), nb::arg("timeout_s"),
             nb::arg("rest_s"));
    module.attr("RANK_GROUP_SLOTS") = RankGroup::num_slots;
}

}  // namespace antiphon::bind

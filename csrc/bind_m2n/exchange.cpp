// Tensors arrive as addresses, as everywhere in the native interface; Python checks shapes and keeps them alive.
#include "bind_m2n/bind_m2n.h"

#include <nanobind/ndarray.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <algorithm>

#include "m2n/expert_split.h"
#include "m2n/token_exchange.h"

namespace nb = nanobind;

namespace antiphon::bind {

namespace {

using m2n::AttentionSide;
using m2n::BatchKey;
using m2n::ExpertSide;
using m2n::ExpertSplit;
using Counts = nb::ndarray<const uint32_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Flags = nb::ndarray<const bool, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

m2n::RowShape row_shape(uint32_t hidden, uint32_t top_k, uint32_t max_rows, const std::string& type) {
    return {hidden, top_k, max_rows, row_type_of(type)};
}

uintptr_t address_of(const void* data) { return reinterpret_cast<uintptr_t>(data); }

nb::tuple requests_of(const m2n::ReceivedBatch& batch) {
    nb::list requests;
    for (const m2n::Prefetch& each : batch.prefetches) {
        requests.append(nb::make_tuple(each.source, each.layer, each.expert));
    }
    return nb::tuple(requests);
}

// As tuples (expert, worker, gain).
nb::list wanted_copies(ExpertSplit& split, const Counts& counts, const Flags& open) {
    nb::list tuples;
    for (const auto& each : split.wanted_copies({counts.data(), counts.size()}, {open.data(), open.size()})) {
        tuples.append(nb::make_tuple(each.expert, each.worker, each.gain));
    }
    return tuples;
}

void bind_attention(nb::module_& module) {
    nb::class_<AttentionSide>(module, "AttentionSide")
        .def("__init__",
             [](AttentionSide* self, uint32_t hidden, uint32_t top_k, uint32_t max_rows, const std::string& type,
                std::shared_ptr<m2n::Inbox> replies, uint32_t num_micro_batches) {
                 m2n::RowScatter scatter(row_shape(hidden, top_k, max_rows, type), replies->spec().sources);
                 new (self) AttentionSide(std::move(scatter), std::move(replies), num_micro_batches);
             },
             nb::arg("hidden"), nb::arg("top_k"), nb::arg("max_rows"), nb::arg("dtype"),
             nb::arg("replies"), nb::arg("num_micro_batches"))
        .def("set_expert", &AttentionSide::set_expert, nb::arg("worker"), nb::arg("outbox").none())
        .def("place",
             [](AttentionSide& side, uint32_t version, uint32_t layer, const std::vector<std::vector<int32_t>>& owners,
                std::vector<double> speeds, uint32_t knee, uint32_t num_workers) {
                 side.place(version, layer, ExpertSplit(num_workers, owners, std::move(speeds), knee));
             },
             nb::arg("version"), nb::arg("layer"), nb::arg("owners"), nb::arg("speeds"), nb::arg("knee"),
             nb::arg("num_workers"))
        .def("dispatch",
             [](AttentionSide& side, uint32_t epoch, uint64_t step, uint32_t layer, uint32_t micro_batch,
                uint64_t participants, uintptr_t rows, uint64_t stride_bytes, uintptr_t ids, uintptr_t weights,
                uint32_t count, double timeout_s) {
                 const m2n::GatedRows gated{pointer_to<const std::byte>(rows), stride_bytes,
                                            pointer_to<const int32_t>(ids), pointer_to<const float>(weights), count};
                 within(timeout_s, [&](m2n::Deadline deadline) {
                     side.dispatch({epoch, step, layer, micro_batch}, participants, gated, deadline);
                 });
             },
             nb::arg("epoch"), nb::arg("step"), nb::arg("layer"), nb::arg("micro_batch"), nb::arg("participants"),
             nb::arg("rows"), nb::arg("stride_bytes"), nb::arg("ids"), nb::arg("weights"), nb::arg("count"),
             nb::arg("timeout_s"))
        .def("combine",
             [](AttentionSide& side, uint32_t epoch, uint64_t step, uint32_t layer, uint32_t micro_batch,
                uintptr_t out, double timeout_s) {
                 const int64_t started_ns = monotonic_ns();
                 std::vector<m2n::ComputeTimes> times;
                 within(timeout_s, [&](m2n::Deadline deadline) {
                     side.combine({epoch, step, layer, micro_batch}, pointer_to<std::byte>(out), times,
                                  deadline);
                 });
                 const int64_t ended_ns = monotonic_ns();
                 return nb::make_tuple(ended_ns - started_ns, m2n::exposed_ns_of(started_ns, ended_ns, times));
             },
             nb::arg("epoch"), nb::arg("step"), nb::arg("layer"), nb::arg("micro_batch"), nb::arg("out"),
             nb::arg("timeout_s"))
        .def("is_back",
             [](AttentionSide& side, uint32_t epoch, uint64_t step, uint32_t layer, uint32_t micro_batch) {
                 return side.is_back({epoch, step, layer, micro_batch});
             },
             nb::arg("epoch"), nb::arg("step"), nb::arg("layer"), nb::arg("micro_batch"))
        .def("prefetch", &AttentionSide::prefetch, nb::arg("worker"), nb::arg("layer"), nb::arg("expert"))
        .def("wanted_copies",
             [](AttentionSide& side, uint32_t layer, const Counts& counts, const Flags& open) {
                 return wanted_copies(side.split_of(layer), counts, open);
             },
             nb::arg("layer"), nb::arg("counts"), nb::arg("open"))
        .def("num_pending", &AttentionSide::num_pending, nb::arg("micro_batch"))
        .def("forget", &AttentionSide::forget)
        .def("take_counts",
             [](AttentionSide& side) {
                 const std::vector<uint32_t> counts = side.take_counts();
                 return nb::bytes(reinterpret_cast<const char*>(counts.data()), counts.size() * sizeof(uint32_t));
             })
        .def_prop_ro("bytes_sent", &AttentionSide::bytes_sent);
}

void bind_split(nb::module_& module) {
    nb::class_<ExpertSplit>(module, "ExpertSplit")
        .def(nb::init<uint32_t, const std::vector<std::vector<int32_t>>&, std::vector<double>, uint32_t>(),
             nb::arg("num_workers"), nb::arg("owners"), nb::arg("speeds") = std::vector<double>(), nb::arg("knee") = 1)
        .def("split",
             [](ExpertSplit& split, const Counts& counts) {
                 const auto rows = split.split({counts.data(), counts.size()});
                 auto* copy = new uint32_t[rows.size()];
                 std::ranges::copy(rows, copy);
                 nb::capsule owner(copy, [](void* memory) noexcept { delete[] static_cast<uint32_t*>(memory); });
                 return nb::ndarray<nb::numpy, uint32_t, nb::ndim<1>>(copy, {rows.size()}, owner);
             },
             nb::arg("counts"))
        .def("wanted_copies", &wanted_copies, nb::arg("counts"), nb::arg("open"));
}

void bind_experts(nb::module_& module) {
    using m2n::ReceivedBatch;
    nb::class_<ReceivedBatch>(module, "ReceivedBatch")
        .def("fields", [](const ReceivedBatch& batch) {
            return nb::make_tuple(batch.key.step, batch.key.layer, batch.key.micro_batch, tuple_of(batch.sources),
                                  tuple_of(batch.rows_per_source), batch.oldest_placement, batch.newest_placement,
                                  requests_of(batch), batch.num_rows, address_of(batch.rows),
                                  address_of(batch.ids), address_of(batch.weights));
        });

    nb::class_<ExpertSide>(module, "ExpertSide")
        .def("__init__",
             [](ExpertSide* self, uint32_t hidden, uint32_t top_k, uint32_t max_rows, const std::string& type,
                std::shared_ptr<m2n::Inbox> requests) {
                 new (self) ExpertSide(row_shape(hidden, top_k, max_rows, type), std::move(requests));
             },
             nb::arg("hidden"), nb::arg("top_k"), nb::arg("max_rows"), nb::arg("dtype"), nb::arg("requests"))
        .def("set_attention", &ExpertSide::set_attention, nb::arg("worker"), nb::arg("outbox"))
        .def("next",
             [](ExpertSide& side, double timeout_s) -> nb::object {
                 return arrived_object(
                     side, within(timeout_s, [&](m2n::Deadline deadline) { return side.next(deadline); }));
             },
             nb::arg("timeout_s"))
        .def("collect",
             [](ExpertSide& side, const std::vector<m2n::Step>& steps) -> nb::object {
                 auto batch = side.collect(steps);
                 return batch ? nb::cast(std::move(*batch)) : nb::none();
             },
             nb::arg("steps"))
        .def("reply",
             [](ExpertSide& side, ReceivedBatch& batch, uintptr_t partials, int64_t start_ns, int64_t end_ns,
                double timeout_s) {
                 within(timeout_s, [&](m2n::Deadline deadline) {
                     side.reply(batch, pointer_to<const std::byte>(partials), {start_ns, end_ns}, deadline);
                 });
             },
             nb::arg("batch"), nb::arg("partials"), nb::arg("start_ns"), nb::arg("end_ns"), nb::arg("timeout_s"))
        .def("overdue",
             [](ExpertSide& side, double age_s) { return side.overdue(nanoseconds("an age", age_s)); },
             nb::arg("age_s"))
        .def_prop_ro("bytes_sent", &ExpertSide::bytes_sent);
}

}  // namespace

nb::object arrived_object(ExpertSide& side, const ExpertSide::Arrived& arrived) {
    if (arrived.step) {
        const BatchKey key = BatchKey::unpack(*arrived.step);
        return nb::make_tuple(*arrived.step, key.layer, key.micro_batch, tuple_of(side.sources_of(*arrived.step)));
    }
    if (!arrived.introduction) return nb::none();
    return nb::make_tuple(arrived.introduction->source, bytes_object(arrived.introduction->ticket));
}

void bind_m2n_exchange(nb::module_& module) {
    bind_split(module);
    bind_attention(module);
    bind_experts(module);
    module.def(
        "dispatch_bytes",
        [](uint32_t hidden, uint32_t top_k, uint32_t rows, const std::string& type) {
            return row_shape(hidden, top_k, rows, type).dispatch_bytes(rows);
        },
        nb::arg("hidden"), nb::arg("top_k"), nb::arg("rows"), nb::arg("dtype"));
    module.def("first_step_of", &BatchKey::first_of, nb::arg("epoch"));
    module.attr("INTRODUCTION") = m2n::introduction_bit;
    module.attr("MAX_ATTENTION_WORKERS") = m2n::max_attention_workers;
}

}  // namespace antiphon::bind

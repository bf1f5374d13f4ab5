// Calls in the order of a compute stream. Memory arrives as addresses; Python keeps it until the calls are over.
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <memory>
#include <optional>
#include <tuple>

#include "bind_m2n/bind_m2n.h"
#include "m2n/endpoint.h"
#include "m2n/stream_core.h"

namespace nb = nanobind;

namespace antiphon::bind {

namespace {

using m2n::StreamCore;
using m2n::StreamDevice;

constexpr int64_t signal_look_ns = 200'000'000;

// The core's thread may want the interpreter's lock (it looks for signals), so it is stopped without it: by the core
// itself, and by an end that it serves.
template <class Stopped>
struct Unlocked : Stopped {
    using Stopped::Stopped;
    ~Unlocked() {
        nb::gil_scoped_release release;
        this->stop();
    }
};
using Core = Unlocked<StreamCore>;
using AttentionEnd = Unlocked<m2n::AttentionStream>;
using ExpertEnd = Unlocked<m2n::ExpertStream>;

bool wait_idle(Core& core, double timeout_s) {
    const m2n::Deadline deadline = deadline_after(timeout_s);
    for (;;) {
        bool idle = false;
        {
            nb::gil_scoped_release release;
            idle = core.wait_idle(std::min(deadline.left_ns(), signal_look_ns));
        }
        if (idle || deadline.passed()) return idle;
        if (PyErr_CheckSignals() != 0) throw nb::python_error();
    }
}

void bind_core(nb::module_& module) {
    nb::class_<StreamDevice>(module, "StreamDevice")
        .def_prop_ro("name", &StreamDevice::name)
        .def_prop_ro("needs_flush", &StreamDevice::needs_flush)
        .def_prop_ro("why_not_written", &StreamDevice::why_not_written);
    module.def("stream_device", &m2n::make_stream_device, nb::arg("kind"), nb::arg("library") = "");

    nb::class_<Core>(module, "StreamCore")
        .def("__init__",
             [](Core* self, m2n::Endpoint& endpoint, std::shared_ptr<StreamDevice> device, double stream_timeout_s) {
                 new (self) Core(endpoint.name(), std::move(device), [&endpoint] { endpoint.interrupt(); },
                                 nanoseconds("a timeout", stream_timeout_s));
             },
             nb::arg("endpoint"), nb::arg("device"), nb::arg("stream_timeout_s"), nb::keep_alive<1, 2>())
        .def("wait_idle", &wait_idle, nb::arg("timeout_s"))
        .def("check", &Core::check)
        .def("is_over", &Core::is_over, nb::arg("number"))
        .def("abort", &Core::abort, nb::arg("epoch"))
        .def("begin", &Core::begin, nb::arg("epoch"))
        .def("stop", &Core::stop, nb::call_guard<nb::gil_scoped_release>());
}

void bind_attention_stream(nb::module_& module) {
    nb::class_<AttentionEnd>(module, "AttentionStream")
        .def("__init__",
             [](AttentionEnd* self, m2n::AttentionSide& side, Core& core, nb::handle) {
                 new (self) AttentionEnd(side, core);
             },
             nb::arg("side"), nb::arg("core"), nb::arg("memory"), nb::keep_alive<1, 2>(), nb::keep_alive<1, 3>(),
             nb::keep_alive<1, 4>())
        .def("dispatch",
             [](AttentionEnd& self, uintptr_t stream, uint32_t epoch, uint64_t step, uint32_t layer,
                uint32_t micro_batch, uint64_t participants, uintptr_t rows, uint64_t stride_bytes, uintptr_t ids,
                uintptr_t weights, uint32_t count, double timeout_s) {
                 const m2n::GatedRows gated{pointer_to<const std::byte>(rows), stride_bytes,
                                            pointer_to<const int32_t>(ids), pointer_to<const float>(weights), count};
                 self.dispatch(stream, {epoch, step, layer, micro_batch}, participants, gated, timeout_s);
             },
             nb::arg("stream"), nb::arg("epoch"), nb::arg("step"), nb::arg("layer"), nb::arg("micro_batch"),
             nb::arg("participants"), nb::arg("rows"), nb::arg("stride_bytes"), nb::arg("ids"), nb::arg("weights"),
             nb::arg("count"), nb::arg("timeout_s"), nb::call_guard<nb::gil_scoped_release>())
        .def("combine",
             [](AttentionEnd& self, uintptr_t stream, uint32_t epoch, uint64_t step, uint32_t layer,
                uint32_t micro_batch, uintptr_t out, double timeout_s) {
                 self.combine(stream, {epoch, step, layer, micro_batch}, pointer_to<std::byte>(out), timeout_s);
             },
             nb::arg("stream"), nb::arg("epoch"), nb::arg("step"), nb::arg("layer"), nb::arg("micro_batch"),
             nb::arg("out"), nb::arg("timeout_s"), nb::call_guard<nb::gil_scoped_release>())
        .def_prop_ro("wait_ns", &AttentionEnd::wait_ns)
        .def_prop_ro("exposed_ns", &AttentionEnd::exposed_ns);
}

void bind_expert_stream(nb::module_& module) {
    using Addresses = std::tuple<uintptr_t, uintptr_t, uintptr_t>;
    nb::class_<ExpertEnd>(module, "ExpertStream")
        .def("__init__",
             [](ExpertEnd* self, m2n::ExpertSide& side, Core& core, const std::vector<Addresses>& stages,
                uint32_t stage_rows, nb::handle) {
                 std::vector<m2n::BatchPlace> made;
                 for (const auto& [rows, ids, weights] : stages) {
                     made.push_back({pointer_to<std::byte>(rows), pointer_to<int32_t>(ids), pointer_to<float>(weights),
                                     stage_rows});
                 }
                 new (self) ExpertEnd(side, core, std::move(made));
             },
             nb::arg("side"), nb::arg("core"), nb::arg("stages"), nb::arg("stage_rows"), nb::arg("memory"),
             nb::keep_alive<1, 2>(), nb::keep_alive<1, 3>(), nb::keep_alive<1, 6>())
        .def("next",
             [](ExpertEnd& self, m2n::ExpertSide& side, double timeout_s) -> nb::object {
                 nb::object arrived = nb::none();
                 within(timeout_s, [&](m2n::Deadline deadline) {
                     self.next(deadline, [&](const m2n::ExpertSide::Arrived& each) {
                         const nb::gil_scoped_acquire acquire;
                         arrived = arrived_object(side, each);
                     });
                 });
                 return arrived;
             },
             nb::arg("side"), nb::arg("timeout_s"))
        .def("collect",
             [](ExpertEnd& self, const std::vector<m2n::Step>& steps) -> nb::object {
                 std::optional<m2n::ReceivedBatch> batch;
                 {
                     const nb::gil_scoped_release release;
                     batch = self.collect(steps);
                 }
                 return batch ? nb::cast(std::move(*batch)) : nb::none();
             },
             nb::arg("steps"))
        .def("reply",
             [](ExpertEnd& self, uintptr_t stream, const m2n::ReceivedBatch& batch, uintptr_t partials,
                int64_t start_ns, int64_t end_ns, double timeout_s) {
                 return self.reply(stream, batch, pointer_to<const std::byte>(partials), {start_ns, end_ns},
                                   timeout_s);
             },
             nb::arg("stream"), nb::arg("batch"), nb::arg("partials"), nb::arg("start_ns"), nb::arg("end_ns"),
             nb::arg("timeout_s"), nb::call_guard<nb::gil_scoped_release>())
        .def("overdue",
             [](ExpertEnd& self, double age_s) { return self.overdue(nanoseconds("an age", age_s)); },
             nb::arg("age_s"), nb::call_guard<nb::gil_scoped_release>())
        .def("forget", &ExpertEnd::forget);
}

}  // namespace

void bind_m2n_streams(nb::module_& module) {
    bind_core(module);
    bind_attention_stream(module);
    bind_expert_stream(module);
}

}  // namespace antiphon::bind

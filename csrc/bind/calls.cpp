#include "kernels/calls.h"

#include <nanobind/stl/tuple.h>

#include <tuple>

#include "bind/bind.h"

namespace nb = nanobind;

namespace antiphon::bind {

using kernels::CallList;
using kernels::KernelTime;

void bind_calls(nb::module_& module) {
    nb::class_<CallList>(module, "CallList")
        .def(nb::init<>())
        .def("begin", &CallList::begin)
        .def_static("end", &CallList::end)
        .def("mark", &CallList::mark)
        .def("__len__", &CallList::num_calls)
        .def(
            "run",
            [](CallList& calls, int64_t num_rows, uintptr_t times) {
                const nb::gil_scoped_release released;
                calls.run(num_rows, pointer<int64_t>(times));
            },
            nb::arg("num_rows"), nb::arg("times_address"));
    module.def("count_kernel_time", [](bool counts) { KernelTime::instance().counts = counts; }, nb::arg("counts"));
    module.def("kernel_time", [] {
        const KernelTime& time = KernelTime::instance();
        return std::make_tuple(time.processor_ns, time.elapsed_ns, time.num_calls);
    });
}

}  // namespace antiphon::bind

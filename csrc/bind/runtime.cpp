#include "bind/bind.h"
#include "kernels/isa.h"

#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

namespace nb = nanobind;

namespace antiphon::bind {

using kernels::ThreadPool;

void bind_runtime(nb::module_& module) {
    module.def("isa", [] { return std::string(kernels::kernels().name); });
    module.def("available_isas", &kernels::available_isas);
    module.def("set_isa", &kernels::set_isa, nb::arg("name"));
    module.def("num_threads", [] { return ThreadPool::instance().num_threads(); });
    module.def("work_alone", &ThreadPool::work_alone);
    module.def("set_num_threads", [](int count) { ThreadPool::instance().set_num_threads(count); },
               nb::arg("num_threads"));
    module.def("set_spin_ns", [](int64_t spin_ns) { ThreadPool::instance().set_spin_ns(spin_ns); }, nb::arg("spin_ns"));
}

}  // namespace antiphon::bind

#include "bind/bind.h"

#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include "base/wait_word.h"
#include "kernels/isa.h"

namespace nb = nanobind;

namespace antiphon::bind {

namespace {

using kernels::ThreadPool;

void bind_wait_word(nb::module_& module) {
    module.def("load_u32", [](uintptr_t address) { return load_u32(pointer<const uint32_t>(address)); },
               nb::arg("address"));
    module.def(
        "wait_u32",
        [](uintptr_t address, uint32_t old_value, int64_t timeout_ns, int64_t spin_ns) {
            return wait_u32(pointer<const uint32_t>(address), old_value, timeout_ns, spin_ns);
        },
        nb::arg("address"), nb::arg("old_value"), nb::arg("timeout_ns"), nb::arg("spin_ns"),
        nb::call_guard<nb::gil_scoped_release>());
    module.def(
        "fetch_add_wake_u32",
        [](uintptr_t address, uint32_t amount) { return fetch_add_wake_u32(pointer<uint32_t>(address), amount); },
        nb::arg("address"), nb::arg("amount"));
}

void bind_runtime(nb::module_& module) {
    module.def("isa", [] { return std::string(kernels::kernels().name); });
    module.def("available_isas", &kernels::available_isas);
    module.def("set_isa", &kernels::set_isa, nb::arg("name"));
    module.def("num_threads", [] { return ThreadPool::instance().num_threads(); });
    module.def("work_alone", &ThreadPool::work_alone);
    module.def("set_num_threads", [](int count) { ThreadPool::instance().set_num_threads(count); },
               nb::arg("num_threads"));
    module.def("set_spin_ns", [](int64_t spin_ns) { ThreadPool::instance().set_spin_ns(spin_ns); }, nb::arg("spin_ns"));
    module.def("release_core", [] { ThreadPool::instance().release_core(); });
}

}  // namespace

}  // namespace antiphon::bind

NB_MODULE(_native, module) {
    module.doc() = "Native CPU kernels and process-shared wait words. Addresses are plain integers.";
    antiphon::bind::bind_wait_word(module);
    antiphon::bind::bind_runtime(module);
    antiphon::bind::bind_formats(module);
    antiphon::bind::bind_linear(module);
    antiphon::bind::bind_experts(module);
    antiphon::bind::bind_kv_cache(module);
    antiphon::bind::bind_rows(module);
    antiphon::bind::bind_training(module);
    antiphon::bind::bind_calls(module);
}

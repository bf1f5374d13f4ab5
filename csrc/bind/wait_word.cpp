#include "base/wait_word.h"

#include "bind/bind.h"

namespace nb = nanobind;

namespace antiphon::bind {

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
    module.def("store_wake_u32",
               [](uintptr_t address, uint32_t value) { store_wake_u32(pointer<uint32_t>(address), value); },
               nb::arg("address"), nb::arg("value"));
    module.def("fetch_add_wake_u32",
               [](uintptr_t address, uint32_t amount) { return fetch_add_wake_u32(pointer<uint32_t>(address), amount); },
               nb::arg("address"), nb::arg("amount"));
}

}  // namespace antiphon::bind

#include "m2n/expert_split.h"

#include <nanobind/stl/vector.h>

#include "bind_m2n/arguments.h"
#include "bind_m2n/bind_m2n.h"

namespace nb = nanobind;

namespace antiphon::bind {

nb::list wanted_copies(m2n::ExpertSplit& split, const Counts& counts, const Flags& open) {
    nb::list tuples;
    for (const auto& each : split.wanted_copies({counts.data(), counts.size()}, {open.data(), open.size()})) {
        tuples.append(nb::make_tuple(each.expert, each.worker, each.gain));
    }
    return tuples;
}

void bind_m2n_expert_split(nb::module_& module) {
    using m2n::ExpertSplit;
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

}  // namespace antiphon::bind

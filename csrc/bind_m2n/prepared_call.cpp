#include "bind_m2n/prepared_call.h"

#include "bind_m2n/bind_m2n.h"

namespace antiphon::bind {

void bind_m2n_prepared_call(nanobind::module_& module) {
    // Without names of arguments nanobind has nothing to look up in a call.
    nanobind::class_<PreparedCall>(module, "PreparedCall").def("__call__", &PreparedCall::operator());
}

}  // namespace antiphon::bind

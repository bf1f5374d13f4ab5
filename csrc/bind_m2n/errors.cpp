#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include "bind_m2n/bind_m2n.h"
#include "m2n/error.h"

namespace nb = nanobind;

namespace antiphon::bind {

namespace {

const char* name_of(m2n::Code code) {
    switch (code) {
        case m2n::Code::invalid: return "invalid";
        case m2n::Code::timeout: return "timeout";
        case m2n::Code::peer_lost: return "peer_lost";
        case m2n::Code::no_credit: return "no_credit";
        case m2n::Code::refused: return "refused";
        case m2n::Code::interrupted: return "interrupted";
        case m2n::Code::system: return "system";
    }
    return "system";
}

void translate(const std::exception_ptr& pending, void*) {
    try {
        std::rethrow_exception(pending);
    } catch (const m2n::Error& error) {
        nb::object exception = nb::module_::import_("antiphon.base.errors")
                                   .attr("native_error")(name_of(error.code), error.what(), error.peers, error.reason);
        PyErr_SetObject(reinterpret_cast<PyObject*>(Py_TYPE(exception.ptr())), exception.ptr());
    }
}

}  // namespace

void bind_m2n_errors(nb::module_&) { nb::register_exception_translator(translate); }

}  // namespace antiphon::bind

#include "bind/bind.h"

#include <nanobind/stl/string.h>

#include <stdexcept>
#include <string>

#include "kernels/ggml_blocks.h"

namespace nb = nanobind;

namespace antiphon::bind {

namespace {

using kernels::CodeKind;
using kernels::OffsetKind;
using kernels::PackedFormat;
using kernels::ScaleKind;
using kernels::SourceMatrix;

template <class Kind, size_t count>
Kind kind_named(const std::string& name, const char* const (&names)[count]) {
    for (size_t i = 0; i < count; ++i) {
        if (name == names[i]) return static_cast<Kind>(i);
    }
    throw std::invalid_argument("'" + name + "' is not a part of a format known to the cpu back-end");
}

PackedFormat quantized_format(const std::string& codes, const std::string& scales, const std::string& offset,
                              int64_t group) {
    PackedFormat format;
    format.codes = kind_named<CodeKind>(codes, {"floats", "int8", "int4", "mxfp4", "fp8"});
    format.scales = kind_named<ScaleKind>(scales, {"float32", "bfloat16", "float16", "float8_e8m0fnu", "int8"});
    format.offset = kind_named<OffsetKind>(offset, {"none", "zeros", "offsets"});
    format.type = kernels::ElementType::fp32;
    format.group = group;
    if (group < 1 || (format.has_nibbles() && group % 8 != 0)) {
        throw std::invalid_argument("a group of " + std::to_string(group) + " columns does not fit " + codes);
    }
    return format;
}

PackedFormat float_format(bool is_bf16) {
    PackedFormat format;
    format.type = element_type(is_bf16);
    return format;
}

// `codes`, `scales`, `offsets` and `units` (or 0) are filled; see kernels/ggml_blocks.h.
void read_ggml_rows(const std::string& type, uintptr_t blocks, int64_t row_bytes, int64_t num_rows, int64_t num_blocks,
                    uintptr_t codes, uintptr_t scales, uintptr_t offsets, uintptr_t units) {
    const kernels::GgmlBlockType* found = kernels::ggml_block_type(type.c_str());
    if (found == nullptr) throw std::invalid_argument("'" + type + "' is not a type of blocks known here");
    const nb::gil_scoped_release released;
    kernels::read_ggml_rows(*found, {pointer<const uint8_t>(blocks), row_bytes, num_rows, num_blocks},
                            {pointer<uint8_t>(codes), pointer<uint8_t>(scales), pointer<uint8_t>(offsets),
                             pointer<uint8_t>(units)},
                            kernels::ThreadPool::instance());
}

}  // namespace

void bind_formats(nb::module_& module) {
    nb::class_<PackedFormat>(module, "PackedFormat")
        .def_static("floats", &float_format, nb::arg("is_bf16"))
        .def_static("quantized", &quantized_format, nb::arg("codes"), nb::arg("scales"), nb::arg("offset"),
                    nb::arg("group"));
    nb::class_<SourceMatrix>(module, "SourceAddresses")
        .def(
            "__init__",
            [](SourceMatrix* self, uintptr_t data, int64_t row_bytes, uintptr_t scales, uintptr_t offsets,
               uintptr_t units, int64_t scale_stride) {
                new (self) SourceMatrix{pointer<const char>(data), 0, row_bytes, pointer<const char>(scales),
                                        pointer<const char>(offsets), pointer<const char>(units), scale_stride};
            },
            nb::arg("data_address"), nb::arg("row_bytes"), nb::arg("scales_address") = 0,
            nb::arg("offsets_address") = 0, nb::arg("units_address") = 0, nb::arg("scale_stride") = 0);
    module.def("read_ggml_rows", &read_ggml_rows, nb::arg("type"), nb::arg("blocks_address"), nb::arg("row_bytes"),
               nb::arg("num_rows"), nb::arg("num_blocks"), nb::arg("codes_address"), nb::arg("scales_address"),
               nb::arg("offsets_address"), nb::arg("units_address"));
}

}  // namespace antiphon::bind

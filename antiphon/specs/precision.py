"""In which number formats weights are kept, keys and values cached, rows sent and products computed: four choices."""

from dataclasses import dataclass
from typing import Literal

from antiphon.specs.checked import checked
from antiphon.specs.device import ComputeDtype

StorageDtype = Literal["float32", "bfloat16", "float16", "fp8", "int8", "int4", "mxfp4", "nvfp4"]
WEIGHTS_ONLY: tuple[StorageDtype, ...] = ("int8", "int4", "mxfp4", "nvfp4")  # computed in bfloat16
# How an engine keeps keys and values: in the model's dtype, or in 8 bits with a float32 scale for each key and value.
KVStorage = Literal["auto", "int8", "fp8"]
KV_SCALE_BYTES = 4
BYTES_OF: dict[StorageDtype, float] = {
    **{"float32": 4, "bfloat16": 2, "float16": 2, "fp8": 1},
    "int8": 1 + 2 / 32,  # groups of 32, as `antiphon quantize` writes and GGUF's Q8_0 has them
    "int4": 0.5 + 2 / 128,  # GPTQ's and AWQ's usual group: a 16-bit scale for 128 weights
    "mxfp4": 0.5 + 1 / 32,  # OCP Microscaling Formats 1.0, section 5.2: an 8-bit scale for 32
    "nvfp4": 0.5 + 1 / 16,  # an 8-bit scale for 16
}


@checked("precision")
@dataclass(frozen=True, kw_only=True)
class PrecisionSpec:
    """`dispatch` is the format of rows on their way to the experts, `combine` of what comes back. `experts`: of the
    routed experts' weights, where it is not that of all others (None)."""

    weights: StorageDtype = "bfloat16"
    kv: StorageDtype = "bfloat16"
    dispatch: StorageDtype = "bfloat16"
    combine: StorageDtype = "bfloat16"
    compute: ComputeDtype = "bfloat16"
    experts: StorageDtype | None = None

    @property
    def weight_bytes(self) -> float:
        return BYTES_OF[self.weights]

    @property
    def expert_bytes(self) -> float:
        """Bytes of one element of a routed expert."""
        return BYTES_OF[self.experts or self.weights]

    @property
    def kv_bytes(self) -> float:
        return BYTES_OF[self.kv]

    @property
    def dispatch_bytes(self) -> float:
        return BYTES_OF[self.dispatch]

    @property
    def combine_bytes(self) -> float:
        return BYTES_OF[self.combine]

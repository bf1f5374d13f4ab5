"""In which number formats weights are kept, keys and values cached, rows sent and products computed: four choices."""

from dataclasses import dataclass
from typing import Literal

from antiphon.specs.checked import Count, checked
from antiphon.specs.device import ComputeDtype

StorageDtype = Literal["float32", "bfloat16", "float16", "fp8", "int8", "int4", "mxfp4", "nvfp4"]
WEIGHTS_ONLY: tuple[StorageDtype, ...] = ("int8", "int4", "mxfp4", "nvfp4")  # computed in bfloat16
# How an engine keeps keys and values: in the model's dtype, or in 8 bits with a float32 scale for each key and value.
KVStorage = Literal["auto", "int8", "fp8"]
KV_SCALE_BYTES = 4
WEIGHT_GROUP = 32
"""Columns that share a scale in int8 and int4, unless another number is given: of `serve --weights` and `antiphon
quantize`, which pack weights so, of plans, and of GGUF's Q8_0 and Q4_0."""
WEIGHT_SCALE_BYTES = 2  # a scale has the 16 bits of the weights that were rounded
BYTES_OF: dict[StorageDtype, float] = {
    **{"float32": 4, "bfloat16": 2, "float16": 2, "fp8": 1},
    "int8": 1 + WEIGHT_SCALE_BYTES / WEIGHT_GROUP,
    "int4": 0.5 + WEIGHT_SCALE_BYTES / WEIGHT_GROUP,
    "mxfp4": 0.5 + 1 / 32,  # OCP Microscaling Formats 1.0, section 5.2: an 8-bit scale for 32
    "nvfp4": 0.5 + 1 / 16,  # an 8-bit scale for 16
}


@checked("precision")
@dataclass(frozen=True, kw_only=True)
class PrecisionSpec:
    """`dispatch` is the format of rows on their way to the experts, `combine` of what comes back. `experts`: of the
    routed experts' weights, where it is not that of all others (None). `group`: columns of a scale in int8 and int4."""

    weights: StorageDtype = "bfloat16"
    kv: StorageDtype = "bfloat16"
    dispatch: StorageDtype = "bfloat16"
    combine: StorageDtype = "bfloat16"
    compute: ComputeDtype = "bfloat16"
    experts: StorageDtype | None = None
    group: Count = WEIGHT_GROUP

    @property
    def weight_bytes(self) -> float:
        return self._weight_bytes(self.weights)

    @property
    def expert_bytes(self) -> float:
        """Bytes of one element of a routed expert."""
        return self._weight_bytes(self.experts or self.weights)

    @property
    def plain_bytes(self) -> float:
        """Bytes of one element of what stays in floats when weights are rounded: embedding, head, norms, routers, and
        the up projections of latent attention."""
        return BYTES_OF["bfloat16" if self.weights in ("fp8", *WEIGHTS_ONLY) else self.weights]

    @property
    def kv_bytes(self) -> float:
        return BYTES_OF[self.kv]

    @property
    def dispatch_bytes(self) -> float:
        return BYTES_OF[self.dispatch]

    @property
    def combine_bytes(self) -> float:
        return BYTES_OF[self.combine]

    def _weight_bytes(self, storage: StorageDtype) -> float:
        codes = {"int8": 1.0, "int4": 0.5}.get(storage)
        return BYTES_OF[storage] if codes is None else codes + WEIGHT_SCALE_BYTES / self.group

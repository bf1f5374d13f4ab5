"""In which number formats weights are kept, keys and values cached, rows sent and products computed: four choices."""

from dataclasses import dataclass
from typing import Literal

from antiphon.base.errors import UserError
from antiphon.specs.device import ComputeDtype

StorageDtype = Literal["float32", "bfloat16", "float16", "fp8", "int4"]
BYTES_OF: dict[StorageDtype, float] = {"float32": 4, "bfloat16": 2, "float16": 2, "fp8": 1, "int4": 0.5}


@dataclass(frozen=True, kw_only=True)
class PrecisionSpec:
    """`dispatch` is the format of rows on their way to the experts, `combine` of what comes back."""

    weights: StorageDtype = "bfloat16"
    kv: StorageDtype = "bfloat16"
    dispatch: StorageDtype = "bfloat16"
    combine: StorageDtype = "bfloat16"
    compute: ComputeDtype = "bfloat16"

    def __post_init__(self) -> None:
        for name in ("weights", "kv", "dispatch", "combine"):
            if getattr(self, name) not in BYTES_OF:
                raise UserError(f"precision: {name} is {getattr(self, name)!r}: use one of {', '.join(BYTES_OF)}")

    @property
    def weight_bytes(self) -> float:
        return BYTES_OF[self.weights]

    @property
    def kv_bytes(self) -> float:
        return BYTES_OF[self.kv]

    @property
    def dispatch_bytes(self) -> float:
        return BYTES_OF[self.dispatch]

    @property
    def combine_bytes(self) -> float:
        return BYTES_OF[self.combine]

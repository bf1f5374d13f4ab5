"""What a device can do, as its maker states it, from TOML files, shipped or a user's own, and to JSON and back.

Peaks only. How much of a peak is reached belongs to `EfficiencySpec`, because it depends on the software and the
cluster. A file holds the fields of `DeviceSpec` and a table `[sources]` with one text per field: a shipped number
without a source is a fault that a test finds; a user's own file need not say. `flops_per_s` is a table by compute
dtype, DENSE rates; links are ONE direction (makers print both together); GB are decimal, as printed.
"""

from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, Literal

from antiphon.base.errors import UserError
from antiphon.specs.catalog import shipped_file
from antiphon.specs.strict_table import Positive, Table, read_table

ComputeDtype = Literal["float32", "bfloat16", "fp8", "fp4"]


@dataclass(frozen=True, kw_only=True)
class DeviceSpec:
    """One accelerator (or one CPU socket's share). All rates are per device and, for links, one direction.

    `flops_per_s`: dense peak by compute dtype; a dtype that is missing cannot be computed in.
    `scale_up_domain`: how many devices the scale-up link connects at most (8: one server; 72: GB200 NVL72; 1: none).
    `scale_up_spans_nodes`: whether that link leaves the server (NVL72), so that a domain may be larger than a node.
    `scale_up_mesh`: whether it is a wire of its own to each other device of a full domain, and no switch.
    `sustained`: fraction of the peak rates that is left at the clock a loaded device settles at. `num_processors`: how
    many parts work on tiles of a matrix product at a time (streaming multiprocessors); None: tiles are free; a GPU must
    say it.
    `price`: relative purchase price, NVIDIA L20 = 1 (MegaScale-Infer, Table 3); None where none is stated.
    `sources`: field name -> where its number is from.
    """

    name: str
    kind: Literal["gpu", "npu", "cpu"] = "gpu"
    memory_bytes: int
    memory_bytes_per_s: Positive
    flops_per_s: dict[ComputeDtype, Positive]
    scale_up_bytes_per_s: Positive
    scale_up_domain: int
    scale_out_bytes_per_s: Positive
    power_w: Positive
    price: Positive | None = None
    scale_up_spans_nodes: bool = False
    scale_up_mesh: bool = False
    sustained: float = 1.0
    num_processors: int | None = None
    sources: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in ("memory_bytes", "memory_bytes_per_s", "scale_up_bytes_per_s", "scale_out_bytes_per_s", "power_w"):
            if not getattr(self, name) > 0:
                raise UserError(f"device {self.name}: {name} is {getattr(self, name)}: it must be above 0")
        if self.scale_up_domain < 1:
            raise UserError(f"device {self.name}: scale_up_domain is {self.scale_up_domain}: it must be at least 1")
        if not self.flops_per_s or not all(rate > 0 for rate in self.flops_per_s.values()):
            raise UserError(f"device {self.name}: flops_per_s is {self.flops_per_s}: give at least one rate above 0")
        if not 0 < self.sustained <= 1:
            raise UserError(f"device {self.name}: sustained is {self.sustained}: it must be above 0 and at most 1")
        if self.num_processors is None and self.kind == "gpu":
            raise UserError(
                f"device {self.name}: num_processors is missing: add how many multiprocessors (compute units) the GPU "
                "has: times of products depend on it"
            )
        if self.num_processors is not None and self.num_processors < 1:
            raise UserError(f"device {self.name}: num_processors is {self.num_processors}: it must be at least 1")
        if self.price is not None and not self.price > 0:
            raise UserError(f"device {self.name}: price is {self.price}: it must be above 0")

    def peak_flops_per_s(self, dtype: ComputeDtype) -> float:
        """Dense peak in `dtype`; `UserError` if the device cannot compute in it."""
        if dtype not in self.flops_per_s:
            known = ", ".join(sorted(self.flops_per_s))
            raise UserError(f"{self.name} has no {dtype} arithmetic: compute in one of {known}")
        return self.flops_per_s[dtype]


def load_device(name_or_path: str | Path) -> DeviceSpec:
    """A shipped device (``"H20"``) or that of a TOML or JSON file; `UserError` names what is wrong and where."""
    table = read_table(shipped_file("device", name_or_path))
    for key in ("aliases", "summary", "source"):
        table.has(key)
    return device_from_table(table)


def device_from_table(table: Table) -> DeviceSpec:
    """The device a table describes; unknown keys, wrong types and sizes of zero or less are refused."""
    sources = table.optional_table("sources")
    given = {field.name: sources.text(field.name) for field in fields(DeviceSpec) if sources.has(field.name)}
    sources.finish()
    return table.read(DeviceSpec, sources=given)


def device_to_json(device: DeviceSpec) -> dict[str, Any]:
    """What `device_from_table` reads back as an equal device."""
    return {key: value for key, value in asdict(device).items() if value is not None}

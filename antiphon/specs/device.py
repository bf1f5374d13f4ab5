"""What a device can do, as its maker states it, from TOML files, shipped or a user's own, and to JSON and back.

Peaks only. How much of a peak is reached belongs to `EfficiencySpec`, because it depends on the software and the
cluster. A file holds the fields of `DeviceSpec` and a table `[sources]` with one text per field: a shipped number
without a source is a fault that a test finds; a user's own file need not say. `flops_per_s` is a table by compute
dtype, DENSE rates; links are ONE direction (makers print both together); GB are decimal, as printed.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

from pydantic import Field

from antiphon.base.errors import UserError
from antiphon.specs.catalog import LISTED, shipped_file
from antiphon.specs.checked import Count, Flag, Positive, Text, checked, did_you_mean, read, read_mapping

ComputeDtype = Literal["float32", "bfloat16", "fp8", "fp4"]


@checked("device")
@dataclass(frozen=True, kw_only=True)
class DeviceSpec:
    """One accelerator (or one CPU socket's share). All rates are per device and, for links, one direction.

    `flops_per_s`: dense peak by compute dtype; a dtype that is missing cannot be computed in.
    `scale_up_domain`: how many devices the scale-up link connects at most (8: one server; 72: GB200 NVL72; 1: none).
    `scale_up_spans_nodes`: whether that link leaves the server (NVL72), so that a domain may be larger than a node.
    `scale_up_mesh`: whether it is a wire of its own to each other device of a full domain, and no switch.
    `sustained`: fraction of the peak rates that is left at the clock a loaded device settles at. `num_processors`: how
    many parts work on tiles of a matrix product at a time (streaming multiprocessors); None: tiles are free, which no
    file of a GPU may say.
    `streamed`: fraction of `memory_bytes_per_s` that reads reach beside the cluster's efficiency, where a cluster's
    other devices reach more (CPUs beside GPUs); None: all of it.
    `price`: relative purchase price, NVIDIA L20 = 1 (MegaScale-Infer, Table 3); None where none is stated.
    `sources`: field name -> where its number is from.
    """

    name: Text
    kind: Literal["gpu", "npu", "cpu"] = "gpu"
    memory_bytes: Count
    memory_bytes_per_s: Positive
    flops_per_s: Annotated[dict[ComputeDtype, Positive], Field(min_length=1)]
    scale_up_bytes_per_s: Positive
    scale_up_domain: Count
    scale_out_bytes_per_s: Positive
    power_w: Positive
    price: Positive | None = None
    scale_up_spans_nodes: Flag = False
    scale_up_mesh: Flag = False
    sustained: Annotated[Positive, Field(le=1)] = 1.0
    num_processors: Count | None = None
    streamed: Annotated[Positive, Field(le=1)] | None = None
    sources: dict[str, Text] = field(default_factory=dict)

    def peak_flops_per_s(self, dtype: ComputeDtype) -> float:
        """Dense peak in `dtype`; `UserError` if the device cannot compute in it."""
        if dtype not in self.flops_per_s:
            known = ", ".join(sorted(self.flops_per_s))
            raise UserError(f"{self.name} has no {dtype} arithmetic: compute in one of {known}")
        return self.flops_per_s[dtype]


def load_device(name_or_path: str | Path) -> DeviceSpec:
    """A shipped device (``"H20"``) or that of a TOML or JSON file; `UserError` names what is wrong and where."""
    path = shipped_file("device", name_or_path)
    return device_from_json(read_mapping(path), str(path))


def device_from_json(mapping: Mapping[str, Any], where: str) -> DeviceSpec:
    """The device a mapping describes; unknown keys, wrong types and sizes of zero or less are refused."""
    values = {key: value for key, value in mapping.items() if key not in (*LISTED, "source")}
    if isinstance(rates := values.get("flops_per_s"), Mapping):  # in one order, whatever the file's
        values["flops_per_s"] = {name: rates[name] for name in get_args(ComputeDtype) if name in rates} | dict(rates)
    device = read(DeviceSpec, values, where)
    if device.num_processors is None and device.kind == "gpu":
        raise UserError(
            f"{where}: num_processors is missing: add how many multiprocessors (compute units) the GPU has, on which "
            "the times of products depend"
        )
    known = [field.name for field in fields(DeviceSpec)]
    if unknown := [name for name in device.sources if name not in known]:
        raise UserError(f"{where}: unknown key sources.{unknown[0]}: {did_you_mean(unknown[0], known)}")
    return device

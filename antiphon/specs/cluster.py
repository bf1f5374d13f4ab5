"""Which machines there are and how they are wired: groups of equal nodes, in any mix; from TOML files and to JSON.

The network has two levels. Devices of one scale-up domain reach each other through the scale-up link (NVLink, HCCS,
xGMI, PCIe, shared memory); anything farther goes through the nodes' NICs and one switched fabric with an
oversubscription.

    name = "mine"
    [[groups]]
    device = "H20"                 # a shipped device, a path, or a table with all of a device's fields
    num_nodes = 3
    devices_per_node = 8           # everything below may be left out: then the device's own numbers hold
    node_scale_out_bytes_per_s = 200e9
    price = 2.1
    [efficiency]                   # any of the fields of `EfficiencySpec`

Links are one direction. A group's `price` and `power_w` replace the device's. JSON holds the same keys, devices in
full. Rejected: one file of fields per group on the command line, which could not be kept or shared.

A device is what its maker states of it, peaks only. How much of a peak is reached belongs to `EfficiencySpec`, because
it depends on the software and the cluster. A device's file holds the fields of `DeviceSpec` and a table `[sources]`
with one text per field: a shipped number without a source is a fault that a test finds; a user's own file need not say.
`flops_per_s` is a table by compute dtype, DENSE rates; links are ONE direction (makers print both together); GB are
decimal, as printed.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

from pydantic import Field

from antiphon.base.errors import UserError
from antiphon.specs.catalog import LISTED, a_file_of, shipped_file
from antiphon.specs.checked import (
    Count,
    CountFromZero,
    Flag,
    NotNegative,
    Number,
    Positive,
    Share,
    Text,
    checked,
    describe,
    did_you_mean,
    is_number,
    placed,
    plain,
    read,
    read_mapping,
)

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
    with a_file_of("device", path):
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


Efficiency = Annotated[Positive, Field(le=1)]


@checked("efficiency")
@dataclass(frozen=True, kw_only=True)
class EfficiencySpec:
    """How much of the peaks a cluster's software reaches: ONE calibration per cluster, stated, shared by all that is
    computed for it.

    `gemm`: fraction of sustained FLOP/s of a large matrix product; `attention` the same for attention's own products.
    `memory`: fraction of memory bandwidth when streaming weights or KV. `scale_up`, `scale_out`: fraction of
    link bandwidth of a large message. `scale_up_half_bytes`, `scale_out_half_bytes`: message size at which half of that
    is reached (Util(x) = x / (x + half)). `kernel_s`: fixed time of one kernel (launch, tail); `tile_s`: what a wave of
    output tiles of a product takes to begin and end. `collective_s`: fixed time of one collective beyond the wire
    latency; `exchange_s`: of an all-to-all, or of one way of rows to their experts or back; `round_s`: of each round of
    a fused exchange, 0 where one kernel runs all rounds; `exchange_processors`: processors that this kernel holds in
    prefill. `layer_overhead_s`: what a layer costs beside what is modelled (norms, router, sampling's share).
    `memory_reserve`: fraction of device memory that is not for weights and KV (activations, workspace, runtime).
    `overlap`: fraction of hideable communication that really is hidden. `flat_rings`: whether collectives over several
    nodes run in one ring over all devices, as libraries do that know no levels. `source`: how these were found.
    """

    gemm: Efficiency = 0.88
    attention: Efficiency = 0.78
    memory: Efficiency = 0.88
    scale_up: Efficiency = 0.75
    scale_out: Efficiency = 0.92
    scale_up_half_bytes: NotNegative = 256e3
    scale_out_half_bytes: NotNegative = 2e3
    kernel_s: NotNegative = 2e-6
    tile_s: NotNegative = 1.3e-6
    collective_s: NotNegative = 10e-6
    exchange_s: NotNegative = 35e-6
    round_s: NotNegative = 0.0
    exchange_processors: CountFromZero = 24
    layer_overhead_s: NotNegative = 10e-6
    memory_reserve: Share = 0.1
    overlap: Share = 0.7
    flat_rings: Flag = False
    source: str = "default: set by published tables of kernels and exchanges (docs/calibration.md), fitted to no system"


@checked("nodes")
@dataclass(frozen=True, kw_only=True)
class NodeGroup:
    """`num_nodes` equal nodes of `devices_per_node` equal devices.

    `scale_up_domain`: devices that the scale-up link joins; more than `devices_per_node` when it spans nodes (NVL72).
    `node_scale_out_bytes_per_s`: all NICs of one node together, one direction; a device gets its even share.
    """

    device: DeviceSpec
    num_nodes: Count
    devices_per_node: Count
    scale_up_domain: Count
    scale_up_bytes_per_s: Positive
    node_scale_out_bytes_per_s: Positive

    @property
    def num_devices(self) -> int:
        return self.num_nodes * self.devices_per_node

    @property
    def scale_out_bytes_per_s(self) -> float:
        """One device's share of its node's NICs, one direction."""
        return self.node_scale_out_bytes_per_s / self.devices_per_node


def equal_nodes(
    device: DeviceSpec, num_nodes: int, in_node: int, domain: int, *, nics_bytes_per_s: float = 0.0
) -> NodeGroup:
    """Nodes of `in_node` devices with the device's own links, which join `domain` of them. `nics_bytes_per_s`: of all
    NICs of a node; 0: the device's, for each."""
    return NodeGroup(
        device=device,
        num_nodes=num_nodes,
        devices_per_node=in_node,
        scale_up_domain=domain,
        scale_up_bytes_per_s=device.scale_up_bytes_per_s,
        node_scale_out_bytes_per_s=nics_bytes_per_s or in_node * device.scale_out_bytes_per_s,
    )


@checked("cluster")
@dataclass(frozen=True, kw_only=True)
class ClusterSpec:
    """Groups of nodes on one fabric. `oversubscription` divides the fabric's bandwidth between nodes (1: none);
    `calibrated`: the day on which its efficiencies were found, YYYY-MM-DD, where they were."""

    name: Text
    groups: tuple[NodeGroup, ...]
    scale_up_latency_s: NotNegative = 2e-6
    scale_out_latency_s: NotNegative = 5e-6
    oversubscription: Annotated[Number, Field(ge=1)] = 1.0
    efficiency: EfficiencySpec = field(default_factory=EfficiencySpec)
    calibrated: str = ""
    source: str = ""

    def __post_init__(self) -> None:
        if self.calibrated and not re.fullmatch(r"\d{4}-\d\d-\d\d", self.calibrated):
            found = describe(self.calibrated)
            raise UserError(f"cluster {self.name}: calibrated is {found}: write a day, such as 2026-11-21")
        if not self.groups:
            raise UserError(f"cluster {self.name}: it has no nodes: give at least one group")
        names = [group.device.name for group in self.groups]
        if len(set(names)) != len(names):
            raise UserError(f"cluster {self.name}: groups {names} repeat a device: join the groups of equal devices")

    @property
    def num_devices(self) -> int:
        return sum(group.num_devices for group in self.groups)


DEVICES_PER_NODE = 8


def load_cluster(name_or_path: str | Path) -> ClusterSpec:
    """A shipped cluster by name, or that of a TOML or JSON file; `UserError` names what is wrong and where."""
    path = shipped_file("cluster", name_or_path)
    with a_file_of("cluster", path):
        return cluster_from_json(read_mapping(path), str(path), path.parent)


def cluster_from_json(mapping: Mapping[str, Any], where: str, folder: Path = Path()) -> ClusterSpec:
    """What `cluster_to_json` or a file says. `folder` is where a relative path of a device starts."""
    values = {key: value for key, value in mapping.items() if key not in LISTED}
    groups, efficiency = values.get("groups"), values.get("efficiency")
    if isinstance(groups, (list, tuple)):
        values["groups"] = [
            _group(group, f"{where}: groups[{number}]", folder) if isinstance(group, Mapping) else group
            for number, group in enumerate(groups)
        ]
    if isinstance(efficiency, Mapping) and efficiency:
        values["efficiency"] = {"source": f"stated in {where}: efficiency", **efficiency}
    return read(ClusterSpec, values, where)


def cluster_to_json(cluster: ClusterSpec) -> dict[str, Any]:
    """Plain JSON values, devices in full, so that a report needs no other file."""
    return {key: value for key, value in plain(cluster).items() if value != ""}


def _group(mapping: Mapping[str, Any], where: str, folder: Path) -> NodeGroup:
    """A group whose links are its device's own, where the mapping says nothing else."""
    values = {"devices_per_node": DEVICES_PER_NODE, **mapping}
    if "device" in values:
        given = {name: values.pop(name) for name in ("price", "power_w") if name in values}
        device = _device(values["device"], where, folder)
        sources = device.sources | dict.fromkeys(given, f"stated in {where}")
        with placed(where):
            device = replace(device, **given, sources=sources) if given else device
        values = {**_own_links(device, values["devices_per_node"]), **values, "device": device}
    return read(NodeGroup, values, where)


def _own_links(device: DeviceSpec, devices_per_node: Any) -> dict[str, Any]:
    if not is_number(devices_per_node):
        return {}
    domain = device.scale_up_domain
    return {
        "scale_up_domain": domain if device.scale_up_spans_nodes else min(domain, devices_per_node),
        "scale_up_bytes_per_s": device.scale_up_bytes_per_s,
        "node_scale_out_bytes_per_s": devices_per_node * device.scale_out_bytes_per_s,
    }


def _device(value: Any, where: str, folder: Path) -> DeviceSpec:
    if isinstance(value, Mapping):
        return device_from_json(value, f"{where}: device")
    with placed(where):
        if not isinstance(value, str) or not value:
            raise UserError(f"device is {describe(value)}: it must be a name, a path or an object")
        return load_device(folder / value if (folder / value).is_file() else value)

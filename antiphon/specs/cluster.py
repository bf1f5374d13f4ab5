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
"""

import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from antiphon.base.errors import UserError
from antiphon.specs.catalog import shipped_file
from antiphon.specs.device import DeviceSpec, device_from_table, device_to_json, load_device
from antiphon.specs.strict_table import Positive, Table, read_table

_NOT_NEGATIVE = (
    "scale_up_half_bytes",
    "scale_out_half_bytes",
    "kernel_s",
    "tile_s",
    "collective_s",
    "exchange_s",
    "round_s",
    "exchange_processors",
    "layer_overhead_s",
)


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

    gemm: float = 0.88
    attention: float = 0.78
    memory: float = 0.88
    scale_up: float = 0.75
    scale_out: float = 0.92
    scale_up_half_bytes: float = 256e3
    scale_out_half_bytes: float = 2e3
    kernel_s: float = 2e-6
    tile_s: float = 1.3e-6
    collective_s: float = 10e-6
    exchange_s: float = 35e-6
    round_s: float = 0.0
    exchange_processors: int = 24
    layer_overhead_s: float = 10e-6
    memory_reserve: float = 0.1
    overlap: float = 0.9
    flat_rings: bool = False
    source: str = "default: set by published tables of kernels and exchanges (docs/calibration.md), fitted to no system"

    def __post_init__(self) -> None:
        for name in ("gemm", "attention", "memory", "scale_up", "scale_out"):
            if not 0 < getattr(self, name) <= 1:
                raise UserError(f"efficiency: {name} is {getattr(self, name)}: it must be above 0 and at most 1")
        for name in _NOT_NEGATIVE:
            if not getattr(self, name) >= 0:
                raise UserError(f"efficiency: {name} is {getattr(self, name)}: it must be at least 0")
        for name in ("memory_reserve", "overlap"):
            if not 0 <= getattr(self, name) <= 1:
                raise UserError(f"efficiency: {name} is {getattr(self, name)}: it must be from 0 to 1")


@dataclass(frozen=True, kw_only=True)
class NodeGroup:
    """`num_nodes` equal nodes of `devices_per_node` equal devices.

    `scale_up_domain`: devices that the scale-up link joins; more than `devices_per_node` when it spans nodes (NVL72).
    `node_scale_out_bytes_per_s`: all NICs of one node together, one direction; a device gets its even share.
    """

    device: DeviceSpec
    num_nodes: int
    devices_per_node: int
    scale_up_domain: int
    scale_up_bytes_per_s: Positive
    node_scale_out_bytes_per_s: Positive

    def __post_init__(self) -> None:
        for name in ("num_nodes", "devices_per_node", "scale_up_domain"):
            if getattr(self, name) < 1:
                raise UserError(f"nodes of {self.device.name}: {name} is {getattr(self, name)}: it must be at least 1")
        for name in ("scale_up_bytes_per_s", "node_scale_out_bytes_per_s"):
            if not getattr(self, name) > 0:
                raise UserError(f"nodes of {self.device.name}: {name} is {getattr(self, name)}: it must be above 0")

    @property
    def num_devices(self) -> int:
        return self.num_nodes * self.devices_per_node

    @property
    def scale_out_bytes_per_s(self) -> float:
        """One device's share of its node's NICs, one direction."""
        return self.node_scale_out_bytes_per_s / self.devices_per_node


@dataclass(frozen=True, kw_only=True)
class ClusterSpec:
    """Groups of nodes on one fabric. `oversubscription` divides the fabric's bandwidth between nodes (1: none);
    `calibrated`: the day on which its efficiencies were found, YYYY-MM-DD, where they were."""

    name: str
    groups: tuple[NodeGroup, ...]
    scale_up_latency_s: float = 2e-6
    scale_out_latency_s: float = 5e-6
    oversubscription: float = 1.0
    efficiency: EfficiencySpec = field(default_factory=EfficiencySpec)
    calibrated: str = ""
    source: str = ""

    def __post_init__(self) -> None:
        if self.calibrated and not re.fullmatch(r"\d{4}-\d\d-\d\d", self.calibrated):
            raise UserError(f"cluster {self.name}: calibrated is {self.calibrated!r}: write a day, such as 2026-11-21")
        if not self.groups:
            raise UserError(f"cluster {self.name}: it has no nodes: give at least one group")
        names = [group.device.name for group in self.groups]
        if len(set(names)) != len(names):
            raise UserError(f"cluster {self.name}: groups {names} repeat a device: join the groups of equal devices")
        if not self.oversubscription >= 1:
            raise UserError(f"cluster {self.name}: oversubscription is {self.oversubscription}: it must be at least 1")
        for name in ("scale_up_latency_s", "scale_out_latency_s"):
            if not getattr(self, name) >= 0:
                raise UserError(f"cluster {self.name}: {name} is {getattr(self, name)}: it must be at least 0")

    @property
    def num_devices(self) -> int:
        return sum(group.num_devices for group in self.groups)


DEVICES_PER_NODE = 8


def load_cluster(name_or_path: str | Path) -> ClusterSpec:
    """A shipped cluster by name, or that of a TOML or JSON file; `UserError` names what is wrong and where."""
    path = shipped_file("cluster", name_or_path)
    return cluster_from_table(read_table(path), path.parent)


def cluster_from_table(table: Table, folder: Path) -> ClusterSpec:
    """`folder` is where a relative path of a device starts."""
    for key in ("aliases", "summary"):  # of the shipped files, for lists
        table.has(key)
    groups = tuple(_group(group, folder) for group in table.tables("groups"))
    return table.read(ClusterSpec, groups=groups, efficiency=_efficiency(table))


def cluster_to_json(cluster: ClusterSpec) -> dict[str, Any]:
    """Plain JSON values, devices in full, so that a report needs no other file."""
    written = asdict(cluster)
    for group, spec in zip(written["groups"], cluster.groups, strict=True):
        group["device"] = device_to_json(spec.device)
    written["groups"] = list(written["groups"])
    return {key: value for key, value in written.items() if value != ""}


def _group(table: Table, folder: Path) -> NodeGroup:
    """A group whose links are its device's own, where the table says nothing else."""
    device = _with_overrides(table, _device(table, folder))
    devices_per_node = table.whole("devices_per_node", DEVICES_PER_NODE)
    domain = device.scale_up_domain
    own: dict[str, Any] = {
        "devices_per_node": devices_per_node,
        "scale_up_domain": domain if device.scale_up_spans_nodes else min(domain, devices_per_node),
        "scale_up_bytes_per_s": device.scale_up_bytes_per_s,
        "node_scale_out_bytes_per_s": devices_per_node * device.scale_out_bytes_per_s,
    }
    return table.read(NodeGroup, device=device, **{name: value for name, value in own.items() if not table.has(name)})


def _device(table: Table, folder: Path) -> DeviceSpec:
    if isinstance(table.raw("device"), Mapping):
        return device_from_table(table.table("device"))
    name = table.text("device")
    beside = folder / name
    return table.build(load_device, name_or_path=beside if beside.is_file() else name)


def _with_overrides(table: Table, device: DeviceSpec) -> DeviceSpec:
    given = [name for name in ("price", "power_w") if table.has(name)]
    return replace(
        device,
        price=table.number("price", above=0) if "price" in given else device.price,
        power_w=table.number("power_w", device.power_w, above=0),
        sources=device.sources | dict.fromkeys(given, f"stated in {table.where}"),
    )


def _efficiency(cluster: Table) -> EfficiencySpec:
    table = cluster.optional_table("efficiency")
    stated = not table.is_empty and not table.has("source")
    return table.read(EfficiencySpec, **({"source": f"stated in {table.where}"} if stated else {}))

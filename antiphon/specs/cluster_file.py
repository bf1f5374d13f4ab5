"""Clusters from TOML files, shipped or a user's own, and to JSON and back.

    name = "mine"
    [[groups]]
    device = "H20"                 # a shipped device, a path, or a table with all of a device's fields
    num_nodes = 3
    devices_per_node = 8           # everything below may be left out: then the device's own numbers hold
    node_scale_out_bytes_per_s = 200e9
    price = 2.1
    [efficiency]                   # any of the fields of `EfficiencySpec`

Links are one direction. A group's `price` and `power_w` replace the device's. JSON holds the same keys, devices in
full. Rejected: one file of fields per group on the command line, which nobody could keep or share.
"""

from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from antiphon.specs.catalog import shipped_file
from antiphon.specs.cluster import ClusterSpec, EfficiencySpec, NodeGroup
from antiphon.specs.device import DeviceSpec
from antiphon.specs.device_file import device_from_table, device_to_json, load_device
from antiphon.specs.strict_table import Table, read_table

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

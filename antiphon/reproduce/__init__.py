"""The papers' figures and tables, theirs beside ours: rows as data, each with the function that computes our value.

Here: what is shipped and many rows ask for, read once.
"""

from functools import cache

from antiphon.models.config import load_model_spec
from antiphon.specs.catalog import shipped_model_config
from antiphon.specs.cluster import ClusterSpec, DeviceSpec, NodeGroup, load_cluster, load_device
from antiphon.specs.model import ModelSpec
from antiphon.specs.workload import load_workload

shipped_cluster, shipped_device, shipped_workload = cache(load_cluster), cache(load_device), cache(load_workload)


@cache
def shipped_model(name: str) -> ModelSpec:
    """A model that is shipped, read once."""
    return load_model_spec(shipped_model_config(name))


def cluster_of(
    device: DeviceSpec, num_nodes: int, domain: int = 8, *, in_node: int = 8, nics: float = 0.0
) -> ClusterSpec:
    """Nodes of `in_node` devices with the device's own links, which join `domain` of them. `nics`: bytes per second of
    all NICs of a node; 0: the device's, for each."""
    group = NodeGroup(
        device=device,
        num_nodes=num_nodes,
        devices_per_node=in_node,
        scale_up_domain=domain,
        scale_up_bytes_per_s=device.scale_up_bytes_per_s,
        node_scale_out_bytes_per_s=nics or in_node * device.scale_out_bytes_per_s,
    )
    return ClusterSpec(name=device.name, groups=(group,))

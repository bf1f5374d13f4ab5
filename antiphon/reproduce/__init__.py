"""The papers' figures and tables, theirs beside ours: rows as data, each with the function that computes our value.

Here: what is shipped and many rows ask for, read once.
"""

from functools import cache

from antiphon.cost.network import Network, network
from antiphon.models.planned import load_planned_model
from antiphon.specs.catalog import shipped_file
from antiphon.specs.cluster import ClusterSpec, DeviceSpec, equal_nodes, load_cluster, load_device
from antiphon.specs.model import ModelSpec
from antiphon.specs.workload import load_workload

shipped_cluster, shipped_device, shipped_workload = cache(load_cluster), cache(load_device), cache(load_workload)


@cache
def shipped_model(name: str) -> ModelSpec:
    """A model that is shipped, read once."""
    return load_planned_model(shipped_file("model", name)).spec


def cluster_of(
    device: DeviceSpec, num_nodes: int, domain: int = 8, *, in_node: int = 8, nics: float = 0.0
) -> ClusterSpec:
    """A cluster of `equal_nodes`, called as its device."""
    group = equal_nodes(device, num_nodes, in_node, domain, nics_bytes_per_s=nics)
    return ClusterSpec(name=device.name, groups=(group,))


def shipped_network(name: str) -> Network:
    """The network of the first nodes of a cluster that is shipped."""
    cluster = shipped_cluster(name)
    return network(cluster, cluster.groups[0])

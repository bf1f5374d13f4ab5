"""Models, clusters and workloads that are shipped, read once."""

from functools import cache

from antiphon.models.config import load_model_spec
from antiphon.specs.catalog import shipped_model_config
from antiphon.specs.cluster import ClusterSpec, load_cluster
from antiphon.specs.device import DeviceSpec, load_device
from antiphon.specs.model import ModelSpec
from antiphon.specs.workload import WorkloadSpec, load_workload


@cache
def model(name: str) -> ModelSpec:
    return load_model_spec(shipped_model_config(name))


@cache
def cluster(name: str) -> ClusterSpec:
    return load_cluster(name)


@cache
def device(name: str) -> DeviceSpec:
    return load_device(name)


@cache
def workload(name: str) -> WorkloadSpec:
    return load_workload(name)

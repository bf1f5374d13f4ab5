"""Models, clusters and workloads that are shipped, read once."""

from functools import cache

from antiphon.models.config import load_model_spec
from antiphon.specs.catalog import shipped_model_config
from antiphon.specs.cluster import load_cluster
from antiphon.specs.device import load_device
from antiphon.specs.model import ModelSpec
from antiphon.specs.workload import load_workload


@cache
def model(name: str) -> ModelSpec:
    return load_model_spec(shipped_model_config(name))


cluster, device, workload = cache(load_cluster), cache(load_device), cache(load_workload)

"""The papers' figures and tables, theirs beside ours: rows as data, each with the function that computes our value.

Here: what is shipped and many rows ask for, read once.
"""

from functools import cache

from antiphon.models.config import load_model_spec
from antiphon.specs.catalog import shipped_model_config
from antiphon.specs.cluster import load_cluster
from antiphon.specs.device import load_device
from antiphon.specs.model import ModelSpec
from antiphon.specs.workload import load_workload

shipped_cluster, shipped_device, shipped_workload = cache(load_cluster), cache(load_device), cache(load_workload)


@cache
def shipped_model(name: str) -> ModelSpec:
    """A model that is shipped, read once."""
    return load_model_spec(shipped_model_config(name))

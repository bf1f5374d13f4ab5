"""MegaScale-Infer's deployments as our planner sees them: plans of a layout, the same plan with other m or attention
DP.

Micro-batch sizes are the planner's: the largest under memory and the 150 ms per token. "vLLM" and "TensorRT-LLM" are
one and the same here: the model on TP 8, with PP 2 over two nodes for Scaled-MoE (section 7.2), all kernels as ours.
"""

from dataclasses import dataclass, replace
from functools import cache

import numpy as np

from antiphon.planner.outcome import outcome_at
from antiphon.planner.search import evaluate_phase, settings_of
from antiphon.planner.setting import SearchLimits, Setting
from antiphon.planner.table import CandidateTable, Outcome
from antiphon.reproduce import shipped
from antiphon.specs.cluster import ClusterSpec
from antiphon.specs.plan import Layout, Objective

AMPERE, MIXED = "msi-ampere", "msi-hetero"
MODELS = ("mixtral-8x22b", "dbrx", "scaled-moe")
NODE = 8
BASELINE_PP = {"mixtral-8x22b": 1, "dbrx": 1, "scaled-moe": 2}
PING_PONG = 3  # micro-batches of Figure 13, and Algorithm 1's least


@dataclass(frozen=True)
class Found:
    """One candidate of a table."""

    setting: Setting
    table: CandidateTable
    index: int

    def alone(self, *, micro_batches: int | None = None, attention_dp: int | None = None) -> Outcome:
        """One instance of it, its micro-batch size kept, with other numbers of micro-batches or attention workers."""
        picked = np.array([self.index])
        one = self.table.candidates.take(picked).with_batch(self.table.outcome.batch[picked])
        if micro_batches is not None:
            one = replace(one, micro_batches=np.array([micro_batches]))
        if attention_dp is not None:
            one = replace(one, attention_dp=np.array([attention_dp]))
        return outcome_at(self.setting, one, np.ones(1, dtype=np.int64))

    def devices(self) -> tuple[str, str]:
        """(kind of attention, kind of experts)."""
        return str(self.table.attention_device[self.index]), str(self.table.expert_device[self.index])


@cache
def best(
    model: str,
    layout: Layout,
    cluster_name: str = AMPERE,
    objective: Objective = "per-gpu",
    limits: SearchLimits | None = None,
    kind: str = "",
) -> Found | None:
    """The planner's best candidate of `layout`, on devices of `kind` alone if given; None if there is none."""
    cluster = shipped.cluster(cluster_name)
    setting = settings_of(
        shipped.model(model),
        only(cluster, kind) if kind else cluster,
        shipped.workload("msi-production"),
        objective=objective,
        limits=limits,
    )["decode"]
    table = evaluate_phase(setting, (layout,))
    index = table.best(objective)
    return None if index is None else Found(setting, table, index)


def only(cluster: ClusterSpec, kind: str) -> ClusterSpec:
    """The cluster without its other devices."""
    return replace(cluster, groups=tuple(group for group in cluster.groups if group.device.name == kind))


def score(found: Found | None, objective: Objective = "per-gpu") -> float:
    """Tokens/s per GPU or price; 0 if there is no such plan."""
    return 0.0 if found is None else float(found.table.score(objective)[found.index])


def colocated(model: str, cluster_name: str = AMPERE, objective: Objective = "per-gpu", kind: str = "") -> Found | None:
    """TP over the node (and PP where one node is too small): how the baselines are deployed."""
    pp = BASELINE_PP[model] if not kind or kind == "H20" else None
    limits = SearchLimits(attention_tp=(NODE,), expert_tp=(NODE,), pp=() if pp is None else (pp,))
    return best(model, "tp_pp", cluster_name, objective, limits, kind)


def throughput(found: Found, micro_batches: int) -> float:
    """Tokens per second of one instance with that many micro-batches of the plan's size."""
    return float(found.alone(micro_batches=micro_batches).capacity[0])

"""Deployments of others, pinned as they are described and asked of the planner's evaluator with its defaults.

Nothing in the cost model was chosen by them: its defaults come from tables of kernels and exchanges alone
(docs/calibration.md). Weights, arithmetic and rows to experts are in FP8, keys and values and rows back in BF16 unless
a deployment says otherwise; experts are equally popular.

Rejected: rows of `claims`. Those belong to four papers, whose clusters have calibrations of their own.
"""

from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Literal

import numpy as np

from antiphon.planner.outcome import outcome_at
from antiphon.planner.search import evaluate_phase, settings_of
from antiphon.planner.setting import SearchLimits
from antiphon.reproduce import shipped
from antiphon.specs.checked import CountFromZero, NotNegative, Positive, read, read_mapping
from antiphon.specs.cluster import ClusterSpec, NodeGroup
from antiphon.specs.plan import PhaseName
from antiphon.specs.precision import PrecisionSpec
from antiphon.specs.workload import LengthSpec, WorkloadSpec

WITHIN = 0.25
GPUS = 8
DATA = Path(__file__).parent / "data" / "deployments.toml"


@dataclass(frozen=True, kw_only=True)
class Deployment:
    """One deployment of nodes of 8, attention on `tp` GPUs and data-parallel beyond. `rows_each`: sequences in flight
    or tokens of a pass on one GPU. `reason`: why ours is farther off than `WITHIN`, if it is."""

    id: str
    what: str
    source: str
    reason: str = ""
    device: str
    nodes: int
    node_scale_out_bytes_per_s: NotNegative = 0.0
    phase: PhaseName
    prompt: int
    output: int = 1
    tp: int = 1
    rows_each: int
    draft_tokens: CountFromZero = 0
    accept_rate: float = 0.0
    overlapped: bool = True
    kv: Literal["bfloat16", "fp8"] = "bfloat16"
    theirs: Positive
    per: Literal["node", "GPU"]

    def ours(self) -> float:
        """Tokens per second of a node or GPU."""
        device = shipped.device(self.device)
        group = NodeGroup(
            device=device,
            num_nodes=self.nodes,
            devices_per_node=GPUS,
            scale_up_domain=GPUS,
            scale_up_bytes_per_s=device.scale_up_bytes_per_s,
            node_scale_out_bytes_per_s=self.node_scale_out_bytes_per_s or GPUS * device.scale_out_bytes_per_s,
        )
        num_devices = self.nodes * GPUS
        workload = WorkloadSpec(
            input_tokens=LengthSpec(median=self.prompt),
            output_tokens=LengthSpec(median=self.output),
            draft_tokens=self.draft_tokens,
            accept_rate=self.accept_rate,
        )
        limits = SearchLimits(
            attention_tp=(self.tp,),
            attention_dp=(num_devices // self.tp,),
            expert_tp=(self.tp,),
            pp=(1,),
            overlapped=self.overlapped,
            extra_slots=(0,),
        )
        precision = PrecisionSpec(weights="fp8", compute="fp8", dispatch="fp8", kv=self.kv)
        cluster = ClusterSpec(name=self.id, groups=(group,))
        model = shipped.model("deepseek-v3")
        settings = settings_of(model, cluster, workload, phases=(self.phase,), precision=precision, limits=limits)
        setting = settings[self.phase]
        found = evaluate_phase(setting, ("hybrid", "tp_pp", "dp_ep")).candidates
        assert len(found) == 1, f"{self.id}: {len(found)} candidates"
        one = found.with_batch(np.array([self.rows_each * self.tp]))
        rate = float(outcome_at(setting, one, np.ones(1, dtype=np.int64)).capacity[0])
        return rate / (self.nodes if self.per == "node" else num_devices)


@cache
def deployments() -> tuple[tuple[Deployment, float], ...]:
    """All of the file, each with our value."""
    found = [read(Deployment, table, str(DATA)) for table in read_mapping(DATA)["deployments"]]
    return tuple((deployment, deployment.ours()) for deployment in found)


def section() -> str:
    """The section of docs/reproduction.md about published deployments."""
    rows = deployments()
    close = sum(abs(ours / one.theirs - 1) <= WITHIN for one, ours in rows)
    lines = [
        "## Deployments that chose nothing\n",
        "Layouts that others run and describe, pinned and asked of the planner with its defaults, which come from",
        "tables of kernels and exchanges alone (`docs/calibration.md`). Tokens per second. After a first comparison",
        "two rules were added, with values from DeepEP's documentation: prefill's exchange kernels hold 24 processors,",
        "and decode sends no rows once per node.\n",
        f"{close} of {len(rows)} within {WITHIN:.0%}.\n",
        "| id | what | source | theirs | ours | error |",
        "| --- | --- | --- | ---: | ---: | ---: |",
    ]
    for one, ours in rows:
        cells = f"`{one.id}` | {one.what} | {one.source} | {one.theirs:,.0f} per {one.per} | {ours:,.0f}"
        lines.append(f"| {cells} | {ours / one.theirs - 1:+.0%} |")
    far = [one for one, ours in rows if abs(ours / one.theirs - 1) > WITHIN]
    lines += [""] if far else []
    lines += [f"- `{one.id}`: {' '.join(one.reason.split())}" for one in far]
    return "\n".join(lines) + "\n"

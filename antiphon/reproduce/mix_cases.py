"""MixServe's evaluation as our planner sees it: the layouts of its Table II and Figure 11 on both clusters.

Not stated in the paper and taken here, for all rows:
1. Sixteen requests are in flight (the maximum batch size), spread over the DP ranks; TP+PP passes them through its
   stages as one batch. Contexts and prompts are those of the workload files (ShareGPT's published means).
2. TTFT is eq. 9 without waiting: a pass with the prompts of all sixteen. At 2 to 8 requests/s and the printed ITL every
   configuration is over capacity, so that eq. 7 has no finite wait.
3. Throughput is eq. 11 times sixteen. DP+EP does not share rows out among a TP group (eq. 12); hybrid TP-EP does (eq.
   13). No layout sends rows once per node, and none but the
   fused one hides them.
   A pass takes whole prompts, so DP ranks wait for the one with the longest.
4. DeepSeek-R1 in its published FP8 on the H20, in BF16 on the 910B, which has no FP8.
"""

from dataclasses import dataclass, replace
from functools import cache

import numpy as np

from antiphon.planner.candidates import Candidates
from antiphon.planner.search import evaluate_phase, settings_of
from antiphon.planner.setting import SearchLimits, Setting
from antiphon.planner.step_times import StepTimes, step_times
from antiphon.reproduce import shipped
from antiphon.reproduce.mix_equations import throughput
from antiphon.specs.plan import Layout, PhaseName
from antiphon.specs.precision import PrecisionSpec

ASCEND, H20 = "mix-ascend", "mix-h20"
R1, QWEN = "deepseek-r1", "qwen3-235b-a22b"
WORKLOAD = "mix-sharegpt-4"
IN_FLIGHT = 16


@dataclass(frozen=True, kw_only=True)
class Case:
    """One configuration of parallel degrees. `fused`: the collectives of hybrid TP-EP overlap."""

    layout: Layout
    attention_tp: int
    attention_dp: int
    expert_tp: int
    pp: int = 1
    fused: bool = True


def hybrid(attention_tp: int, attention_dp: int, expert_tp: int, *, fused: bool = True) -> Case:
    return Case(layout="hybrid", attention_tp=attention_tp, attention_dp=attention_dp, expert_tp=expert_tp, fused=fused)


def dp_ep(attention_tp: int, attention_dp: int) -> Case:
    return Case(layout="dp_ep", attention_tp=attention_tp, attention_dp=attention_dp, expert_tp=1)


CASES: dict[str, dict[str, Case]] = {
    ASCEND: {
        "TP+PP": Case(layout="tp_pp", attention_tp=8, attention_dp=1, expert_tp=8, pp=4),
        "DP+EP TP8": dp_ep(8, 4),
        "DP+EP TP4": dp_ep(4, 8),
        "d_DP = d_EP": hybrid(8, 4, 8),
        "d_DP > d_EP": hybrid(4, 8, 8),
        "d_DP < d_EP": hybrid(8, 4, 4),
    },
    H20: {
        "TP+PP": Case(layout="tp_pp", attention_tp=8, attention_dp=1, expert_tp=8, pp=2),
        "DP+EP TP8": dp_ep(8, 2),
        "DP+EP TP4": dp_ep(4, 4),
        "Tutel TP8": hybrid(8, 2, 8, fused=False),
        "Tutel TP4": hybrid(4, 4, 4, fused=False),
        "d_DP = d_EP": hybrid(8, 2, 8),
        "d_DP > d_EP": hybrid(4, 4, 8),
        "d_DP < d_EP": hybrid(8, 2, 4),
    },
}
MIXSERVE = {ASCEND: "d_DP = d_EP", H20: "d_DP < d_EP"}
"""What the paper's own search takes (Figure 11)."""


@cache
def _prepared(model: str, cluster_name: str, case: Case, phase: PhaseName) -> tuple[Setting, Candidates]:
    limits = SearchLimits(
        attention_tp=(case.attention_tp,),
        attention_dp=(case.attention_dp,),
        expert_tp=(case.expert_tp,),
        pp=(case.pp,),
        collectives="fused" if case.fused else "synchronous",
        sliced=case.layout == "hybrid",
        overlapped=False,
        per_node=False,
        whole_prompts=True,
        extra_slots=(0,),
    )
    precision = PrecisionSpec(weights="fp8") if (model, cluster_name) == (R1, H20) else PrecisionSpec()
    workload = replace(shipped.workload(WORKLOAD), requests_per_s=None)
    setting = settings_of(
        shipped.model(model),
        shipped.cluster(cluster_name),
        workload,
        phases=(phase,),
        precision=precision,
        limits=limits,
    )[phase]
    candidates = evaluate_phase(setting, (case.layout,)).candidates
    assert len(candidates) == 1, f"{model} on {cluster_name}: {len(candidates)} candidates for {case}"
    return setting, candidates


def pass_times(model: str, cluster_name: str, name: str, phase: PhaseName, *, fused: bool | None = None) -> StepTimes:
    """One pass of all sixteen: a token each (decode), or their prompts (prefill)."""
    case = CASES[cluster_name][name]
    if fused is not None:
        case = replace(case, fused=fused)
    setting, candidates = _prepared(model, cluster_name, case, phase)
    each = IN_FLIGHT / case.attention_dp
    if phase == "prefill":
        each *= setting.lengths.prompt
    return step_times(setting, candidates.with_batch(np.array([max(round(each), 1)])))


def itl_s(model: str, cluster_name: str, name: str, *, fused: bool | None = None) -> float:
    """Eq. 10."""
    return float(pass_times(model, cluster_name, name, "decode", fused=fused).step_s[0])


def ttft_s(model: str, cluster_name: str, name: str, *, fused: bool | None = None) -> float:
    """Eq. 9 without its wait."""
    return float(pass_times(model, cluster_name, name, "prefill", fused=fused).step_s[0])


def tokens_per_s(model: str, cluster_name: str, name: str, *, fused: bool | None = None) -> float:
    """Eq. 11, of sixteen requests side by side."""
    workload = shipped.workload(WORKLOAD)
    prefill_s = ttft_s(model, cluster_name, name, fused=fused)
    decode_s = itl_s(model, cluster_name, name, fused=fused)
    one = throughput(workload.input_tokens.mean, workload.output_tokens.mean, 0.0, prefill_s, decode_s)
    return IN_FLIGHT * float(one)

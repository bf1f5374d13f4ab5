"""The cost model held against what others published: kernels and exchanges one by one, then whole deployments.

Every table of kernels and exchanges is asked of the functions the planner uses, with the defaults of `EfficiencySpec`,
on the device it was measured on. No part is fitted to whole deployments. Both stand in `data/published.toml`, with
their sources; a table:

    [[tables]]
    name = "deepep-normal"
    kind = "rows sent once per node"      # which function of the cost model answers for it
    device = "H800"
    source = "title, address, on what"
    columns = ["way", "ranks", "gb_per_s"]
    rows = [["dispatch", 8, 153]]

Numbers stand as they are printed, in the printed unit. Rejected: tables that the cost model reads instead of a formula.
They know some twenty shapes of two devices; a formula with a few constants that meets them within their spread also
answers for the others. Rejected: comparing whole layers only. Two wrong parts then cancel, unseen.

Deployments are pinned as they are described and asked of the planner's evaluator. Nothing in the cost model was chosen
by them (docs/calibration.md). Weights, arithmetic and rows to experts are in FP8, keys and values and rows back in BF16
unless a deployment says otherwise; experts are equally popular. Rejected: rows of `claims`. Those belong to four
papers, whose clusters have calibrations of their own.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Literal

import numpy as np

from antiphon.base.units import format_bytes
from antiphon.cost.exchange import Spread, direct, expected_distinct, once_per_node
from antiphon.cost.layers import query_tile
from antiphon.cost.network import Network, network
from antiphon.cost.roofline import Parts, grouped_gemm, kernel, roof, roofs
from antiphon.cost.training.setup import TrainingPrecision
from antiphon.planner.candidates import Pins
from antiphon.planner.outcome import outcome_at
from antiphon.planner.search import evaluate_phase, settings_of
from antiphon.planner.setting import SearchLimits
from antiphon.planner.training import plan_training
from antiphon.reproduce import cluster_of, shipped_cluster, shipped_device, shipped_model
from antiphon.specs.checked import CountFromZero, NotNegative, Positive, read, read_mapping
from antiphon.specs.cluster import DeviceSpec, EfficiencySpec, load_device
from antiphon.specs.model import PrecisionSpec, StorageDtype
from antiphon.specs.plan import PhaseName
from antiphon.specs.workload import UNKNOWN_LOADS, LengthSpec, WorkloadSpec

DATA = Path(__file__).parent / "data" / "published.toml"
MeasuredKind = Literal[
    "rows sent direct",
    "rows sent once per node",
    "all-to-all of blocks",
    "products",
    "absorbed attention",
    "whole attention",
]
Cell = str | int | float


@dataclass(frozen=True, kw_only=True)
class MeasuredTable:
    """One published table. `device`: name of the shipped device it was measured on."""

    name: str
    summary: str
    kind: MeasuredKind
    device: str
    source: str
    columns: tuple[str, ...]
    rows: tuple[tuple[Cell, ...], ...]

    def each(self) -> list[dict[str, Cell]]:
        """Its rows, by column."""
        return [dict(zip(self.columns, row, strict=True)) for row in self.rows]


@cache
def measured() -> tuple[MeasuredTable, ...]:
    """All of the file, by name."""
    return tuple(read(MeasuredTable, table, str(DATA)) for table in read_mapping(DATA)["tables"])


WITHIN = 0.15
FP8_ROW, BF16_ROW = 7168 * (1 + 4 / 128), 7168 * 2.0  # FP8 with one 4-byte scale for each 128 elements
LOW_LATENCY_TOKENS, NORMAL_TOKENS = 128, 4096
Case = dict[str, Cell]
Answer = tuple[str, float, Parts]
"""What was measured, their time, and ours in parts."""


@dataclass(frozen=True, kw_only=True)
class Compared:
    """One row of a published table: what was measured, their time and ours."""

    what: str
    theirs_s: float
    ours_s: float

    @property
    def error(self) -> float:
        """Ours over theirs, less one."""
        return self.ours_s / self.theirs_s - 1


def compared(table: MeasuredTable) -> list[Compared]:
    """All rows of a table."""
    device = load_device(table.device)
    answers = (ANSWERS[table.kind](device, case) for case in table.each())
    return [Compared(what=what, theirs_s=theirs_s, ours_s=float(parts.total_s)) for what, theirs_s, parts in answers]


def spread_of_errors(rows: Sequence[Compared]) -> float:
    """Root mean square of the logarithms of ours over theirs."""
    return math.sqrt(sum(math.log(1 + row.error) ** 2 for row in rows) / len(rows))


def _network(device: DeviceSpec, num_ranks: int) -> tuple[Network, int]:
    """Nodes of 8 with the device's own links, and how many ranks share one."""
    cluster = cluster_of(device, max(num_ranks // 8, 1))
    return network(cluster, cluster.groups[0]), min(num_ranks, 8)


def _spread(num_ranks: int, together: int) -> Spread:
    """8 of 256 experts in at most 4 groups; in DeepEP's test a group is a node."""
    num_nodes = num_ranks // together

    def touched(num_workers: int) -> float:
        return float(expected_distinct(256, 8, num_workers, num_groups=num_nodes, top_k_groups=min(num_nodes, 4)))

    return Spread(
        num_ranks=num_ranks,
        ranks_per_domain=together,
        ranks_per_row=touched(num_ranks),
        domains_per_row=touched(num_nodes),
    )


def _direct(device: DeviceSpec, case: Case) -> Answer:
    ranks = int(case["ranks"])
    wires, together = _network(device, ranks)
    per_row = 8.0 if case.get("copies") is None else float(_spread(ranks, together).ranks_per_row)
    copies = Spread(num_ranks=ranks, ranks_per_domain=together, ranks_per_row=per_row, domains_per_row=1.0)
    parts = direct(wires, copies, LOW_LATENCY_TOKENS, _row_bytes(case))
    return f"{case['way']}, {ranks} ranks", float(case["time_us"]) * 1e-6, parts


def _per_node(device: DeviceSpec, case: Case) -> Answer:
    ranks = int(case["ranks"])
    wires, together = _network(device, ranks)
    spread, one_node = _spread(ranks, together), ranks == together
    counted = NORMAL_TOKENS * float(spread.ranks_per_row if one_node else spread.domains_per_row) * _row_bytes(case)
    parts = (direct if one_node else once_per_node)(wires, spread, NORMAL_TOKENS, _row_bytes(case))
    return f"{case['way']}, {ranks} ranks", counted / (float(case["gb_per_s"]) * 1e9), parts


def _blocks(device: DeviceSpec, case: Case) -> Answer:
    ranks, size_bytes = int(case["ranks"]), float(case["bytes"])
    wires, _ = _network(device, ranks)
    what = f"{format_bytes(size_bytes)}, {ranks} ranks"
    return what, size_bytes / float(case["bytes_per_s"]), wires.all_to_all(size_bytes, ranks)


def _product(device: DeviceSpec, case: Case) -> Answer:
    """A product in FP8 with results in BF16, or with rows, weights and results in 16 bits."""
    groups, m, n, k = (int(case.get(name, 1)) for name in ("groups", "m", "n", "k"))
    narrow = case.get("format", "fp8") == "fp8"
    weight_bytes, row_bytes = (1.0, (k + 2 * n) / (k + n)) if narrow else (2.0, 2.0)
    reached = roof(device, EfficiencySpec(), "fp8" if narrow else "bfloat16")
    parts = grouped_gemm(reached, groups * m, groups, k, n, weight_bytes, row_bytes)
    what = f"{m} x {n} x {k}" + (f", {groups} groups" if "groups" in case else "")
    flops = 2.0 * groups * m * n * k
    return what, flops / (float(case["tflops"]) * 1e12), parts


def _absorbed(device: DeviceSpec, case: Case) -> Answer:
    """DeepSeek-V3's cached row of 576, of which 512 are the value."""
    sequences, queries, heads, context = (int(case[name]) for name in ("sequences", "queries", "heads", "context"))
    roofs_ = roofs(device, EfficiencySpec())
    width = query_tile(roofs_, queries * heads, shared=True) * (576 + 512)
    moved = sequences * (context * 576 + queries * heads * (576 + 512)) * 2.0
    parts = kernel(roofs_.attention, 2.0 * sequences * context * width, moved)
    return f"{queries} x {heads} query rows, context {context}", float(case["time_ms"]) * 1e-3, parts


def _whole(device: DeviceSpec, case: Case) -> Answer:
    sequences, tokens, heads, head_dim = (int(case[name]) for name in ("sequences", "tokens", "heads", "head_dim"))
    pairs = tokens * ((tokens + 1) / 2 if case["causal"] == "yes" else tokens)
    moved = 4 * sequences * tokens * heads * head_dim * 2.0
    parts = kernel(roofs(device, EfficiencySpec()).attention, 4.0 * sequences * pairs * heads * head_dim, moved)
    what = f"{heads} heads of {head_dim}" + (", causal" if case["causal"] == "yes" else "")
    return what, float(case["time_ms"]) * 1e-3, parts


def _row_bytes(case: Case) -> float:
    return FP8_ROW if case["way"] == "dispatch" else BF16_ROW


ANSWERS: dict[MeasuredKind, Callable[[DeviceSpec, Case], Answer]] = {
    "rows sent direct": _direct,
    "rows sent once per node": _per_node,
    "all-to-all of blocks": _blocks,
    "products": _product,
    "absorbed attention": _absorbed,
    "whole attention": _whole,
}

INTRODUCTION = """# Calibration of the parts

For people who want to know what the cost model's parts rest on.

Generated by `antiphon reproduce --calibration docs/calibration.md`; do not edit. Published measurements of kernels and
exchanges beside what the planner's cost model says of them with the defaults of `EfficiencySpec`. The tables are in
`antiphon/reproduce/data/published.toml`; each states its source.

Not found in public with shapes and device: an all-to-all of RCCL on a device that is shipped here (MORI's kernels stand
for AMD's), all-to-alls of NCCL over several nodes as a table, attention on an A100 with its passes apart,
grouped products and attention on a 910B. There the formula is what the other devices' tables made it.
"""


def calibration_page() -> str:
    """The whole page, ending with a line break."""
    tables = [(table, compared(table)) for table in measured()]
    lines = [
        INTRODUCTION,
        f"| table | rows | within {WITHIN:.0%} | largest error | spread |",
        "| --- | ---: | ---: | ---: | ---: |",
    ]
    for table, rows in tables:
        close = sum(abs(row.error) <= WITHIN for row in rows)
        largest = max((row.error for row in rows), key=abs)
        spread = spread_of_errors(rows)
        lines.append(f"| [{table.name}](#{table.name}) | {len(rows)} | {close} | {largest:+.0%} | {spread:.0%} |")
    for table, rows in tables:
        lines += ["", f"## {table.name}", "", f"{table.summary}; {table.device}. {' '.join(table.source.split())}", ""]
        lines += ["| what | theirs, µs | ours, µs | error |", "| --- | ---: | ---: | ---: |"]
        lines += [
            f"| {row.what} | {row.theirs_s * 1e6:.4g} | {row.ours_s * 1e6:.4g} | {row.error:+.0%} |" for row in rows
        ]
    return "\n".join(lines) + "\n"


DEPLOYMENT_WITHIN = 0.25
GPUS = 8


@dataclass(frozen=True, kw_only=True)
class Deployment:
    """One deployment of nodes of 8, attention on `tp` GPUs and data-parallel beyond. `rows_each`: sequences in flight
    or tokens of a pass on one GPU. `balanced`: experts were loaded equally by
    assumption. `reason`: why ours is farther off than `DEPLOYMENT_WITHIN`, if it is."""

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
    balanced: bool = False
    kv: Literal["bfloat16", "fp8"] = "bfloat16"
    theirs: Positive
    per: Literal["node", "GPU"]

    def ours(self) -> float:
        """Tokens per second of a node or GPU."""
        nodes = cluster_of(shipped_device(self.device), self.nodes, nics=self.node_scale_out_bytes_per_s)
        num_devices = self.nodes * GPUS
        workload = WorkloadSpec(
            input_tokens=LengthSpec(median=self.prompt),
            output_tokens=LengthSpec(median=self.output),
            draft_tokens=self.draft_tokens,
            accept_rate=self.accept_rate,
            expert_spread=0.0 if self.balanced else UNKNOWN_LOADS,
        )
        limits = SearchLimits(
            pins=Pins(attention_tp=self.tp, attention_dp=num_devices // self.tp, expert_tp=self.tp, pp=1),
            overlapped=self.overlapped,
            extra_slots=(0,),
        )
        precision = PrecisionSpec(weights="fp8", compute="fp8", dispatch="fp8", kv=self.kv)
        cluster = replace(nodes, name=self.id)
        model = shipped_model("deepseek-v3")
        settings = settings_of(model, cluster, workload, phases=(self.phase,), precision=precision, limits=limits)
        setting = settings[self.phase]
        found = evaluate_phase(setting, ("hybrid", "tp_pp", "dp_ep")).candidates
        assert len(found) == 1, f"{self.id}: {len(found)} candidates"
        one = found.having(batch=np.array([self.rows_each * self.tp]))
        rate = float(outcome_at(setting, one, np.ones(1, dtype=np.int64)).capacity[0])
        return rate / (self.nodes if self.per == "node" else num_devices)


@cache
def deployments() -> tuple[tuple[Deployment, float], ...]:
    """All of the file, each with our value."""
    found = [read(Deployment, table, str(DATA)) for table in read_mapping(DATA)["deployments"]]
    return tuple((deployment, deployment.ours()) for deployment in found)


def _overlap_gains() -> str:
    """What two-batch overlap gains in our model of the two runs of which SGLang's blog says it."""
    runs = [one for one, _ in deployments() if one.id in ("sglang-decode-ep72", "sglang-decode-ep72-mtp")]
    return " and ".join(f"{one.ours() / replace(one, overlapped=False).ours() - 1:.0%}" for one in runs)


PUBLISHED_TRAINING = 1543.0
"""Tokens/s of a GPU: 14.8 T tokens in 2.664 M GPU hours of H800 (DeepSeek-V3's report, arXiv 2412.19437, Table 1)."""


@cache
def deepseek_training() -> tuple[float, float]:
    """Tokens/s of a GPU of DeepSeek-V3 trained on 2,048 H800 at its own layout: 16 stages, experts over 64 GPUs of 8
    nodes, 15,360 sequences of 4,096, products in FP8; rows sent as BF16 both ways, and as FP8. The run sends FP8 there
    and BF16 back; its schedule of stages (DualPipe) has a shorter bubble."""
    pins = {"n": 1, "pp": 16, "chunks": 1, "dp": 128, "micro_batch": 1, "shared": 64}
    wires: tuple[StorageDtype, StorageDtype] = ("bfloat16", "fp8")
    plain, narrow = (
        plan_training(
            shipped_model("deepseek-v3"),
            shipped_cluster("h800-2048"),
            sequence_length=4096,
            global_batch=15360,
            precision=TrainingPrecision(compute="fp8", activation_wire=wire),
            deduplicate=True,
            pins=pins,
        ).predicted.tokens_per_s_per_device
        for wire in wires
    )
    return plain, narrow


def training_lines() -> list[str]:
    """The paragraph about a published training run, pinned to its own layout."""
    plain, narrow = deepseek_training()
    return [
        "",
        "Training, pinned to the published layout: DeepSeek-V3 on 2,048 H800 (`--precision compute=fp8,wire=fp8`: rows",
        "in FP8).",
        "",
        "```",
        "antiphon plan deepseek-v3 --phase train --cluster h800-2048 --sequence-length 4096 \\",
        "    --global-batch 15360 --precision compute=fp8 --deduplicate \\",
        "    --pin n=1,pp=16,chunks=1,dp=128,micro_batch=1,shared=64",
        "```",
        "",
        "| rows between devices | tokens/s of a GPU | error |",
        "| --- | ---: | ---: |",
        f"| published: FP8 there, BF16 back (14.8 T tokens in 2.664 M GPU hours, arXiv 2412.19437) "
        f"| {PUBLISHED_TRAINING:,.0f} | |",
        f"| ours, BF16 both ways | {plain:,.0f} | {plain / PUBLISHED_TRAINING - 1:+.0%} |",
        f"| ours, FP8 both ways: the model has one format for both | {narrow:,.0f} "
        f"| {narrow / PUBLISHED_TRAINING - 1:+.0%} |",
    ]


def deployments_section() -> str:
    """The section of docs/reproduction.md about published deployments."""
    rows = deployments()
    close = sum(abs(ours / one.theirs - 1) <= DEPLOYMENT_WITHIN for one, ours in rows)
    lines = [
        "## Deployments that others describe\n",
        "Layouts that others run and describe, pinned and asked of the planner with its defaults, which come from",
        "tables of kernels and exchanges (`docs/calibration.md`). Tokens per second. After a first comparison",
        "two rules were added, with values from DeepEP's documentation: prefill's exchange kernels hold 24 processors,",
        "and decode sends no rows once per node.\n",
        "Rows of SGLang's blog chose two defaults, so they are no check of these; the other rows chose nothing:\n",
        "| default | value | of what there | here | with another value |",
        "| --- | ---: | --- | --- | --- |",
        f"| of an exchange, two halves of a batch can hide | {EfficiencySpec().overlap:.0%} "
        f"| overlap gains 25.5% and 34% | {_overlap_gains()} | 90%: 51% and 45% |",
        f"| an expert's load varies from step to step by | {UNKNOWN_LOADS:.0%} | prefill EP 32, decode EP 72 "
        "| rows below | 0%: +27%, +12% |\n",
        f"{close} of {len(rows)} within {DEPLOYMENT_WITHIN:.0%}. They are no sample: large batches, mostly of one",
        "model on one generation of GPUs, taken because they are described in full. The servers below are one.",
        "",
        "| id | what | source | theirs | ours | error |",
        "| --- | --- | --- | ---: | ---: | ---: |",
    ]
    for one, ours in rows:
        cells = f"`{one.id}` | {one.what} | {one.source} | {one.theirs:,.0f} per {one.per} | {ours:,.0f}"
        lines.append(f"| {cells} | {ours / one.theirs - 1:+.0%} |")
    lines += training_lines()
    far = [one for one, ours in rows if abs(ours / one.theirs - 1) > DEPLOYMENT_WITHIN]
    lines += [""] if far else []
    lines += [f"- `{one.id}`: {' '.join(one.reason.split())}" for one in far]
    return "\n".join(lines) + "\n"

"""What `antiphon bench train --ladder` compares: variants of one training step, each with one more idea than the last.

    msm           MegaScale-MoE, Table 5: from tensor parallelism to everything that overlaps
    compression   section 5: the same step with less on the wire
    lina          Lina, section 7: the order of all-to-all and all-reduce

A variant is a few keys of the trainer's own file, so that what is timed is what a user gets. Beside them stand two
loops as anybody would write them: `DistributedDataParallel` and FSDP2.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from antiphon.base.errors import UserError
from antiphon.bench.step_case import StepCase
from antiphon.train.packing import EVERY, FIRST_STEP

Kind = Literal["antiphon", "ddp", "fsdp2"]
Tables = Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class Variant:
    """`tables`: of the trainer's file. `overlaps`: else each exchange is waited for where it is started. `band`: how
    far its losses may be from those of the first variant, relative. `settles`: steps that are not timed, because they
    decide how the later ones run."""

    name: str
    kind: Kind = "antiphon"
    tables: Tables = field(default_factory=dict)
    overlaps: bool = True
    band: float = 1e-4
    settles: int = 0


@dataclass(frozen=True, kw_only=True)
class LadderCase(StepCase):
    """`ladder` on a box of `nodes` times `ranks_per_node` ranks whose links carry `mbit` 10^6 bits/s each way.
    `rounds`: timed steps of each variant."""

    ladder: str
    nodes: int
    ranks_per_node: int
    mbit: float
    rounds: int

    @property
    def ranks(self) -> int:
        return self.nodes * self.ranks_per_node


BASELINES = (Variant(name="DDP", kind="ddp"), Variant(name="FSDP2", kind="fsdp2"))


def variants_of(case: LadderCase) -> tuple[Variant, ...]:
    """In the order in which they stand in the table. `UserError` for a ladder that does not exist."""
    if case.ladder not in LADDERS:
        raise UserError(f"--ladder is {case.ladder!r}: use {', '.join(sorted(LADDERS))}")
    return (*LADDERS[case.ladder](case), *BASELINES)


def _msm(case: LadderCase) -> tuple[Variant, ...]:
    """Every rank in one group, as in a node of the paper: here the slow wire is inside it."""
    ranks = case.ranks
    tensor = {"parallel": {"tensor": ranks, "expert_tensor": ranks, "dispatch": "gather_scatter"}}
    rows = {"parallel": {"sequence": ranks, "expert": ranks}}
    return (
        Variant(name="TP + TP", tables=tensor, overlaps=False),
        Variant(name="SP + EP", tables=rows, overlaps=False),
        Variant(name="+ between operators", tables=rows),
        Variant(name="+ inside operators", tables=rows | {"overlap": {"inside": True}}),
        Variant(name="selective, between", tables=rows | {"memory": {"remake": "selective"}}),
        Variant(name="two micro-batches", tables=rows | {"micro_batch": case.batch // 2}),
        Variant(name="+ in turns", tables=rows | {"micro_batch": case.batch // 2, "overlap": {"pairs": True}}),
    )


def _compression(case: LadderCase) -> tuple[Variant, ...]:
    """Experts on all ranks and attention on each: rows and gradients both pass the wire."""
    rows = {"parallel": {"expert": case.ranks}}
    narrow = rows | {"communication": {"gradients": "bfloat16"}}
    levels = narrow | {"communication": {"gradients": "bfloat16", "hierarchical": True}}
    fewer = narrow | {"communication": {"gradients": "bfloat16", "activations": "float8"}}
    has_levels = case.nodes > 1 and case.ranks_per_node > 1
    return (
        Variant(name="off, nothing beside", tables=rows, overlaps=False),
        Variant(name="off", tables=rows),
        Variant(name="gradients in BF16", tables=narrow, band=0.02),
        *((Variant(name="+ by levels", tables=levels, band=0.02),) if has_levels else ()),
        Variant(name="+ rows in FP8", tables=fewer, band=0.02),
    )


def _lina(case: LadderCase) -> tuple[Variant, ...]:
    """Experts on all ranks and attention on each. A chunk is what a link carries in 50 ms: Lina's 30 MB are for links
    of 100 Gbit/s. The last two leave the order to the wire itself, where the M2N library marks rows."""
    ranks, chunk_bytes = case.ranks, max(1000, round(case.mbit * 1e6 / 8 * 0.05))
    halvings = (ranks & -ranks).bit_length() - 1
    settled = FIRST_STEP + EVERY * max(0, halvings - 1)
    if ranks % 2 or case.rounds <= settled:
        raise UserError(
            f"the lina ladder with {ranks} ranks and {case.rounds} rounds: packing halves the ranks that share the "
            f"experts, and decides until step {settled}: give an even number, and more than {settled} --rounds"
        )
    parallel = {"parallel": {"expert": ranks}}
    keys: dict[str, Any] = {"sums": "fixed", "chunk_bytes": chunk_bytes}
    found = [Variant(name="nothing beside", tables=parallel, overlaps=False)]
    for name, more in (
        ("fixed", {}),
        ("priority", {"sums": "priority"}),
        ("+ partition", {"partition": True}),
        ("+ pipeline", {"pipeline_experts": True}),
        ("+ packing", {"packing": True}),
    ):
        keys = keys | more
        settles = settled if "packing" in more else 0
        found.append(Variant(name=name, tables=parallel | {"communication": keys}, settles=settles))
    fixed = parallel | {"communication": {"sums": "fixed"}}
    found.append(Variant(name="fixed, in tiles", tables=fixed | {"overlap": {"inside": True}}))
    found.append(Variant(name="+ tiles first", tables=fixed | {"overlap": {"inside": True, "tiles_first": True}}))
    return tuple(found)


LADDERS: Mapping[str, Callable[[LadderCase], tuple[Variant, ...]]] = {
    "msm": _msm,
    "compression": _compression,
    "lina": _lina,
}

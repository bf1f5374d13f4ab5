"""What `antiphon bench train --ladder` compares: variants of one training step, each with one more idea than the last.

    msm           MegaScale-MoE, Table 5: from tensor parallelism to everything that overlaps
    tensor        section 4.2 where all ranks share every matrix
    memory        section 4.1: what is made again in backward
    pairs         two micro-batches, one after the other and in turns
    compression   section 5: the same step with less sent
    lina          Lina, section 7.2.2: the order of all-to-all and all-reduce
    packing       Lina, section 4.2: fewer ranks share the experts
    marks         tiles that the wire itself puts ahead of sums
    chunks        Lina, Figure 15: the size of the chunks that sums go in

A variant is a few keys of the trainer's own file, so that what is timed is what a user gets. The ladders of whole
systems also time two loops without anything of ours: `DistributedDataParallel` and FSDP2.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

from typer import Option

from antiphon.base.allowance import allowance
from antiphon.base.errors import ResourceError, UserError
from antiphon.bench.harness.processes import quota_unavailable, require_box
from antiphon.bench.train import StepCase
from antiphon.models.config import load_model_spec
from antiphon.specs.checked import did_you_mean
from antiphon.train.measured_choices import EVERY, FIRST_STEP

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
class LadderOptions:
    """Which ladder, and on which box: `nodes` times `ranks_per_node` ranks, whose links carry `mbit` 10^6 bits/s each
    way. `rank_cores`: a control group gives a rank this many cores, so that ranks that share cores take each other
    nothing; None: they share what there is. `inner_mbit`: ranks of a node have links of this rate to each other, and
    each has one out of the node; None: they share memory, and the way out. `timeout`: seconds."""

    ladder: Annotated[
        str | None,
        Option(
            metavar="NAME",
            help="Variants of a step: msm, tensor, memory, pairs, compression, lina, packing, marks, chunks.",
        ),
    ] = None
    nodes: Annotated[int, Option(metavar="N", show_default="2", help="Of a ladder: nodes.")] = 2
    ranks_per_node: Annotated[int, Option(metavar="N", show_default="2", help="Of a ladder: ranks of a node.")] = 2
    mbit: Annotated[float, Option(metavar="R", show_default="100", help="Of a ladder: each link, in 10^6 bits/s.")] = (
        100.0
    )
    rank_cores: Annotated[
        float | None, Option(metavar="F", show_default="all", help="Of a ladder: cores that a rank gets at most.")
    ] = None
    inner_mbit: Annotated[
        float | None, Option(metavar="R", show_default="as fast as memory", help="Of a ladder: links inside a node.")
    ] = None
    variants: Annotated[
        str | None, Option(metavar="NAME;NAME", show_default="all", help="Of a ladder: its first, and these.")
    ] = None
    figure: Annotated[
        Path | None, Option(metavar="FILE", show_default="no figure", help="Of a ladder: write it as SVG.")
    ] = None
    timeout: Annotated[float, Option(metavar="S", show_default="3600", help="Of a ladder: to its end.")] = 3600.0


@dataclass(frozen=True, kw_only=True)
class LadderCase(StepCase, LadderOptions):
    """A ladder of a step. `rounds`: timed steps of each variant."""

    ladder: str = field()  # without it the other class's default would hold
    rounds: int

    @property
    def chosen(self) -> list[str]:
        """Variants that run, beside the first, with which all are compared; empty: all."""
        return [name.strip() for name in (self.variants or "").split(";") if name.strip()]

    @property
    def ranks(self) -> int:
        return self.nodes * self.ranks_per_node

    @property
    def split(self) -> Tables:
        """Every rank in one group, as in a node of the paper: here the slow wire is inside it."""
        return {"parallel": {"sequence": self.ranks, "expert": self.ranks}}

    @property
    def experts(self) -> Tables:
        """Experts on all ranks and attention on each: rows and gradients both pass the wire."""
        return {"parallel": {"expert": self.ranks}}


LOOPS = (Variant(name="DDP", kind="ddp"), Variant(name="FSDP2", kind="fsdp2"))
BESIDE: Tables = {"communication": {"sums": "baseline"}}  # sums of gradients run beside backward
INSIDE: Tables = {"overlap": {"inside": True}}


def variants_of(case: LadderCase) -> tuple[Variant, ...]:
    """In the order in which they stand in the table. `UserError` for a ladder that does not exist."""
    if case.ladder not in LADDERS:
        raise UserError(f"--ladder is {case.ladder!r}: use {', '.join(sorted(LADDERS))}")
    every = LADDERS[case.ladder](case)
    names = [each.name for each in every]
    for name in case.chosen:
        if name not in names:
            raise UserError(
                f"--variants names {name!r}, which the ladder {case.ladder} lacks: {did_you_mean(name, names)}"
            )
    return tuple(each for each in every if not case.chosen or each is every[0] or each.name in case.chosen)


def _msm(case: LadderCase) -> tuple[Variant, ...]:
    """Sums of gradients run beside backward, as in both systems of the paper."""
    rows = {**case.split, **BESIDE}
    return (
        _tensor(case)[0],
        Variant(name="SP + EP", tables=rows, overlaps=False),
        Variant(name="+ between operators", tables=rows),
        Variant(name="+ inside operators", tables={**rows, **INSIDE}),
        *LOOPS,
    )


def _tensor(case: LadderCase) -> tuple[Variant, ...]:
    parallel = {"tensor": case.ranks, "expert_tensor": case.ranks, "dispatch": "gather_scatter"}
    tables = {"parallel": parallel, **BESIDE}
    return (
        Variant(name="TP + TP", tables=tables, overlaps=False),
        Variant(name="+ between operators", tables=tables),
        Variant(name="+ inside operators", tables={**tables, **INSIDE}),
    )


def _memory(case: LadderCase) -> tuple[Variant, ...]:
    rows = {**case.split, **BESIDE}
    return (
        Variant(name="all kept", tables=rows),
        Variant(name="selective", tables=rows | {"memory": {"remake": "selective"}}),
        Variant(name="full", tables=rows | {"memory": {"remake": "full"}}),
        Variant(name="rows in used memory", tables=rows | {"memory": {"reuse_rows": True}}),
    )


def _pairs(case: LadderCase) -> tuple[Variant, ...]:
    halves = {**case.split, "micro_batch": case.batch // 2}
    return (
        Variant(name="two micro-batches", tables=halves),
        Variant(name="+ in turns", tables=halves | {"overlap": {"pairs": True}}),
    )


def _compression(case: LadderCase) -> tuple[Variant, ...]:
    def narrow(name: str, **more: Any) -> Variant:
        communication = {"gradients": "bfloat16", **more}
        return Variant(name=name, tables={**case.experts, "communication": communication}, band=0.02)

    has_levels = case.nodes > 1 and case.ranks_per_node > 1
    levels = (
        narrow("+ by levels, in turn", hierarchical=True, level_chunks=1),
        narrow("+ by levels", hierarchical=True),
    )
    return (
        Variant(name="off, nothing beside", tables=case.experts, overlaps=False),
        Variant(name="off", tables=case.experts),
        narrow("gradients in BF16"),
        *(levels if has_levels else ()),
        narrow("+ rows in FP8", activations="float8"),
        *LOOPS,
    )


def _orders(case: LadderCase) -> tuple[Variant, ...]:
    """Lina's ideas, each with those before it. A chunk is what a link carries in 50 ms: Lina's 30 MB are for links of
    100 Gbit/s."""
    keys: dict[str, Any] = {"chunk_bytes": max(1000, round(case.mbit * 1e6 / 8 * 0.05))}
    found = []
    for name, more in (
        ("baseline", {"sums": "baseline"}),
        ("fixed: between pairs", {"sums": "between"}),
        ("priority", {"sums": "priority"}),
        ("+ partition", {"partition": True}),
        ("+ pipeline", {"pipeline_experts": True}),
    ):
        keys = keys | more
        found.append(Variant(name=name, tables={**case.experts, "communication": keys}))
    return tuple(found)


def _lina(case: LadderCase) -> tuple[Variant, ...]:
    return (Variant(name="nothing beside", tables=case.experts, overlaps=False), *_orders(case), *LOOPS)


def _packing(case: LadderCase) -> tuple[Variant, ...]:
    """It halves the ranks that share the experts, and decides every few steps until one has all."""
    baseline, *_, last = _orders(case)
    halvings = (case.ranks & -case.ranks).bit_length() - 1
    tables = {**last.tables, "communication": last.tables["communication"] | {"packing": True}}
    settles = FIRST_STEP + EVERY * max(0, halvings - 1)
    return (baseline, last, Variant(name="+ packing", tables=tables, settles=settles))


def _marks(case: LadderCase) -> tuple[Variant, ...]:
    """The order is left to the wire itself, where the M2N library marks rows."""
    tables = {**case.experts, **BESIDE}
    return (
        Variant(name="in tiles", tables={**tables, **INSIDE}),
        Variant(name="+ tiles first", tables=tables | {"overlap": {"inside": True, "tiles_first": True}}),
    )


PAPER_MBIT, PAPER_CHUNKS_MB = 100_000.0, (30, 10, 20, 50, 100)  # the first is Lina's choice


def _chunks(case: LadderCase) -> tuple[Variant, ...]:
    """Sizes as Lina's, over links as slow as these: a chunk travels as long as there."""
    whole: dict[str, Any] = {"sums": "priority"}
    found = [
        Variant(
            name=f"as {size} MB there",
            tables={
                **case.experts,
                "communication": whole
                | {"partition": True, "chunk_bytes": max(1000, round(size * 1e6 * case.mbit / PAPER_MBIT))},
            },
        )
        for size in PAPER_CHUNKS_MB
    ]
    return (*found, Variant(name="whole sums", tables={**case.experts, "communication": whole}))


LADDERS: Mapping[str, Callable[[LadderCase], tuple[Variant, ...]]] = {
    "msm": _msm,
    "tensor": _tensor,
    "memory": _memory,
    "pairs": _pairs,
    "compression": _compression,
    "lina": _lina,
    "packing": _packing,
    "marks": _marks,
    "chunks": _chunks,
}


def check_ladder(case: LadderCase) -> None:
    """`UserError` for what cannot be, `ResourceError` where there can be no box."""
    for variant in variants_of(case):
        if case.rounds <= variant.settles:
            raise UserError(
                f"--rounds is {case.rounds}: {variant.name} with {case.ranks} ranks decides until step "
                f"{variant.settles}, so give more than {variant.settles} --rounds"
            )
    if case.ladder == "packing" and case.ranks % 2:
        raise UserError(f"{case.ranks} ranks: packing halves those that share the experts, so give an even number")
    spec = load_model_spec(case.folder)
    if case.ranks < 2:
        raise UserError(f"--nodes is {case.nodes}, --ranks-per-node {case.ranks_per_node}: a ladder needs two ranks")
    case.check_sizes(spec)
    if case.ranks > min(spec.attention.num_heads, spec.router.num_experts):
        raise UserError(
            f"{case.ranks} ranks share {spec.attention.num_heads} heads and {spec.router.num_experts} experts: use "
            "fewer ranks, or a larger model"
        )
    if case.rank_cores and not 0 < case.rank_cores * case.ranks <= allowance().num_cores:
        raise UserError(
            f"--rank-cores is {case.rank_cores:g} for {case.ranks} ranks, this process may use {allowance().num_cores} "
            f"cores: use at most {allowance().num_cores / case.ranks:g}, and above 0"
        )
    if case.rank_cores and (reason := quota_unavailable()):
        raise ResourceError(f"--rank-cores is {case.rank_cores:g}: no part of a core can be set aside: {reason}")
    if case.inner_mbit and case.ranks_per_node == 1:
        raise UserError(f"--inner-mbit is {case.inner_mbit:g} and --ranks-per-node 1: there are no links inside a node")
    require_box("--ladder")

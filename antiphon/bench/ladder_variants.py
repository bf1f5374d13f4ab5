"""What `antiphon bench train --ladder` compares: variants of one training step, each with one more idea than the last.

    msm           MegaScale-MoE, Table 5: from tensor parallelism to everything that overlaps
    compression   section 5: the same step with less sent
    lina          Lina, section 7: the order of all-to-all and all-reduce
    chunks        Lina, Figure 15: the size of the chunks that sums go in

A variant is a few keys of the trainer's own file, so that what is timed is what a user gets. Beside them stand two
loops without anything of ours: `DistributedDataParallel` and FSDP2.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

from typer import Option

from antiphon.base.allowance import allowance
from antiphon.base.errors import ResourceError, UserError
from antiphon.bench.box import box_unavailable
from antiphon.bench.harness.cores import quota_unavailable
from antiphon.bench.train import StepCase
from antiphon.models.config import load_model_spec
from antiphon.specs.checked import did_you_mean
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
class LadderOptions:
    """Which ladder, and on which box. What is None was left out."""

    ladder: Annotated[
        str | None, Option(metavar="NAME", help="Variants of a step instead: msm, compression, lina, chunks.")
    ] = None
    nodes: Annotated[int | None, Option(metavar="N", show_default="2", help="Of a ladder: nodes.")] = None
    ranks_per_node: Annotated[
        int | None, Option(metavar="N", show_default="2", help="Of a ladder: ranks of a node.")
    ] = None
    mbit: Annotated[
        float | None, Option(metavar="R", show_default="100", help="Of a ladder: each link, in 10^6 bits/s.")
    ] = None
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
    timeout: Annotated[float | None, Option(metavar="S", show_default="3600", help="Of a ladder: to its end.")] = None

    def refuse_without_ladder(self) -> None:
        values = {name: value for name, value in vars(self).items() if name != "ladder"}
        if named := [f"--{name.replace('_', '-')}" for name, value in values.items() if value is not None]:
            raise UserError(f"{', '.join(named)}: only a ladder runs in a box, so give --ladder too, or leave it out")


@dataclass(frozen=True, kw_only=True)
class LadderCase(StepCase):
    """`ladder` on a box of `nodes` times `ranks_per_node` ranks whose links carry `mbit` 10^6 bits/s each way.
    `rounds`: timed steps of each variant. `rank_cores`: a control group gives a rank this many cores, so that ranks
    that share cores take each other nothing; 0: they share what there is. `chosen`: names of variants that run, beside
    the first, with which all are compared; empty: all. `inner_mbit`: ranks of a node have links of this rate to each
    other, and each has one out of the node; 0: they share memory, and the way out."""

    ladder: str
    nodes: int
    ranks_per_node: int
    mbit: float
    rounds: int
    rank_cores: float = 0.0
    chosen: tuple[str, ...] = ()
    inner_mbit: float = 0.0

    @property
    def ranks(self) -> int:
        return self.nodes * self.ranks_per_node


BASELINES = (Variant(name="DDP", kind="ddp"), Variant(name="FSDP2", kind="fsdp2"))


def variants_of(case: LadderCase) -> tuple[Variant, ...]:
    """In the order in which they stand in the table. `UserError` for a ladder that does not exist."""
    if case.ladder not in LADDERS:
        raise UserError(f"--ladder is {case.ladder!r}: use {', '.join(sorted(LADDERS))}")
    every = (*LADDERS[case.ladder](case), *BASELINES)
    names = [each.name for each in every]
    for name in case.chosen:
        if name not in names:
            raise UserError(
                f"--variants names {name!r}, which the ladder {case.ladder} lacks: {did_you_mean(name, names)}"
            )
    return tuple(each for each in every if not case.chosen or each is every[0] or each.name in case.chosen)


def _msm(case: LadderCase) -> tuple[Variant, ...]:
    """Every rank in one group, as in a node of the paper: here the slow wire is inside it. Sums of gradients run beside
    backward, as in both systems of the paper, except with several micro-batches, which are compared with each other."""
    ranks = case.ranks
    beside = {"communication": {"sums": "baseline"}}
    split = {"sequence": ranks, "expert": ranks}
    tensor = {"parallel": {"tensor": ranks, "expert_tensor": ranks, "dispatch": "gather_scatter"}} | beside
    rows = {"parallel": split} | beside
    halves = {"parallel": split, "micro_batch": case.batch // 2}
    return (
        Variant(name="TP + TP", tables=tensor, overlaps=False),
        Variant(name="SP + EP", tables=rows, overlaps=False),
        Variant(name="+ between operators", tables=rows),
        Variant(name="+ inside operators", tables=rows | {"overlap": {"inside": True}}),
        Variant(name="selective, between", tables=rows | {"memory": {"remake": "selective"}}),
        Variant(name="two micro-batches", tables=halves),
        Variant(name="+ in turns", tables=halves | {"overlap": {"pairs": True}}),
        Variant(name="TP + TP, inside", tables=tensor | {"overlap": {"inside": True}}),
    )


def _compression(case: LadderCase) -> tuple[Variant, ...]:
    """Experts on all ranks and attention on each: rows and gradients both pass the wire."""
    rows = {"parallel": {"expert": case.ranks}}
    narrow = rows | {"communication": {"gradients": "bfloat16"}}
    levels = narrow | {"communication": {"gradients": "bfloat16", "hierarchical": True}}
    in_turn = narrow | {"communication": {"gradients": "bfloat16", "hierarchical": True, "level_chunks": 1}}
    fewer = narrow | {"communication": {"gradients": "bfloat16", "activations": "float8"}}
    has_levels = case.nodes > 1 and case.ranks_per_node > 1
    return (
        Variant(name="off, nothing beside", tables=rows, overlaps=False),
        Variant(name="off", tables=rows),
        Variant(name="gradients in BF16", tables=narrow, band=0.02),
        *((Variant(name="+ by levels, in turn", tables=in_turn, band=0.02),) if has_levels else ()),
        *((Variant(name="+ by levels", tables=levels, band=0.02),) if has_levels else ()),
        Variant(name="+ rows in FP8", tables=fewer, band=0.02),
    )


PACKING = "+ packing"


def _lina(case: LadderCase) -> tuple[Variant, ...]:
    """Experts on all ranks and attention on each. A chunk is what a link carries in 50 ms: Lina's 30 MB are for links
    of 100 Gbit/s. The last two leave the order to the wire itself, where the M2N library marks rows."""
    ranks, chunk_bytes = case.ranks, max(1000, round(case.mbit * 1e6 / 8 * 0.05))
    halvings = (ranks & -ranks).bit_length() - 1
    settled = FIRST_STEP + EVERY * max(0, halvings - 1)
    packs = not case.chosen or PACKING in case.chosen
    if packs and (ranks % 2 or case.rounds <= settled):
        raise UserError(
            f"the lina ladder with {ranks} ranks and {case.rounds} rounds: packing halves the ranks that share the "
            f"experts, and decides until step {settled}: give an even number, and more than {settled} --rounds"
        )
    parallel = {"parallel": {"expert": ranks}}
    keys: dict[str, Any] = {"sums": "baseline", "chunk_bytes": chunk_bytes}
    found = [Variant(name="nothing beside", tables=parallel, overlaps=False)]
    for name, more in (
        ("baseline", {}),
        ("fixed: between pairs", {"sums": "between"}),
        ("priority", {"sums": "priority"}),
        ("+ partition", {"partition": True}),
        ("+ pipeline", {"pipeline_experts": True}),
        (PACKING, {"packing": True}),
    ):
        keys = keys | more
        settles = settled if "packing" in more else 0
        found.append(Variant(name=name, tables=parallel | {"communication": keys}, settles=settles))
    baseline = parallel | {"communication": {"sums": "baseline"}}
    found.append(Variant(name="baseline, in tiles", tables=baseline | {"overlap": {"inside": True}}))
    found.append(Variant(name="+ tiles first", tables=baseline | {"overlap": {"inside": True, "tiles_first": True}}))
    return tuple(found)


PAPER_MBIT, PAPER_CHUNKS_MB = 100_000.0, (10, 20, 30, 50, 100)


def _chunks(case: LadderCase) -> tuple[Variant, ...]:
    """Sizes as Lina's, over links as slow as these: a chunk travels as long as there."""
    parallel = {"parallel": {"expert": case.ranks}}
    whole = {"sums": "priority"}
    found = [Variant(name="whole sums", tables=parallel | {"communication": whole}, overlaps=False)]
    found.append(Variant(name="whole sums, beside", tables=parallel | {"communication": whole}))
    for size in PAPER_CHUNKS_MB:
        chunk_bytes = max(1000, round(size * 1e6 * case.mbit / PAPER_MBIT))
        keys = whole | {"partition": True, "chunk_bytes": chunk_bytes}
        found.append(Variant(name=f"as {size} MB there", tables=parallel | {"communication": keys}))
    return tuple(found)


LADDERS: Mapping[str, Callable[[LadderCase], tuple[Variant, ...]]] = {
    "msm": _msm,
    "compression": _compression,
    "lina": _lina,
    "chunks": _chunks,
}


def check_ladder(case: LadderCase) -> None:
    """`UserError` for what cannot be, `ResourceError` where there can be no box."""
    variants_of(case)
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
    if reason := box_unavailable():
        raise ResourceError(f"a ladder runs on a cluster in a box (docs/box.md): {reason}")

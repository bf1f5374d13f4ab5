"""Ways to share a model between four ranks, and how far each is from one process. `test_parallel` runs it on ranks."""

from dataclasses import dataclass, replace
from itertools import combinations
from typing import Any

import torch
from torch import Tensor

from antiphon.comm.m2n.tile_links import TileLinks
from antiphon.comm.mesh import Mesh, Sizes, connect
from antiphon.models.config import model_spec
from antiphon.specs.model import ModelSpec
from antiphon.train.bucket import Piece
from antiphon.train.config_tables import CommunicationConfig, LossConfig, ParallelConfig
from antiphon.train.layer_plan import PlanOptions
from antiphon.train.model import Batch, MoeModel
from antiphon.train.passes import Passes, PassResult
from antiphon.train.setup import connect_tiles
from antiphon.train.shards import Shards
from antiphon.train.spans import StepSpans
from antiphon.train.weights import FirstValues
from tests.comm.ranks import begin_anew, made_once

RANKS, LENGTH, BATCH, VOCABULARY = 4, 11, 4, 97
PLAIN = CommunicationConfig()
BASELINE = CommunicationConfig(sums="baseline")
BETWEEN = CommunicationConfig(sums="between")
PRIORITY = CommunicationConfig(sums="priority")
CHUNKS = CommunicationConfig(sums="priority", partition=True, chunk_bytes=3000)
LEVELS = CommunicationConfig(sums="priority", partition=True, chunk_bytes=3000, hierarchical=True, node_size=2)
EARLY = CommunicationConfig(gate_weights="experts")
NODES = CommunicationConfig(node_size=2)
EARLY_NODES = CommunicationConfig(node_size=2, gate_weights="experts")
LOSSES = LossConfig(balance=0.1, device_balance=0.05, device_groups=2, z=0.01)
OVER_MODEL = LossConfig(balance=0.1, balance_over="model")
DROPPING = replace(LOSSES, capacity=1.0, device_capacity=0.9)
NAMES: dict[Any, str] = {LOSSES: "layer", OVER_MODEL: "model", DROPPING: "dropping"}
NAMES |= {NODES: "nodes", EARLY_NODES: "early, nodes"}
NAMES |= {
    EARLY: "early",
    BASELINE: "baseline",
    BETWEEN: "between",
    PRIORITY: "priority",
    CHUNKS: "chunks",
    LEVELS: "levels",
}


@dataclass(frozen=True)
class Form:
    pipeline: int = 1
    virtual_stages: int = 1
    sequence: int = 1
    tensor: int = 1
    expert: int = 1
    expert_tensor: int = 1
    dispatch: str = "all_to_all"
    deduplicate: bool = True
    row_budget: float = 1.1
    losses: LossConfig = LOSSES
    communication: CommunicationConfig = PLAIN
    keep: str = "none"
    inside: bool = False
    parts: int = 1

    def __str__(self) -> str:
        """What is not as it is by itself."""
        plain = Form()
        named = {name: value for name, value in vars(self).items() if value != vars(plain)[name]}
        return ",".join(f"{name}={NAMES.get(value, value)}" for name, value in named.items()) or "data"

    def sizes(self) -> Sizes:
        return Sizes(
            world_size=RANKS,
            pipeline=self.pipeline,
            sequence=self.sequence,
            tensor=self.tensor,
            expert=self.expert,
            expert_tensor=self.expert_tensor,
        )

    @property
    def num_layers(self) -> int:
        """Enough for every stage."""
        return 4 if self.pipeline > 1 else 2

    @property
    def micro_batches(self) -> int:
        """Of a step; two even without a pipeline, where ranks of the data axis leave room for them."""
        return self.pipeline if self.pipeline > 1 else BATCH // max(2, self.sizes().data)

    @property
    def parallel(self) -> ParallelConfig:
        return ParallelConfig(
            pipeline=self.pipeline,
            virtual_stages=self.virtual_stages,
            dispatch=self.dispatch,  # type: ignore[arg-type]
            deduplicate=self.deduplicate,
            row_budget=self.row_budget,
        )


EVERY_FAMILY = (
    Form(),
    Form(sequence=4, expert=4),
    Form(tensor=4, expert_tensor=4),
    Form(sequence=2, tensor=2, expert=2, expert_tensor=2),
    Form(pipeline=4),
    Form(pipeline=2, virtual_stages=2, sequence=2, expert=2, losses=OVER_MODEL),
)
SOME_FAMILIES = (
    Form(expert=4),
    Form(expert=2, dispatch="gather_scatter"),
    Form(sequence=2, expert=4, deduplicate=False),
    Form(tensor=2, expert_tensor=2),
    Form(tensor=2, expert=4, dispatch="gather_scatter"),
    Form(pipeline=2),
    Form(pipeline=2, virtual_stages=2),
    Form(pipeline=2, expert=2),
    Form(pipeline=2, sequence=2),
    Form(pipeline=2, virtual_stages=2, tensor=2, expert_tensor=2),
    Form(pipeline=4, losses=OVER_MODEL),
    Form(row_budget=0.5),  # here and below, some rows are worked on again in backward
    Form(sequence=2, expert=2, deduplicate=False, row_budget=0.3),
    Form(sequence=2, tensor=2, expert=2, expert_tensor=2, row_budget=0.5),
    Form(pipeline=2, virtual_stages=2, expert=2, row_budget=0.5),
    Form(losses=DROPPING),
    Form(sequence=4, expert=4, losses=DROPPING),
    Form(tensor=4, expert_tensor=4, losses=DROPPING),
    Form(tensor=2, expert=4, dispatch="gather_scatter", row_budget=0.5, losses=DROPPING),
    Form(pipeline=2, expert=2, losses=DROPPING),
    Form(pipeline=2, virtual_stages=2, sequence=2, expert=2, row_budget=0.5, losses=DROPPING),
    Form(expert=4, communication=EARLY),
    Form(tensor=2, expert=2, expert_tensor=2, deduplicate=False, row_budget=0.5, communication=EARLY),
    Form(sequence=4, expert=4, keep="selective"),  # here and below, rows are sent again in backward
    Form(sequence=2, expert=2, deduplicate=False, row_budget=0.3, losses=DROPPING, keep="selective"),
    Form(sequence=2, tensor=2, expert=2, expert_tensor=2, keep="selective"),
    Form(tensor=2, expert=4, dispatch="gather_scatter", keep="full"),
    Form(pipeline=2, virtual_stages=2, sequence=2, expert=2, keep="full"),
    Form(sequence=4, expert=4, inside=True),  # here and below, rows pass experts in tiles
    Form(sequence=2, expert=2, deduplicate=False, row_budget=0.3, losses=DROPPING, keep="selective", inside=True),
    Form(tensor=4, expert_tensor=4, keep="selective", inside=True),
    Form(sequence=2, tensor=2, expert=2, expert_tensor=2, keep="full", inside=True),
    Form(tensor=2, expert=4, dispatch="gather_scatter", losses=DROPPING, inside=True),
    Form(pipeline=2, virtual_stages=2, expert=2, row_budget=0.5, communication=EARLY, inside=True),
    Form(expert=4, dispatch="two_level", communication=NODES),  # here and below, rows travel across nodes, then inside
    Form(
        sequence=2,
        expert=4,
        dispatch="two_level",
        row_budget=0.5,
        losses=DROPPING,
        keep="selective",
        communication=NODES,
    ),
    Form(tensor=2, expert=4, dispatch="two_level", keep="full", communication=EARLY_NODES),
    Form(sequence=2, expert=4, communication=BETWEEN),
    Form(expert=2, communication=BASELINE),  # here and below, gradients are summed beside backward
    Form(sequence=2, expert=2, communication=PRIORITY),
    Form(sequence=2, expert=2, communication=CHUNKS),
    Form(sequence=2, tensor=2, expert=2, expert_tensor=2, row_budget=0.5, losses=DROPPING, communication=CHUNKS),
    Form(sequence=4, expert=2, keep="selective", communication=LEVELS),
    Form(pipeline=2, virtual_stages=2, sequence=2, expert=2, communication=CHUNKS),
    Form(sequence=2, expert=4, parts=3),  # here and below, experts work on parts of their rows
    Form(sequence=2, expert=2, deduplicate=False, parts=2, keep="selective", communication=CHUNKS),
    Form(tensor=2, expert=4, dispatch="gather_scatter", parts=2, keep="full", communication=CHUNKS),
    Form(sequence=2, tensor=2, expert=2, expert_tensor=2, row_budget=0.5, parts=5, communication=CHUNKS),
)


def pairs_of(form: Form) -> set[tuple[tuple[str, Any], ...]]:
    """Every two settings that it has together."""
    return set(combinations(vars(form).items(), 2))


def pairwise() -> list[Form]:
    """Of `SOME_FAMILIES` as many as it takes to meet every two settings that are met together in one of all forms."""
    left = set[Any]().union(*map(pairs_of, SOME_FAMILIES)).difference(*map(pairs_of, EVERY_FAMILY))
    chosen = []
    while left:
        chosen.append(max(SOME_FAMILIES, key=lambda form: (len(pairs_of(form) & left), -form.num_layers)))
        left -= pairs_of(chosen[-1])
    return chosen


def batch_of(rows: slice) -> Batch:
    generator = torch.Generator().manual_seed(5)
    ids = torch.randint(0, VOCABULARY, (BATCH, LENGTH + 1), generator=generator)
    documents = (torch.arange(LENGTH) >= 6).long().expand(BATCH, LENGTH)
    positions = torch.arange(LENGTH) - 6 * documents
    targets = ids[:, 1:].clone()
    targets[:, 5] = -100
    return Batch(ids[rows, :-1], targets[rows], positions[rows], documents[rows])


def one_step(spec: ModelSpec, mesh: Mesh, form: Form) -> tuple[list[Piece], PassResult, Tensor]:
    """The parameters with the gradients of a step, what its passes say, and the norm of the gradient. What `form` says
    of ranks is in `mesh` already."""
    parallel = form.parallel if mesh.sizes.world_size > 1 else ParallelConfig()
    links = tuple[TileLinks, ...]()
    if form.inside and mesh.sizes.world_size > 1:  # more tiles than one for a rank
        links = connect_tiles(spec, 3, mesh)
    model = MoeModel(
        spec,
        mesh,
        max_positions=LENGTH,
        dtype=torch.float64,
        first=FirstValues(1, 0.2),
        parallel=parallel,
        communication=form.communication,
        options=(
            PlanOptions(keep=form.keep, parts=form.parts, late_weights=mesh.sizes.sequence > 1)
            if mesh.sizes.world_size > 1
            else PlanOptions()
        ),
        links=links,
    )
    model.double()
    size = BATCH // form.micro_batches
    own = size // mesh.sizes.data
    begin = mesh.sizes.place(mesh.rank, "data") * own
    batches = [batch_of(slice(begin + first, begin + first + own)) for first in range(0, BATCH, size)]
    shards = Shards(model, communication=form.communication)
    passed = Passes(model, form.losses, StepSpans()).run(batches, shards)
    assert bool(passed.dropped_L.all()) if form.losses.drops else not passed.dropped_L.any()
    shards.reduce()
    model.close()
    return shards.pieces, passed, shards.norm()


@dataclass(frozen=True)
class Difference:
    """From one process: of the loss, the balance loss and the norm; rows that went elsewhere, or were dropped in one of
    the two only; of the gradient that differs most, relative to its largest number, and whose it is."""

    loss: float
    balance: float
    norm: float
    rows: int
    gradient: float
    purpose: str


def differences(
    models: dict[str, tuple[dict[int, dict[str, Any]], tuple[Form, ...]]], rank: int
) -> dict[Any, Difference]:
    """By model and form; of `models` are given their `config.json` by number of layers, and their forms."""
    alone = connect(Sizes(), 0)
    alike: dict[Any, tuple[str, Form]] = {}  # of forms that are one in one process, the first
    for form in (*EVERY_FAMILY, *SOME_FAMILIES):
        for name in (name for name, (_, forms) in models.items() if form in forms):
            alike.setdefault(_in_one_process(name, form), (name, form))

    def reference(key: Any) -> tuple[dict[str, Tensor], PassResult, Tensor]:
        name, form = alike[key]
        pieces, passed, norm = one_step(model_spec(models[name][0][form.num_layers]), alone, form)
        return {piece.name: _gradient(piece) for piece in pieces}, passed, norm

    found, expected = {}, made_once(list(alike), reference)
    for form in (*EVERY_FAMILY, *SOME_FAMILIES):
        if not any(form in forms for _, forms in models.values()):
            continue
        first = form.communication.orders_exchanges
        mesh = connect(form.sizes(), rank, 60, form.communication.launcher(), first=first)
        for name, (configs, forms) in models.items():
            if form not in forms:
                continue
            spec = model_spec(configs[form.num_layers])
            found[name, form] = _difference(*one_step(spec, mesh, form), *expected[_in_one_process(name, form)])
        mesh.close()
        begin_anew()
    return found


def _in_one_process(name: str, form: Form) -> Any:
    """What one process computes in another way."""
    return name, form.num_layers, form.micro_batches, form.losses


def _difference(
    pieces: list[Piece],
    passed: PassResult,
    norm: Tensor,
    gradients: dict[str, Tensor],
    wanted: PassResult,
    wanted_norm: Tensor,
) -> Difference:
    worst = (0.0, "")
    for piece in pieces:
        expected = gradients[piece.name]
        scale = float(expected.abs().max()) or 1.0
        if piece.values.numel():
            off = float((_gradient(piece) - piece.part.of(expected)).abs().max())
            worst = max(worst, (off / scale, piece.name))
    return Difference(
        abs(float(passed.loss - wanted.loss)),
        abs(float(passed.balance - wanted.balance)),
        abs(float(norm - wanted_norm)),
        int((passed.counts_LE - wanted.counts_LE).abs().sum() + (passed.dropped_L - wanted.dropped_L).abs().sum()),
        *worst,
    )


def _gradient(piece: Piece) -> Tensor:
    """In the shape of the part of the parameter."""
    assert piece.values.grad is not None
    return piece.values.grad.view(piece.part.local_shape)

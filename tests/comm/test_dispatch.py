"""Rows through every dispatcher between ranks, against one process; bytes on the wire against the formulas."""

import itertools
from pathlib import Path

import pytest
import torch
from torch import Tensor

from antiphon.base.errors import UserError
from antiphon.base.split_evenly import split_evenly
from antiphon.comm.dispatch import AllToAllWay, Dispatcher, GatherScatter, Way
from antiphon.comm.mesh import Mesh, Sizes, connect
from antiphon.cost.exchange import expected_distinct
from antiphon.cost.training.counts import expert_parallel_volume
from tests.comm.ranks import on_ranks

RANKS, HIDDEN, NUM_EXPERTS, TOP_K = 4, 6, 5, 3
ROWS = (3, 0, 7, 1)  # of each rank
KINDS = ("all_to_all", "once", "gather_scatter")
Case = tuple[int, int, str]  # expert ranks, ranks that share an expert's width, kind
CASES: list[Case] = [
    (experts, slices, kind) for experts, slices in ((4, 1), (2, 1), (2, 2), (1, 2), (1, 4)) for kind in KINDS
]


def dispatcher_of(mesh: Mesh, kind: str, num_experts: int) -> tuple[Dispatcher, tuple[int, int]]:
    group, slices = mesh.group("expert"), mesh.group("expert_tensor")
    experts = split_evenly(num_experts, group.size)
    own = experts[group.index]
    ways: list[Way] = [GatherScatter(slices)] if slices.size > 1 else []
    if group.size > 1 and kind == "gather_scatter":
        ways.append(GatherScatter(group, own))
    elif group.size > 1:
        ways.append(AllToAllWay(group, experts, deduplicate=kind == "once"))
    return Dispatcher(own[1] - own[0], tuple(ways)), own


def drawn(rank: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Rows, choices (one absent, expert 4 never chosen, rows with an expert twice on a rank), weights, a gradient."""
    generator = torch.Generator().manual_seed(rank)
    x, grad = (torch.randn(ROWS[rank], HIDDEN, generator=generator, dtype=torch.float64) for _ in range(2))
    ids = torch.rand(ROWS[rank], NUM_EXPERTS - 1, generator=generator).argsort(1)[:, :TOP_K].int()
    weights = torch.rand(ROWS[rank], TOP_K, generator=generator, dtype=torch.float64)
    if rank == 2:
        ids[4, 1] = -1
    return x.requires_grad_(), ids, weights.requires_grad_(), grad


def through(
    dispatcher: Dispatcher, experts: tuple[int, int], part: float, inputs: tuple[Tensor, Tensor, Tensor, Tensor]
) -> tuple[list[Tensor], int]:
    """Sums and gradients, and rows that arrived; expert e adds its share `part` of e + 1 times the row squared."""
    x, ids, weights, grad = inputs
    arrived = []

    def square(rows: Tensor, counts: tuple[int, ...], _: Tensor | None) -> Tensor:
        arrived.append(rows.shape[0])
        factors = (1.0 + torch.arange(*experts, dtype=rows.dtype)).repeat_interleave(torch.tensor(counts))
        return part * factors.unsqueeze(1) * rows.square()

    out = dispatcher.through(square, x, ids, weights)
    return [out.detach(), *torch.autograd.grad(out, (x, weights), grad)], arrived[0]


def differences(rank: int) -> dict[Case, float]:
    """The largest difference of sums and gradients from one process's, by case, and the same bits twice."""
    expected, _ = through(Dispatcher(NUM_EXPERTS), (0, NUM_EXPERTS), 1.0, drawn(rank))
    found = {}
    for case in CASES:
        experts, slices, kind = case
        mesh = connect(Sizes(world_size=RANKS, expert=experts, expert_tensor=slices), rank, 60)
        dispatcher, own = dispatcher_of(mesh, kind, NUM_EXPERTS)
        ours, _ = through(dispatcher, own, 1 / slices, drawn(rank))
        again, _ = through(dispatcher, own, 1 / slices, drawn(rank))
        assert all(torch.equal(first, second) for first, second in zip(ours, again, strict=True)), case
        pairs = zip(ours, expected, strict=True)
        found[case] = max((float((a - b).abs().max()) for a, b in pairs if a.numel()), default=0.0)
    return found


@pytest.fixture(scope="module")
def all_differences(tmp_path_factory: pytest.TempPathFactory) -> list[dict[Case, float]]:
    return on_ranks(RANKS, tmp_path_factory.mktemp("ranks"), differences)


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"expert{case[0]}-width{case[1]}-{case[2]}")
def test_sums_and_gradients_are_those_of_one_process(all_differences: list[dict[Case, float]], case: Case) -> None:
    assert max(of_rank[case] for of_rank in all_differences) < 1e-12


def sent_forward(rank: int) -> list[tuple[int, float]]:
    """(bytes of rows that left this rank, forward and backward; by the formula) for each kind. Every rank has one row
    for each possible choice of two of eight experts, so that expectations are exact."""
    mesh = connect(Sizes(world_size=RANKS, expert=RANKS), rank, 60)
    choices = list(itertools.combinations(range(8), 2))
    ids, weights = torch.tensor(choices, dtype=torch.int32), torch.ones(len(choices), 2)
    whole = RANKS * len(choices) * HIDDEN * 4
    found = []
    for kind, copies in zip(KINDS, (2, float(expected_distinct(8, 2, RANKS)), RANKS), strict=True):
        dispatcher, own = dispatcher_of(mesh, kind, 8)
        x = torch.ones(len(choices), HIDDEN, requires_grad=True)
        mesh.ledger.take()
        through(dispatcher, own, 1.0, (x, ids, weights.clone().requires_grad_(), torch.ones(len(choices), HIDDEN)))
        sent = mesh.ledger.take().sent_bytes
        rows = sum(number for name, number in sent.items() if name.split(".")[0] in ("dispatch", "combine"))
        found.append((rows, 2 * whole * float(expert_parallel_volume(RANKS, copies))))
    return found


def test_bytes_are_those_of_the_formulas(tmp_path: Path) -> None:
    for of_rank in on_ranks(RANKS, tmp_path, sent_forward):
        for sent, formula in of_rank:
            assert sent == pytest.approx(formula, rel=1e-12)


def test_groups_of_both_readings() -> None:
    sizes = Sizes(world_size=8, pipeline=2, sequence=2, tensor=2, expert=2)
    assert (sizes.data, sizes.expert_data) == (1, 2)
    assert sizes.groups(("tensor",)) == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert sizes.groups(("sequence",)) == [[0, 2], [1, 3], [4, 6], [5, 7]]
    assert sizes.groups(("expert_data",)) == [[0, 2], [1, 3], [4, 6], [5, 7]]
    assert sizes.groups(("data", "sequence", "tensor")) == [[0, 1, 2, 3], [4, 5, 6, 7]]


def test_sizes_that_do_not_fit() -> None:
    with pytest.raises(
        UserError, match=r"experts: pipeline 1 \* expert 3 \* expert_tensor 1 is 3, which does not divide"
    ):
        Sizes(world_size=4, expert=3)

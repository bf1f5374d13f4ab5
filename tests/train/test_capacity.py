"""Which choices are dropped: against a naive loop, in other orders of rows, and what a dropped choice does."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from antiphon.base.errors import UserError
from antiphon.base.split_evenly import split_evenly
from antiphon.comm.ledger import Ledger
from antiphon.comm.mesh import Group, Sizes, connect
from antiphon.models.config import model_spec
from antiphon.train.config_tables import LossConfig
from antiphon.train.model import Batch, MoeModel
from antiphon.train.routing import Routing, row_numbers
from antiphon.train.weights import FirstValues
from tests.train.harness import CONFIG

ALONE = Group((0,), 0, Ledger())


def limited(ids: Tensor, weights: Tensor, losses: LossConfig, num_experts: int) -> tuple[Tensor, int]:
    """Choices with -1 for those that are dropped, and how many those are."""
    router = replace(model_spec(CONFIG).router, num_experts=num_experts)
    routing = Routing(router, losses, ALONE, num_layers=1)
    routing.number_rows(lambda: torch.arange(ids.shape[0]))
    return routing.limit(ids, weights), routing.dropped[0]


def naive(ids: list[list[int]], weights: list[list[float]], losses: LossConfig, num_experts: int) -> list[list[int]]:
    """Choices from the heaviest to the lightest, each bin taking what it has room for; experts first, then groups."""
    choices = [(row, choice) for row in range(len(ids)) for choice in range(len(ids[row]))]
    choices.sort(key=lambda at: (-weights[at[0]][at[1]], at))
    mean = len(choices) / num_experts
    kept = [list(row) for row in ids]
    for factor, bins in (
        (losses.capacity, [(e, e + 1) for e in range(num_experts)]),
        (losses.device_capacity, split_evenly(num_experts, losses.device_groups)),
    ):
        for first, last in bins if factor else ():
            room = int(factor * mean * (last - first))
            for row, choice in choices:
                if first <= kept[row][choice] < last:
                    room -= 1
                    if room < 0:
                        kept[row][choice] = -1
    return kept


@settings(max_examples=60, deadline=None)
@given(
    st.integers(0, 30),
    st.integers(1, 3),
    st.integers(3, 7),
    st.integers(0, 1000),
    st.sampled_from([0.0, 0.5, 1.0, 1.3]),
)
def test_what_a_naive_loop_drops(num_rows: int, top_k: int, num_experts: int, seed: int, factor: float) -> None:
    generator = torch.Generator().manual_seed(seed)
    ids = (torch.rand(num_rows, num_experts, generator=generator) ** 2).argsort(1)[:, :top_k]
    weights = torch.randint(0, 9, (num_rows, top_k), generator=generator) / 8  # many are equal
    losses = LossConfig(capacity=factor, device_capacity=0.9, device_groups=2)
    kept, dropped = limited(ids, weights, losses, num_experts)
    assert kept.tolist() == naive(ids.tolist(), weights.tolist(), losses, num_experts)
    assert dropped == int((kept < 0).sum())


def test_no_limit_drops_nothing() -> None:
    ids = torch.zeros(5, 1, dtype=torch.int64)
    kept, dropped = limited(ids, torch.ones(5, 1), LossConfig(), 4)
    assert torch.equal(kept, ids)
    assert dropped == 0


def test_rows_are_known_by_their_place_in_the_micro_batch() -> None:
    """Positions 3 to 5 of sequences 4 and 5, of length 10."""
    assert row_numbers(4, 2, (3, 6), 10, torch.device("cpu")).tolist() == [43, 44, 45, 53, 54, 55]


def pass_of(losses: LossConfig) -> tuple[Tensor, Routing, dict[str, Any]]:
    spec = model_spec(CONFIG | {"num_experts": 4})
    model = MoeModel(
        spec, connect(Sizes(), 0), max_positions=16, dtype=torch.float64, first=FirstValues(3, 0.3)
    ).double()
    ids = torch.randint(0, 320, (2, 16), generator=torch.Generator().manual_seed(0))
    routing = Routing(spec.router, losses, model.mesh.stage, num_layers=spec.num_moe_layers)
    loss = model.stage(0, None, Batch(ids, ids, torch.arange(16).expand(2, 16), None), torch.tensor(32), routing)
    loss.backward()
    return loss.detach(), routing, dict(model.named_parameters())


def test_experts_take_what_they_have_room_for() -> None:
    """64 choices of four experts: 16 each at even use. The router's own counts stay those of what it chose."""
    free, free_routing, _ = pass_of(LossConfig())
    fewer, routing, parameters = pass_of(LossConfig(capacity=0.75))
    assert free_routing.dropped == [0, 0]
    wanted = free_routing.facts(0).counts_E
    assert routing.dropped[0] == int((wanted - 12).clamp(min=0).sum())
    assert torch.equal(routing.facts(0).counts_E, wanted)
    assert not torch.equal(free, fewer)
    assert all(torch.isfinite(each.grad).all() for each in parameters.values())


def test_wide_capacity_is_dropless() -> None:
    loss, routing, parameters = pass_of(LossConfig(capacity=4.0, device_capacity=2.0, device_groups=2))
    expected, _, wanted = pass_of(LossConfig())
    assert routing.dropped == [0, 0]
    assert torch.equal(loss, expected)
    assert all(torch.equal(parameters[name].grad, wanted[name].grad) for name in wanted)


def test_capacity_of_one_group_is_refused() -> None:
    with pytest.raises(UserError, match=r"device_capacity is 1\.2, device_groups is 1, so nothing would be dropped"):
        LossConfig(device_capacity=1.2)

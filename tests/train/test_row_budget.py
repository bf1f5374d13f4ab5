"""Peak memory of a pass with all rows on few experts, against one with even use; what goes into which piece."""

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from antiphon.comm.mesh import Sizes, connect
from antiphon.kernels.ops.route import choose_experts
from antiphon.models.config import model_spec
from antiphon.specs.model import RouterSpec
from antiphon.train import feed_forward
from antiphon.train.config_tables import LossConfig, ParallelConfig
from antiphon.train.model import Batch, MoeModel
from antiphon.train.routing import Routing
from antiphon.train.row_budget import RowBudget
from antiphon.train.setup import prepare
from antiphon.train.trainer import Trainer
from antiphon.train.weights import FirstValues
from tests.comm.ranks import on_ranks
from tests.train.harness import CONFIG, config_of
from tests.train.live_bytes import LiveBytes

EXPERTS, LENGTH = 8, 512
SIZES = {"num_experts": EXPERTS, "hidden_size": 64, "moe_intermediate_size": 64, "vocab_size": 64}
LIMIT = 1.15


def even(num_rows: int) -> Tensor:
    rows = torch.arange(num_rows)
    return torch.stack((rows % EXPERTS, (rows + 1 + rows // EXPERTS % (EXPERTS - 1)) % EXPERTS), dim=1)


def skewed(num_rows: int) -> Tensor:
    """Two experts of eight take all rows, four times the mean; both are on the first rank of two or four."""
    return torch.tensor([0, 1]).expand(num_rows, 2)


def peak(ranks: int, rank: int, dispatch: str, row_budget: float, choices: Any) -> int:
    """Bytes of tensors that a forward and a backward of rank `rank` hold at once."""
    spec = model_spec(CONFIG | SIZES)
    parallel = ParallelConfig(dispatch=dispatch, row_budget=row_budget)  # type: ignore[arg-type]
    mesh = connect(Sizes(world_size=ranks, expert=ranks), rank, 60)
    model = MoeModel(
        spec, mesh, max_positions=LENGTH, dtype=torch.float32, first=FirstValues(1, 0.2), parallel=parallel
    )
    ids = torch.randint(0, 64, (2, LENGTH), generator=torch.Generator().manual_seed(rank))
    batch = Batch(ids, ids, torch.arange(LENGTH).expand(2, LENGTH), None)
    live = LiveBytes()
    with pytest.MonkeyPatch.context() as patch, live:
        patch.setattr(feed_forward, "choose_experts", partial(chosen, choices))
        routing = Routing(spec.router, LossConfig(), mesh.stage, num_layers=spec.num_moe_layers)
        model.stage(0, None, batch, torch.tensor(ranks * ids.numel()), routing).backward()
    return live.peak


def chosen(choices: Any, logits_TE: Tensor, score_bias_E: Tensor | None, router: RouterSpec) -> tuple[Tensor, Tensor]:
    _, weights_TK = choose_experts(logits_TE, score_bias_E, router)
    return choices(logits_TE.shape[0]), weights_TK


def ratios(ranks: int, rank: int) -> dict[tuple[str, float], tuple[int, int]]:
    return {
        (dispatch, budget): (
            peak(ranks, rank, dispatch, budget, even),
            peak(ranks, rank, dispatch, budget, skewed),
        )
        for dispatch in ("all_to_all", "gather_scatter")
        for budget in (0.0, ParallelConfig().row_budget)
    }


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_peak_memory_at_fourfold_skew(tmp_path: Path, ranks: int) -> None:
    """Of the fullest rank; without a budget it is far above the limit, so the counter sees what it is there for."""
    found = on_ranks(ranks, tmp_path, partial(ratios, ranks))
    for dispatch, budget in found[0]:
        balanced, at_skew = (max(of_rank[dispatch, budget][which] for of_rank in found) for which in (0, 1))
        assert (at_skew / balanced <= LIMIT) == bool(budget), (dispatch, budget, at_skew / balanced)


def test_one_process_has_the_same_rows_at_any_skew() -> None:
    assert peak(1, 0, "all_to_all", 1.1, skewed) <= LIMIT * peak(1, 0, "all_to_all", 1.1, even)


def test_less_than_a_share_keeps_less() -> None:
    assert peak(1, 0, "all_to_all", 0.25, even) < 0.75 * peak(1, 0, "all_to_all", 1.1, even)


def pieces_of(rank: int) -> list[Any]:
    mesh = connect(Sizes(world_size=2, expert=2), rank, 60)
    pieces = RowBudget(mesh, EXPERTS, 1.0).pieces(skewed(100) if rank else even(100))
    return [pieces.choices(piece).tolist() for piece in range(1 + pieces.num_more)]


def test_every_choice_is_in_one_piece_and_every_piece_within_its_part(tmp_path: Path) -> None:
    pieces_rTK = torch.stack([torch.tensor(pieces) for pieces in on_ranks(2, tmp_path, pieces_of)], dim=1)
    choices_rTK = torch.stack((even(100), skewed(100)))
    assert ((pieces_rTK >= 0).sum(0) == 1).all()
    assert torch.equal(pieces_rTK.amax(0), choices_rTK)
    share, slack = 200, 2 * 2  # rows of a rank at even use; a row of each rank is not cut
    for number, piece in enumerate(pieces_rTK):
        rows = [int(((piece >= first) & (piece < first + 4)).sum()) for first in (0, 4)]
        assert max(rows) <= (0.25 if number else 0.75) * share + slack


def test_rows_in_used_memory_have_the_same_bits(tmp_path: Path) -> None:
    """Two runs of several steps, and what the buffers take."""
    found = []
    for reuse in ("false", "true"):
        config = config_of(tmp_path / reuse, f"memory.reuse_rows={reuse}")
        Trainer(prepare(config)).run()
        found.append([json.loads(each) for each in (tmp_path / reuse / "out/metrics.jsonl").read_text().splitlines()])
    plain, reused = ([each for each in lines if "loss" in each] for lines in found)
    assert [each["loss"] for each in plain] == [each["loss"] for each in reused]
    assert "row_buffers_bytes" not in plain[-1]
    assert reused[-1]["row_buffers_bytes"] > 0
    assert reused[-1]["row_buffers_made"] - reused[-2]["row_buffers_made"] < reused[0]["row_buffers_made"]

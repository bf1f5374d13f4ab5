"""Many backward passes of one batch give one loss and one gradient, bit for bit; so do other processes."""

import hashlib
from functools import partial
from pathlib import Path

import pytest
import torch

from antiphon.comm.m2n.tile_links import TileLinks
from antiphon.comm.mesh import Sizes, connect
from antiphon.models.config import model_spec
from antiphon.train.config_tables import LossConfig, ParallelConfig
from antiphon.train.model import Batch, MoeModel
from antiphon.train.passes import Passes
from antiphon.train.shards import Shards
from antiphon.train.spans import StepSpans
from antiphon.train.weights import FirstValues
from tests.comm.ranks import begin_anew, on_ranks
from tests.train.harness import CONFIG

LENGTH = 12
FORMS = (  # and whether rows pass experts in tiles
    (ParallelConfig(), LossConfig(balance=0.1, z=0.01), False),
    (ParallelConfig(row_budget=0.5, deduplicate=False), LossConfig(balance=0.1), False),
    (ParallelConfig(row_budget=0.5, dispatch="gather_scatter"), LossConfig(capacity=1.0), False),
    (ParallelConfig(), LossConfig(balance=0.1, z=0.01), True),
    (ParallelConfig(row_budget=0.5, dispatch="gather_scatter"), LossConfig(capacity=1.0), True),
)


def bits(num_passes: int, rank: int) -> list[set[str]]:
    """By form: digests of loss and all summed gradients of two ranks that share positions and experts."""
    found = []
    for form in FORMS:
        found.append(set(digests(num_passes, rank, *form)))
        begin_anew()
    return found


def digests(num_passes: int, rank: int, parallel: ParallelConfig, losses: LossConfig, inside: bool) -> list[str]:
    spec = model_spec(CONFIG)
    mesh = connect(Sizes(world_size=2, sequence=2, expert=2), rank, 60)
    first = FirstValues(1, 0.2)
    links = [TileLinks.connect(mesh.group("expert"), 5, 8 * spec.hidden_size, 60)] if inside else []
    model = MoeModel(spec, mesh, max_positions=LENGTH, dtype=torch.float32, first=first, parallel=parallel, links=links)
    passes, shards = Passes(model, losses, StepSpans()), Shards(model)
    ids = torch.randint(0, 320, (2, LENGTH + 1), generator=torch.Generator().manual_seed(7))
    batch = Batch(ids[:, :-1], ids[:, 1:], torch.arange(LENGTH).expand(2, LENGTH), None)
    found = []
    for _ in range(num_passes):
        shards.zero_grad()
        result = passes.run([batch])
        shards.reduce()
        numbers = [
            result.loss.view(1),
            *(each.values.grad.flatten() for each in shards.pieces if each.values.grad is not None),
        ]
        found.append(hashlib.blake2b(torch.cat(numbers).numpy().tobytes()).hexdigest())
    model.close()
    return found


@pytest.mark.parametrize("num_passes", [3, pytest.param(40, marks=pytest.mark.slow)])
def test_all_passes_have_the_same_bits(tmp_path: Path, num_passes: int) -> None:
    folders = tmp_path / "first", tmp_path / "second"
    for folder in folders:
        folder.mkdir()
    first, second = (on_ranks(2, folder, partial(bits, n)) for folder, n in zip(folders, (num_passes, 1), strict=True))
    assert all(len(found) == 1 for of_rank in first for found in of_rank)
    assert first == second

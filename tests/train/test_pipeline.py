"""A pipeline of three stages: what it sends and holds, its evaluation, its spans, and where a NaN comes from."""

from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch

from antiphon.comm.mesh import Mesh, Sizes, connect
from antiphon.models.config import model_spec
from antiphon.train import pipeline
from antiphon.train.config_tables import LossConfig, ParallelConfig
from antiphon.train.model import Batch, MoeModel
from antiphon.train.passes import Passes
from antiphon.train.pipeline import Parcel
from antiphon.train.shards import Shards
from antiphon.train.spans import StepSpans, share_spans
from antiphon.train.weights import FirstValues
from tests.comm.ranks import on_ranks
from tests.train.harness import CONFIG

RANKS, MICRO_BATCHES, LENGTH, SEQUENCES = 3, 6, 7, 2
LOSSES = LossConfig(balance_over="model")
TIED = CONFIG | {"num_hidden_layers": 4, "tie_word_embeddings": True}
ROWS_BYTES = SEQUENCES * LENGTH * CONFIG["hidden_size"] * 8
USE_BYTES = CONFIG["num_experts"] * 8


@dataclass
class Seen:
    """By a rank."""

    names: list[str]
    held_out: float
    sent_bytes: int
    most_sent_at_once: int
    operators: set[str]
    why: str


def model_on(mesh: Mesh) -> MoeModel:
    parallel = ParallelConfig(pipeline=mesh.sizes.pipeline)
    first = FirstValues(1, 0.2)
    model = MoeModel(model_spec(TIED), mesh, max_positions=LENGTH, dtype=torch.float64, first=first, parallel=parallel)
    return model.double()


def batches() -> list[Batch]:
    ids = torch.arange(MICRO_BATCHES * SEQUENCES * (LENGTH + 1)).view(MICRO_BATCHES, SEQUENCES, -1) * 7 % 320
    positions = torch.arange(LENGTH).expand(SEQUENCES, LENGTH)
    return [Batch(each[:, :-1], each[:, 1:].clone(), positions, None) for each in ids]


def seen_by(rank: int) -> Seen:
    mesh = connect(Sizes(world_size=RANKS, pipeline=RANKS), rank, 60)
    model, spans = model_on(mesh), StepSpans()
    share_spans(model, spans)
    passes, shards = Passes(model, LOSSES, spans), Shards(model)
    sums = passes.losses_of(batches()[:2], range(2), 2)
    held_out = float(sums[:, 0].sum() / sums[:, 1].sum())
    mesh.ledger.take()
    most = 0

    def start_send(*arguments: Any) -> Parcel:
        nonlocal most
        parcel = plain(*arguments)
        waiting.append(parcel)
        most = max(most, len(waiting))
        return replace(parcel, work=Noted(parcel.work, lambda: waiting.remove(parcel)))

    waiting: list[Parcel] = []
    plain, pipeline.start_send = pipeline.start_send, start_send
    spans.on = True
    passes.run(batches())
    operators = {f"{span.label}" for span in spans.take()}
    sent = mesh.ledger.take().sent_bytes["pipeline.send"]
    assert not waiting
    if rank == 1:
        with torch.no_grad():
            model.layers[2].get_parameter("router").fill_(1e200)
    return Seen(
        [piece.name for piece in shards.pieces], held_out, sent, most, operators, passes.cause_of_nan(batches(), shards)
    )


@dataclass
class Noted:
    """Work whose end is told."""

    work: Any
    ended: Any

    def wait(self) -> None:
        self.work.wait()
        self.ended()


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> list[Seen]:
    return on_ranks(RANKS, tmp_path_factory.mktemp("ranks"), seen_by)


def test_layers_are_held_once_and_the_tied_embedding_at_both_ends(seen: list[Seen]) -> None:
    layers = [{name.split(".")[1] for name in each.names if name.startswith("layers.")} for each in seen]
    assert layers == [{"0", "1"}, {"2"}, {"3"}], "the longer run first"
    outer = [[name for name in each.names if "." not in name] for each in seen]
    assert outer == [["embedding"], [], ["embedding", "final_norm"]]


def test_the_held_out_loss_is_that_of_one_process(seen: list[Seen]) -> None:
    sums = Passes(model_on(connect(Sizes(), 0)), LOSSES, StepSpans()).losses_of(batches()[:2], range(2), 2)
    alone = float(sums[:, 0].sum() / sums[:, 1].sum())
    for each in seen:
        assert each.held_out == pytest.approx(alone, rel=1e-12)


def test_bytes_are_those_of_rows_and_their_gradients(seen: list[Seen]) -> None:
    """Each stage sends rows forward and gradients back, with the use of experts; the ends only one of them."""
    once = MICRO_BATCHES * (ROWS_BYTES + USE_BYTES)
    assert [each.sent_bytes for each in seen] == [once, 2 * once, once]


def test_what_was_sent_is_freed_long_before_the_step_ends(seen: list[Seen]) -> None:
    """Rows and use count as two. Kept until the end of the step they would be 12, 24 and 12."""
    assert [each.most_sent_at_once for each in seen] == [6, 6, 4]


def test_waits_are_spans_of_their_own(seen: list[Seen]) -> None:
    rows, gradients = "rows from the stage before, forward", "gradients from the next stage, forward"
    assert [rows in each.operators for each in seen] == [False, True, True]
    assert [gradients in each.operators for each in seen] == [True, True, False]
    assert "layer 2, fc1, backward" in seen[1].operators


def test_a_nan_is_traced_to_the_rank_that_made_it(seen: list[Seen]) -> None:
    assert "layer 2, gate, forward" in seen[1].why
    assert [seen[0].why, seen[2].why] == ["rank 1 found where it began"] * 2

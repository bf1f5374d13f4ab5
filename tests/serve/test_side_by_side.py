"""The head of a step that runs beside others: cut into pieces that hold all rows once."""

from collections import deque
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from antiphon.serve.policy.request import SequenceStep
from antiphon.serve.worker.attention import MicroBatch
from antiphon.serve.worker.messages import Sampled
from antiphon.serve.worker.row_sampler import rows_with_logits
from antiphon.serve.worker.side_by_side import SideBySide, _Step, pieces_of
from antiphon.serve.worker.spans import SpanRecorder


def sequence(name: int, num_rows: int, *, samples: bool = True, num_logprobs: int = 0) -> SequenceStep:
    tokens = tuple(range(num_rows))
    return SequenceStep(str(name), name, tokens, 0, 0, (), samples, 0, num_logprobs)


@pytest.mark.parametrize(
    ("sequences", "sizes"),
    [
        ([sequence(i, 1) for i in range(130)], [64, 64, 2]),
        ([sequence(0, 50, samples=False), *(sequence(i, 1) for i in range(1, 4)), sequence(5, 9, samples=False)], [3]),
        ([sequence(0, 100, num_logprobs=99), sequence(1, 1), sequence(2, 30, samples=False)], [100, 1]),
        ([sequence(0, 50, samples=False)], []),
    ],
)
def test_every_row_with_logits_is_in_one_piece(sequences: list[SequenceStep], sizes: list[int]) -> None:
    num_rows = sum(len(each.token_ids) for each in sequences)
    x_TH = torch.arange(num_rows, dtype=torch.float32)[:, None].repeat(1, 3)
    batch: Any = SimpleNamespace(num_tokens=num_rows)
    pieces = list(pieces_of(MicroBatch(sequences, batch, x_TH, x_TH + 0.5)))
    found = [[float(piece.x_TH[row, 0]) for row in rows_with_logits(piece.sequences)] for piece in pieces]
    assert [len(rows) for rows in found] == sizes
    assert [row for rows in found for row in rows] == rows_with_logits(sequences)
    for piece in pieces:
        assert piece.delta_TH is not None
        assert torch.equal(piece.delta_TH, piece.x_TH + 0.5)


def under_way(num_begun: int, after: list[_Step], *, num_pieces: int | None = None) -> _Step:
    unused: Any = None
    micro_batch: Any = SimpleNamespace(in_flight=None)
    pieces = None if num_pieces is None else deque([micro_batch] * num_pieces)
    return _Step(unused, micro_batch, iter(()), after, num_begun, pieces)


@pytest.mark.parametrize(
    ("first", "second", "may"),
    [
        ((0, None), 0, False),  # its keys and values of layer 0 are not there
        ((1, None), 0, True),
        ((1, None), 1, False),
        ((3, None), 2, True),
        ((3, None), 3, False),  # both are through: the first one ends first
        ((3, 1), 3, False),
        ((3, 0), 3, True),
    ],
)
def test_a_chunk_follows_the_one_before_it_layer_by_layer(
    first: tuple[int, int | None], second: int, may: bool
) -> None:
    """Of three layers. What may go on is chosen although the other has waited longer."""
    earlier = under_way(first[0], [], num_pieces=first[1])
    later = under_way(second, [earlier])
    assert later.may_go_on(3) is may
    unused: Any = None
    stage: Any = SimpleNamespace(half=SimpleNamespace(layers=range(3)))
    exchange: Any = SimpleNamespace(recorder=SpanRecorder(keeps_all=False))
    steps = SideBySide(exchange, unused, unused, stage, unused)
    steps._steps = [later, earlier]
    assert steps._next() is (later if may else earlier)


def test_after_a_failure_nothing_begins_until_all_begins_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step planned ahead may still be in the socket: it would begin with tokens of before. Pages are left alone."""
    started: list[int] = []
    flushed: list[int] = []
    monkeypatch.setattr(SideBySide, "_start", lambda self, order: started.append(order.step))
    unused: Any = None
    sender: Any = SimpleNamespace(flush=lambda: flushed.append(len(started)))
    exchange: Any = SimpleNamespace(recorder=SpanRecorder(keeps_all=False))
    stage: Any = SimpleNamespace(half=None)
    steps = SideBySide(exchange, unused, unused, stage, unused, sender)

    def begin(number: int) -> None:
        order: Any = SimpleNamespace(step=number, first_micro_batch=0)
        steps.begin(order)

    steps._sampled[0] = [Sampled("a", 7)]
    begin(1)
    steps.fail()
    assert flushed == [1]
    assert not steps._sampled
    begin(2)
    assert (started, steps.num_running) == ([1], 0)
    steps.forget()
    begin(3)
    assert started == [1, 3]

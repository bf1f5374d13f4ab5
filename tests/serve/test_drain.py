"""A worker is taken out of service while it decodes: its requests go on elsewhere, with the same text."""

from collections.abc import Callable
from contextlib import suppress

import pytest

from antiphon.base.errors import UserError
from antiphon.serve.engine import Engine
from antiphon.serve.launch import build_engine
from antiphon.serve.prepare import prepare
from tests.serve.engine_harness import (
    GREEDY,
    Run,
    TinyModel,
    complete,
    config,
    kill,
    random_prompts,
    running,
    wait_until_idle,
)
from tests.waiting import wait_until

PROMPTS = random_prompts([20, 45, 33, 70, 18, 50], seed=9)


def is_drained(engine: Engine, worker: str) -> bool:
    return engine.stats().workers[worker] == "drained"


class Drain:
    """Drains the worker when the first tokens are out: steps of a tiny model are over soon. Then calls `then`."""

    def __init__(self, engine: Engine, worker: str, then: Callable[[], object] = lambda: None) -> None:
        self._engine = engine
        self._worker = worker
        self._then = then
        self._is_due = True

    def __call__(self, num_tokens: int) -> None:
        if self._is_due and num_tokens > 2:
            self._is_due = False
            self._engine.drain_worker(self._worker, undo=False)
            self._then()


def hand_over(engine: Engine, worker: str, expected: list[list[int]]) -> None:
    """Drains the worker while it decodes. It may have answered all before it hears of that: then once more."""
    for _ in range(10):
        finished = Run(engine, PROMPTS, GREEDY).finish(Drain(engine, worker))
        assert [request.token_ids for request in finished] == expected
        if engine.stats().handovers.num_done:
            return
        engine.drain_worker(worker, undo=True)
    pytest.fail("ten runs were over before the worker was drained")


def test_two_workers_drained_at_once_leave_none_without_a_worker(tiny_model: TinyModel) -> None:
    with running(config(tiny_model, "2")) as engine:
        wait_until(lambda: engine.complete, "all workers")
        assert engine.drain_worker("replica[0]", undo=False) == "drained"
        with pytest.raises(UserError, match=r"replica\[1\] is the only worker left that takes requests: add"):
            engine.drain_worker("replica[1]", undo=False)
        assert engine.drain_worker("replica[0]", undo=True) == engine.drain_state("replica[0]") == "ready"
        assert engine.drain_worker("replica[1]", undo=False) == engine.drain_state("replica[1]") == "drained"
        assert engine.drain_worker("replica[1]", undo=True) == "ready"


def test_a_worker_that_is_not_there_is_not_drained(tiny_model: TinyModel) -> None:
    """An order would be for the process that comes, which no order names."""
    engine = build_engine(prepare(config(tiny_model, "2")))  # not started: both load
    with pytest.raises(UserError, match=r"replica\[0\] is not there .*: it has no requests"):
        engine.drain_worker("replica[0]", undo=False)
    assert engine.drain_worker("replica[0]", undo=True) == engine.drain_state("replica[0]") != "ready"
    engine.stop()


def test_an_order_to_a_worker_that_dies_is_not_for_the_next(tiny_model: TinyModel) -> None:
    with running(config(tiny_model, "2")) as engine:
        wait_until(lambda: engine.complete, "all workers")
        kill(engine, "replica", 0)
        with suppress(UserError):  # the engine may have noticed
            engine.drain_worker("replica[0]", undo=False)
        with suppress(UserError):
            engine.drain_worker("replica[1]", undo=False)
            pytest.fail("none would be left to take requests")
        wait_until(lambda: engine.stats().num_worker_restarts == 1 and engine.complete, "another in its place")
        assert engine.drain_state("replica[0]") == "ready"


@pytest.mark.parametrize(
    ("layout", "worker"),
    [
        ("2", "replica[1]"),
        pytest.param("2+1/m2", "attention[0]", marks=pytest.mark.slow),
        pytest.param("2t2", "replica[0]", marks=pytest.mark.slow),
        pytest.param("1>2", "decode/replica[0]", marks=pytest.mark.slow),
    ],
)
def test_requests_of_a_drained_worker_go_on_with_their_keys_and_values(
    layout: str, worker: str, tiny_model: TinyModel
) -> None:
    with running(config(tiny_model, layout)) as engine:
        wait_until(lambda: engine.complete, "all workers")
        hand_over(engine, worker, tiny_model.greedy(PROMPTS))
        counts = engine.stats().handovers
        assert counts.num_failed == counts.num_recomputed == 0
        wait_until(lambda: is_drained(engine, worker), "a drained worker")
        assert complete(engine, PROMPTS) == tiny_model.greedy(PROMPTS)
        assert is_drained(engine, worker)
        wait_until_idle(engine)


def test_codes_of_8_bits_move_with_a_drained_worker(tiny_model: TinyModel) -> None:
    with running(config(tiny_model, "2", kv_dtype="int8")) as engine:
        wait_until(lambda: engine.complete, "all workers")
        expected = complete(engine, PROMPTS)
        hand_over(engine, "replica[1]", expected)
        counts = engine.stats().handovers
        assert counts.num_failed == counts.num_recomputed == 0
        wait_until_idle(engine)


def test_a_worker_that_was_drained_serves_again(tiny_model: TinyModel) -> None:
    """Once that is undone, or another process has taken its place."""
    with running(config(tiny_model, "2")) as engine:
        wait_until(lambda: engine.complete, "all workers")
        assert engine.drain_worker("replica[0]", undo=False) == "drained"
        wait_until(lambda: is_drained(engine, "replica[0]"), "a drained worker")
        with pytest.raises(UserError, match="only worker left"):
            engine.drain_worker("replica[1]", undo=False)
        with pytest.raises(UserError, match=r"replica\[0\], replica\[1\]"):
            engine.drain_worker("experts[0]", undo=False)
        engine.drain_worker("replica[0]", undo=True)
        wait_until(lambda: engine.stats().workers["replica[0]"] == "ready", "the end of it")
        engine.drain_worker("replica[0]", undo=False)
        wait_until(lambda: is_drained(engine, "replica[0]"), "a drained worker")
        kill(engine, "replica", 0)
        wait_until(lambda: engine.stats().workers["replica[0]"] != "drained", "its death")
        wait_until(lambda: engine.complete, "all workers")
        assert complete(engine, PROMPTS) == tiny_model.greedy(PROMPTS)


@pytest.mark.parametrize("victim", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_a_death_while_a_worker_is_drained_costs_nothing(victim: int, tiny_model: TinyModel) -> None:
    with running(config(tiny_model, "2")) as engine:
        wait_until(lambda: engine.complete, "all workers")
        drain = Drain(engine, "replica[0]", then=lambda: kill(engine, "replica", victim))
        finished = Run(engine, PROMPTS, GREEDY).finish(drain)
        assert [request.token_ids for request in finished] == tiny_model.greedy(PROMPTS)
        wait_until_idle(engine)

"""Experts move while requests run: the same greedy text, whoever decides and whoever dies meanwhile."""

import contextlib
import random
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from antiphon.base.errors import UserError
from antiphon.cli.main import app
from antiphon.cli.output import run_command
from antiphon.placement.sample_paths import PathProfile
from antiphon.serve import placement_control, prepare
from antiphon.serve.engine import Engine
from antiphon.serve.worker.messages import Role
from antiphon.serve.worker_handle import WorkerName
from antiphon.specs.placement import ExpertPlacement, Owners
from tests.serve.engine_harness import (
    GREEDY,
    NUM_TOKENS,
    Prompts,
    Run,
    TinyModel,
    Tokens,
    complete,
    config,
    kill,
    running,
)
from tests.waiting import wait_until

# Five experts of each of two layers on two workers with four slots. From the first to the second all of them move.
FIRST: Owners = ((0,), (0,), (0,), (1,), (1,))
SECOND: Owners = ((1,), (1,), (0, 1), (0,), (0,))
COPIES: Owners = ((0, 1), (0,), (0, 1), (1,), (1,))
SPARES: Owners = ((0, 1), (0, 1), (0, 1), (0, 1), (0, 1))


def placement(owners: Owners) -> ExpertPlacement:
    return ExpertPlacement(2, {0: owners, 1: owners})


def owners_of(engine: Engine) -> Owners:
    placing = engine.workforce.groups[0].placing
    assert placing is not None
    return placing.current.owners[1]


def at_outputs(*actions: Callable[[], object]) -> Callable[[int], None]:
    """Do one after the other, each at the next output."""
    left = list(actions)

    def on_output(num_tokens: int) -> None:
        if left:
            left.pop(0)()

    return on_output


@pytest.mark.parametrize(
    ("layout", "policy"),
    [
        ("2+2/m2", "static"),
        ("2+2/m2", "window"),
        ("2+2/m2 free", "window"),
        ("2t2*2", "window"),
        pytest.param("2*1/m2", "static", marks=pytest.mark.slow),
    ],
)
def test_the_same_text_whoever_decides(
    layout: str,
    policy: str,
    tiny_model: TinyModel,
    prompts: Prompts,
    reference: Tokens,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(placement_control, "WINDOW_STEPS", 4)
    monkeypatch.setattr(placement_control, "PERIOD_S", 0.0)
    with running(config(tiny_model, layout, balance=policy, expert_slots=4)) as engine:
        before = owners_of(engine)
        assert complete(engine, prompts) == reference
        wait_until(lambda: engine.stats().placement_changes > 0, "experts that moved")
        assert owners_of(engine) != before
        assert complete(engine, prompts[:8]) == reference[:8]
        wait_until(lambda: set(engine.stats().balancedness_per_layer) == {0, 1}, "a report of both workers' rows")
        assert set(engine.stats().rows_per_expert[0]) == {0, 1}


def test_rows_of_workers_that_step_each_for_itself_add_up_to_those_of_whole_steps(
    tiny_model: TinyModel, prompts: Prompts
) -> None:
    """What a plan compares with the floor of a step: the rows of two micro-batches of both workers."""
    with running(config(tiny_model, "2+2/m2 free", balance="window", expert_slots=4)) as engine:
        complete(engine, prompts[:8])
        judge = engine.workforce.groups[0]._balancer
        assert judge is not None
        sizes = [len(counted) for counted in judge._window]
    assert len(sizes) > 5
    assert set(sizes[:-1]) == {4}


@pytest.fixture
def eager(monkeypatch: pytest.MonkeyPatch) -> None:
    """A copy ahead of a layer pays at once: rows are divided however few they are, and a load costs as much as one."""
    monkeypatch.setattr(prepare, "_KNEE_ROWS", {"cpu": 1})
    monkeypatch.setattr(prepare, "_LOAD_ROWS", {"cpu": 1})


@pytest.mark.parametrize(
    "layout",
    ["2+2/m2", "1t2+2t2/m2", "2t2*2", *(pytest.param(each, marks=pytest.mark.slow) for each in ("3+2/m3", "2*1/m2"))],
)
@pytest.mark.usefixtures("eager")
def test_copies_ahead_of_a_layer_do_not_change_the_text(
    layout: str, tiny_model: TinyModel, prompts: Prompts, reference: Tokens
) -> None:
    with running(config(tiny_model, layout, balance="predict", expert_slots=4)) as engine:
        assert complete(engine, prompts[:8]) == reference[:8]
        moves = [lambda: engine.place(placement(SECOND)), lambda: engine.place(placement(COPIES))]
        finished = Run(engine, prompts, GREEDY).finish(at_outputs(*moves))
        assert [request.token_ids for request in finished] == reference
        assert complete(engine, prompts[:8]) == reference[:8]
        counts = engine.stats().prefetch
    assert counts.num_copies > 0
    assert counts.num_forecasts >= counts.num_phase_two > 0
    assert counts.num_late > 0


@pytest.mark.parametrize(("layout", "victim"), [("2+2/m2", "experts"), ("2*1/m2", "replica")])
@pytest.mark.usefixtures("eager")
def test_copies_that_paths_foresee_do_not_change_the_text(
    layout: str, victim: Role, tiny_model: TinyModel, prompts: Prompts, reference: Tokens, tmp_path: Path
) -> None:
    """A profile of the model's own rows, as `antiphon placement --profile-paths` makes it."""
    trace, paths = tmp_path / "routing.trace", tmp_path / "paths"
    with running(config(tiny_model, layout, record_routing=trace)) as engine:
        complete(engine, prompts)
    options = [str(trace), "--workers", "2", "--slots", "4", "--profile-paths", str(paths), "--path-length", "1"]
    assert run_command(lambda: app(["placement", *options], prog_name="antiphon", standalone_mode=False)) == 0
    with running(config(tiny_model, layout, balance="paths", path_profile=paths, expert_slots=4)) as engine:
        finished = Run(engine, prompts, GREEDY).finish(at_outputs(lambda: kill(engine, victim, 1)))
        assert [request.token_ids for request in finished] == reference
        counts = engine.stats().prefetch
    assert counts.num_copies > 0
    assert counts.num_forecasts > 0


@pytest.mark.parametrize(("phases", "ahead", "late"), [("first", True, False), ("second", False, True)])
@pytest.mark.usefixtures("eager")
def test_either_phase_alone_does_not_change_the_text(
    phases: str, ahead: bool, late: bool, tiny_model: TinyModel, prompts: Prompts, reference: Tokens
) -> None:
    with running(config(tiny_model, "2+2/m2", balance="predict", phases=phases, expert_slots=4)) as engine:
        assert complete(engine, prompts) == reference
        counts = engine.stats().prefetch
    assert (counts.num_copies > 0, counts.num_late > 0) == (ahead, late)


def test_paths_need_a_profile_of_this_model(tiny_model: TinyModel, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="--balance paths and --path-profile go together"):
        config(tiny_model, "2+2/m2", balance="paths")
    PathProfile.of_rows(np.zeros((3, 4, 2), dtype=np.int64), 6, 1).write(tmp_path / "paths")
    command = ["serve", str(tiny_model.folder), "--layout", "disaggregated", "--balance", "paths", "--port", "0"]
    command += ["--path-profile", str(tmp_path / "paths")]
    with pytest.raises(UserError, match="2 of 6 experts in 3 layers"):
        app(command, prog_name="antiphon", standalone_mode=False)


@pytest.mark.parametrize("victims", [[("attention", 0)], [("experts", 1)]])
@pytest.mark.usefixtures("eager")
def test_deaths_among_copies_cost_no_token(
    victims: list[tuple[str, int]], tiny_model: TinyModel, prompts: Prompts, reference: Tokens
) -> None:
    """A restarted worker has none of the copies that the others knew of."""
    with running(config(tiny_model, "2+2/m2", balance="predict", expert_slots=4)) as engine:
        kills = [partial(kill, engine, role, index) for role, index in victims]
        finished = Run(engine, prompts, GREEDY).finish(at_outputs(*kills))
        assert [request.token_ids for request in finished] == reference
        assert engine.stats().num_worker_restarts == len(victims)
        assert complete(engine, prompts[:8]) == reference[:8]


@pytest.mark.parametrize(
    "layout",
    [
        "2+2/m2",
        "3+2/m2 free",
        "2t2*2",
        *(pytest.param(each, marks=pytest.mark.slow) for each in ("1t2+2t2/m2", "2*1/m2", "2p2*1")),
    ],
)
def test_moves_while_requests_run_and_what_is_refused(
    layout: str, tiny_model: TinyModel, prompts: Prompts, reference: Tokens
) -> None:
    with running(config(tiny_model, layout, expert_slots=4, placement=placement(FIRST))) as engine:
        moves = [lambda: engine.place(placement(SECOND)), lambda: engine.place(placement(COPIES))]
        finished = Run(engine, prompts, GREEDY).finish(at_outputs(*moves))
        assert [request.token_ids for request in finished] == reference
        wait_until(lambda: owners_of(engine) == COPIES, "the last placement asked for")
        assert engine.place(placement(COPIES)) == 0
        assert engine.place(placement(SECOND)) == 6  # three experts of each layer
        wait_until(lambda: owners_of(engine) == SECOND, "the next one")
        for wrong, message in (
            (ExpertPlacement(2, {0: FIRST}), "the placement is for layers 0 to 0, this model has experts in 0 to 1"),
            (placement(FIRST[:4]), "the placement has 4 experts in layer 0, this model has 5"),
            (ExpertPlacement(3, {0: FIRST, 1: FIRST}), "the placement is for 3 expert workers, 2 run"),
            (placement(SPARES), "the placement puts 5 experts of layer 0 on worker 0, which has 4 slots"),
        ):
            with pytest.raises(UserError, match=message):
                engine.place(wrong)
        assert complete(engine, prompts[:8]) == reference[:8]
        assert owners_of(engine) == SECOND


def test_a_placement_is_for_the_pools_that_have_as_many_expert_workers(
    tiny_model: TinyModel, prompts: Prompts, reference: Tokens
) -> None:
    of_three = ((2,), (0,), (1,), (0,), (2,))
    three = ExpertPlacement(3, {0: of_three, 1: of_three})
    with running(config(tiny_model, "1+2>1+3", expert_slots=4)) as engine:
        moves = [lambda: engine.place(placement(SECOND)), lambda: engine.place(three)]
        finished = Run(engine, prompts, GREEDY).finish(at_outputs(*moves))
        assert [request.token_ids for request in finished] == reference
        wait_until(
            lambda: [each.current.owners[1] for each in engine.workforce.placing] == [of_three, SECOND],
            "the decode pool has the one of three workers, the prefill pool the one of two",
        )
        with pytest.raises(UserError, match="the placement is for 4 expert workers, 2 or 3 run"):
            engine.place(replace(three, num_workers=4))


@pytest.mark.parametrize(
    ("layout", "victims"),
    [
        ("2+2/m2", [("attention", 0)]),
        ("2+2/m2", [("experts", 0)]),
        ("2*1", [("replica", 1)]),
        pytest.param("2+2/m2", [("experts", 1)], marks=pytest.mark.slow),
        pytest.param("2+2/m2", [("experts", 1), ("attention", 1)], marks=pytest.mark.slow),
        pytest.param("2+2/m2", [("experts", 0), ("experts", 1)], marks=pytest.mark.slow),
        pytest.param("2t2*2", [("replica", 0), ("replica", 1)], marks=pytest.mark.slow),
    ],
)
def test_deaths_in_the_middle_of_a_move_cost_no_token(
    layout: str, victims: list[tuple[str, int]], tiny_model: TinyModel, prompts: Prompts, reference: Tokens
) -> None:
    """All experts of worker 0 go to worker 1 and the other way round: each is an old and a new owner."""
    with running(config(tiny_model, layout, expert_slots=4, placement=placement(FIRST))) as engine:

        def die() -> None:
            for role, index in victims:
                kill(engine, role, index)

        finished = Run(engine, prompts, GREEDY).finish(at_outputs(lambda: engine.place(placement(SECOND)), die))
        assert [request.error for request in finished] == [None] * len(prompts)
        assert [request.token_ids for request in finished] == reference
        wait_until(lambda: owners_of(engine) == SECOND, "a move that goes on")
        num_processes = len(victims) * (2 if "t2" in layout else 1)
        assert engine.stats().num_worker_restarts == num_processes
        wait_until(lambda: engine.complete, "all workers are back")
        assert complete(engine, prompts[:8]) == reference[:8]


@pytest.mark.parametrize(
    ("layout", "seed"),
    [
        ("2+2/m2", 0),
        *(pytest.param("2+2/m2", seed, marks=pytest.mark.slow) for seed in range(1, 8)),
        *(pytest.param("1+2t2/m2", seed, marks=pytest.mark.slow) for seed in range(8, 11)),
        *(pytest.param("2t2*2", seed, marks=pytest.mark.slow) for seed in range(11, 15)),
    ],
)
def test_moves_and_deaths_in_any_order(
    layout: str, seed: int, tiny_model: TinyModel, prompts: Prompts, reference: Tokens
) -> None:
    """Two moves and three deaths, the order and the moments drawn by chance."""
    chance = random.Random(seed)
    settings = config(tiny_model, layout, expert_slots=4, placement=placement(FIRST))
    with running(settings) as engine:

        def dies(name: WorkerName) -> Callable[[], object]:
            def at_once() -> None:
                with contextlib.suppress(ProcessLookupError):  # it is dead already, and not back yet
                    kill(engine, name.role, name.index, rank=name.rank)

            return at_once

        asked: list[Owners] = []

        def place(owners: Owners) -> None:
            asked.append(owners)
            engine.place(placement(owners))

        events: list[Callable[[], object]] = [
            *(dies(chance.choice(list(engine.workforce.names))) for _ in range(3)),
            *(partial(place, owners) for owners in (SECOND, COPIES)),
        ]
        chance.shuffle(events)
        total = len(prompts) * NUM_TOKENS
        moments = sorted(chance.uniform(0.0, 0.8) * total for _ in events)

        def on_output(num_tokens: int) -> None:
            while moments and num_tokens >= moments[0]:
                moments.pop(0)
                events.pop(0)()

        finished = Run(engine, prompts, GREEDY).finish(on_output)
        assert [request.error for request in finished] == [None] * len(prompts)
        assert [request.token_ids for request in finished] == reference
        wait_until(lambda: engine.complete, "all workers are back")
        wait_until(lambda: owners_of(engine) == asked[-1], "the last placement asked for")
        assert complete(engine, prompts[:8]) == reference[:8]


def test_a_copy_is_a_spare(
    tiny_model: TinyModel, prompts: Prompts, reference: Tokens, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The worker that dies does not come back; all others serve on, and moves wait for it."""
    for name in ("_SECOND_DELAY_S", "_LONGEST_DELAY_S", "_LONGEST_DELAY_AFTER_KILL_S"):
        monkeypatch.setattr(f"antiphon.serve.policy.restarts.{name}", 1000.0)
    with running(config(tiny_model, "1+2/m2", expert_slots=5, placement=placement(SPARES))) as engine:
        name = WorkerName("experts", 1)
        first = kill(engine, "experts", 1)
        wait_until(lambda: engine.worker_pid(name) != first, "a replacement")
        kill(engine, "experts", 1)
        wait_until(lambda: "restart in" in engine.stats().status, "a worker that waits for its restart")
        assert complete(engine, prompts) == reference
        stats = engine.stats()
        assert stats.healthy
        assert stats.missing == ("experts[1]",)
        engine.place(placement(FIRST))
        assert complete(engine, prompts[:4]) == reference[:4]
        assert owners_of(engine) == SPARES


def test_who_was_missing_is_taken_back(tiny_model: TinyModel, prompts: Prompts, reference: Tokens) -> None:
    with running(config(tiny_model, "2+2/m2", expert_slots=5, placement=placement(SPARES))) as engine:
        finished = Run(engine, prompts, GREEDY).finish(at_outputs(lambda: kill(engine, "experts", 0)))
        assert [request.token_ids for request in finished] == reference
        wait_until(lambda: engine.stats().status == "ok", "the worker is back")
        placing = engine.workforce.groups[0].placing
        wait_until(lambda: placing is not None and not placing.absent, "it gets rows again")
        assert complete(engine, prompts[:8]) == reference[:8]

"""Requests that break whatever computes them. They end with an error that says what happened; all others live."""

import re
from dataclasses import replace
from pathlib import Path

import pytest

from antiphon.serve.engine import Engine
from tests.serve.engine_harness import (
    GREEDY,
    Finished,
    Prompts,
    Run,
    TinyModel,
    Tokens,
    complete,
    config,
    running,
    wait_until_idle,
)
from tests.serve.poisoned_worker import SEED, poison
from tests.waiting import wait_until

POISON = replace(GREEDY, seed=SEED)
GUILTY = r"\d+ steps with this request failed, the last one with it alone: {}; the server has given the request up"


def run_with_poison(engine: Engine, prompts: Prompts, reference: Tokens, num_poisons: int = 1) -> list[Finished]:
    """Send poisons amid the prompts; the others' text must be right. Returns the poisons."""
    middle = len(prompts) // 2
    poisons = [[5, 6, 7, 8, 9, 10, 11, 12, index + 13] for index in range(num_poisons)]
    everything = [*prompts[:middle], *poisons, *prompts[middle:]]
    params = [POISON if prompt in poisons else GREEDY for prompt in everything]
    finished = Run(engine, everything, params).finish()
    others = finished[:middle] + finished[middle + num_poisons :]
    assert [request.error for request in others] == [None] * len(prompts)
    assert [request.token_ids for request in others] == reference[: len(prompts)]
    assert engine.fatal is None
    wait_until_idle(engine)
    return finished[middle : middle + num_poisons]


@pytest.mark.parametrize(
    ("layout", "way", "message"),
    [
        ("1", "die", r"replica\[0\] died: killed by SIGKILL \(.*\)"),
        pytest.param("1", "error", r"replica\[0\]: RuntimeError: poisoned", marks=pytest.mark.slow),
        ("1", "break", r"replica\[0\]: RuntimeError: poisoned"),
        ("1", "hang", r"replica\[0\] died: killed by SIGKILL \(it has not answered for .* s\)"),
        pytest.param(
            "2+1/m2",
            "die",
            r"(attention\[[01]\] died: killed by SIGKILL|experts\[0\]: lost attention\[[01]\]).*",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            "2+1/m2 free",
            "die",
            r"(attention\[[01]\] died: killed by SIGKILL|experts\[0\]: lost attention\[[01]\]).*",
            marks=pytest.mark.slow,
        ),
        pytest.param("2+1/m2 free", "error", r"attention\[[01]\]: RuntimeError: poisoned", marks=pytest.mark.slow),
        ("1+1/m2", "error", r"attention\[0\]: RuntimeError: poisoned"),
        pytest.param("1>1", "die", r"decode/replica\[0\] died: killed by SIGKILL \(.*\)", marks=pytest.mark.slow),
        pytest.param("1>1", "error", r"decode/replica\[0\]: RuntimeError: poisoned", marks=pytest.mark.slow),
        pytest.param(
            "1+1/m3 free",
            "experts",
            r"(experts\[0\] died: killed by SIGKILL|attention\[0\]: lost experts\[0\]).*",
            marks=pytest.mark.slow,
        ),
        ("1+1/m2", "experts", r"(experts\[0\] died: killed by SIGKILL|attention\[0\]: lost experts\[0\]).*"),
    ],
)
def test_poison_among_others(
    layout: str,
    way: str,
    message: str,
    tiny_model: TinyModel,
    prompts: Prompts,
    reference: Tokens,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It breaks the worker while it generates, with two other requests in its steps."""
    poison(tmp_path, monkeypatch, way, point=12)
    with running(config(tiny_model, layout, timeout_s=1.5 if way == "hang" else 30.0)) as engine:
        (victim,) = run_with_poison(engine, prompts[:2], reference)
        assert victim.last.finish_reason == "error"
        assert re.fullmatch(GUILTY.format(message), str(victim.error)), victim.error
        assert len(victim.token_ids) == 4, "what it said before it broke anything was delivered"
        assert complete(engine, prompts[:4]) == reference[:4]


def test_poison_cannot_use_up_the_workers_restarts(
    tiny_model: TinyModel, prompts: Prompts, reference: Tokens, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One after the other, alone, and deadly in the first step: more deaths in a row than a worker has restarts."""
    poison(tmp_path, monkeypatch, "die")
    with running(config(tiny_model, "1")) as engine:
        for _ in range(2):
            run_with_poison(engine, [], [])
        assert engine.stats().num_worker_restarts == 6
        assert complete(engine, prompts[:4]) == reference[:4]


def test_several_poisons_at_once(
    tiny_model: TinyModel, prompts: Prompts, reference: Tokens, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    poison(tmp_path, monkeypatch, "error", point=20)
    with running(config(tiny_model, "2")) as engine:
        poisons = run_with_poison(engine, prompts[:8], reference, num_poisons=2)
        assert all(re.search("RuntimeError: poisoned", str(request.error)) for request in poisons)


def test_suspects_may_be_aborted(
    tiny_model: TinyModel, prompts: Prompts, reference: Tokens, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The client of the culprit goes while the search for it is on: the others get on with it."""
    poison(tmp_path, monkeypatch, "die")
    with running(config(tiny_model, "1")) as engine:
        culprit = Run(engine, [[5, 6, 7]], POISON)
        others = Run(engine, prompts[:4], GREEDY)
        wait_until(lambda: engine.stats().num_worker_restarts >= 2, "a search")
        engine.abort(culprit.ids[0])
        assert [request.token_ids for request in others.finish()] == reference[:4]
        assert [request.last.finish_reason for request in culprit.finish()] == ["abort"]
        wait_until_idle(engine)

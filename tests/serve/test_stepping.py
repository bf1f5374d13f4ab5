"""Attention workers that step each for itself (`--stepping free`): the same text, and a stopped one delays no other.

Kills, suspects, moves, requests and families with it are cases of the tests of those (layouts that end with "free")."""

import signal
from pathlib import Path
from typing import Any

import pytest

from antiphon.base.errors import UserError
from antiphon.cli.main import app
from antiphon.serve.fleet import Fleet
from antiphon.serve.policy.request import PENDING
from antiphon.serve.worker.messages import RunStep
from antiphon.serve.worker_handle import WorkerName
from tests.serve.engine_harness import (
    GREEDY,
    Prompts,
    Run,
    TinyModel,
    Tokens,
    complete,
    config,
    kill,
    running,
    wait_until_idle,
)
from tests.serve.server_harness import serve, write_checkpoint

QUICK = ("3+2/m2",)


@pytest.mark.parametrize(
    "layout",
    [
        *QUICK,
        *(
            pytest.param(layout, marks=pytest.mark.slow)
            for sizes in ("1+3", "3+2", "5+2")
            for layout in (f"{sizes}/m{m}" for m in (1, 2, 3, 4))
            if layout not in QUICK
        ),
        pytest.param("1t2+2t2/m2", marks=pytest.mark.slow),
        pytest.param("2+2/m2>2+1/m2", marks=pytest.mark.slow),
        pytest.param("2x2+1/m2", marks=pytest.mark.slow),
    ],
)
def test_the_same_text_as_in_one_process(
    layout: str, tiny_model: TinyModel, prompts: Prompts, reference: Tokens
) -> None:
    with running(config(tiny_model, f"{layout} free")) as engine:
        assert complete(engine, prompts) == reference
        wait_until_idle(engine)


def test_the_same_text_among_preemptions(tiny_model: TinyModel, prompts: Prompts, reference: Tokens) -> None:
    with running(config(tiny_model, "2+1/m2 free", num_blocks=24)) as engine:
        assert complete(engine, prompts[:16]) == reference[:16]
        assert engine.stats().num_preemptions > 0


def test_a_stopped_attention_worker_delays_no_other(
    tiny_model: TinyModel, prompts: Prompts, reference: Tokens, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All that the others have is answered while one stands still. Where all step together nothing would be."""
    monkeypatch.setattr("antiphon.serve.workforce._STOPPED_S", float("inf"))
    with running(config(tiny_model, "3+1/m2 free", timeout_s=600.0)) as engine:
        schedulers = engine.workforce.schedulers
        stopped = schedulers[WorkerName("attention", 0)]
        run = Run(engine, prompts, GREEDY)
        held: set[str] = set()
        ended: set[str] = set()
        texts: dict[str, list[int]] = {}
        for output in run.sink.outputs(len(run.ids)):
            texts.setdefault(output.request_id, []).extend(output.token_ids)
            if not held and stopped.requests and len(texts) > len(run.ids) // 2:
                kill(engine, "attention", 0, signal.SIGSTOP)
                held = set(stopped.requests)
            ended |= {output.request_id} if output.finish_reason else set()
            if held and ended == set(run.ids) - held:
                kill(engine, "attention", 0, signal.SIGCONT)
        assert 0 < len(held) < len(run.ids)
        assert [texts[request_id] for request_id in run.ids] == reference
        assert engine.stats().num_worker_restarts == 0


def test_the_next_step_of_a_replica_waits_for_it(
    tiny_model: TinyModel, prompts: Prompts, reference: Tokens, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Planned before the tokens are known that it begins with: nearly all steps, on a machine that is free for it."""
    ahead: list[bool] = []
    send = Fleet.send

    def watched(self: Fleet, worker: Any, message: Any) -> bool:
        if isinstance(message, RunStep):
            ahead.append(message.micro_batches[0][0].token_ids == (PENDING,))
        return send(self, worker, message)

    monkeypatch.setattr(Fleet, "send", watched)
    with running(config(tiny_model, "1")) as engine:
        assert complete(engine, prompts[:8]) == reference[:8]
        wait_until_idle(engine)
    assert sum(ahead) > len(ahead) // 8
    with running(config(tiny_model, "1t2")) as engine:
        ahead.clear()
        assert complete(engine, prompts[:8]) == reference[:8]
    assert not any(ahead), "several ranks follow each step"


def test_servers_that_step_freely_and_hand_over_answer_alike(tmp_path: Path) -> None:
    """Several answers to a prompt, stop strings and grammars."""
    model = write_checkpoint(tmp_path / "checkpoint")
    schema = {"type": "object", "properties": {"a": {"enum": ["x", "y"]}}, "required": ["a"]}
    answers: list[list[Any]] = []
    for name, options in (
        ("together", ["--layout", "colocated"]),
        ("free", ["--layout", "disaggregated", "--attention", "2", "--stepping", "free"]),
        ("pools", ["--prefill", "1", "--decode", "1+1/m2", "--stepping", "free"]),
    ):
        (tmp_path / name).mkdir()
        with serve(model, tmp_path / name, *options) as server:
            prompt = "bada" * 16  # more than a block of tokens, so that it is handed over
            text = server.text(prompt=prompt, max_tokens=40)
            stop = next(text[at : at + 3] for at in range(10, len(text)) if text[at : at + 3].isascii())
            bodies: list[dict[str, Any]] = [
                {"n": 3, "seed": 5, "temperature": 1.0, "max_tokens": 30},
                {"max_tokens": 40, "stop": [stop, "never in it"]},
                {"max_tokens": 40, "response_format": {"type": "json_schema", "json_schema": {"schema": schema}}},
            ]
            bodies[2]["response_format"]["json_schema"]["name"] = "letters"
            replies = [server.complete(prompt=prompt, **body) for body in bodies]
            assert [reply.status_code for reply in replies] == [200] * 3, [reply.text for reply in replies]
            answers.append(
                [
                    sorted((each["index"], each["text"], each["finish_reason"]) for each in reply.json()["choices"])
                    for reply in replies
                ]
            )
            if name == "pools":
                assert server.metrics()["antiphon:handovers_total"] > 0
    assert answers[0] == answers[1] == answers[2]
    assert len(answers[0][0]) == 3
    assert answers[0][1][0][2] == "stop"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--layout", "colocated"], r"--stepping free needs --layout disaggregated: colocated, replicas step freely"),
        (["--layout", "hybrid", "--attention", "2"], r"--stepping free needs --layout disaggregated: hybrid, replicas"),
        (["--prefill", "1", "--decode", "1"], r"--stepping free needs a pool with expert workers"),
        (["--layout", "disaggregated", "--balance", "predict"], r"--balance predict with --stepping free"),
    ],
)
def test_what_does_not_go_with_it_is_refused(options: list[str], message: str, tiny_model: TinyModel) -> None:
    command = ["serve", str(tiny_model.folder), "--port", "0", "--stepping", "free", *options]
    with pytest.raises(UserError, match=message):
        app(command, prog_name="antiphon", standalone_mode=False)

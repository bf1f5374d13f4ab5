"""Rows exchanged in the order of a stream, in the form for CPUs: the same text in all layouts, kills, stopped peers."""

import signal
import time
from types import SimpleNamespace
from typing import Any

import pytest

from antiphon.base.errors import UserError
from antiphon.serve.worker.attention import AttentionRunner
from antiphon.serve.worker.exchange import RowRouting, StepExchange
from antiphon.serve.worker.spans import SpanRecorder
from tests.serve.engine_harness import GREEDY, Run, TinyModel, complete, config, kill, random_prompts, running
from tests.waiting import wait_until

PROMPTS = random_prompts([1, 9, 33, 60, 17, 5])


@pytest.mark.parametrize(
    ("layout", "changes"),
    [
        ("1+1", {}),
        ("2+2/m2", {"exchange": "tcp"}),
        ("1t2+1t2/m3", {}),
        ("2+2/m2", {"stepping": "free"}),
        ("1+2/m2", {"balance": "predict", "expert_slots": 4}),
    ],
)
def test_the_text_is_the_same(tiny_model: TinyModel, layout: str, changes: dict[str, object]) -> None:
    with running(config(tiny_model, layout, streams="on", **changes)) as engine:
        assert complete(engine, PROMPTS) == tiny_model.greedy(PROMPTS)
        stats = engine.stats()
    assert stats is not None


class _RunsAhead:
    """An end on a GPU: its times are known when `bytes_sent` has waited for the device."""

    wait_s = exposed_s = 0.0

    @property
    def bytes_sent(self) -> int:
        self.wait_s, self.exposed_s = self.wait_s + 0.5, self.exposed_s + 0.25
        return 100

    def begin_step(self, step: int, participants: list[list[int]]) -> None: ...


def test_times_of_a_step_are_read_when_the_device_has_come_there() -> None:
    half: Any = SimpleNamespace(layers=range(2), routes=lambda layer: True)
    end: Any = _RunsAhead()
    stage: Any = SimpleNamespace(half=half, wait_s=0.0)
    unused: Any = None
    recorder = SpanRecorder(keeps_all=False)
    exchange = StepExchange(end, half, recorder, 1.0)
    runner = AttentionRunner(exchange, unused, unused, stage, RowRouting(half))
    order: Any = SimpleNamespace(step=1, participants=[[0]])
    exchange.begin_step(order)
    result = runner._result([], time.monotonic_ns(), 1)
    assert (result.wait_s, result.exposed_s) == (0.5, 0.25)


@pytest.mark.parametrize("role", ["attention", "experts"])
def test_a_killed_worker_costs_no_token(tiny_model: TinyModel, role: str) -> None:
    with running(config(tiny_model, "2+2/m2", streams="on")) as engine:
        killed = []

        def at(num_tokens: int) -> None:
            if num_tokens >= 40 and not killed:
                killed.append(kill(engine, role, 1))

        finished = Run(engine, PROMPTS, GREEDY).finish(at)
        assert killed
        assert [each.token_ids for each in finished] == tiny_model.greedy(PROMPTS)


def test_a_stopped_worker_is_named_after_the_timeout(tiny_model: TinyModel, caplog: pytest.LogCaptureFixture) -> None:
    """Its process lives, so only the deadline of a call tells."""
    with running(config(tiny_model, "1+2/m2", streams="on", timeout_s=1.5)) as engine, caplog.at_level("INFO"):
        stopped = []

        def at(num_tokens: int) -> None:
            if num_tokens >= 20 and not stopped:
                stopped.append(kill(engine, "experts", 1, signal.SIGSTOP))

        finished = Run(engine, PROMPTS, GREEDY).finish(at)
        assert [each.token_ids for each in finished] == tiny_model.greedy(PROMPTS)
        wait_until(lambda: "experts[1]" in caplog.text, "the stopped worker is named")


@pytest.mark.parametrize("layout", ["1", "2t2*1"])
def test_layouts_without_expert_workers_refuse_it(tiny_model: TinyModel, layout: str) -> None:
    with pytest.raises(UserError, match="--streams on needs --layout disaggregated: "):
        config(tiny_model, layout, streams="on")


def test_gpus_use_streams(tiny_model: TinyModel) -> None:
    settings = config(tiny_model, "1+1", device="cuda")
    assert settings.uses_streams("attention")
    assert settings.uses_streams("experts")
    assert not config(tiny_model, "1+1").uses_streams("attention")
    assert not config(tiny_model, "1", device="cuda").uses_streams("replica")

"""Little memory, short queues, odd placements, and the end of an engine."""

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from antiphon.base.errors import ResourceError, UserError
from antiphon.serve.engine import Engine
from antiphon.serve.engine_api import QueueFull, RequestTooLong, ShuttingDown
from antiphon.serve.outputs import ThreadSink
from antiphon.serve.prepare import prepare
from antiphon.specs.placement import ExpertPlacement
from antiphon.specs.sampling import SamplingParams
from tests.serve.engine_harness import (
    GREEDY,
    Prompts,
    Run,
    TinyModel,
    Tokens,
    complete,
    config,
    is_alive,
    kill,
    random_prompts,
    running,
    wait_until_idle,
)
from tests.serve.fork_server import PROGRAMS
from tests.waiting import wait_until

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module", params=["1", "1+2/m2"])
def tight(request: pytest.FixtureRequest, tiny_model: TinyModel) -> Iterator[Engine]:
    """Rows for a fifth of the longest prompt in a step, memory for two requests of the 16 that may run."""
    settings = config(tiny_model, request.param, num_blocks=22, max_running=16, max_batch_tokens=20)
    with running(settings) as engine:
        yield engine


def test_little_memory_and_small_steps_change_nothing(tight: Engine, prompts: Prompts, reference: Tokens) -> None:
    assert complete(tight, prompts) == reference
    assert tight.stats().num_preemptions > 0
    wait_until_idle(tight)


def test_prompt_logprobs_of_a_prompt_in_many_pieces(tight: Engine) -> None:
    prompts = random_prompts([180, 170, 75], seed=21)
    params = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=0)
    for prompt, request in zip(prompts, Run(tight, prompts, params).finish(), strict=True):
        reports = request.outputs[0].prompt_logprobs
        assert reports is not None
        assert [report.token_id for report in reports if report is not None] == prompt[1:]


def test_more_than_the_memory_holds_is_refused(tiny_model: TinyModel) -> None:
    settings = config(tiny_model, "1", num_blocks=5, max_model_len=80)
    with pytest.raises(ResourceError, match="is too small: one sequence of 80 tokens"):
        prepare(config(tiny_model, "1", num_blocks=4, max_model_len=80))
    with running(settings) as engine:
        with pytest.raises(RequestTooLong, match="above the context length of 80"):
            Run(engine, [[5] * 17], GREEDY)
        complete(engine, [[5] * 16], GREEDY)


def test_a_full_queue_refuses_and_recovers(tiny_model: TinyModel, prompts: Prompts, reference: Tokens) -> None:
    with running(config(tiny_model, "1", max_running=2, max_waiting=3)) as engine:
        kill(engine, "replica", 0, signal.SIGSTOP)
        runs = [Run(engine, prompts[:1], GREEDY)]

        def runs_alone() -> bool:
            stats = engine.stats()
            return (stats.num_running, stats.num_waiting) == (1, 0)

        wait_until(runs_alone, "a step that does not end")
        runs.append(Run(engine, prompts[1:4], GREEDY))
        with pytest.raises(QueueFull, match="3 requests are waiting, the limit is 3") as caught:
            Run(engine, prompts[:1], GREEDY)
        assert caught.value.retry_after_s == 1.0
        kill(engine, "replica", 0, signal.SIGCONT)
        finished = [request for run in runs for request in run.finish()]
        assert [request.token_ids for request in finished] == reference[:4]
        assert complete(engine, prompts[:3]) == reference[:3]


def test_draining_lets_requests_finish(tiny_model: TinyModel, prompts: Prompts, reference: Tokens) -> None:
    with running(config(tiny_model, "1")) as engine:
        run = Run(engine, prompts[:8], GREEDY)
        asyncio.run(engine.drain(60.0))
        assert [request.token_ids for request in run.finish()] == reference[:8]
        with pytest.raises(ShuttingDown):
            Run(engine, prompts[:1], GREEDY)


def test_draining_aborts_what_takes_too_long(tiny_model: TinyModel, prompts: Prompts) -> None:
    with running(config(tiny_model, "1")) as engine:
        kill(engine, "replica", 0, signal.SIGSTOP)
        run = Run(engine, prompts[:8], GREEDY)
        asyncio.run(engine.drain(0.1))
        assert [request.last.finish_reason for request in run.finish()] == ["abort"] * 8
        kill(engine, "replica", 0, signal.SIGCONT)


def test_stopping_ends_requests_and_may_be_repeated(tiny_model: TinyModel, prompts: Prompts) -> None:
    with running(config(tiny_model, "1+1/m2")) as engine:
        run = Run(engine, prompts[:8], GREEDY)
        engine.stop()
        assert {request.last.finish_reason for request in run.finish()} <= {"abort", "length"}
        with pytest.raises(ShuttingDown):
            Run(engine, prompts[:1], GREEDY)
        engine.abort("too late")
        assert engine.take_spans() == {}
        engine.stop()


def test_keys_and_values_in_8_bits(tiny_model: TinyModel, prompts: Prompts) -> None:
    """The same memory holds more of them, and answers depend neither on the layout nor on how prompts were cut."""
    answers = []
    for layout, num_rows in (("1", 256), ("1+2/m2", 20)):
        settings = config(tiny_model, layout, num_blocks=40, max_running=16, max_batch_tokens=num_rows, kv_dtype="int8")
        with running(settings) as engine:
            answers.append(complete(engine, prompts))
            assert engine.stats().kv_blocks_total > 60
    assert answers[0] == answers[1]


def test_replicas_and_uneven_shares_of_experts(tiny_model: TinyModel, prompts: Prompts, reference: Tokens) -> None:
    """Worker 0 holds three experts, worker 2 all five; two workers hold some twice."""
    owners = ((0, 2), (2,), (0, 1, 2), (2, 1), (0, 2))
    placement = ExpertPlacement(3, {0: owners, 1: owners})
    with running(config(tiny_model, "2+3/m2", placement=placement)) as engine:
        assert complete(engine, prompts) == reference
    with pytest.raises(UserError, match="the placement is for 3 expert workers, 2 run: make one for them"):
        prepare(config(tiny_model, "1+2", placement=placement))
    with pytest.raises(UserError, match="--experts is 6: the model has 5 experts a layer, so it must be at most that"):
        prepare(config(tiny_model, "1+6"))


@pytest.mark.parametrize("layout", ["1", "2", "1+2/m2"])
@pytest.mark.parametrize("max_batch_tokens", [64, 8])
def test_a_two_token_request_is_soon_done_beside_one_that_wants_everything(
    layout: str, max_batch_tokens: int, tiny_model: TinyModel, reference: Tokens, prompts: Prompts
) -> None:
    """64 answers of one owner want eight slots and too few blocks. The small one comes while the workers are halted, so
    it meets all of them in the line."""
    large = SamplingParams(max_tokens=100, temperature=0.0, ignore_eos=True)
    with running(config(tiny_model, layout, num_blocks=70, max_running=8, max_batch_tokens=max_batch_tokens)) as engine:
        sink = ThreadSink()
        engine.pause_workers()
        for index, prompt in enumerate(random_prompts([150] * 64, seed=5)):
            engine.submit_to(sink, f"large {index}", prompt, large, owner="large")
        engine.submit_to(sink, "small", prompts[0], replace(large, max_tokens=2))
        engine.resume_workers()
        num_tokens, token_ids = 0, []
        for output in sink.outputs(65):
            if output.request_id == "small":
                token_ids += output.token_ids
            elif len(token_ids) < 2:
                num_tokens += len(output.token_ids)
            if output.request_id == "small" and output.finish_reason is not None:
                for index in range(64):
                    engine.abort(f"large {index}")
        assert token_ids == reference[0][:2]
        assert num_tokens < 100, "of 6,400"
        wait_until_idle(engine)


LAUNCHING = """
import sys, threading
from pathlib import Path
from antiphon.serve.config import ServeConfig
from antiphon.serve.launch import build_engine
from antiphon.serve.outputs import ThreadSink
from antiphon.serve.prepare import prepare
from antiphon.specs.sampling import SamplingParams

engine = build_engine(prepare(ServeConfig(model=Path(sys.argv[1]), layout="disaggregated", num_threads=1)))
engine.start()
if sys.argv[2] == "loading":
    print(*engine.worker_pids(), flush=True)
sink = ThreadSink()
for index in range(8):
    engine.submit_to(sink, str(index), [5, 6, 7], SamplingParams(max_tokens=240, temperature=0.0, ignore_eos=True))
for number, _ in enumerate(sink.outputs(8)):
    if number == 20:
        print(*engine.worker_pids(), flush=True)
"""


@pytest.mark.parametrize("moment", ["loading", "serving", "waiting for an expert"])
def test_a_killed_launcher_leaves_no_worker_behind(moment: str, tiny_model: TinyModel) -> None:
    command = [sys.executable, "-c", LAUNCHING, str(tiny_model.folder), moment]
    with PROGRAMS.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT) as launcher:
        try:
            assert launcher.stdout is not None
            pids = [int(word) for word in launcher.stdout.readline().split()]
            assert len(pids) == 2
            assert all(is_alive(pid) for pid in pids)
            if moment == "waiting for an expert":
                os.kill(pids[1], signal.SIGSTOP)
        finally:
            launcher.kill()
    alive = pids[:1] if moment == "waiting for an expert" else pids
    try:
        wait_until(lambda: not any(is_alive(pid) for pid in alive), "the workers are gone", patience_s=20.0)
    finally:
        if alive != pids:
            os.kill(pids[1], signal.SIGCONT)
    wait_until(lambda: not any(is_alive(pid) for pid in pids), "the stopped worker is gone", patience_s=20.0)

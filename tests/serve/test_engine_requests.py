"""What one request may ask for, in all layouts and with prefill apart: the same answers, whatever runs where."""

import asyncio
import json
import math
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from antiphon.base.errors import UserError
from antiphon.serve.engine import Engine
from antiphon.serve.engine_api import RequestTooLong
from antiphon.serve.outputs import ThreadSink
from antiphon.serve.timeline import summarise, write_trace
from antiphon.serve.worker_handle import WorkerName
from antiphon.specs.sampling import SamplingParams
from tests.serve.engine_harness import (
    EOS,
    GREEDY,
    VOCAB_SIZE,
    Prompts,
    Run,
    TinyModel,
    Tokens,
    complete,
    config,
    kill,
    random_prompts,
    running,
    wait_until_idle,
)
from tests.waiting import wait_until

MANY = SamplingParams(max_tokens=150, temperature=0.0, ignore_eos=True)


@pytest.fixture(scope="module")
def colocated(tiny_model: TinyModel) -> Iterator[Engine]:
    with running(config(tiny_model, "1")) as engine:
        yield engine


@pytest.fixture(scope="module")
def disaggregated(tiny_model: TinyModel) -> Iterator[Engine]:
    with running(config(tiny_model, "2+2/m3", trace=True)) as engine:
        yield engine


@pytest.fixture(scope="module")
def free(tiny_model: TinyModel) -> Iterator[Engine]:
    """Attention workers step each for itself."""
    with running(config(tiny_model, "3+2/m2 free")) as engine:
        yield engine


@pytest.fixture(scope="module")
def apart(tiny_model: TinyModel) -> Iterator[Engine]:
    """Prefill and decode in workers of their own."""
    with running(config(tiny_model, "1>1")) as engine:
        yield engine


@pytest.fixture(scope="module")
def both(colocated: Engine, disaggregated: Engine, free: Engine, apart: Engine) -> list[Engine]:
    return [colocated, disaggregated, free, apart]


def test_seeds_give_the_same_tokens_in_every_layout(both: list[Engine], prompts: Prompts) -> None:
    params = [
        SamplingParams(
            max_tokens=32,
            ignore_eos=True,
            temperature=0.5 + 0.1 * (index % 8),
            top_p=(1.0, 0.9)[index % 2],
            top_k=(0, 20)[index // 2 % 2],
            presence_penalty=(0.0, 1.0)[index // 4 % 2],
            repetition_penalty=(1.0, 1.2)[index // 8 % 2],
            seed=index,
        )
        for index in range(len(prompts))
    ]
    first, *others = (complete(engine, prompts, params) for engine in both)
    assert all(tokens == first for tokens in others)
    assert len({tuple(tokens) for tokens in first}) == len(prompts), "seeds make a difference"
    assert complete(both[1], prompts, params) == first, "and nothing else does"


def test_an_end_of_sequence_token_stops(both: list[Engine], prompts: Prompts, reference: Tokens) -> None:
    stop = reference[0][5]
    for engine in both:
        ended = Run(engine, prompts, SamplingParams(max_tokens=64, temperature=0.0, stop_token_ids=(stop,))).finish()
        for request, tokens in zip(ended, reference, strict=True):
            ends = [position for position, token in enumerate(tokens) if token in (EOS, stop)]
            expected = tokens[: ends[0] + 1] if ends else tokens
            assert request.token_ids == expected
            assert request.last.finish_reason == ("stop" if ends else "length")
            assert request.last.stop_token_id == (expected[-1] if ends else None)


def test_logprobs_of_prompt_and_output(
    both: list[Engine], tiny_model: TinyModel, prompts: Prompts, reference: Tokens
) -> None:
    """A prompt longer than the step is cut over steps and micro-batches; every position is reported once, in order."""
    asked = [*prompts[:8], *random_prompts([200, 150], seed=3)]
    params = SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True, logprobs=2, prompt_logprobs=3)
    for engine in both:
        for prompt, request in zip(asked, Run(engine, asked, params).finish(), strict=True):
            with torch.inference_mode():
                logits = tiny_model.model(torch.tensor([prompt + request.token_ids])).logits[0]
            expected = torch.log_softmax(logits.float(), dim=-1)
            assert request.outputs[0].prompt_logprobs is not None
            reports = list(request.outputs[0].prompt_logprobs)
            assert reports[0] is None
            assert [report.token_id for report in reports[1:] if report is not None] == prompt[1:]
            assert all(output.prompt_logprobs is None for output in request.outputs[1:])
            sampled = [report for output in request.outputs for report in output.logprobs or []]
            assert [report.token_id for report in sampled] == request.token_ids
            for position, report in enumerate([*reports[1:], *sampled]):
                assert report is not None
                row = expected[position]
                assert math.isclose(report.logprob, float(row[report.token_id]), abs_tol=1e-3)
                assert report.rank == 1 + int((row > row[report.token_id]).sum())
                assert len(report.top) == (3 if position < len(prompt) - 1 else 2)
                assert report.top[0][0] == int(row.argmax())


def test_a_request_for_no_tokens_reports_its_prompt(both: list[Engine], prompts: Prompts) -> None:
    for engine in both:
        (request,) = Run(engine, [prompts[3]], SamplingParams(max_tokens=0, prompt_logprobs=0)).finish()
        assert request.token_ids == []
        assert request.last.finish_reason == "length"
        assert request.last.prompt_logprobs is not None
        assert len(request.last.prompt_logprobs) == len(prompts[3])


def test_prefix_cache_hits_change_nothing(both: list[Engine]) -> None:
    prompts = random_prompts([100, 100], seed=8)
    for engine in both:
        first = Run(engine, prompts, GREEDY).finish()
        again = Run(engine, prompts, GREEDY).finish()
        assert [request.last.num_cached_tokens for request in first] == [0, 0]
        assert [request.token_ids for request in again] == [request.token_ids for request in first]
    assert [request.last.num_cached_tokens for request in Run(both[0], prompts, GREEDY).finish()] == [96, 96]
    assert both[0].stats().prefix_cache_hit_tokens >= 2 * 96


class EvenTokens:
    """A grammar of even tokens, each larger than 40 in turn with each other; `limit` tokens, then it breaks."""

    def __init__(self, limit: int, may_go: threading.Event | None = None) -> None:
        """`may_go`: its masks are slow, and come only then."""
        self.accepted: list[int] = []
        self.limit = limit
        self.may_go = may_go
        self.is_slow = may_go is not None
        self.grammar_id = limit

    def fill_bitmask(self) -> NDArray[np.int32]:
        if self.may_go is not None:
            assert self.may_go.wait(60)
        low, high = (40, VOCAB_SIZE) if len(self.accepted) % 2 else (4, 40)
        bits = np.zeros(128, dtype=np.uint8)
        bits[low:high:2] = 1
        return np.packbits(bits, bitorder="little").view(np.int32)

    def accept(self, token_id: int) -> bool:
        self.accepted.append(token_id)
        return True

    @property
    def error(self) -> str | None:
        return "no more even numbers" if len(self.accepted) >= self.limit else None


def make_even(grammar: str) -> EvenTokens:
    if not grammar.isdigit():
        raise UserError(f"grammar {grammar!r} is no number")
    return EvenTokens(int(grammar))


def test_grammars_are_followed_and_break_alone(
    both: list[Engine], prompts: Prompts, reference: Tokens, monkeypatch: pytest.MonkeyPatch
) -> None:
    def params(grammar: str | None) -> SamplingParams:
        return SamplingParams(max_tokens=20, temperature=0.0, ignore_eos=True, grammar=grammar)

    asked = [params(("99", "7", None)[index % 3]) for index in range(15)]
    results = []
    for engine in both:
        with pytest.raises(UserError, match="needs a tokenizer"):
            Run(engine, prompts[:1], params("99"))
        monkeypatch.setattr(engine, "_make_matcher", make_even)
        with pytest.raises(UserError, match="'bad' is no number"):
            Run(engine, prompts[:1], params("bad"))
        results.append(Run(engine, prompts[:15], asked).finish())
    for index, (first, *others) in enumerate(zip(*results, strict=True)):
        assert all(first.token_ids == other.token_ids for other in others)
        if index % 3 == 2:
            assert first.token_ids == reference[index][:20]
        for request in (first, *others):
            assert request.error == (None, "structured output broke off: no more even numbers", None)[index % 3]
            assert request.last.finish_reason == ("length", "grammar", "length")[index % 3]
            if index % 3 < 2:
                assert len(request.token_ids) == (20, 7)[index % 3]
                assert all(token % 2 == 0 for token in request.token_ids)
                assert [token >= 40 for token in request.token_ids[:4]] == [False, True, False, True]


def test_a_slow_grammar_delays_nobody_else(
    both: list[Engine], prompts: Prompts, reference: Tokens, monkeypatch: pytest.MonkeyPatch
) -> None:
    params = SamplingParams(max_tokens=20, temperature=0.0, ignore_eos=True)
    for engine in both:
        may_go = threading.Event()
        waits = {"slow": may_go}
        monkeypatch.setattr(engine, "_make_matcher", lambda grammar, waits=waits: EvenTokens(99, waits.get(grammar)))
        slow = Run(engine, prompts[:3], replace(params, grammar="slow"))
        quick = Run(engine, prompts[:3], replace(params, grammar="quick"))
        free = Run(engine, prompts[:8], params).finish()
        assert [request.token_ids for request in free] == [tokens[:20] for tokens in reference[:8]]
        expected = [request.token_ids for request in quick.finish()]
        held = [each for scheduler in engine.workforce.schedulers.values() for each in scheduler.requests.values()]
        assert len(held) == 3, "the slow ones are still there"
        assert not any(request.params.grammar for request in held), "a grammar's text travels to no worker"
        may_go.set()
        assert [request.token_ids for request in slow.finish()] == expected


def test_masks_outlive_the_workers_and_crowding(tiny_model: TinyModel, prompts: Prompts) -> None:
    """A worker is killed while some masks are there and others are still to come; blocks are too few for all."""
    params = SamplingParams(max_tokens=60, temperature=0.0, ignore_eos=True, grammar="any")
    settings = config(tiny_model, "2+1/m2", num_blocks=16)
    with running(settings, make_matcher=lambda _: EvenTokens(99)) as engine:
        expected = [Run(engine, [prompt], params).finish()[0].token_ids for prompt in prompts[:6]]

        def stumble(num_tokens: int) -> None:
            if num_tokens == 60:
                kill(engine, "attention", 0)
            if num_tokens == 150:
                kill(engine, "experts", 0)

        run = Run(engine, prompts[:6], params)
        assert [request.token_ids for request in run.finish(stumble)] == expected
        assert engine.stats().num_worker_restarts == 2
        assert engine.stats().num_preemptions > 0


def test_a_request_that_waits_for_its_mask_can_be_ended(
    both: list[Engine], prompts: Prompts, monkeypatch: pytest.MonkeyPatch
) -> None:
    for engine in both:
        may_go = threading.Event()
        monkeypatch.setattr(engine, "_make_matcher", lambda _, may_go=may_go: EvenTokens(99, may_go))
        run = Run(engine, prompts[:3], SamplingParams(max_tokens=20, grammar="slow"))
        for request_id in run.ids:
            engine.abort(request_id)
        assert [request.last.finish_reason for request in run.finish()] == ["abort"] * 3
        wait_until_idle(engine)
        may_go.set()


def test_aborted_requests_give_back_their_memory(both: list[Engine], prompts: Prompts, reference: Tokens) -> None:
    for engine in both:
        run = Run(engine, prompts, MANY)
        aborted = run.ids[::2]

        def abort(num_tokens: int, engine: Engine = engine, aborted: list[str] = aborted) -> None:
            if num_tokens == 640:
                for request_id in aborted:
                    engine.abort(request_id)
                engine.abort("nobody")

        for index, request in enumerate(run.finish(abort)):
            assert request.last.finish_reason == ("abort" if index % 2 == 0 else "length")
            assert request.error is None
            known = min(64, len(request.token_ids))
            assert request.token_ids[:known] == reference[index][:known]
        wait_until_idle(engine)


def test_what_cannot_be_served_is_refused_at_once(both: list[Engine], prompts: Prompts) -> None:
    for engine in both:
        run = Run(engine, prompts[:1], MANY)
        with pytest.raises(UserError, match="is in use"):
            engine.submit_to(ThreadSink(), run.ids[0], [5], GREEDY)
        with pytest.raises(RequestTooLong, match="above the context length of 256"):
            Run(engine, [[5] * 200], GREEDY)
        with pytest.raises(UserError, match="the prompt is empty"):
            Run(engine, [[]], GREEDY)
        with pytest.raises(UserError, match="names token 97"):
            Run(engine, [[5, 97]], GREEDY)
        run.finish()


def test_streams_of_an_event_loop(both: list[Engine], prompts: Prompts, reference: Tokens) -> None:
    async def read(engine: Engine, index: int) -> list[int]:
        stream = engine.submit(f"stream {index}", prompts[index], GREEDY)
        return [token async for output in stream for token in output.token_ids]

    async def leave_early(engine: Engine) -> None:
        stream = engine.submit("left", prompts[0], MANY)
        with pytest.raises(UserError, match="is in use"):
            engine.submit("left", prompts[0], MANY)
        async for _ in stream:
            break
        await stream.aclose()  # type: ignore[attr-defined]

    async def serve(engine: Engine) -> list[list[int]]:
        answers = asyncio.gather(*(read(engine, index) for index in range(8)))
        await leave_early(engine)
        return list(await answers)

    for engine in both:
        for _ in range(2):
            assert asyncio.run(serve(engine)) == reference[:8]
        wait_until_idle(engine)


def read_until(engine: Engine, ended: threading.Event) -> int:
    """Read the counters again and again; returns how often."""
    count = 0
    while not ended.is_set():
        stats = engine.stats()
        assert 0 <= stats.kv_blocks_used <= stats.kv_blocks_total
        count += 1
    return count


def test_counters_can_be_read_at_any_time(both: list[Engine], prompts: Prompts) -> None:
    for engine in both:
        before = engine.stats()
        ended = threading.Event()
        with ThreadPoolExecutor() as readers:
            reading = readers.submit(read_until, engine, ended)
            complete(engine, prompts, GREEDY)
            ended.set()
            assert reading.result() > 0
        after = engine.stats()
        assert after.healthy
        assert after.status == "ok"
        assert after.generation_tokens - before.generation_tokens == 64 * len(prompts)
        assert after.prompt_tokens - before.prompt_tokens == sum(map(len, prompts))
        assert after.num_worker_restarts == 0
        assert engine.workforce.kernels == {"cpu"}


def test_expert_workers_report_their_balance(disaggregated: Engine, prompts: Prompts) -> None:
    complete(disaggregated, prompts[:4])

    def both_reported() -> bool:
        reported = disaggregated.stats().rows_per_expert
        return set(reported) == {0, 1} and all(len(workers) == 2 for workers in reported.values())

    wait_until(both_reported, "reports of the expert workers")
    stats = disaggregated.stats()
    assert all(0 < balance <= 1 for balance in stats.balancedness_per_layer.values())
    held = {layer: [set(experts) for experts in workers.values()] for layer, workers in stats.rows_per_expert.items()}
    assert held == {layer: [{0, 1, 2}, {3, 4}] for layer in (0, 1)}
    of_prompts = stats.prompt_rows_per_expert
    assert {layer: len(rows) for layer, rows in of_prompts.items()} == {0: 5, 1: 5}
    assert 0 < sum(of_prompts[0]) == sum(of_prompts[1])
    assert 0 <= stats.attention_idle_ratio <= 1
    assert 0 <= stats.expert_idle_ratio <= 1
    assert stats.dispatch_bytes > 0


def test_spans_can_be_taken_while_steps_run(disaggregated: Engine, tmp_path: Path) -> None:
    prompts = random_prompts([30, 60] * 16, seed=77)  # not in the prefix cache
    disaggregated.take_spans()
    run = Run(disaggregated, prompts, GREEDY)
    early = disaggregated.take_spans()
    run.finish()
    late = disaggregated.take_spans()
    workers = {WorkerName(role, index) for role in ("attention", "experts") for index in (0, 1)}
    assert set(early) == set(late) == workers
    rows = [sum(r for r, name in zip(s.rows, s.name_index, strict=True) if s.names[name] == "step")
            for spans in (early, late) for worker, s in spans.items() if worker.role == "attention"]  # fmt: skip
    assert sum(rows) == sum(len(prompt) + 63 for prompt in prompts), "each row in one span, taken once"
    summaries = [summarise(early), summarise(late)]
    assert {name for summary in summaries for name in summary.expert_idle_ratio} == {"experts[0]", "experts[1]"}
    assert max(summary.step_s for summary in summaries) > 0
    write_trace(tmp_path / "trace.json", late)
    assert json.loads((tmp_path / "trace.json").read_text())["traceEvents"]

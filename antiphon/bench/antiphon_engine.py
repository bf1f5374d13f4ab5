"""Antiphon itself as a contestant of the serving benchmark: the same engine that serves, without HTTP.

A contestant is written `colocated`, `colocated*2` (two replicas), `colocated/t2` (of two ranks), `colocated/p2` (two
stages) or `1+1/m2` (one attention worker, one expert worker, two micro-batches). Prefix caching must not help a run's
second pass, so the first token of every prompt differs between the passes.
"""

import os
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import psutil

from antiphon.base.errors import UserError
from antiphon.bench.peers.api import RawRun, RunResult, Workload, run_result, steady_rate
from antiphon.cost.kv_blocks import kv_cache_block_bytes
from antiphon.models.config import load_model_spec
from antiphon.planner.local_prediction import LocalChoice
from antiphon.serve.config import ServeConfig
from antiphon.serve.engine import Engine
from antiphon.serve.engine_api import EngineOutput
from antiphon.serve.launch import start_engine
from antiphon.serve.outputs import ThreadSink
from antiphon.serve.worker.spans import Spans
from antiphon.serve.worker_process import WorkerName
from antiphon.specs.sampling import SamplingParams

BLOCK_SIZE = 16


def parse_contestant(text: str) -> LocalChoice:
    """What a contestant's name says. `UserError` if it says nothing."""
    if match := re.fullmatch(r"colocated(?:\*([1-9]\d*))?(?:/t([1-9]\d*))?(?:/p([1-9]\d*))?", text):
        replicas, tp, num_stages = (int(number or 1) for number in match.groups())
        return LocalChoice(
            layout="colocated", num_attention=replicas, tp=tp, num_stages=num_stages, num_micro_batches=num_stages
        )
    if match := re.fullmatch(r"([1-9]\d*)\+([1-9]\d*)/m([1-9]\d*)", text):
        attention, experts, micro_batches = map(int, match.groups())
        return LocalChoice(
            layout="disaggregated",
            num_attention=attention,
            num_experts=experts,
            num_micro_batches=micro_batches,
        )
    raise UserError(f"{text!r} is no contestant: write colocated, colocated*2, colocated/t2, colocated/p2 or 1+1/m2")


def greedy_outputs(
    engine: Engine, prompts: Sequence[list[int]], output_tokens: int, who: object
) -> Iterator[EngineOutput]:
    """All prompts at once, each continued by this many tokens. `UserError`, which begins with `who`, if one fails."""
    params = SamplingParams(max_tokens=output_tokens, temperature=0.0, ignore_eos=True)
    sink = ThreadSink()
    for index, prompt in enumerate(prompts):
        engine.submit_to(sink, str(index), prompt, params)
    for output in sink.outputs(len(prompts)):
        if output.error is not None:
            raise UserError(f"{who}: {output.error}")
        yield output


@dataclass(frozen=True)
class TimedAnswers:
    """To prompts sent at once: seconds to all answers' end, to first tokens, between tokens; tokens by prompt."""

    took_s: float
    ttft_s: list[float]
    itl_s: list[float]
    token_ids: list[list[int]]


def timed_answers(engine: Engine, prompts: Sequence[list[int]], output_tokens: int, who: object) -> TimedAnswers:
    """`greedy_outputs`, with a clock beside them."""
    started = time.perf_counter()
    last: dict[str, float] = {}
    ttft_s, itl_s = [], []
    token_ids: list[list[int]] = [[] for _ in prompts]
    for output in greedy_outputs(engine, prompts, output_tokens, who):
        now = time.perf_counter()
        if (before := last.get(output.request_id)) is None:
            ttft_s.append(now - started)
        else:
            itl_s.append(now - before)
        last[output.request_id] = now
        token_ids[int(output.request_id)] += output.token_ids
    return TimedAnswers(time.perf_counter() - started, ttft_s, itl_s, token_ids)


class AntiphonEngine:
    """Implements `Peer` with worker processes of this benchmark's own."""

    def __init__(
        self,
        contestant: str,
        model: Path,
        *,
        max_concurrency: int,
        max_tokens: int,
        device: str = "cpu",
        threads: int | None = None,
        trace: bool = False,
        changes: Mapping[str, Any] | None = None,
    ) -> None:
        """`changes`: fields of `ServeConfig` that differ from what the contestant's name says."""
        self.choice = parse_contestant(contestant)
        self._name = f"antiphon {contestant}"
        self._model = model
        self._max_concurrency = max_concurrency
        self._max_tokens = max_tokens
        self._device = device
        self._threads = threads
        self._trace = trace
        self._changes = changes or {}
        self._engine: Engine | None = None
        self._runs = 0
        self._peak_rss_bytes = 0

    @property
    def name(self) -> str:
        return self._name

    @property
    def pid(self) -> int | None:
        return os.getpid()

    def _config(self) -> ServeConfig:
        spec = load_model_spec(self._model)
        choice = self.choice
        per_worker = -(-self._max_concurrency // choice.num_attention)
        blocks = per_worker * (-(-self._max_tokens // BLOCK_SIZE) + 1) + 16
        bytes_per_element = 4 if spec.dtype == "float32" else 2
        block_bytes = kv_cache_block_bytes(spec, BLOCK_SIZE, bytes_per_element)
        config = ServeConfig(
            model=self._model,
            layout=choice.layout,
            num_attention=choice.num_attention,
            num_experts=choice.num_experts,
            attention_tp=choice.tp,
            num_stages=choice.num_stages,
            num_micro_batches=choice.num_micro_batches,
            device=self._device,
            max_model_len=self._max_tokens,
            kv_bytes=blocks * block_bytes * choice.num_attention,
            block_size=BLOCK_SIZE,
            max_running=per_worker,
            max_batch_tokens=max(2048, per_worker),
            max_waiting=2 * self._max_concurrency,
            num_threads=self._threads,
            timeout_s=120.0,
            trace=self._trace,
        )
        return replace(config, **self._changes)

    def sizes(self) -> dict[str, int | str | None]:
        """What a report's row says of this contestant."""
        return {
            "layout": self.choice.layout,
            "attention": self.choice.num_attention,
            "experts": self.choice.num_experts if self.choice.layout == "disaggregated" else 0,
            "micro_batches": self.choice.num_micro_batches,
        }

    def start(self) -> Mapping[str, str]:
        self._engine = start_engine(self._config())
        return {"layout": self.choice.layout, "kernels": ", ".join(sorted(self._engine.workforce.kernels))}

    def run(self, workload: Workload) -> RunResult:
        prefill_s = self._pass(workload.prompts, 1).took_s
        if workload.output_tokens == 1:
            raw = RawRun(prefill_s=prefill_s, total_s=prefill_s, ttft_s=[prefill_s], itl_s=[], token_ids=None)
        else:
            all_s = self._pass(workload.prompts, workload.output_tokens)
            raw = RawRun(
                prefill_s=prefill_s,
                total_s=all_s.took_s,
                ttft_s=all_s.ttft_s,
                itl_s=all_s.itl_s,
                token_ids=all_s.token_ids,
            )
        self._peak_rss_bytes = max(self._peak_rss_bytes, self._rss_bytes())
        return run_result(workload, raw, self._peak_rss_bytes)

    def _pass(self, prompts: list[list[int]], output_tokens: int) -> TimedAnswers:
        self._runs += 1
        vocab_size = self._running().info.vocab_size
        fresh = [[(prompt[0] + self._runs) % vocab_size, *prompt[1:]] for prompt in prompts]
        return timed_answers(self._running(), fresh, output_tokens, self._name)

    def fill_prefix_cache(self, workload: Workload) -> None:
        """Compute the prompts once, so that later runs of the very same prompts begin with decoding."""
        timed_answers(self._running(), workload.prompts, 1, self._name)

    def steady_decode_tokens_per_s(self, workload: Workload) -> float:
        """The prompts stay as they are: after `fill_prefix_cache` little of them is computed again."""
        arrivals_s: dict[str, list[float]] = {}
        for output in greedy_outputs(self._running(), workload.prompts, workload.output_tokens, self._name):
            arrivals_s.setdefault(output.request_id, []).append(time.perf_counter())
        rate = steady_rate(list(arrivals_s.values()))
        if rate is None:
            raise UserError(
                f"{workload.output_tokens} output tokens are too few: never did all requests decode at once"
            )
        return rate

    def _running(self) -> Engine:
        assert self._engine is not None, "start() comes first"
        return self._engine

    def take_spans(self) -> dict[WorkerName, Spans]:
        """What the workers recorded since the last call (with `trace`)."""
        return self._running().take_spans()

    def _rss_bytes(self) -> int:
        return sum(psutil.Process(pid).memory_info().rss for pid in self._running().worker_pids())

    def pause(self) -> None:
        self._running().pause_workers()

    def resume(self) -> None:
        self._running().resume_workers()

    def close(self) -> None:
        if self._engine is not None:
            self.resume()
            self._engine.stop()
            self._engine = None

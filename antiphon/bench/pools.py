"""One pool against two on the same cores: does it pay to compute prompts in workers of their own?

1. Start one engine where every worker does both, and one where prefill and decode are apart; while one runs, the
   workers of the other are stopped.
2. Short prompts begin long answers. While those run, long prompts come, one at a time: the next one when the one
   before has its first token. So both engines are asked for as many prompts as they can take.
3. A row for each engine and length of prompt: time between tokens of the answers, time to the first token of the long
   prompts, tokens of both. `verdicts` says in words who wins at what.

The answers' time between tokens is what users see stall; the prompts' time to the first token is what it costs.
Rejected: prompts at a fixed rate. It would have to be chosen for the machine, and one of the two engines would idle.
"""

import random
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from statistics import median, quantiles
from typing import Annotated, Any

import typer

from antiphon.base.errors import UserError
from antiphon.base.units import format_seconds
from antiphon.bench.harness.contest import ContestColumns, ContestTurns, UpTo, seconds
from antiphon.bench.harness.quiet import Repetitions, foreign_words
from antiphon.cost.kv_blocks import blocks_of, kv_cache_block_bytes
from antiphon.kernels.select import resolve_dtype
from antiphon.models.config import load_model_spec
from antiphon.serve.config import ServeConfig
from antiphon.serve.engine import Engine
from antiphon.serve.launch import start_engine
from antiphon.serve.layout_text import parse_layout
from antiphon.serve.outputs import ThreadSink
from antiphon.specs.model import ModelSpec
from antiphon.specs.sampling import SamplingParams

_SHORT_TOKENS = 32  # of the prompts whose answers are timed
_LONG_ANSWER = 2  # tokens: more than the first one, so that the prompt has to arrive
_NEAR = 0.05  # a smaller difference is none
_IDLE_S = 60.0  # in which aborted requests give back their blocks


@dataclass(frozen=True, kw_only=True)
class PoolsCase:
    """What `antiphon bench pools` may be asked for."""

    together: Annotated[str, typer.Option(metavar="LAYOUT", help="Workers that do both.")] = "2"
    prefill: Annotated[str, typer.Option(metavar="LAYOUT", help="Workers for prompts alone.")] = "1"
    decode: Annotated[str, typer.Option(metavar="LAYOUT", help="Workers beside those.")] = "1"
    answers: Annotated[int, UpTo(4096), typer.Option(metavar="N", help="Answers at once.")] = 16
    output_tokens: Annotated[int, UpTo(65_536), typer.Option(metavar="N", help="Tokens of an answer.")] = 128
    repetitions: Annotated[int, UpTo(100), typer.Option(metavar="N", help="Turns of each engine.")] = 3
    threads: Annotated[int | None, UpTo(256), typer.Option(metavar="N", help="Threads per worker.")] = None


@dataclass
class _PoolRun:
    """One engine under one mix. `prompts_s`: how long long prompts kept coming."""

    itl_s: list[float] = field(default_factory=list)
    ttft_s: list[float] = field(default_factory=list)
    took_s: float = 0.0
    prompts_s: float = 0.0


COLUMNS = ContestColumns(
    (
        ("engine", "engine"),
        ("prompts", "prompt_tokens"),
        ("between tokens, median", seconds("itl_s_median")),
        ("p99", seconds("itl_s_p99")),
        ("first token, median", seconds("ttft_s_median")),
        ("out tok/s", lambda row: f"{row['output_tokens_per_s']:,.0f}"),
        ("prompt tok/s", lambda row: f"{row['prompt_tokens_per_s']:,.0f}"),
        ("foreign", foreign_words),
    )
)


def bench_pools(
    model: Path, lengths: Sequence[int], case: PoolsCase, say: Callable[[str], None]
) -> list[dict[str, Any]]:
    """Two rows for each length of the long prompts. `UserError` for layouts with unequal numbers of processes, and for
    lengths that the model's context does not hold."""
    spec = load_model_spec(model)
    for tokens in (*lengths, _SHORT_TOKENS):
        if tokens + max(case.output_tokens, _LONG_ANSWER) > spec.max_position:
            raise UserError(
                f"{tokens} tokens and {case.output_tokens} of an answer are more than the model's context of "
                f"{spec.max_position}: lower --prompts or --output-tokens"
            )
    configs = _configs(model, spec, lengths, case)
    rows = []
    with ExitStack() as stack:
        engines: dict[str, Engine] = {}
        for name, config in configs.items():
            say(f"starting {name}")
            engines[name] = start_engine(config)
            stack.callback(engines[name].stop)
            stack.callback(engines[name].resume_workers)
            engines[name].pause_workers()
        turns = ContestTurns(num_repetitions=case.repetitions)
        for tokens in lengths:
            say(f"{case.answers} answers of {case.output_tokens} tokens, prompts of {tokens}")
            runs = turns.take({name: partial(_run_alone, engine, tokens, case) for name, engine in engines.items()})
            rows += [_row(name, tokens, runs[name], case) for name in engines]
    return rows


def _configs(model: Path, spec: ModelSpec, lengths: Sequence[int], case: PoolsCase) -> dict[str, ServeConfig]:
    longest = max(max(lengths) + _LONG_ANSWER, _SHORT_TOKENS + case.output_tokens)
    common: dict[str, Any] = {
        "model": model,
        "max_model_len": longest,
        "max_running": case.answers + 1,
        "max_batch_tokens": max(2048, case.answers + 1),
        "num_threads": case.threads,
        "timeout_s": 120.0,
    }
    together = ServeConfig(**parse_layout("--together", case.together), **common)
    prefill = ServeConfig(**parse_layout("--prefill", case.prefill), **common, pool="prefill")
    decode = ServeConfig(**parse_layout("--decode", case.decode), **common, pool="decode")
    apart = replace(decode, prefill=prefill)
    if together.num_workers != apart.num_workers:
        raise UserError(
            f"--together {case.together} has {together.num_workers} processes, --prefill {case.prefill} and --decode "
            f"{case.decode} have {apart.num_workers}: give both the same number"
        )
    per_cache = blocks_of(longest, 16) * 2 + case.answers * (blocks_of(_SHORT_TOKENS + case.output_tokens, 16) + 1) + 64
    block_bytes = kv_cache_block_bytes(spec, 16, resolve_dtype(spec.dtype).itemsize)
    found = {}
    for name, config in ((f"{case.together} together", together), (f"{case.prefill} > {case.decode}", apart)):
        kv_bytes = per_cache * block_bytes * config.num_kv_caches
        pool = None if config.prefill is None else replace(config.prefill, kv_bytes=kv_bytes)
        found[name] = replace(config, kv_bytes=kv_bytes, prefill=pool)
    return found


def _run_alone(engine: Engine, tokens: int, case: PoolsCase) -> _PoolRun:
    engine.resume_workers()
    try:
        return _run(engine, tokens, case)
    finally:
        engine.pause_workers()


def _run(engine: Engine, tokens: int, case: PoolsCase) -> _PoolRun:
    """Answers of short prompts, and long prompts one after another while they run."""
    found, sink = _PoolRun(), ThreadSink()
    prompts = _fresh_prompts(engine.info.vocab_size)
    last_s: dict[str, float] = {}
    sent_s = {"": 0.0}  # of the long prompt under way
    num_left, num_long, long_id = case.answers, 0, ""
    for index in range(case.answers):
        engine.submit_to(sink, f"answer-{index}", next(prompts)(_SHORT_TOKENS), _greedy(case.output_tokens))
    started_s = first_long_s = time.perf_counter()
    for output in sink.outputs(1 << 62):
        now_s = time.perf_counter()
        if output.error is not None:
            raise UserError(f"layout {engine.info.layout}: {output.error}")
        if output.request_id.startswith("answer-"):
            if output.request_id in last_s and num_long:
                found.itl_s.append(now_s - last_s[output.request_id])
            last_s[output.request_id] = now_s
            num_left -= output.finish_reason is not None
        elif output.request_id == long_id and output.token_ids:
            found.ttft_s.append(now_s - sent_s[long_id])
            long_id = ""
        if not num_left:
            break
        if not long_id and len(last_s) == case.answers:
            first_long_s = first_long_s if num_long else now_s
            num_long, long_id = num_long + 1, f"prompt-{num_long}"
            sent_s[long_id] = now_s
            engine.submit_to(sink, long_id, next(prompts)(tokens), _greedy(_LONG_ANSWER))
    found.took_s = time.perf_counter() - started_s
    found.prompts_s = time.perf_counter() - first_long_s
    _end_all(engine)
    return found


def _end_all(engine: Engine) -> None:
    """What is under way is not timed any more; the next run begins with an idle engine. `UserError` if it does not get
    idle."""
    for request_id in engine.unfinished():
        engine.abort(request_id)
    deadline = time.monotonic() + _IDLE_S
    while engine.stats().kv_blocks_used:
        if time.monotonic() > deadline:
            raise UserError(f"layout {engine.info.layout}: requests that were aborted have blocks after {_IDLE_S:g} s")
        time.sleep(0.01)  # a step at most


def _fresh_prompts(vocab_size: int) -> Iterator[Callable[[int], list[int]]]:
    """Makers of prompts that no cache has seen."""
    while True:
        yield lambda count: [random.randrange(vocab_size) for _ in range(count)]


def _greedy(max_tokens: int) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)


def _row(name: str, tokens: int, runs: Repetitions[_PoolRun], case: PoolsCase) -> dict[str, Any]:
    counted = [repetition.value for repetition in runs.counted]
    itl_s = [value for run in counted for value in run.itl_s]
    ttft_s = [value for run in counted for value in run.ttft_s]
    return {
        "engine": name,
        "prompt_tokens": tokens,
        "answers": case.answers,
        "output_tokens": case.output_tokens,
        "itl_s_median": median(itl_s) if itl_s else None,
        "itl_s_p99": quantiles(itl_s, n=100)[-1] if len(itl_s) > 1 else None,
        "ttft_s_median": median(ttft_s) if ttft_s else None,
        "output_tokens_per_s": median(case.answers * case.output_tokens / run.took_s for run in counted),
        "prompt_tokens_per_s": median(len(run.ttft_s) * tokens / run.prompts_s for run in counted),
        "foreign_cpu_share": runs.foreign_share,
        "repetitions": len(counted),
        "quiet": runs.is_quiet,
    }


def verdicts(rows: Sequence[dict[str, Any]]) -> list[str]:
    """For each length of prompt, which of the two engines wins at what, and by how much."""
    lines = []
    for together, apart in zip(rows[::2], rows[1::2], strict=True):
        parts = []
        for what, key, sign in (
            ("p99 between tokens", "itl_s_p99", -1),
            ("time to first token", "ttft_s_median", -1),
            ("answers' tokens/s", "output_tokens_per_s", 1),
            ("prompts' tokens/s", "prompt_tokens_per_s", 1),
        ):
            if not together[key] or not apart[key]:
                parts.append(f"{what}: not measured")
                continue
            gain = (apart[key] / together[key]) ** sign
            if abs(gain - 1) <= _NEAR:
                parts.append(f"{what}: even")
            else:
                winner, factor = ("two pools", gain) if gain > 1 else ("one pool", 1 / gain)
                parts.append(f"{what}: {winner}, {factor:.2f} times")
        worst = "" if together["itl_s_p99"] is None else f" (one pool: p99 {format_seconds(together['itl_s_p99'])})"
        lines.append(f"prompts of {together['prompt_tokens']:,}: {'; '.join(parts)}{worst}")
    return lines

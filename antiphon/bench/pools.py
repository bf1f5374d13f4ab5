"""One pool against two on the same cores: does it pay to compute prompts in workers of their own?

1. Start one engine where every worker does both, and one where prefill and decode are apart; while one runs, the
   workers of the other are stopped. With `--mbit` both are apart, the workers that decode on a node of their own behind
   a link of that rate: one hands over layer by layer, the other at the end of each step.
2. Short prompts begin long answers. While those run, long prompts come, one at a time: the next one when the one
   before has its first token. So both engines are asked for as many prompts as they can take. A run ends with the last
   of the long prompts, or with the answers.
   Each engine has an untimed run first: a block of the cache that was never used costs a fault for each of its pages.
   With `--profile`, waits for cores (`harness.core_waits`) are measured after each run, while the workers are stopped;
   with `--profile here`, the model on this machine, too, before and after each run.
3. A row for each engine and length of prompt: time between tokens of the answers, time to the first token of the long
   prompts, tokens of both, and with `--profile` what the simulator says (`pools_prediction`), as the mean over what was
   measured around the runs. `verdicts` says in words who wins at what.

The answers' time between tokens is what users see stall; the prompts' time to the first token is what it costs.
Rejected: prompts at a fixed rate. It would have to be chosen for the machine, and one of the two engines would idle.
"""

import os
import random
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from statistics import fmean, median, quantiles
from typing import Annotated, Any

import typer

from antiphon.base.errors import UserError
from antiphon.base.units import format_seconds
from antiphon.bench.box import Box
from antiphon.bench.harness.columns import Cell, ContestColumns, Row, UpTo, foreign_words, seconds, share
from antiphon.bench.harness.core_waits import measure_core_waits, packets_s, together
from antiphon.bench.harness.processes import PATIENCE_S, SECRET, check_mbit, require_box, run_beside, start_workers
from antiphon.bench.harness.quiet import MeasuredAround, Repetitions, take_turns
from antiphon.bench.pools_prediction import MeasuredMachine, predict_mix
from antiphon.kernels.select import resolve_dtype
from antiphon.models.config import load_model_spec
from antiphon.serve.config import ServeConfig
from antiphon.serve.engine import Engine
from antiphon.serve.launch import start_engine
from antiphon.serve.layout_text import parse_layout
from antiphon.serve.outputs import ThreadSink
from antiphon.serve.policy.handover import HandOver
from antiphon.sim.host import CoreWaits
from antiphon.specs.counts import blocks_of, kv_cache_block_bytes
from antiphon.specs.sampling import SamplingParams

_SHORT_TOKENS = 32  # of the prompts whose answers are timed
_LONG_ANSWER = 2  # tokens: more than the first one, so that the prompt has to arrive
_NEAR = 0.05  # a smaller difference is none
_FIRST_PORT = 7710  # where workers join the first engine in a box
_HAND_OVERS: dict[HandOver, str] = {"end": "at the end", "layers": "layer by layer"}
_WAITS_S = 5.0  # for which waits for cores are measured after a run
_IDLE_S = 60.0  # in which aborted requests give back their blocks
_HERE = "here"  # in place of a profile's file


@dataclass(frozen=True, kw_only=True)
class PoolsCase:
    """What `antiphon bench pools` may be asked for."""

    together: Annotated[str, typer.Option(metavar="LAYOUT", help="Workers that do both; not with --mbit.")] = "2"
    prefill: Annotated[str, typer.Option(metavar="LAYOUT", help="Workers for prompts alone.")] = "1"
    decode: Annotated[str, typer.Option(metavar="LAYOUT", help="Workers beside those.")] = "1"
    answers: Annotated[int, UpTo(4096), typer.Option(metavar="N", help="Answers at once.")] = 16
    output_tokens: Annotated[int, UpTo(65_536), typer.Option(metavar="N", help="Tokens of an answer, at most.")] = 2048
    long_prompts: Annotated[int, UpTo(64), typer.Option(metavar="N", help="Prompts beside them in a run.")] = 4
    repetitions: Annotated[int, UpTo(100), typer.Option(metavar="N", help="Turns of each engine.")] = 3
    threads: Annotated[int | None, UpTo(256), typer.Option(metavar="N", help="Threads per worker.")] = None
    mbit: Annotated[
        float | None,
        typer.Option(metavar="R", show_default="one machine", help="Decode behind a link of R 10^6 bits/s, in a box."),
    ] = None
    profile: Annotated[
        str | None,
        typer.Option(
            metavar="here|FILE",
            help="What the simulator says, too: measured around each run, or by antiphon profile.",
        ),
    ] = None

    def check(self) -> None:
        """`UserError` for a rate that is none; `ResourceError` where there can be no box."""
        if self.mbit is not None:
            check_mbit("--mbit", self.mbit)
            require_box("--mbit")


@dataclass
class _PoolRun:
    """One engine under one mix. `prompts_s`: how long long prompts kept coming; `engine_share`: of a core, what the
    engine's threads used; `network_share`: of all cores, what packets took in the system; `exposed_s`: of the prompts'
    prefill, what was waiting for keys and values to leave; `num_tokens`: of the answers; `core_waits`: of the machine,
    right after it; `machines`: before and after."""

    itl_s: list[float] = field(default_factory=list)
    ttft_s: list[float] = field(default_factory=list)
    num_tokens: int = 0
    took_s: float = 0.0
    prompts_s: float = 0.0
    engine_share: float = 0.0
    network_share: float = 0.0
    exposed_s: float = 0.0
    core_waits: CoreWaits | None = None
    machines: tuple[MeasuredMachine, ...] = ()


def columns(case: PoolsCase) -> ContestColumns:
    """What of the rows people see."""

    def predicted(key: str, form: Callable[[Any], str]) -> tuple[tuple[str, Cell], ...]:
        return (("predicted", _predicted_words(key, form)),) if case.profile is not None else ()

    exposed = (("exposed", share("exposed_share")), *predicted("exposed_share", "{:.0%}".format))
    return ContestColumns(
        (
            ("engine", "engine"),
            ("prompts", "prompt_tokens"),
            ("between tokens, median", seconds("itl_s_median")),
            *predicted("itl_s_median", format_seconds),
            ("p99", seconds("itl_s_p99")),
            *predicted("itl_s_p99", format_seconds),
            ("first token, median", seconds("ttft_s_median")),
            *predicted("ttft_s_median", format_seconds),
            *(exposed if case.mbit is not None else ()),
            ("out tok/s", lambda row: f"{row['output_tokens_per_s']:,.0f}"),
            ("prompt tok/s", lambda row: f"{row['prompt_tokens_per_s']:,.0f}"),
            ("foreign", foreign_words),
        )
    )


def _predicted_words(key: str, form: Callable[[Any], str]) -> Cell:
    """The mean of the predictions, and between what they lie if they differ."""

    def words(row: Row) -> str | None:
        mean = row.get(f"predicted_{key}")
        if mean is None:
            return None
        first, last = map(form, row[f"predicted_{key}_between"])
        return form(mean) if first == last else f"{form(mean)} ({first} to {last})"

    return words


def bench_pools(
    model: Path, lengths: Sequence[int], case: PoolsCase, say: Callable[[str], None]
) -> list[dict[str, Any]]:
    """Two rows for each length of the long prompts. `UserError` for layouts with unequal numbers of processes.

    Prompts may be longer than the model's context: times hold, texts make no sense."""
    case.check()
    read = None if case.profile in (None, _HERE) else MeasuredMachine.read(Path(case.profile), case.mbit)
    with ExitStack() as stack:
        box = None if case.mbit is None else stack.enter_context(Box(num_nodes=2, mbit=case.mbit))
        contest = partial(_contest, model, lengths, case, read, box, say)
        return run_beside(box, contest)


def _contest(
    model: Path,
    lengths: Sequence[int],
    case: PoolsCase,
    read: MeasuredMachine | None,
    box: Box | None,
    say: Callable[[str], None],
) -> list[dict[str, Any]]:
    """`read`: the profile that was given as a file."""
    configs = _configs(model, lengths, case, box)

    def measure_now() -> MeasuredMachine:
        return read or MeasuredMachine.measured(list(configs.values()), case.mbit, _SHORT_TOKENS + case.output_tokens)

    rows = []
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        engines: dict[str, Engine] = {}
        for name, config in configs.items():
            say(f"starting {name}")
            if box is not None:
                _send_workers(box, config, folder / f"{len(engines)}", stack)
            engines[name] = start_engine(config)
            stack.callback(engines[name].stop)
            stack.callback(engines[name].resume_workers)
            engines[name].pause_workers()
        for tokens in lengths:
            say(f"{case.answers} answers of {case.output_tokens} tokens, prompts of {tokens}")
            for engine in engines.values():
                _run_alone(engine, tokens, case, None)
            around = None if case.profile is None else MeasuredAround(measure_now)
            turns = {
                name: partial(_run_alone, engine, tokens, case, around, is_beside=_plans_ahead(configs[name]))
                for name, engine in engines.items()
            }
            runs = take_turns(turns, case.repetitions)
            rows += [
                _row(name, configs[name], tokens, runs[name], case)
                | _predicted(configs[name], tokens, case, runs[name])
                for name in engines
            ]
    return rows


def _configs(model: Path, lengths: Sequence[int], case: PoolsCase, box: Box | None) -> dict[str, ServeConfig]:
    """The configurations of both engines, by what tables call them."""
    longest = max(max(lengths) + _LONG_ANSWER, _SHORT_TOKENS + case.output_tokens)
    common: dict[str, Any] = {
        "model": model,
        "max_model_len": longest,
        "max_running": case.answers + 1,
        "max_batch_tokens": max(2048, case.answers + 1),
        "num_threads": case.threads if box is None else case.threads or 1,  # a core for each node
        "timeout_s": float(PATIENCE_S),
    }
    if box is not None:
        return {
            f"{case.prefill} > {case.decode}, {words}": _sized(_apart(case, common, box, hand_over), model, case)
            for hand_over, words in _HAND_OVERS.items()
        }
    together = ServeConfig(**parse_layout("--together", case.together), **common)
    apart = _apart(case, common, None, "layers")
    if together.num_workers != apart.num_workers:
        raise UserError(
            f"--together {case.together} has {together.num_workers} processes, --prefill {case.prefill} and --decode "
            f"{case.decode} have {apart.num_workers}: give both the same number"
        )
    named = {f"{case.together} together": together, f"{case.prefill} > {case.decode}": apart}
    return {name: _sized(config, model, case) for name, config in named.items()}


def _apart(case: PoolsCase, common: dict[str, Any], box: Box | None, hand_over: HandOver) -> ServeConfig:
    """Two pools; in a box all workers that decode join from node 1."""
    decode = parse_layout("--decode", case.decode)
    common = common | {"hand_over": hand_over}
    if box is not None:
        if decode["num_instances"] > 1:
            raise UserError(f"--decode {case.decode} with --mbit: several instances do not join; write one")
        port = _FIRST_PORT + list(_HAND_OVERS).index(hand_over)
        common |= {"join_address": f"{box.address(0)}:{port}", "join_secret": SECRET.encode()}
        experts = decode["num_experts"] if decode["layout"] == "disaggregated" else 0
        decode |= {"joined_attention": decode["num_attention"], "joined_experts": experts}
    prefill = ServeConfig(**parse_layout("--prefill", case.prefill), **common, pool="prefill")
    return replace(ServeConfig(**decode, **common, pool="decode"), prefill=prefill)


def _sized(config: ServeConfig, model: Path, case: PoolsCase) -> ServeConfig:
    """With KV caches that hold all answers and two long prompts each."""
    longest = config.max_model_len or 0
    per_cache = blocks_of(longest, 16) * 2 + case.answers * (blocks_of(_SHORT_TOKENS + case.output_tokens, 16) + 1) + 64
    spec = load_model_spec(model)
    block_bytes = kv_cache_block_bytes(spec, 16, resolve_dtype(spec.dtype).itemsize)
    kv_bytes = per_cache * block_bytes * config.num_kv_caches
    pool = None if config.prefill is None else replace(config.prefill, kv_bytes=kv_bytes)
    return replace(config, kv_bytes=kv_bytes, prefill=pool)


def _plans_ahead(config: ServeConfig) -> bool:
    """The engine's work for a step is beside the worker's, in the pool that decodes."""
    return config.layout == "colocated" and config.attention_ranks == 1


def _send_workers(box: Box, config: ServeConfig, log: Path, stack: ExitStack) -> None:
    """Start what joins the engine of `config` from node 1; it waits until that listens."""
    role = "attention" if config.joined_experts else "replica"
    roles = [role] * config.joined_attention * config.attention_ranks
    roles += ["experts"] * config.joined_experts * config.expert_tp
    start_workers(box, 1, roles, config.join_address, log, stack, config.num_threads or 1)


def _run_alone(
    engine: Engine,
    tokens: int,
    case: PoolsCase,
    around: MeasuredAround[MeasuredMachine] | None,
    *,
    is_beside: bool = False,
) -> _PoolRun:
    """`around`: the machine before and after it is noted, and waits for cores are measured. `is_beside`: the engine
    plans steps while others run."""
    before = None if around is None else around.before()
    engine.resume_workers()
    try:
        found = _run(engine, tokens, case)
    finally:
        engine.pause_workers()
    if around is not None and before is not None:
        if found.itl_s:
            period_s = median(found.itl_s)
            turn_s = found.engine_share * period_s if is_beside else float(before.profile.turn_s(case.answers))
            waits = measure_core_waits(_WAITS_S, period_s=period_s, turn_s=turn_s, is_beside=is_beside)
            found.core_waits = replace(waits, network_share=found.network_share)
        found.machines = around.after()
    return found


def _run(engine: Engine, tokens: int, case: PoolsCase) -> _PoolRun:
    """Answers of short prompts, and long prompts one after another while they run."""
    found, sink = _PoolRun(), ThreadSink()
    exposed_s = engine.stats().handovers.exposed_s
    last_s: dict[str, float] = {}
    sent_s = {"": 0.0}  # of the long prompt under way
    num_left, num_long, long_id = case.answers, 0, ""
    long = [_fresh_prompt(engine, tokens) for _ in range(case.long_prompts)]  # what clients do takes no core of a run
    for index in range(case.answers):
        engine.submit_to(sink, f"answer-{index}", _fresh_prompt(engine, _SHORT_TOKENS), _greedy(case.output_tokens))
    started_s = first_long_s = time.perf_counter()
    used_s, on_packets_s = time.process_time(), packets_s()
    for output in sink.outputs(1 << 62):
        now_s = time.perf_counter()
        if output.error is not None:
            raise UserError(f"layout {engine.info.layout}: {output.error}")
        if output.request_id.startswith("answer-"):
            if output.request_id in last_s and num_long:
                found.itl_s.append(now_s - last_s[output.request_id])
            last_s[output.request_id] = now_s
            found.num_tokens += len(output.token_ids)
            num_left -= output.finish_reason is not None
        elif output.request_id == long_id and output.token_ids:
            found.ttft_s.append(now_s - sent_s[long_id])
            long_id = ""
        if not num_left or len(found.ttft_s) == case.long_prompts:
            break
        if not long_id and len(last_s) == case.answers:
            first_long_s = first_long_s if num_long else now_s
            num_long, long_id = num_long + 1, f"prompt-{num_long}"
            sent_s[long_id] = now_s
            engine.submit_to(sink, long_id, long.pop(), _greedy(_LONG_ANSWER))
    found.took_s = time.perf_counter() - started_s
    found.engine_share = (time.process_time() - used_s) / found.took_s
    found.network_share = (packets_s() - on_packets_s) / (found.took_s * (os.cpu_count() or 1))
    found.prompts_s = time.perf_counter() - first_long_s
    found.exposed_s = engine.stats().handovers.exposed_s - exposed_s
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


def _fresh_prompt(engine: Engine, num_tokens: int) -> list[int]:
    """One that no cache has seen."""
    return random.choices(range(engine.info.vocab_size), k=num_tokens)


def _greedy(max_tokens: int) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)


def _row(name: str, config: ServeConfig, tokens: int, runs: Repetitions[_PoolRun], case: PoolsCase) -> dict[str, Any]:
    is_apart = config.prefill is not None
    counted = [repetition.value for repetition in runs.counted]
    itl_s = [value for run in counted for value in run.itl_s]
    ttft_s = [value for run in counted for value in run.ttft_s]
    return {
        "engine": name,
        "prompt_tokens": tokens,
        "hand_over": config.hand_over if case.mbit is not None else None,
        "mbit": case.mbit,
        "answers": case.answers,
        "output_tokens": case.output_tokens,
        "itl_s_median": median(itl_s) if itl_s else None,
        "itl_s_p99": quantiles(itl_s, n=100)[-1] if len(itl_s) > 1 else None,
        "ttft_s_median": median(ttft_s) if ttft_s else None,
        "output_tokens_per_s": median(run.num_tokens / run.took_s for run in counted),
        "prompt_tokens_per_s": median(len(run.ttft_s) * tokens / run.prompts_s for run in counted),
        "exposed_share": sum(run.exposed_s for run in counted) / sum(ttft_s) if is_apart and ttft_s else None,
        "foreign_cpu_share": runs.foreign_share,
        "repetitions": len(counted),
        "quiet": runs.is_quiet,
    }


def _predicted(
    config: ServeConfig, tokens: int, case: PoolsCase, runs: Repetitions[_PoolRun]
) -> dict[str, float | list[float] | None]:
    """What the simulator says: the mean over the machine as it was around each run, and between what it lies."""
    counted = [each.value for each in runs.counted]
    machines = {id(machine): machine for run in counted for machine in run.machines}
    waits = together([run.core_waits for run in counted if run.core_waits is not None])
    answers, prompts = (case.answers, _SHORT_TOKENS, case.output_tokens), (case.long_prompts, tokens)
    found = [predict_mix(config, machine, answers, prompts, waits) for machine in machines.values()]
    row: dict[str, float | list[float] | None] = {}
    for name in found[0] if found else ():
        values = [value for each in found if (value := each[name]) is not None]
        row[f"predicted_{name}"] = fmean(values) if values else None
        row[f"predicted_{name}_between"] = [min(values), max(values)] if values else None
    return row


def verdicts(rows: Sequence[dict[str, Any]]) -> list[str]:
    """For each length of prompt, which of the two engines wins at what, and by how much; with a prediction, how far it
    is off."""
    lines = []
    for first, second in zip(rows[::2], rows[1::2], strict=True):
        in_box = first.get("hand_over") is not None
        names = tuple(_HAND_OVERS.values()) if in_box else ("one pool", "two pools")
        parts = [_verdict(first, second, names, *what) for what in _COMPARED]
        worst = "" if first["itl_s_p99"] is None else f" ({names[0]}: p99 {format_seconds(first['itl_s_p99'])})"
        lines.append(f"prompts of {first['prompt_tokens']:,}: {'; '.join(parts)}{worst}")
    return lines


_COMPARED = (
    ("p99 between tokens", "itl_s_p99", -1),
    ("time to first token", "ttft_s_median", -1),
    ("answers' tokens/s", "output_tokens_per_s", 1),
    ("prompts' tokens/s", "prompt_tokens_per_s", 1),
)


def _verdict(
    first: dict[str, Any], second: dict[str, Any], names: tuple[str, ...], what: str, key: str, sign: int
) -> str:
    if not first[key] or not second[key]:
        return f"{what}: not measured"
    predicted = [row.get(f"predicted_{key}") for row in (first, second)]
    said = ""
    if all(predicted):
        off = ", ".join(f"{each / row[key]:.2f}" for each, row in zip(predicted, (first, second), strict=True))
        said = f" (predicted / measured: {off})"
    gain = (second[key] / first[key]) ** sign
    if abs(gain - 1) <= _NEAR:
        return f"{what}: even{said}"
    winner, factor = (names[1], gain) if gain > 1 else (names[0], 1 / gain)
    return f"{what}: {winner}, {factor:.2f} times{said}"

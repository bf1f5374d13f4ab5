"""The serving benchmark: Antiphon's layouts and its peers on the same prompts, interleaved, beside the limits.

1. start all contestants; each is stopped (SIGSTOP) while another runs
2. for each workload repeat rounds over all contestants, and over the measurement of the machine's limits (read
   bandwidth, products), until each has three repetitions with little foreign CPU
3. one row per contestant and workload: medians, best, fraction of the bound, foreign share

A peer that cannot be started, or fails later, is named in one line and left out: the others' rows are worth having.

The limits are one contestant among others because machines drift: virtual ones may give two cores at one minute and two
threads of one core at the next, and a bound measured at another minute says nothing.
"""

import os
import random
import re
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from statistics import median, quantiles
from typing import Any

import psutil

from antiphon.base.errors import UserError, shortened
from antiphon.bench.harness.columns import ContestColumns, share
from antiphon.bench.harness.limits import (
    DecoderSizes,
    MachineLimits,
    as_kept,
    decode_bound_tokens_per_s,
    measure_limits,
    prefill_bound_tokens_per_s,
)
from antiphon.bench.harness.quiet import Repetitions, repeat_until_quiet
from antiphon.bench.serving_peers import Peer, PeerError, RunResult, Workload, run_result, steady_rate
from antiphon.models.config import load_model_spec
from antiphon.models.load import open_checkpoint
from antiphon.planner.local_prediction import LocalChoice
from antiphon.serve.config import ServeConfig
from antiphon.serve.engine import Engine
from antiphon.serve.engine_api import EngineOutput
from antiphon.serve.launch import start_engine
from antiphon.serve.layout_text import parse_layout
from antiphon.serve.outputs import ThreadSink
from antiphon.serve.worker_handle import WorkerName
from antiphon.specs.counts import kv_cache_block_bytes
from antiphon.specs.sampling import SamplingParams

Say = Callable[[str], None]
Turn = RunResult | MachineLimits | PeerError
_LIMITS = "the machine's limits"


@dataclass(frozen=True)
class WorkloadSize:
    """`concurrency` requests at once, each of `input_tokens`, each generating `output_tokens`."""

    concurrency: int
    input_tokens: int
    output_tokens: int


def make_workload(size: WorkloadSize, vocab_size: int) -> Workload:
    """Random prompts, the same for all engines."""
    generator = random.Random(0)
    prompts = [[generator.randrange(vocab_size) for _ in range(size.input_tokens)] for _ in range(size.concurrency)]
    return Workload(prompts, size.output_tokens)


def check_context(model: Path, input_tokens: int, output_tokens: int) -> None:
    """`UserError` for requests that the model's context cannot hold."""
    most = load_model_spec(model).max_position
    if input_tokens + output_tokens > most:
        raise UserError(
            f"--input-tokens {input_tokens} and --output-tokens {output_tokens} are more than the model's context of "
            f"{most}: lower them"
        )


def bench_serve(
    model: Path,
    peers: Sequence[Peer],
    sizes: Sequence[WorkloadSize],
    *,
    max_rounds: int,
    say: Say,
    device: str = "cpu",
) -> tuple[list[dict[str, Any]], MachineLimits]:
    """Rows of `bench serve`, and the machine's limits as measured between the runs (the last workload's median).

    No rows if no engine could be started. What Antiphon itself refuses (`UserError`) ends the benchmark."""
    spec = load_model_spec(model)
    checkpoint = open_checkpoint(model, spec)  # what is wrong with it is said before an engine starts
    decoder = as_kept(spec, checkpoint)
    rows: list[dict[str, Any]] = []
    with ExitStack() as stack:
        for peer in peers:
            stack.callback(peer.close)
        running = _start(peers, say)
        limits = measure_limits(device)
        for size in sizes:
            if not running:
                break
            workload = make_workload(size, spec.vocab_size)
            say(f"{size.concurrency} x {size.input_tokens} + {size.output_tokens} tokens")
            pids = [peer.pid for peer in running if peer.pid is not None]
            contestants: dict[str, Callable[[], Turn]] = {_LIMITS: partial(measure_limits, device)}
            contestants |= {peer.name: partial(_run_alone, peer, workload) for peer in running}
            outcomes = repeat_until_quiet(contestants, max_rounds=max_rounds, extra_root_pids=pids)
            limits = median_limits(outcomes[_LIMITS])
            running = _still_running(running, outcomes, say)
            for peer in running:
                row = _row(peer, size, outcomes[peer.name])
                rows.append(row | _bounds(row, decoder, limits))
    return rows, limits


def median_limits(repetitions: Repetitions[Turn]) -> MachineLimits:
    """The measurement with the median bandwidth."""
    measured = [r.value for r in repetitions.counted if isinstance(r.value, MachineLimits)]
    return sorted(measured, key=lambda limits: limits.read_bytes_per_s)[len(measured) // 2]


COLUMNS = ContestColumns(
    (
        ("engine", "engine"),
        ("conc.", "concurrency"),
        ("in", "input_tokens"),
        ("out", "output_tokens"),
        ("out tok/s", "output_tokens_per_s"),
        ("decode tok/s", "decode_tokens_per_s"),
        ("of bound", share("decode_fraction_of_bound")),
        ("prefill tok/s", "prefill_tokens_per_s"),
        ("of bound", share("prefill_fraction_of_bound")),
        ("foreign", share("foreign_cpu_share")),
    )
)


def _start(peers: Sequence[Peer], say: Say) -> list[Peer]:
    """Start all engines in turn; a peer that cannot be started is named, with the reason, and left out."""
    running = []
    for peer in peers:
        say(f"starting {peer.name}")
        try:
            details = peer.start()
            peer.pause()
        except PeerError as error:
            say(f"without {_one_line(peer, error)}")
            continue
        say(f"{peer.name}: " + ", ".join(f"{key} {value}" for key, value in details.items()))
        running.append(peer)
    return running


def _still_running(peers: Sequence[Peer], outcomes: dict[str, Repetitions[Turn]], say: Say) -> list[Peer]:
    """The peers that did not fail in these repetitions; the others are named, with the reason."""
    running = []
    for peer in peers:
        failures = [each.value for each in outcomes[peer.name].all if isinstance(each.value, PeerError)]
        if failures:
            say(f"from here on without {_one_line(peer, failures[0])}")
        else:
            running.append(peer)
    return running


def _one_line(peer: Peer, error: PeerError) -> str:
    """The peer and the reason: what the error says first, and the last line of the engine's own output, if any."""
    first, *rest = [line.strip() for line in str(error).splitlines() if line.strip()]
    reason = first.removeprefix(f"{peer.name}: ")
    if rest:  # an engine that could say itself what is wrong has said it at the end of its output too
        reason = reason.removesuffix("; its last lines:") if rest[-1] in reason else f"{reason} {rest[-1]}"
    return f"{peer.name}: {reason}"


def _run_alone(peer: Peer, workload: Workload) -> RunResult | PeerError:
    """A run while all others are stopped; a failure is a result too, and costs little when it is repeated."""
    try:
        peer.resume()
        try:
            return peer.run(workload)
        finally:
            peer.pause()
    except PeerError as error:
        return error


def _row(peer: Peer, size: WorkloadSize, outcomes: Repetitions[Turn]) -> dict[str, Any]:
    runs = [repetition.value for repetition in outcomes.counted if isinstance(repetition.value, RunResult)]
    itl_s = sorted(value for run in runs for value in run.itl_s)
    ttft_s = [value for run in runs for value in run.ttft_s]
    decode_rates = [run.decode_tokens_per_s for run in runs if run.decode_tokens_per_s is not None]
    return {
        "engine": peer.name,
        **peer.sizes(),
        "concurrency": size.concurrency,
        "input_tokens": size.input_tokens,
        "output_tokens": size.output_tokens,
        "output_tokens_per_s": median(run.output_tokens_per_s for run in runs),
        "output_tokens_per_s_best": max(run.output_tokens_per_s for run in runs),
        "decode_tokens_per_s": median(decode_rates) if decode_rates else None,
        "prefill_tokens_per_s": median(run.prefill_tokens_per_s for run in runs),
        "ttft_s_median": median(ttft_s) if ttft_s else None,
        "itl_s_median": median(itl_s) if itl_s else None,
        "itl_s_p99": quantiles(itl_s, n=100)[-1] if len(itl_s) > 1 else None,
        "peak_rss_bytes": max(run.peak_rss_bytes for run in runs),
        "foreign_cpu_share": outcomes.foreign_share,
        "repetitions": len(runs),
        "quiet": outcomes.is_quiet,
    }


def _bounds(row: dict[str, Any], decoder: DecoderSizes, limits: MachineLimits) -> dict[str, Any]:
    """The physical limit of a row's workload and what fraction of it was reached."""
    context = row["input_tokens"] + row["output_tokens"] // 2
    prefill = prefill_bound_tokens_per_s(decoder, limits, row["concurrency"], row["input_tokens"])
    bounds = {
        "read_bytes_per_s": limits.read_bytes_per_s,
        "gemm_flops_per_s": limits.gemm_flops_per_s,
        "prefill_bound_tokens_per_s": prefill,
        "prefill_fraction_of_bound": row["prefill_tokens_per_s"] / prefill,
    }
    if row["decode_tokens_per_s"] is not None:
        decode = decode_bound_tokens_per_s(decoder, limits, row["concurrency"], context)
        bounds |= {"decode_bound_tokens_per_s": decode, "decode_fraction_of_bound": row["decode_tokens_per_s"] / decode}
    return bounds


# --- Antiphon itself: the same engine that serves, without HTTP
#
# A contestant is written `colocated`, `colocated*2` (two replicas), `colocated/t2` (of two ranks), `colocated/p2` (two
# stages), or as `serve --decode` takes a layout (`serve/served_plan`): `1+1/m2`, `2t2*4`. Prefix caching must not help
# a run's second pass, so the first token of every prompt differs between the passes.


BLOCK_SIZE = 16


def parse_contestant(text: str, option: str = "a layout") -> LocalChoice:
    """What a contestant's name says. `UserError`, which begins with `option`, if it says nothing."""
    if match := re.fullmatch(r"colocated(?:\*([1-9]\d*))?(?:/t([1-9]\d*))?(?:/p([1-9]\d*))?", text):
        replicas, tp, num_stages = (int(number or 1) for number in match.groups())
        return LocalChoice(
            layout="colocated",
            num_attention=replicas,
            attention_tp=tp,
            num_stages=num_stages,
            num_micro_batches=num_stages,
        )
    try:
        found = parse_layout("contestant", text)
        del found["written_in"]
        if found.pop("num_instances") > 1:
            raise UserError("a contestant is one instance")
        if found["layout"] == "hybrid":
            found["num_experts"] = found["num_attention"] * found["attention_tp"] // max(found["expert_tp"], 1)
        return LocalChoice(**found)
    except UserError:
        raise UserError(
            f"{option} is {shortened(text)!r}: write colocated, colocated*2, colocated/t2, colocated/p2, 1+1/m2 or 2*1 "
            "(hybrid)"
        ) from None


def greedy_outputs(
    engine: Engine, prompts: Sequence[list[int]], output_tokens: int, who: object
) -> Iterator[EngineOutput]:
    """`outputs_of` each prompt's likeliest tokens, this many."""
    yield from outputs_of(
        engine, prompts, SamplingParams(max_tokens=output_tokens, temperature=0.0, ignore_eos=True), who
    )


def outputs_of(
    engine: Engine, prompts: Sequence[list[int]], params: SamplingParams, who: object
) -> Iterator[EngineOutput]:
    """All prompts at once. `UserError`, which begins with `who`, if one fails."""
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


class AntiphonEngine(Peer):
    """A peer with worker processes of this benchmark's own."""

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
        self.choice = choice = parse_contestant(contestant)
        self.name = f"antiphon {contestant}"  # in reports; another where the layout does not say what differs
        spec = load_model_spec(model)
        per_worker = -(-max_concurrency // choice.num_attention)
        blocks = per_worker * (-(-max_tokens // BLOCK_SIZE) + 1) + 16
        block_bytes = kv_cache_block_bytes(spec, BLOCK_SIZE, 4 if spec.dtype == "float32" else 2)
        config = ServeConfig(
            model=model,
            **vars(choice),
            written_in=f"layout {contestant}",
            device=device,
            max_model_len=max_tokens,
            kv_bytes=blocks * block_bytes * choice.num_attention,
            block_size=BLOCK_SIZE,
            max_running=per_worker,
            max_batch_tokens=max(2048, per_worker),
            max_waiting=2 * max_concurrency,
            num_threads=threads,
            timeout_s=120.0,
            trace=trace,
        )
        self._config = replace(config, **(changes or {}))
        self._engine: Engine | None = None
        self._runs = 0
        self._peak_rss_bytes = 0

    @property
    def pid(self) -> int | None:
        return os.getpid()

    def sizes(self) -> dict[str, int | str | None]:
        return {
            "layout": self.choice.layout,
            "attention": self.choice.num_attention,
            "experts": self.choice.num_experts if self.choice.layout == "disaggregated" else 0,
            "micro_batches": self.choice.num_micro_batches,
        }

    def start(self) -> Mapping[str, str]:
        self._engine = start_engine(self._config)
        return {"layout": self.choice.layout, "kernels": ", ".join(sorted(self._engine.workforce.kernels))}

    def run(self, workload: Workload) -> RunResult:
        first, is_single = self._pass(workload.prompts, 1), workload.output_tokens == 1
        seen = first if is_single else self._pass(workload.prompts, workload.output_tokens)
        self._peak_rss_bytes = max(self._peak_rss_bytes, self._rss_bytes())
        return run_result(
            workload,
            self._peak_rss_bytes,
            prefill_s=first.took_s,
            total_s=seen.took_s,
            ttft_s=[first.took_s] if is_single else seen.ttft_s,
            itl_s=seen.itl_s,
            token_ids=None if is_single else seen.token_ids,
        )

    def _pass(self, prompts: list[list[int]], output_tokens: int) -> TimedAnswers:
        self._runs += 1
        fresh = [[(prompt[0] + self._runs) % self.running.info.vocab_size, *prompt[1:]] for prompt in prompts]
        return timed_answers(self.running, fresh, output_tokens, self.name)

    def fill_prefix_cache(self, workload: Workload) -> None:
        """Compute the prompts once, so that later runs of the very same prompts begin with decoding."""
        timed_answers(self.running, workload.prompts, 1, self.name)

    def steady_decode_tokens_per_s(self, workload: Workload, *, workers: Collection[WorkerName] = ()) -> float:
        """The prompts stay as they are: after `fill_prefix_cache` little of them is computed again. `workers`: count
        the requests of these attention workers alone."""
        arrivals_s: dict[str, list[float]] = {}
        counted = {name: self.running.workforce.schedulers[name].requests for name in workers}
        for output in greedy_outputs(self.running, workload.prompts, workload.output_tokens, self.name):
            if not workers or any(output.request_id in requests for requests in counted.values()):
                arrivals_s.setdefault(output.request_id, []).append(time.perf_counter())
        rate = steady_rate(list(arrivals_s.values()))
        if rate is None:
            raise UserError(f"{workload.output_tokens} output tokens are too few: never did all decode at once")
        return rate

    @property
    def running(self) -> Engine:
        assert self._engine is not None, "start() comes first"
        return self._engine

    def _rss_bytes(self) -> int:
        return sum(psutil.Process(pid).memory_info().rss for pid in self.running.worker_pids())

    def pause(self) -> None:
        self.running.pause_workers()

    def resume(self) -> None:
        self.running.resume_workers()

    def close(self) -> None:
        if self._engine is not None:
            self.resume()
            self._engine.stop()
            self._engine = None

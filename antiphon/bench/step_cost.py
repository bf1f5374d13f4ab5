"""What a decode step costs outside its kernels: Python, scheduling, and messages between engine and worker.

An engine serves the model as ever. When all requests decode, the window of a measurement begins; it ends before the
first answer does. What is counted in it, by step:

- as the clock runs: the step, and the kernels in it as the worker's thread sees them; the rest is what a step loses
- processor time outside the kernels, which other programs on the machine do not stretch: of the worker's thread by what
  it did (`CountingRecorder`), of the thread that reads its messages, and of the engine's thread by the methods it is in

Processor times are of threads, so they do not say what runs side by side: a replica's next step waits for it, planned
while the step before runs, and then the engine's part costs no time of the clock where a core is free.

Rejected: a profiler. It takes longer than what it measures.
"""

import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Annotated, Any

from typer import Option

from antiphon.base.errors import ResourceError, UserError
from antiphon.bench.harness.columns import ContestColumns, UpTo, milliseconds
from antiphon.bench.serve import AntiphonEngine, Say, WorkloadSize, make_workload, outputs_of, parse_contestant
from antiphon.models.config import load_model_spec
from antiphon.serve.fleet import Fleet
from antiphon.serve.group import StepGroup
from antiphon.serve.outputs import TrackedRequests
from antiphon.serve.worker.spans import STEP, Spans
from antiphon.specs.sampling import SamplingParams

_EDGE_TOKENS = 4  # of a request before the window, and behind it
_ENGINE_METHODS: tuple[tuple[type, str, str], ...] = (
    (Fleet, "poll", "engine: read"),
    (Fleet, "send", "engine: write"),
    (StepGroup, "start_steps", "engine: schedule"),
    (StepGroup, "on_message", "engine: commit"),
    (TrackedRequests, "publish", "engine: outputs"),
)
_WORKER_PARTS = {
    "inputs": ("inputs",),
    "layers": ("attention", "dispatch", "combine"),
    "sampling": ("sample",),
    "answer": ("step", "answer"),
    "orders": ("orders",),
}


@dataclass(frozen=True, kw_only=True)
class StepCostCase:
    """What `antiphon bench step` may be asked for."""

    input_tokens: Annotated[int, Option(metavar="N", help="Prompt length."), UpTo(1_000_000)] = 16
    output_tokens: Annotated[int, Option(metavar="N", help="Tokens of a request."), UpTo(65_536)] = 96
    rounds: Annotated[int, Option(metavar="N", help="Windows of each number of requests."), UpTo(1000)] = 3
    layout: Annotated[str, Option(metavar="L", help="As bench serve has it, of one attention worker.")] = "colocated"
    temperature: Annotated[float, Option(metavar="T", help="Of draws; 0: the likeliest token.")] = 0.0
    top_p: Annotated[float, Option("--top-p", metavar="P", help="Of draws; 1: off.")] = 1.0
    presence_penalty: Annotated[float, Option("--presence-penalty", metavar="N", help="Of tokens seen.")] = 0.0

    def params(self) -> SamplingParams:
        """Those of all requests. `UserError` for what no request may ask for."""
        return SamplingParams(
            max_tokens=self.output_tokens,
            temperature=self.temperature,
            top_p=self.top_p,
            presence_penalty=self.presence_penalty,
            seed=0,
            ignore_eos=True,
        )

    def check(self, model: Path) -> None:
        """`UserError` for what the model or a window does not hold."""
        tokens, most = self.input_tokens + self.output_tokens, load_model_spec(model).max_position
        if tokens > most:
            raise UserError(
                f"--input-tokens and --output-tokens are {tokens} together, the model's context has {most}: lower one"
            )
        if self.output_tokens < 4 * _EDGE_TOKENS:
            raise UserError(f"--output-tokens is {self.output_tokens}: a window needs at least {4 * _EDGE_TOKENS}")
        parse_contestant(self.layout, "--layout")


COLUMNS = ContestColumns(
    (
        ("requests", "requests"),
        ("steps", "steps"),
        ("step ms", milliseconds("step_s")),
        ("kernels", milliseconds("kernels_s")),
        ("outside", milliseconds("outside_s")),
        ("processor", milliseconds("processor_s")),
        *((name, milliseconds(f"{name}_s")) for name in _WORKER_PARTS),
        ("engine", milliseconds("engine_s")),
    )
)


def bench_step(
    model: Path, counts: Sequence[int], case: StepCostCase, say: Say, *, threads: int | None
) -> list[dict[str, Any]]:
    """A row for each number of requests: seconds a step, medians over the windows. `processor_s` is all of it outside
    the kernels, `outside_s` what the clock says. `ResourceError` where requests never decode together."""
    engine = AntiphonEngine(
        case.layout,
        model,
        max_concurrency=max(counts),
        max_tokens=case.input_tokens + case.output_tokens,
        threads=threads,
        trace=True,
    )
    if engine.choice.num_attention * engine.choice.attention_tp * engine.choice.num_stages > 1:
        raise UserError(f"--layout {case.layout} has several attention workers: their steps differ, so write one")
    vocab_size, rows = load_model_spec(model).vocab_size, []
    with _engine_clock() as engine_clock, engine:
        for count in counts:
            say(f"requests at once: {count}")
            size = WorkloadSize(count, case.input_tokens, case.output_tokens)
            prompts = make_workload(size, vocab_size).prompts
            windows = [_window(engine, prompts, case.params(), engine_clock) for _ in range(case.rounds)]
            rows.append({"requests": count} | {key: median(each[key] for each in windows) for key in windows[0]})
    return rows


def _window(
    engine: AntiphonEngine, prompts: list[list[int]], params: SamplingParams, engine_clock: "_EngineClock"
) -> dict[str, float]:
    """Figures of the steps between the time when all requests decode and the end of the first."""
    counts: Counter[str] = Counter()
    begun: tuple[Spans, dict[str, int]] | None = None
    ended: tuple[Spans, dict[str, int]] | None = None
    for output in outputs_of(engine.running, prompts, params, engine.name):
        counts[output.request_id] += len(output.token_ids)
        if begun is None and len(counts) == len(prompts) and min(counts.values()) >= _EDGE_TOKENS:
            begun = _snapshot(engine, engine_clock)
        elif begun is not None and ended is None and max(counts.values()) >= params.max_tokens - _EDGE_TOKENS:
            ended = _snapshot(engine, engine_clock)
    if begun is None or ended is None:
        raise ResourceError(f"{len(prompts)} requests never decoded together: raise --output-tokens")
    return _of_steps(*begun, *ended, num_rows=len(prompts))


def _snapshot(engine: AntiphonEngine, engine_clock: "_EngineClock") -> tuple[Spans, dict[str, int]]:
    """What the attention worker has counted, and the engine's thread."""
    taken = engine.running.take_spans()
    (spans,) = [each for name, each in taken.items() if name.role != "experts"]
    return spans, engine_clock.read()


def _of_steps(
    before: Spans, engine_before: dict[str, int], after: Spans, engine_after: dict[str, int], num_rows: int
) -> dict[str, float]:
    steps = [index for index, kind in enumerate(after.name_index) if kind == STEP and after.rows[index] == num_rows]
    if len(steps) < 2:
        raise ResourceError(f"{num_rows} requests never decoded together: raise --output-tokens")
    period_s = (after.ends_ns[steps[-1]] - after.ends_ns[steps[0]]) * 1e-9 / (len(steps) - 1)
    num_steps = sum(kind == STEP for kind in after.name_index)

    def per_step(names: Sequence[str]) -> float:
        return sum(after.processor_ns[name] - before.processor_ns[name] for name in names) * 1e-9 / num_steps

    kernels_s = (after.kernels_elapsed_ns - before.kernels_elapsed_ns) * 1e-9 / num_steps
    found = {f"{name}_s": per_step(names) for name, names in _WORKER_PARTS.items()}
    own = {name: (engine_after[name] - engine_before[name]) * 1e-9 / num_steps for name in engine_after}
    found |= {f"{name}_s": seconds for name, seconds in own.items()}
    found["engine_s"] = sum(own.values())
    found["processor_s"] = sum(found[f"{name}_s"] for name in _WORKER_PARTS) + found["engine_s"]
    return {"steps": num_steps, "step_s": period_s, "kernels_s": kernels_s, "outside_s": period_s - kernels_s} | found


class _EngineClock:
    """Processor time of the engine's thread, by the method that it is in; what one calls of the others is theirs."""

    def __init__(self) -> None:
        self._taken_ns = dict.fromkeys([*(part for _, _, part in _ENGINE_METHODS), "engine: rest"], 0)
        self._part = "engine: rest"
        self._counted_until_ns: int | None = None

    def read(self) -> dict[str, int]:
        """Nanoseconds so far. From any thread: what the present method has taken is not in it yet."""
        return dict(self._taken_ns)

    def enter(self, part: str) -> str:
        """The thread is in `part` from now on; where it was."""
        now_ns, left = time.thread_time_ns(), self._part
        if self._counted_until_ns is not None:
            self._taken_ns[left] += now_ns - self._counted_until_ns
        self._counted_until_ns, self._part = now_ns, part
        return left


@contextmanager
def _engine_clock() -> Iterator[_EngineClock]:
    """Counts the engine that is started within; one at a time."""
    clock = _EngineClock()
    kept: list[tuple[type, str, Callable[..., Any]]] = []

    def counted(work: Callable[..., Any], part: str) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            left = clock.enter(part)
            try:
                return work(*args, **kwargs)
            finally:
                clock.enter(left)

        return call

    try:
        for owner, name, part in _ENGINE_METHODS:
            kept.append((owner, name, getattr(owner, name)))
            setattr(owner, name, counted(getattr(owner, name), part))
        yield clock
    finally:
        for owner, name, work in kept:
            setattr(owner, name, work)

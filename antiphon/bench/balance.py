"""What moving experts brings: one workload under each `--balance` policy in turn, on engines of this machine.

Several workers share this machine's cores, so that a slow one is helped by those that wait for it. `expert_cores` gives
each expert worker a fixed part of a core instead, as machines of their own would have.

Five cases. `plain`: the model as it is. `hot`: in every layer the first expert gets half the rows, because its router
row is replaced by a long random vector, whose product with a row is as often far above the others as far below. `slow`:
the first expert worker computes at half speed: it has half of the part, or the core of a busy neighbour. `recorded`:
rows go where the rows of a record went (`antiphon serve --record-routing`), with all drift that it has,
and forecasts are those of the record. `skewed`: the same with a record that is drawn (`made_load`), as skewed as the
load that Lina measured (Figure 6).

Besides the policies there are Lina's measures of them (section 7.3): `no-estimation` chooses copies only when a layer's
gate has spoken, `no-fine-tuning` never then; `ideal` has rows that choose all experts alike, so nothing is to balance.
`paths` foresees by sample paths, profiled on the first half of a record's rows, or on other rows of the same draw.

1. In float32 all policies must give the same greedy text, but for one request in fifty: a row's sum is added in another
   order when its experts are elsewhere, and two tokens may be nearly equally likely. Else nothing is reported. In other
   types rounding decides more often, so texts are not compared.
2. Each round runs every policy once, in an order that turns, on an engine of its own: a pass in which counts are
   gathered and experts move, then the timed pass.
3. A step's time is that of the attention workers' step spans, all of them together.
4. Processor time of a step: of the engine's process and all workers. It shows what a policy costs where others disturb
   the clock.

Rejected: a synthetic exchange without attention. What a user gets is the whole step.
"""

import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from operator import ne
from pathlib import Path
from time import clock_gettime, process_time
from typing import Annotated, Any, Literal, cast

import numpy as np
import psutil
from typer import Option

from antiphon.base.errors import UserError
from antiphon.base.progress import Report
from antiphon.bench.harness.columns import ContestColumns, Row, UpTo, milliseconds
from antiphon.bench.harness.processes import limited
from antiphon.bench.made_load import LINA_SKEW, SkewedLoad, make_hot, write_even_routing
from antiphon.bench.serve import timed_answers
from antiphon.models.config import load_model_spec
from antiphon.placement.routing_trace import read_routing_trace
from antiphon.placement.sample_paths import PathProfile
from antiphon.placement.split import balancedness
from antiphon.serve.config import ServeConfig
from antiphon.serve.engine import Engine
from antiphon.serve.launch import start_engine
from antiphon.serve.placement_control import POLICIES
from antiphon.serve.worker.exchange import RoutingReplay
from antiphon.serve.worker.spans import COMBINE, DISPATCH, EXPERTS, NAMES, STEP, Spans
from antiphon.serve.worker_handle import WorkerName

Case = Literal["plain", "hot", "slow", "skewed", "recorded"]
CASES: tuple[Case, ...] = ("plain", "hot", "slow", "skewed", "recorded")
MOST_WORKERS = 64  # more is a slip of the finger
_PROFILED = "profiled.trace"
_SAME_TEXTS = 0.98  # of the requests, in float32
RUNS: Mapping[str, Mapping[str, Any]] = {  # what of `ServeConfig` makes it
    **{policy: {"balance": policy} for policy in (*POLICIES, "paths")},
    "no-estimation": {"balance": "predict", "phases": "second"},
    "no-fine-tuning": {"balance": "predict", "phases": "first"},
    "ideal": {"balance": "off"},
}
MOST_SKEW = 100.0


@dataclass(frozen=True, kw_only=True)
class BalanceOptions:
    """What is measured of each case. `batch` requests run at once, each with this many tokens; `expert_slots` of a
    layer, None: a quarter more than needed; `routing`: the record of the case `recorded`."""

    attention: Annotated[int, Option(metavar="N", help="Attention workers."), UpTo(MOST_WORKERS)] = 1
    experts: Annotated[int, Option(metavar="N", help="Expert workers."), UpTo(MOST_WORKERS)] = 4
    micro_batches: Annotated[int, Option(metavar="N", help="Micro-batches."), UpTo(MOST_WORKERS)] = 2
    expert_slots: Annotated[
        int | None, Option(metavar="N", show_default="a quarter more than needed", help="Slots a layer.")
    ] = None
    batch: Annotated[int, Option(metavar="N", help="Requests at once."), UpTo(65_536)] = 64
    prompt_tokens: Annotated[int, Option(metavar="N", help="Of each request."), UpTo(100_000)] = 32
    output_tokens: Annotated[int, Option(metavar="N", help="Of each request."), UpTo(100_000)] = 128
    dtype: Annotated[str, Option(metavar="NAME", help="Texts are compared in float32.")] = "float32"
    rounds: Annotated[int, Option(metavar="N", help="Runs of each policy, in turns."), UpTo(1000)] = 3
    expert_cores: Annotated[
        float | None, Option(metavar="X", show_default="shared", help="Part of a core of an expert worker.")
    ] = None
    routing: Annotated[Path | None, Option(metavar="FILE", help="For recorded: of serve --record-routing.")] = None
    skew: Annotated[
        float, Option(metavar="R", help="For skewed: rows of the most popular expert over the least's.")
    ] = LINA_SKEW
    policies: Annotated[str, Option(metavar="P,...", help="Also paths, ideal, no-estimation, no-fine-tuning.")] = (
        ",".join(POLICIES)
    )
    path_length: Annotated[int, Option(metavar="L", help="Layers of a sample path, for paths."), UpTo(16)] = 3

    def check(self) -> None:
        """`UserError` for what cannot be."""
        for name in self.chosen:
            if name not in RUNS:
                raise UserError(f"--policies has {name!r}: use some of {', '.join(RUNS)}")
        if self.expert_cores is not None and not 0.1 <= self.expert_cores <= MOST_WORKERS:
            raise UserError(f"--expert-cores is {self.expert_cores:g}: it must be 0.1 to {MOST_WORKERS}")
        if not 1 <= self.skew <= MOST_SKEW:
            raise UserError(f"--skew is {self.skew:g}: it must be 1 (even) to {MOST_SKEW:g}")

    @property
    def chosen(self) -> list[str]:
        """The policies, and what else is run."""
        return [name.strip() for name in self.policies.split(",")]

    def slots(self, model: Path) -> int:
        """Slots that an expert worker has in a layer."""
        needed = -(-load_model_spec(model).router.num_experts // self.experts)
        return needed + -(-needed // 4) if self.expert_slots is None else self.expert_slots


def chosen_cases(text: str | None, routing: Path | None) -> list[Case]:
    """``"plain,hot"`` -> ["plain", "hot"]; without a text all that there can be."""
    if text is None:
        return [case for case in CASES if case != "recorded" or routing is not None]
    if routing is not None and "recorded" not in text:
        raise UserError(f"--routing {routing} is for the case recorded, which --cases {text} leaves out")
    names = [part.strip() for part in text.split(",")]
    if wrong := [name for name in names if name not in CASES]:
        raise UserError(f"--cases has {wrong[0]!r}: use some of {', '.join(CASES)}")
    return cast(list[Case], names)


@dataclass(frozen=True, kw_only=True)
class BalanceOrder(BalanceOptions):
    """One case. `UserError` if its record does not fit the model."""

    model: Path
    case: Case
    seed: int = 0

    @property
    def num_rows(self) -> int:
        """All rows of a run: those of prompts, and of answers."""
        return self.batch * (self.prompt_tokens + self.output_tokens)

    def __post_init__(self) -> None:
        if self.case != "recorded":
            return
        if self.routing is None:
            raise UserError("the case recorded needs a record: write one with antiphon serve --record-routing FILE")
        RoutingReplay(read_routing_trace(self.routing), load_model_spec(self.model), self.batch)


Figures = dict[str, float]
"""What one run gave; rows have the medians. `layer_s`: from sending a micro-batch's rows to experts to having their
sum; `exchange_s`: what of it is not the slowest expert worker's computing. `processor_s`: of one step, all processes
together. `balancedness`: the mean of steps and layers, by rows. `copies`: asked for ahead of a layer or with its
rows."""
_MOST = ("placement_changes", "copies")  # of them the row has the most of any run


def columns(rows: Sequence[Row]) -> ContestColumns:
    """They compare with the first policy of each case."""
    first = {row["case"]: row["step_s_p95"] for row in reversed(rows)}
    return ContestColumns(
        (
            ("case", "case"),
            ("policy", "policy"),
            ("tokens/s", lambda row: f"{row['tokens_per_s']:.0f}"),
            ("step ms", milliseconds("step_s_median")),
            ("p95 ms", milliseconds("step_s_p95")),
            ("layer ms", milliseconds("layer_s_median")),
            ("p95 ms", milliseconds("layer_s_p95")),
            ("exchange ms", milliseconds("exchange_s_median")),
            ("p95 ms", milliseconds("exchange_s_p95")),
            ("to first", lambda row: f"{first[row['case']] / row['step_s_p95']:.2f}"),
            ("processor ms", milliseconds("processor_s")),
            ("balancedness", lambda row: f"{row['balancedness']:.3f}"),
            ("moves", "placement_changes"),
            ("copies", "copies"),
        ),
        title="medians over the rounds; to first: its p95 of a step over this one's, higher is better",
    )


def bench_balance(
    order: BalanceOrder, policies: Sequence[str], folder: Path, report: Report | None = None
) -> list[dict[str, Any]]:
    """A row for each policy. `folder`: for a changed model. `UserError` if the policies do not give the same text, or a
    record does not say what `predict` needs."""
    foreseen = [name for name in policies if RUNS[name].get("balance") == "predict"]
    if order.case == "skewed":
        order = replace(order, routing=folder / "skewed.trace")
        drawn = SkewedLoad(load_model_spec(order.model), order.skew)
        drawn.write(folder / "skewed.trace", order.num_rows, order.seed)
        drawn.write(folder / _PROFILED, order.num_rows, order.seed + 1)
    record = order.routing if order.case == "recorded" and foreseen else None
    if record is not None and not read_routing_trace(record).has_forecasts:
        raise UserError(f"{record} has no forecasts, which the policy {foreseen[0]} needs: record it again")
    model = make_hot(order.model, folder, order.seed) if order.case == "hot" else order.model
    changes = {name: _changes(order, name, folder) for name in policies}
    found: dict[str, list[tuple[list[list[int]], Figures]]] = {policy: [] for policy in policies}
    for number in range(order.rounds):
        turn = number % len(policies)
        for policy in (*policies[turn:], *policies[:turn]):
            found[policy].append(_run(order, model, changes[policy]))
            if report is not None:
                report(sum(map(len, found.values())), order.rounds * len(policies))
        if order.dtype == "float32":
            same = [passes for name, passes in found.items() if name != "ideal"]
            _check_texts(order, [token_ids for passes in same for token_ids, _ in passes])
    return [_row(order.case, policy, [figures for _, figures in passes]) for policy, passes in found.items()]


def _check_texts(order: BalanceOrder, texts: list[list[list[int]]]) -> None:
    different = max((sum(map(ne, texts[0], each)) for each in texts), default=0)
    if different > max(1.0, (1 - _SAME_TEXTS) * order.batch):
        raise UserError(
            f"{order.model}: under one policy {different} of {order.batch} requests have other texts: no time is worth "
            f"anything"
        )


def _changes(order: BalanceOrder, name: str, folder: Path) -> dict[str, Any]:
    """Fields of `ServeConfig`; files that they name are made in `folder`."""
    changes = dict(RUNS[name])
    if order.case in ("recorded", "skewed"):
        changes["replay_routing"] = order.routing
    if name == "ideal":
        changes["replay_routing"] = folder / "even.trace"
        write_even_routing(folder / "even.trace", load_model_spec(order.model), order.batch)
    elif name == "paths":
        if order.case not in ("recorded", "skewed"):
            raise UserError(
                f"--policies has paths: case {order.case} has no record to profile, use --cases recorded or skewed"
            )
        changes["path_profile"] = folder / "paths"
        _path_profile(order, folder).write(folder / "paths")
    return changes


def _path_profile(order: BalanceOrder, folder: Path) -> PathProfile:
    """A profile of the first half of a record's rows; of a drawn record, of as many other rows."""
    file, spec = order.routing, load_model_spec(order.model)
    if order.case == "skewed":
        file = folder / _PROFILED
    assert file is not None, "checked when the order was made"
    trace = read_routing_trace(file)
    numbers = np.arange(len(spec.expert_layers)) % trace.header.num_layers  # as they are replayed
    ids_LTK = trace.ids_LTK()[numbers]
    rows_LTK = ids_LTK if order.case == "skewed" else ids_LTK[:, : ids_LTK.shape[1] // 2]
    return PathProfile.of_rows(rows_LTK, trace.header.num_experts, order.path_length, spec.expert_layers)


def _row(case: Case, policy: str, runs: Sequence[Figures]) -> dict[str, Any]:
    """Medians over the rounds."""
    of_runs = {name: [figures[name] for figures in runs] for name in runs[0]}
    medians = {name: max(each) if name in _MOST else float(np.median(each)) for name, each in of_runs.items()}
    return {"case": case, "policy": policy, **medians}


def _run(order: BalanceOrder, model: Path, fields: Mapping[str, Any]) -> tuple[list[list[int]], Figures]:
    """(texts, figures)"""
    config = ServeConfig(
        model=model,
        layout="disaggregated",
        num_attention=order.attention,
        num_experts=order.experts,
        num_micro_batches=order.micro_batches,
        dtype=order.dtype,
        max_running=order.batch,
        max_batch_tokens=max(order.batch, 2048),
        trace=True,
        expert_slots=order.slots(order.model),
        **fields,
    )
    engine = start_engine(config)
    random = np.random.default_rng(order.seed)
    prompts = random.integers(0, engine.info.vocab_size, (order.batch, order.prompt_tokens)).tolist()
    try:
        with _slowness(engine, order):
            timed_answers(engine, prompts, order.output_tokens, order.model)  # the first pass: counts, plans, moves
            engine.take_spans()
            worked_s = _processor_s(engine)
            answers = timed_answers(engine, prompts, order.output_tokens, order.model)
            worked_s = _processor_s(engine) - worked_s
        spans = engine.take_spans()
        changes, prefetch = engine.stats().placement_changes, engine.stats().prefetch
    finally:
        engine.stop()
    steps_s = [
        (end - start) * 1e-9
        for name, of_worker in spans.items()
        if name.role == "attention"
        for index, start, end in zip(of_worker.name_index, of_worker.starts_ns, of_worker.ends_ns, strict=True)
        if of_worker.names[index] == NAMES[STEP]
    ]
    layers_s, exchanges_s = _layers(spans)
    figures: Figures = {"tokens_per_s": sum(map(len, answers.token_ids)) / answers.took_s}
    for name, values in (("step_s", steps_s), ("layer_s", layers_s), ("exchange_s", exchanges_s)):
        figures |= {f"{name}_median": float(np.median(values)), f"{name}_p95": float(np.quantile(values, 0.95))}
    return answers.token_ids, figures | {
        "processor_s": worked_s / max(1, len(steps_s)) * order.attention,
        "balancedness": _balancedness(order, spans),
        "placement_changes": changes,
        "copies": prefetch.num_copies + prefetch.num_late,
    }


def _processor_s(engine: Engine) -> float:
    """Used so far by this process and all workers."""
    clocks = [(~engine.worker_pid(name) << 3) | 2 for name in engine.workforce.names]  # as clock_getcpuclockid(3)
    return process_time() + sum(map(clock_gettime, clocks))


def _layers(spans: Mapping[WorkerName, Spans]) -> tuple[list[float], list[float]]:
    """Seconds of every layer and micro-batch at every attention worker: with its experts, and without the computing of
    the slowest of them."""
    computing: dict[tuple[int, int, int], float] = {}
    whole: list[tuple[tuple[int, int, int], float]] = []
    for name, of_worker in spans.items():
        sent: dict[tuple[int, int, int], int] = {}
        columns = (of_worker.name_index, of_worker.steps, of_worker.layers, of_worker.micro_batches)
        for kind, *place, start, end in zip(*columns, of_worker.starts_ns, of_worker.ends_ns, strict=True):
            key = (place[0], place[1], place[2])
            if kind == EXPERTS:
                computing[key] = max(computing.get(key, 0.0), (end - start) * 1e-9)
            elif kind == DISPATCH and name.role == "attention":
                sent[key] = start
            elif kind == COMBINE and key in sent:
                whole.append((key, (end - sent.pop(key)) * 1e-9))
    return [seconds for _, seconds in whole], [max(0.0, s - computing.get(key, 0.0)) for key, s in whole]


def _balancedness(order: BalanceOrder, spans: Mapping[WorkerName, Spans]) -> float:
    """Mean over maximum of the rows that expert workers computed in a step and layer; the mean by rows."""
    rows: dict[tuple[int, int], list[float]] = {}
    for name, of_worker in spans.items():
        if name.role != "experts":
            continue
        columns = (of_worker.name_index, of_worker.steps, of_worker.layers, of_worker.rows)
        for index, step, layer, count in zip(*columns, strict=True):
            if of_worker.names[index] == NAMES[EXPERTS]:
                rows.setdefault((step, layer), [0.0] * order.experts)[name.index] += count
    if not rows:
        return 1.0
    shares = [float(balancedness(np.array([each]))) for each in rows.values()]
    return float(np.average(shares, weights=[sum(each) + 1e-9 for each in rows.values()]))


@contextmanager
def _slowness(engine: Engine, order: BalanceOrder) -> Iterator[None]:
    """While inside, expert workers have what `order` says of a core, the first one half of it if it is to be slow."""
    is_slow = order.case == "slow"
    pids = [engine.worker_pid(WorkerName("experts", index)) for index in range(order.experts)]
    with ExitStack() as stack:
        if order.expert_cores is not None:
            for index, pid in enumerate(pids):
                stack.enter_context(limited(pid, order.expert_cores / (2 if is_slow and index == 0 else 1)))
        elif is_slow:
            stack.enter_context(_slowed(pids[0]))
        yield


@contextmanager
def _slowed(pid: int) -> Iterator[None]:
    """While inside, the process shares its cores with a busy one of its own priority."""
    cores = psutil.Process(pid).cpu_affinity()[:1]
    neighbour = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        psutil.Process(pid).cpu_affinity(cores)
        psutil.Process(neighbour.pid).cpu_affinity(cores)
        yield
    finally:
        neighbour.kill()
        neighbour.wait()

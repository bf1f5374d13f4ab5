"""What moving experts brings: one workload under each `--balance` policy in turn, on engines of this machine.

Several workers share this machine's cores, so that a slow one is helped by those that wait for it. `expert_cores` gives
each expert worker a fixed part of a core instead, as machines of their own would have.

Four cases. `plain`: the model as it is. `hot`: in every layer the first expert gets half the rows, because its router
row is replaced by a long random vector, whose product with a row is as often far above the others as far below. `slow`:
the first expert worker computes at half speed: it has half of the part, or the core of a busy neighbour. `recorded`:
rows go where the rows of a record went (`antiphon serve --record-routing`), with all drift that it has,
and forecasts are those of the record.

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

import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from operator import ne
from pathlib import Path
from time import clock_gettime, process_time
from typing import Annotated, Literal, cast

import numpy as np
import psutil
import torch
from safetensors.torch import load_file, save_file
from typer import Option

from antiphon.base.errors import UserError
from antiphon.base.progress import Report
from antiphon.bench.harness.contest import ContestColumns, Row, UpTo, milliseconds
from antiphon.bench.harness.cores import limited
from antiphon.bench.serve import timed_answers
from antiphon.models.config import load_model_spec
from antiphon.models.gguf.checkpoint import open_weights
from antiphon.models.tensors import attention_layer_plan
from antiphon.placement.routing_trace import read_routing_trace
from antiphon.placement.split import balancedness
from antiphon.serve.balancer import Policy
from antiphon.serve.config import ServeConfig
from antiphon.serve.engine import Engine
from antiphon.serve.launch import start_engine
from antiphon.serve.worker.routing import RoutingReplay
from antiphon.serve.worker.spans import EXPERTS, NAMES, STEP, Spans
from antiphon.serve.worker_process import WorkerName

Case = Literal["plain", "hot", "slow", "recorded"]
CASES: tuple[Case, ...] = ("plain", "hot", "slow", "recorded")
MOST_WORKERS = 64  # more is a slip of the finger
_SAME_TEXTS = 0.98  # of the requests, in float32
_FAR = 1e3  # times the length of a usual router row


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

    def check(self) -> None:
        """`UserError` for what cannot be."""
        if self.expert_cores is not None and not 0.1 <= self.expert_cores <= MOST_WORKERS:
            raise UserError(f"--expert-cores is {self.expert_cores:g}: it must be 0.1 to {MOST_WORKERS}")

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

    def __post_init__(self) -> None:
        if self.case != "recorded":
            return
        if self.routing is None:
            raise UserError("the case recorded needs a record: write one with antiphon serve --record-routing FILE")
        RoutingReplay(read_routing_trace(self.routing), load_model_spec(self.model), self.batch)


@dataclass(frozen=True, kw_only=True)
class BalanceRow:
    """One policy's medians over the rounds; `balancedness` is the mean over layers. `processor_s`: of one step, all
    processes together. `copies`: asked for ahead of a layer or with its rows."""

    case: Case
    policy: Policy
    tokens_per_s: float
    step_s_median: float
    step_s_p95: float
    processor_s: float
    balancedness: float
    placement_changes: int
    copies: int


@dataclass(frozen=True)
class _ServedPass:
    token_ids: list[list[int]]
    tokens_per_s: float
    steps_s: list[float]
    processor_s: float
    balancedness: float
    placement_changes: int
    copies: int


def columns(rows: Sequence[Row]) -> ContestColumns:
    """They compare with the policy off of each case."""
    off = {row["case"]: row["step_s_p95"] for row in rows if row["policy"] == "off"}
    return ContestColumns(
        (
            ("case", "case"),
            ("policy", "policy"),
            ("tokens/s", lambda row: f"{row['tokens_per_s']:.0f}"),
            ("step ms", milliseconds("step_s_median")),
            ("p95 ms", milliseconds("step_s_p95")),
            ("p95 to off", lambda row: f"{off[row['case']] / row['step_s_p95']:.2f}"),
            ("processor ms", milliseconds("processor_s")),
            ("balancedness", lambda row: f"{row['balancedness']:.3f}"),
            ("moves", "placement_changes"),
            ("copies", "copies"),
        ),
        title="medians over the rounds; p95 to off: higher is better",
    )


def bench_balance(
    order: BalanceOrder, policies: Sequence[Policy], folder: Path, report: Report | None = None
) -> list[BalanceRow]:
    """A row for each policy. `folder`: for a changed model. `UserError` if the policies do not give the same text, or a
    record does not say what `predict` needs."""
    record = order.routing if order.case == "recorded" and "predict" in policies else None
    if record is not None and not read_routing_trace(record).has_forecasts:
        raise UserError(f"{record} has no forecasts, which the policy predict needs: record it again")
    model = make_hot(order.model, folder, order.seed) if order.case == "hot" else order.model
    found: dict[Policy, list[_ServedPass]] = {policy: [] for policy in policies}
    for number in range(order.rounds):
        turn = number % len(policies)
        for policy in (*policies[turn:], *policies[:turn]):
            found[policy].append(_run(order, model, policy))
            if report is not None:
                report(sum(map(len, found.values())), order.rounds * len(policies))
        if order.dtype == "float32":
            _check_texts(order, [each.token_ids for passes in found.values() for each in passes])
    return [_row(order.case, policy, passes) for policy, passes in found.items()]


def _check_texts(order: BalanceOrder, texts: list[list[list[int]]]) -> None:
    different = max(sum(map(ne, texts[0], each)) for each in texts)
    if different > max(1.0, (1 - _SAME_TEXTS) * order.batch):
        raise UserError(
            f"{order.model}: under one policy {different} of {order.batch} requests have other texts: no time is worth "
            f"anything"
        )


def _row(case: Case, policy: Policy, passes: list[_ServedPass]) -> BalanceRow:
    return BalanceRow(
        case=case,
        policy=policy,
        tokens_per_s=float(np.median([each.tokens_per_s for each in passes])),
        step_s_median=float(np.median([np.median(each.steps_s) for each in passes])),
        step_s_p95=float(np.median([np.quantile(each.steps_s, 0.95) for each in passes])),
        processor_s=float(np.median([each.processor_s for each in passes])),
        balancedness=float(np.median([each.balancedness for each in passes])),
        placement_changes=max(each.placement_changes for each in passes),
        copies=max(each.copies for each in passes),
    )


def _run(order: BalanceOrder, model: Path, policy: Policy) -> _ServedPass:
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
        balance=policy,
        expert_slots=order.slots(order.model),
        replay_routing=order.routing if order.case == "recorded" else None,
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
    rate = sum(map(len, answers.token_ids)) / answers.took_s
    per_step_s = worked_s / max(1, len(steps_s)) * order.attention
    return _ServedPass(
        answers.token_ids,
        rate,
        steps_s,
        per_step_s,
        _balancedness(order, spans),
        changes,
        prefetch.num_copies + prefetch.num_late,
    )


def _processor_s(engine: Engine) -> float:
    """Used so far by this process and all workers."""
    clocks = [(~engine.worker_pid(name) << 3) | 2 for name in engine.workforce.names]  # as clock_getcpuclockid(3)
    return process_time() + sum(map(clock_gettime, clocks))


def _balancedness(order: BalanceOrder, spans: Mapping[WorkerName, Spans]) -> float:
    """Mean over maximum of the rows that expert workers computed, the mean of all layers."""
    rows: dict[int, list[float]] = {}
    for name, of_worker in spans.items():
        if name.role != "experts":
            continue
        for index, layer, count in zip(of_worker.name_index, of_worker.layers, of_worker.rows, strict=True):
            if of_worker.names[index] == NAMES[EXPERTS]:
                rows.setdefault(layer, [0.0] * order.experts)[name.index] += count
    return float(np.mean([float(balancedness(np.array([of_layer]))) for of_layer in rows.values()] or [1.0]))


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


def make_hot(model: Path, folder: Path, seed: int) -> Path:
    """A copy of a checkpoint in which the first expert of every layer gets half the rows."""
    shutil.copytree(model, folder, dirs_exist_ok=True)
    spec, checkpoint = load_model_spec(model), open_weights(model)
    names = checkpoint.family_names(spec.family)
    routers = set[str]()
    for layer in spec.expert_layers:
        ((router,),) = (attention_layer_plan(spec, names, layer, checkpoint)["router"],)
        routers.add(router.name)
    generator = torch.Generator().manual_seed(seed)
    for file in sorted(model.glob("*.safetensors")):
        tensors = load_file(file)
        for name in sorted(routers & tensors.keys()):
            rows = tensors[name]
            hot = torch.randn(rows.shape[1], generator=generator)
            rows[0] = (hot / hot.norm() * rows.float().norm(dim=1).mean() * _FAR).to(rows.dtype)
        save_file(tensors, folder / file.name, {"format": "pt"})
    return folder


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

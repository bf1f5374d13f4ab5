"""Runs a ladder (`ladder_variants`) on a cluster in a box, one process a rank.

Links between nodes are slow on purpose: they are the bottleneck, as in the papers, and not the cores that all ranks
share. Variants take turns, step by step, in the same processes. Each trainer runs in a thread of its own and hands the
turn back after every step, so it is `Trainer.run` that is timed, not a copy of its inside. What is reported is what the
trainer's metrics say. Rejected: one run after the other, for the machine drifts within a minute; and a process for each
variant, which would start for longer than it runs.
"""

import json
import os
import statistics
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import IO, Any
from xml.sax.saxutils import escape

from antiphon.base.allowance import allowance
from antiphon.base.errors import ResourceError
from antiphon.base.progress import Report
from antiphon.base.system import python_module
from antiphon.base.units import format_bytes, round_step
from antiphon.bench.box import Box, NodeProcess
from antiphon.bench.box.topology import plan_ranks
from antiphon.bench.harness import child
from antiphon.bench.harness.children import Children
from antiphon.bench.harness.columns import ContestColumns, Row, num_bytes, shown
from antiphon.bench.harness.processes import box_of_ranks, limited
from antiphon.bench.harness.quiet import CpuWatch
from antiphon.bench.ladder_prediction import BoxLinks, predicted_step_s
from antiphon.bench.ladder_variants import LadderCase, Variant, variants_of
from antiphon.bench.plain_loop import PlainLoop
from antiphon.bench.train import TEXT, EnoughError, kept_for_backward, samples_of, write_text
from antiphon.models.config import load_model_spec
from antiphon.train.config import TrainConfig, config_of
from antiphon.train.memory import memory_need, setup_of
from antiphon.train.model import Batch
from antiphon.train.ranks import leave, sizes_of
from antiphon.train.row_budget import part_over_budget
from antiphon.train.setup import prepare
from antiphon.train.trainer import TrainedStep, Trainer

LINK = Path("/sys/class/net/eth0/statistics/tx_bytes")  # of this rank's node
WARM = 2  # steps whose losses are compared and whose times are not
END_S = 30.0


# --- turns of one rank


@dataclass
class VariantRecord:
    """One variant's measurements, by step. `exposed_s`: waiting for others, of the rank that waits longest.
    `expert_rows`: of the last step, by layer and expert."""

    losses: list[float] = field(default_factory=list)
    step_s: list[float] = field(default_factory=list)
    exposed_s: list[float] = field(default_factory=list)
    sent_bytes: float = 0.0
    activation_bytes: float = 0.0
    operator_s: list[dict[str, float]] = field(default_factory=list)
    expert_rows: list[list[int]] = field(default_factory=list)


class TrainerTurns:
    """The trainer of `config`; a step begins when `step` is called, on all ranks. `end`: what was recorded."""

    def __init__(self, config: TrainConfig) -> None:
        self.trainer: Trainer  # made by the first step
        self._config = config
        self._folder = Path(config.output.folder)
        self._turn, self._back = threading.Semaphore(0), threading.Semaphore(0)
        self._ending = False
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name=f"trainer {self._folder.name}", daemon=True)

    def step(self) -> None:
        if not self._thread.is_alive():
            self._thread.start()
        self._turn.release()
        self._back.acquire()
        if self._error is not None:
            raise self._error

    def end(self) -> VariantRecord:
        self._ending = True
        self._turn.release()
        self._thread.join()
        return read_record(self._folder) if self.trainer.is_first else VariantRecord()

    def _run(self) -> None:
        self._turn.acquire()
        try:
            self.trainer = Trainer(prepare(self._config), self._on_step)
            self.trainer.run()
        except EnoughError:
            return
        except BaseException as error:  # raised where the step was asked for
            self._error = error
        self._back.release()

    def _on_step(self, result: TrainedStep) -> None:
        self._back.release()  # metrics of this step are written when the next turn begins
        self._turn.acquire()
        if self._ending:
            raise EnoughError


class LoopTurns:
    """`DistributedDataParallel` or FSDP2, over the same sequences. The trainers' process group has to be there."""

    def __init__(self, case: LadderCase, config: TrainConfig, rank: int, *, sharded: bool) -> None:
        self._case = case
        self._config = config
        self._rank = rank
        self._sharded = sharded
        self._record = VariantRecord()
        self._loop: PlainLoop | None = None

    def step(self) -> None:
        loop, batch = self._loop or self._begin(), self._batch()
        number = len(self._record.losses)
        if 0 < number < WARM:  # it takes two more passes
            self._record.exposed_s.append(loop.exposed_s(batch))
        started_s = time.perf_counter()
        if number:
            loss = loop.step(batch, self._config.optimizer.learning_rate)
        else:
            with kept_for_backward() as kept:
                loss = loop.step(batch, self._config.optimizer.learning_rate)
            self._record.activation_bytes = sum(kept.values())
        self._record.step_s.append(time.perf_counter() - started_s)
        self._record.losses.append(loss)

    def end(self) -> VariantRecord:
        assert self._loop is not None
        self._record.sent_bytes = self._loop.sent_bytes
        return self._record

    def _begin(self) -> PlainLoop:
        loop = self._loop = self._case.loop(self._config, sharded=self._sharded)
        self._samples = samples_of(self._config)
        loop.choose_experts(load_model_spec(self._case.folder), self._batch(), lambda text: None)
        return loop

    def _batch(self) -> Batch:
        return self._case.batch_of(self._samples, len(self._record.losses), self._rank)


Turns = TrainerTurns | LoopTurns


def read_record(folder: Path) -> VariantRecord:
    """What a trainer wrote of itself."""
    record = VariantRecord()
    for line in (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        if "step_s" in row:
            record.losses.append(row["loss"])
            record.step_s.append(row["step_s"])
            record.exposed_s.append(row["exposed_comm_s"])
            record.operator_s.append(row["operator_s"])
            record.expert_rows = row["expert_rows"]
            record.sent_bytes = sum(row["collective_bytes"].values())
            record.activation_bytes = max(record.activation_bytes, row["activation_bytes"])
    return record


def configuration(case: LadderCase, variant: Variant, number: int, workplace: Path) -> TrainConfig:
    """A run of the trainer that logs every step; all variants share the tokens of one text."""
    tables = case.tables(workplace, {"folder": str(workplace / f"variant-{number}"), "log_every": 1})
    tables["data"]["cache"] = str(workplace / "tokens")
    tables |= {name: dict(table) if isinstance(table, Mapping) else table for name, table in variant.tables.items()}
    if "communication" in tables:
        tables["communication"].setdefault("node_size", case.ranks_per_node)
    if not variant.overlaps:
        tables.setdefault("overlap", {})["beside"] = False
    return config_of(tables, f"variant {variant.name}")


class LadderRank:
    """One rank of a ladder: its part in every variant."""

    def __init__(self, case: LadderCase, workplace: Path) -> None:
        self._case, self._rank, self._variants = case, int(os.environ["RANK"]), variants_of(case)
        self._contestants = [self._turns(variant, number, workplace) for number, variant in enumerate(self._variants)]
        self._link_bytes: list[list[int]] = [[] for _ in self._variants]
        self._processor_s: list[list[float]] = [[] for _ in self._variants]

    def step(self, index: int) -> None:
        """The next step of one variant."""
        before, before_s = _link_bytes(), time.process_time()
        self._contestants[index].step()
        self._link_bytes[index].append(_link_bytes() - before)
        self._processor_s[index].append(time.process_time() - before_s)

    def end(self) -> list[dict[str, Any]]:
        """The rows, of the first rank. `AssertionError` if a variant does not train as the first one does."""
        records = [each.end() for each in self._contestants]
        leave()
        if self._rank:
            return []
        check_losses(self._variants, records)
        rows = _rows(self._case, self._variants, self._contestants, records)
        for index, (row, variant) in enumerate(zip(rows, self._variants, strict=True)):
            row["link_bytes"] = statistics.median(self._link_bytes[index][WARM:])
            row["processor_s"] = statistics.median(self._processor_s[index][timed_steps(self._case, variant)])
        return rows

    def _turns(self, variant: Variant, number: int, workplace: Path) -> Turns:
        config = configuration(self._case, variant, number, workplace)
        if variant.kind == "antiphon":
            return TrainerTurns(config)
        return LoopTurns(self._case, config, self._rank, sharded=variant.kind == "fsdp2")


def _link_bytes() -> int:
    return int(LINK.read_text(encoding="utf-8")) if LINK.exists() else 0


# --- all ranks, in a box


def bench_ladder(case: LadderCase, report: Report) -> list[dict[str, Any]]:
    """A row for each variant. `ChildFailed` or `PeerLost` names a rank that fails, `PeerTimeout` those that are not
    done in time."""
    deadline = time.monotonic() + case.timeout
    num_variants, num_steps = len(variants_of(case)), WARM + case.rounds + 1  # the last one is not recorded
    with TemporaryDirectory(prefix="antiphon-ladder-") as name:
        workplace = Path(name)
        check_room(case, workplace)
        write_text(workplace / TEXT, case.tokens_per_step * (WARM + case.rounds + 2))
        watch, shape = CpuWatch(), (case.nodes, case.ranks_per_node, case.mbit, case.inner_mbit)
        with box_of_ranks(*shape) as box, Children() as ranks, ExitStack() as quotas:
            names = [f"rank[{rank}]" for rank in range(case.ranks)]
            ranks.start(names, [partial(LadderRank, case, workplace)] * case.ranks, partial(_start_in, box))
            if case.rank_cores:
                for pid in ranks.pids:
                    quotas.enter_context(limited(pid, case.rank_cores))
            for done in range(num_steps * num_variants):
                ranks.ask("step", done % num_variants, timeout_s=deadline - time.monotonic())
                report(done + 1, num_steps * num_variants)
            rows: list[dict[str, Any]] = ranks.ask("end", timeout_s=max(END_S, deadline - time.monotonic()))[0]
    return [row | {"foreign_cpu_share": watch.foreign_share()} for row in rows]


def check_room(case: LadderCase, workplace: Path, free_bytes: int | None = None) -> None:
    """`ResourceError` if all variants do not fit beside each other: each keeps its parameters and moments from turn to
    turn. `free_bytes` None: what this process may take."""
    free = allowance().memory.left_bytes if free_bytes is None else free_bytes
    spec, variants = load_model_spec(case.folder), variants_of(case)
    kept = turn = 0.0
    for number, variant in enumerate(variants):
        config = configuration(case, variant, number, workplace)
        need = memory_need(spec, config, setup_of(config, sizes_of(config, spec, case.ranks)))
        held = need.parameters + need.gradients + need.optimizer
        kept += held / case.ranks if variant.kind == "fsdp2" else held
        turn = max(turn, need.activations + need.head)
    if case.ranks * (kept + turn) > free:
        raise ResourceError(
            f"the {len(variants)} variants of the ladder {case.ladder} need {format_bytes(case.ranks * (kept + turn))} "
            f"in {case.ranks} ranks, all at once, {format_bytes(free)} are free: name fewer with --variants"
        )


def _start_in(box: Box, socket: str, count: int, log: IO[bytes]) -> list[NodeProcess]:
    """A starter of `harness.children`: as many processes in each node."""
    threads = {"OMP_NUM_THREADS": str(max(1, allowance().num_cores // count))}
    command = python_module(child.__name__, socket, "{rank}")
    plans = plan_ranks(num_nodes=box.num_nodes, num_local_ranks=count // box.num_nodes, command=command)
    return [box.start(plan.node, plan.args, env=plan.env | threads, stdout=log, stderr=log) for plan in plans]


# --- the report


def check_losses(variants: tuple[Variant, ...], records: list[VariantRecord]) -> None:
    """`AssertionError` if a variant does not train as the first one does: a time of something else says nothing."""
    for variant, record in zip(variants, records, strict=True):
        for step, (loss, first) in enumerate(zip(record.losses[:WARM], records[0].losses, strict=False)):
            difference = abs(loss - first) / max(1.0, abs(first))
            assert difference <= variant.band, (
                f"step {step}: the loss of {variant.name} is {loss:.6f}, that of {variants[0].name} {first:.6f}"
            )


def _rows(
    case: LadderCase, variants: tuple[Variant, ...], contestants: Sequence[Turns], records: list[VariantRecord]
) -> list[dict[str, Any]]:
    rows, plain_s, before_s = [], dict[str, dict[str, float]](), None
    for variant, contestant, record in zip(variants, contestants, records, strict=True):
        steps = timed_steps(case, variant)
        step_s = statistics.median(record.step_s[steps])
        row = {
            "ladder": case.ladder,
            "variant": variant.name,
            "world_size": case.ranks,
            "nodes": case.nodes,
            "mbit": case.mbit,
            "inner_mbit": case.inner_mbit or 0.0,
            "rank_cores": case.rank_cores or 0.0,
            "tokens_per_s": case.tokens_per_step / step_s,
            "step_s_median": step_s,
            "before_to_this": None if before_s is None else before_s / step_s,
            "steps_s": record.step_s[steps],
            "exposed_comm_s": statistics.median(record.exposed_s[steps] or record.exposed_s),
            "exposed_share": statistics.median(record.exposed_s[steps] or record.exposed_s) / step_s,
            "comm_bytes": record.sent_bytes,
            "activation_bytes": record.activation_bytes,
            "first_losses": record.losses[:WARM],
            "parameter_bytes": None,
            "predicted_step_s": None,
        }
        if isinstance(contestant, TrainerTurns):
            own_s = {
                name: statistics.median(each.get(name, 0.0) for each in record.operator_s[steps])
                for name in record.operator_s[-1]
            }
            # Operators beside an exchange are slowed by it: a variant without overlap has their own times. Not
            # simulated: links inside nodes, and forms of which no variant runs without overlap.
            form = str(contestant.trainer.mesh.sizes)
            if not variant.overlaps:
                plain_s[form] = own_s
            if form in plain_s and not case.inner_mbit:
                row["predicted_step_s"] = _predicted_s(case, contestant, plain_s[form], record.expert_rows)
            row["operator_s"] = own_s
            row["parameter_bytes"] = sum(each.nbytes for each in contestant.trainer.model.parameters())
        rows.append(row)
        before_s = step_s
    return rows


def timed_steps(case: LadderCase, variant: Variant) -> slice:
    """The steps of a variant that count."""
    return slice(max(WARM, variant.settles), WARM + case.rounds)


def _predicted_s(
    case: LadderCase, contestant: TrainerTurns, operator_s: dict[str, float], expert_rows: list[list[int]]
) -> float:
    trainer, factor = contestant.trainer, contestant.trainer.config.parallel.row_budget
    links = BoxLinks(nodes=case.nodes, ranks_per_node=case.ranks_per_node, bytes_per_s=case.mbit * 1e6 / 8)
    plans = [layer.plan for layer in trainer.model.layers]
    over = statistics.fmean(part_over_budget(rows, trainer.mesh.sizes.expert, factor) for rows in expert_rows)
    return predicted_step_s(trainer.spec, trainer.config, trainer.mesh.sizes, plans, operator_s, links, over)


def _error(row: Row) -> str:
    predicted_s = row["predicted_step_s"]
    return "" if predicted_s is None else f"{predicted_s / row['step_s_median'] - 1:+.0%}"


def columns(rows: Sequence[Row]) -> ContestColumns:
    """They compare with the first row."""
    first_s = rows[0]["step_s_median"]
    return ContestColumns(
        (
            ("variant", "variant"),
            ("tok/s", "tokens_per_s"),
            ("step s", "step_s_median"),
            ("waits s", "exposed_comm_s"),
            ("of it", lambda row: f"{row['exposed_share']:.0%}"),
            ("processor s", "processor_s"),
            ("sends", num_bytes("comm_bytes")),
            ("keeps", num_bytes("activation_bytes")),
            ("parameters", num_bytes("parameter_bytes")),
            ("to the first", lambda row: f"{first_s / row['step_s_median']:.3f}"),
            ("to the one before", shown("before_to_this", lambda value: f"{value:.3f}")),
            ("simulated s", "predicted_step_s"),
            ("error", _error),
        ),
        title=f"{rows[0]['nodes']} nodes, {rows[0]['world_size']} ranks, {rows[0]['mbit']:g} Mbit/s; others took "
        f"{rows[0]['foreign_cpu_share']:.0%} of the cores",
    )


# --- the figure


LEFT, WIDTH, ROW, TOP = 190, 480, 34, 64
BUSY, WAITING, LINE, WORDS, GRID = "#4878a8", "#d9a441", "#c0504d", "#333333", "#dddddd"


def draw(rows: list[dict[str, Any]], title: str) -> str:
    """A figure as SVG: each variant's median step as a bar, its waiting in another colour, what the simulation says as
    a line."""
    longest_s = 1.08 * max(max(row["step_s_median"], row["predicted_step_s"] or 0.0) for row in rows)
    height = TOP + ROW * len(rows) + 60
    total = LEFT + WIDTH + 130
    parts = [_text(12, 22, title, size=13)]
    between_s = round_step(longest_s / 5)
    for tick in range(int(longest_s / between_s) + 1):
        x = LEFT + WIDTH * tick * between_s / longest_s
        parts.append(f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{TOP - 8}" y2="{height - 52}" stroke="{GRID}"/>')
        parts.append(_text(x, TOP - 14, f"{tick * between_s:g} s", anchor="middle", size=10))
    for index, row in enumerate(rows):
        parts += _bar(row, TOP + index * ROW, WIDTH / longest_s, rows[0]["step_s_median"])
    parts.append(_text(LEFT, height - 30, "blue: computing and what runs beside it", color=BUSY, size=10))
    parts.append(_text(LEFT, height - 16, "yellow: waiting for other ranks", color=WAITING, size=10))
    parts.append(_text(LEFT + 260, height - 30, "red line: simulated", color=LINE, size=10))
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{total}" height="{height}" viewBox="0 0 {total} {height}" '
        'font-family="sans-serif">'
    )
    return "\n".join([head, f'<rect width="{total}" height="{height}" fill="white"/>', *parts, "</svg>\n"])


def _bar(row: dict[str, Any], y: float, scale: float, first_s: float) -> list[str]:
    step_s = row["step_s_median"]
    waiting_s = min(step_s, row["exposed_comm_s"])
    busy, waiting = (step_s - waiting_s) * scale, waiting_s * scale
    parts = [
        _text(LEFT - 8, y + 16, row["variant"], anchor="end", size=12),
        f'<rect x="{LEFT}" y="{y}" width="{busy:.1f}" height="22" fill="{BUSY}"/>',
        f'<rect x="{LEFT + busy:.1f}" y="{y}" width="{waiting:.1f}" height="22" fill="{WAITING}"/>',
        _text(LEFT + busy + waiting + 6, y + 15, f"{step_s:.2f} s   ×{first_s / step_s:.2f}", size=11),
    ]
    if row["predicted_step_s"] is not None:
        x = LEFT + row["predicted_step_s"] * scale
        parts.append(f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{y - 4}" y2="{y + 26}" stroke="{LINE}" stroke-width="2.5"/>')
    return parts


def _text(x: float, y: float, words: str, *, anchor: str = "start", size: int = 11, color: str = WORDS) -> str:
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" font-size="{size}" fill="{color}">{escape(words)}</text>'
    )

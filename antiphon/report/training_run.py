"""The page of a training run: one HTML file, made of what the run left in its output folder.

1. `run.json` and `metrics.jsonl` are read. Rejected: taking them from the trainer. A page can be made of a run that was
   killed, and of one that still runs.
2. curves over steps: loss, learning rate, gradient norm; a long run's are thinned to means over blocks of steps
3. heat maps: the fullest expert of each layer over steps, every expert of each layer in the end
4. bars: time by operator, bytes by collective
5. the plan's prediction stands beside the run. Rejected: a picture a figure, which TensorBoard shows already.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from antiphon.base.errors import UserError
from antiphon.base.units import format_bytes, milliseconds, number
from antiphon.report.document import (
    BATCH_COLOURS,
    MARK,
    Axis,
    BlockChart,
    Chart,
    ChartBlock,
    ChartLine,
    Columns,
    Drawing,
    Grid,
    HeatMap,
    LineChart,
    Notes,
    PageSection,
    Pairs,
    Piece,
    ReportDocument,
    Sentence,
    html,
    stacked,
)
from antiphon.report.draw import draw
from antiphon.report.words import plural, time_unit
from antiphon.specs.training_plan import training_plan_from_json
from antiphon.train.run_folder import FILE

PAGE = "report.html"
MOST_ALARMS = 20
_UNKNOWN = "-"
_OPTIMIZERS = {"adamw": "AdamW", "muon": "Muon and AdamW"}
MOST_POINTS = 1000
MOST_COLUMNS = 300
LEAST_SHARE = 0.002
ROW_HEIGHT = 26
BACKWARD = " backward"
TRAIN_COLOUR, HELD_OUT_COLOUR = BATCH_COLOURS[0], MARK
FORWARD_COLOUR, BACKWARD_COLOUR = BATCH_COLOURS[0], BATCH_COLOURS[1]
STEPS = Axis(title="Step", low=None)


@dataclass(frozen=True, kw_only=True)
class RunRecord:
    """`steps`: the logged ones, each a dictionary of metrics. `held_out`: (step, nats a token). `alarms`: (step, text).
    `ranks`: (first logged step, number of ranks) of each stretch of the run; time, speed and memory are of the last
    one, since another number of ranks has others. `facts`: `run.json`."""

    facts: dict[str, Any]
    steps: list[dict[str, Any]] = field(default_factory=list)
    held_out: list[tuple[int, float]] = field(default_factory=list)
    alarms: list[tuple[int, str]] = field(default_factory=list)
    ranks: list[tuple[int, int]] = field(default_factory=list)

    @property
    def measured(self) -> list[dict[str, Any]]:
        """The logged steps of the last stretch; of a run that logged none in it, all."""
        first = self.ranks[-1][0] if self.ranks else 0
        return [row for row in self.steps if row["step"] >= first] or self.steps

    def curve(self, name: str) -> tuple[list[int], list[float]]:
        """(steps, values) of a metric that is a number, where it was finite."""
        rows = [row for row in self.steps if row.get(name) is not None]
        return [row["step"] for row in rows], [row[name] for row in rows]

    def mean(self, name: str) -> dict[str, float]:
        """Mean over steps of a metric that is numbers by name; a name that is missing counts as 0. The first logged
        step, which warms up, is left out where there are others."""
        rows = [row[name] for row in self.measured if name in row]
        rows = rows[1:] or rows
        names = dict.fromkeys(key for row in rows for key in row)
        return {key: sum(row.get(key, 0.0) for row in rows) / len(rows) for key in names}

    def median(self, name: str) -> float | None:
        """The median of a metric that is a number; None if no step has it."""
        values = sorted(row[name] for row in self.measured if name in row)
        return values[len(values) // 2] if values else None


def read_run(folder: Path) -> RunRecord:
    """The record of the run whose `output.folder` is `folder`; `UserError` if there is none."""
    try:
        facts = json.loads((folder / FILE).read_text(encoding="utf-8"))
        lines = (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    except (OSError, ValueError) as error:
        raise UserError(f"{folder}: not the output of a training run ({error}): name a run's output.folder") from error
    record = RunRecord(facts=facts)
    for line in lines:
        try:
            row = json.loads(line)
        except ValueError:  # a kill cut it off
            continue
        if "num_ranks" in row and (not record.ranks or record.ranks[-1][1] != row["num_ranks"]):
            record.ranks.append((row["step"], row["num_ranks"]))
        if "alarm" in row:
            record.alarms.append((row["step"], row["alarm"]))
        elif row.get("held_out_loss") is not None:
            record.held_out.append((row["step"], row["held_out_loss"]))
        else:
            record.steps.append(row)
    return record


def write_run_page(folder: Path) -> Path:
    """Write `folder/report.html` from what the run left there. To be called by one rank, after the last step."""
    page = folder / PAGE
    page.write_text(html(run_page(read_run(folder))), encoding="utf-8")
    return page


def run_page(record: RunRecord) -> ReportDocument:
    """The page."""
    facts = record.facts
    config = facts["config"]
    tokens = config["batch"] * config["sequence_length"]
    return ReportDocument(
        title=f"Training of {facts['model']}",
        pieces=[
            Sentence(
                f"{plural(config['steps'], 'step')} of {plural(config['batch'], 'sequence')} of "
                f"{config['sequence_length']:,} tokens ({tokens:,} a step) on {plural(facts['num_ranks'], 'rank')}",
                "soft",
            ),
            *_of_other_ranks(record),
            Sentence("Every number on this page was measured, but for those called predicted.", "soft"),
            Sentence(f"{_headline(record)}.", "answer"),
            Pairs(_cards(record), "cards"),
            Columns([Grid(rows=_facts(record))], _compared_and_alarms(record)),
            *_sections(record),
        ],
        footer="The run's configuration is in this page's source (element `run`), its numbers in `metrics.jsonl`.",
        data_name="run",
        data=facts,
    )


def _of_other_ranks(record: RunRecord) -> list[Piece]:
    """What a run says whose number of ranks has changed."""
    if len(record.ranks) < 2:
        return []
    stretches = ", ".join(f"{plural(num, 'rank')} from step {step + 1:,}" for step, num in record.ranks)
    return [Sentence(f"The number of ranks changed: {stretches}. Times, speed and memory are of the last.", "soft")]


def _compared_and_alarms(record: RunRecord) -> list[Piece]:
    rows = [each.words() for each in comparisons(record)]
    columns = ("", "predicted", "measured", "measured / predicted")
    pieces: list[Piece] = [
        Sentence("Predicted against measured", "heading"),
        Grid(columns=columns, rows=rows, names_rows=True),
    ]
    if record.alarms:
        shown = record.alarms[-MOST_ALARMS:]
        left_out = f", the last {len(shown)} of {len(record.alarms)}" if len(record.alarms) > len(shown) else ""
        said = [text if text.startswith(f"step {step}: ") else f"step {step}: {text}" for step, text in shown]
        pieces += [Sentence(f"Alarms{left_out}", "heading"), Notes(said)]
    return pieces


def _headline(record: RunRecord) -> str:
    steps, losses = record.curve("loss")
    if not steps:
        return "No step was logged"
    held_out = f", held out {record.held_out[-1][1]:.3f}" if record.held_out else ""
    alarms = f"; {plural(len(record.alarms), 'alarm')}" if record.alarms else ""
    return f"Loss {losses[0]:.3f} → {losses[-1]:.3f} nats a token at step {steps[-1] + 1:,}{held_out}{alarms}"


def _cards(record: RunRecord) -> list[tuple[str, str]]:
    last = record.steps[-1] if record.steps else {}
    peak = last.get("peak_rss_bytes")
    fullest = last.get("fullest_expert_ratio")
    waited_s = record.median("exposed_comm_s")
    waiting = [] if waited_s is None else [("waiting for ranks, a step", milliseconds(waited_s))]
    return [
        ("a step, median", milliseconds(record.median("step_s"))),
        ("tokens/s, median", number(record.median("tokens_per_s"))),
        ("GFLOP/s of the model", number((record.median("flops_per_s") or 0) / 1e9 or None)),
        ("peak memory of a rank", _UNKNOWN if peak is None else format_bytes(peak)),
        ("fullest expert, × mean", _UNKNOWN if fullest is None else f"{max(fullest):.2f}"),
        *waiting,
    ]


def _facts(record: RunRecord) -> list[tuple[str, str]]:
    facts, config = record.facts, record.facts["config"]
    optimizer, loss = config["optimizer"], config["loss"]
    size = config["micro_batch"] or config["batch"]
    return [
        ("parameters", f"{facts['num_parameters']:,}, of them {facts['num_active_parameters']:,} for a token"),
        ("experts", f"{facts['top_k']} of {facts['num_experts']} in {plural(len(facts['moe_layers']), 'layer')}"),
        ("arithmetic", config["dtype"]),
        ("a pass", f"{plural(size, 'sequence')}; {plural(config['batch'] // size, 'pass', 'passes')} a step"),
        (
            "optimizer",
            f"{_OPTIMIZERS[optimizer['name']]}, peak rate {optimizer['learning_rate']:g}, {optimizer['schedule']}, "
            f"{optimizer['warmup_steps']} steps of warm-up, decay {optimizer['weight_decay']:g}, "
            f"clip {optimizer['clip']:g}",
        ),
        ("added losses", f"balance {loss['balance']:g}, z {loss['z']:g}"),
        ("begun with", f"{config['model']['begin']} weights, seed {config['seed']}"),
        ("ranks", f"{plural(facts['num_ranks'], 'rank')} of {plural(facts['num_threads'], 'thread')}"),
    ]


@dataclass(frozen=True)
class PredictedMeasured:
    """One number of a run beside what was predicted of it; `measured` None: the run did not say. `unit`: "s",
    "tokens/s", "of peak" or "bytes"."""

    name: str
    unit: str
    predicted: float
    measured: float | None

    def words(self) -> tuple[str, str, str, str]:
        """(what, predicted, measured, measured over predicted)."""
        written = _WRITTEN[self.unit]
        if self.measured is None:
            return self.name, written(self.predicted), _UNKNOWN, _UNKNOWN
        ratio = f"{self.measured / self.predicted:.2f}" if self.predicted else _UNKNOWN
        return self.name, written(self.predicted), written(self.measured), ratio


_WRITTEN: dict[str, Callable[[float], str]] = {
    "s": milliseconds,
    "tokens/s": number,
    "of peak": lambda value: f"{value:.1%}",
    "bytes": format_bytes,
}


def comparisons(record: RunRecord) -> list[PredictedMeasured]:
    """Memory by the check before the first step; the rest by the plan, if the run obeyed one. MFU is by the plan's own
    peak, so it grows with tokens/s."""
    peak = max((row["peak_rss_bytes"] for row in record.measured if "peak_rss_bytes" in row), default=None)
    used = None if peak is None else peak - record.facts["rss_before_bytes"]
    memory = PredictedMeasured(
        "memory of a rank, less the runtime's", "bytes", record.facts["memory_need"]["total"], used
    )
    if record.facts["plan"] is None:
        return [memory]
    predicted = training_plan_from_json(record.facts["plan"]).predicted
    tokens_per_s = record.median("tokens_per_s")
    mfu = None if tokens_per_s is None else predicted.mfu * tokens_per_s / predicted.tokens_per_s
    return [
        PredictedMeasured("a step", "s", predicted.iteration_s, record.median("step_s")),
        PredictedMeasured("tokens/s", "tokens/s", predicted.tokens_per_s, tokens_per_s),
        PredictedMeasured("MFU", "of peak", predicted.mfu, mfu),
        PredictedMeasured("memory of a rank by the plan", "bytes", predicted.memory_bytes["total"], used),
        memory,
    ]


def _sections(record: RunRecord) -> list[PageSection]:
    """A section without figures is left out."""
    has = {name for row in record.steps for name in row}
    drawn: dict[str, list[Drawing]] = {"Learning": [], "Experts": [], "Time and bytes": []}

    def add(section: str, name: str, title: str, caption: str, chart: Chart) -> None:
        drawn[section].append(draw(f"run-{name}", title, caption, chart))

    if "loss" in has:
        add("Learning", "loss", "Loss", "Of logged steps; a long run shows means.", loss_chart(record))
        rate = curve_chart(record, "learning_rate", "Learning rate")
        add("Learning", "rate", "Learning rate", "What the optimizer was given.", rate)
        norm = curve_chart(record, "gradient_norm", "Gradient norm", logarithmic=True)
        add("Learning", "norm", "Gradient norm", "Before it was limited.", norm)
    if "fullest_expert_ratio" in has:
        words = "Rows of the fullest expert over the mean: 1 is even."
        add("Experts", "balance", "Balance by layer and step", words, balance_chart(record))
    if "expert_rows" in has:
        words = "Rows of each expert over the mean of its layer, at the last logged step."
        add("Experts", "load", "Load of each expert", words, load_chart(record))
    if "dropped_rows" in has:
        add("Experts", "dropped", "Dropped rows", "No expert had room for them.", dropped_chart(record))
    if "operator_s" in has:
        words = "Mean over logged steps, on one rank. The rest is between operators: residual sums and bookkeeping."
        add("Time and bytes", "time", "Where the time went", words, time_chart(record))
    if "collective_bytes" in has:
        words = "What a rank sends in one step: mean over ranks and logged steps."
        add("Time and bytes", "bytes", "Bytes by collective", words, bytes_chart(record))
    return [PageSection(title.split()[0].lower(), title, drawings) for title, drawings in drawn.items() if drawings]


def loss_chart(record: RunRecord) -> LineChart:
    lines = [_line("train", *record.curve("loss"), TRAIN_COLOUR)]
    if record.held_out:
        steps, values = zip(*record.held_out, strict=True)
        lines.append(_line("held out", list(steps), list(values), HELD_OUT_COLOUR, has_dots=True))
    return LineChart(x=STEPS, y=Axis(title="Loss (nats a token)", low=None), lines=tuple(lines), height=380)


def curve_chart(record: RunRecord, name: str, title: str, *, logarithmic: bool = False) -> LineChart:
    """One metric over steps."""
    y = Axis(title=title, low=None, is_logarithmic=True) if logarithmic else Axis(title=title)
    return LineChart(x=STEPS, y=y, lines=(_line(name, *record.curve(name), TRAIN_COLOUR),), height=260)


def balance_chart(record: RunRecord) -> HeatMap:
    """Layers over steps; a block of steps shows its worst."""
    rows = [row for row in record.steps if "fullest_expert_ratio" in row]
    size = -(-len(rows) // MOST_COLUMNS) or 1
    blocks = [rows[first : first + size] for first in range(0, len(rows), size)]
    worst = [
        [max(values) for values in zip(*(row["fullest_expert_ratio"] for row in block), strict=True)]
        for block in blocks
    ]
    limit = record.facts["num_experts"] / record.facts["top_k"]
    most = min(limit, 4.0)
    return HeatMap(
        column_name="step",
        columns=tuple(block[-1]["step"] for block in blocks),
        rows=_layers(record),
        values=tuple(tuple(values) for values in zip(*worst, strict=True)),
        low=0.0 if most <= 2 else 1.0,
        high=most,
        unit="× the mean",
    )


def load_chart(record: RunRecord) -> HeatMap:
    """Experts of each layer at the last logged step: rows over the mean."""
    last = [row for row in record.steps if "expert_rows" in row][-1]["expert_rows"]
    return HeatMap(
        column_name="expert",
        columns=tuple(range(record.facts["num_experts"])),
        rows=_layers(record),
        values=tuple(tuple(count * len(counts) / max(1, sum(counts)) for count in counts) for counts in last),
        low=0.0,
        high=2.0,
        unit="× the mean",
    )


def time_chart(record: RunRecord) -> BlockChart:
    """A bar an operator, forward and backward; what no operator took is the last, with what took next to nothing."""
    step_s = _mean_step_s(record)
    whole = record.mean("operator_s")
    names = sorted({name.removesuffix(BACKWARD) for name in whole}, key=lambda name: -_both(whole, name))
    names = [name for name in names if _both(whole, name) > LEAST_SHARE * step_s]
    both_ways = {name: (whole.get(name, 0.0), whole.get(name + BACKWARD, 0.0)) for name in names}
    rest_s = max(0.0, step_s - sum(map(sum, both_ways.values())))
    scale_s, unit = time_unit(step_s)
    lengths = {
        f"{name} ({sum(ways) / step_s:.0%})": {"forward": ways[0] / scale_s, "backward": ways[1] / scale_s}
        for name, ways in (both_ways | {"the rest": (rest_s, 0.0)}).items()
    }
    colours = {"forward": FORWARD_COLOUR, "backward": BACKWARD_COLOUR}
    x = Axis(title=f"Time of one step ({unit})")
    return BlockChart(x=x, blocks=stacked(lengths, unit, between=", "), colours=colours, row_height=ROW_HEIGHT)


def bytes_chart(record: RunRecord) -> BlockChart:
    """A bar a collective: what a rank sends in one step."""
    sent = dict(sorted(record.mean("collective_bytes").items(), key=lambda item: -item[1]))
    blocks = tuple(
        ChartBlock(row=name, start=0.0, length=num_bytes / 1e6, group="sent", tip=f"{name}: {num_bytes / 1e6:.4g} MB")
        for name, num_bytes in sent.items()
    )
    x = Axis(title="Bytes a rank sends in one step (MB)")
    return BlockChart(x=x, blocks=blocks, colours={"sent": FORWARD_COLOUR}, row_height=ROW_HEIGHT)


def dropped_chart(record: RunRecord) -> LineChart:
    """Rows that no expert had room for, a line a layer."""
    rows = [row for row in record.steps if "dropped_rows" in row]
    steps = [row["step"] for row in rows]
    by_layer = zip(*(row["dropped_rows"] for row in rows), strict=True)
    lines = tuple(
        _line(name, steps, list(values), BATCH_COLOURS[index % len(BATCH_COLOURS)])
        for index, (name, values) in enumerate(zip(_layers(record), by_layer, strict=True))
    )
    return LineChart(x=STEPS, y=Axis(title="Rows dropped"), lines=lines)


def _both(seconds: dict[str, float], name: str) -> float:
    return seconds.get(name, 0.0) + seconds.get(name + BACKWARD, 0.0)


def _mean_step_s(record: RunRecord) -> float:
    """Over the steps whose operators are counted."""
    values = [row["step_s"] for row in record.measured if "operator_s" in row]
    values = values[1:] or values
    return float(sum(values) / len(values))


def _layers(record: RunRecord) -> tuple[str, ...]:
    return tuple(f"layer {layer}" for layer in record.facts["moe_layers"])


def _line(name: str, steps: list[int], values: list[float], colour: str, *, has_dots: bool = False) -> ChartLine:
    size = -(-len(steps) // MOST_POINTS) or 1
    blocks = [range(first, min(first + size, len(steps))) for first in range(0, len(steps), size)]
    x = tuple(float(steps[block[-1]]) for block in blocks)
    y = tuple(sum(values[index] for index in block) / len(block) for block in blocks)
    tips = tuple(f"{name}, step {step:.0f}: {value:.4g}" for step, value in zip(x, y, strict=True))
    return ChartLine(name=name, colour=colour, x=x, y=y, tips=tips, has_dots=has_dots or len(steps) == 1)

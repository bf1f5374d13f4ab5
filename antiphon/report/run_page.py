"""The page that closes a training run: one HTML file in the frame of the planner's pages, made from the run's files.

Rejected: a picture a figure, which TensorBoard shows already. Here the plan's prediction stands beside the run.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from antiphon.base.units import format_bytes
from antiphon.report.chart import Chart, Drawing
from antiphon.report.draw import draw
from antiphon.report.page import inside_script, render
from antiphon.report.run_figures import (
    balance_chart,
    bytes_chart,
    curve_chart,
    dropped_chart,
    load_chart,
    loss_chart,
    time_chart,
)
from antiphon.report.run_record import RunRecord, read_run
from antiphon.report.words import milliseconds, number, plural
from antiphon.specs.training_plan import training_plan_from_json

PAGE = "report.html"
MOST_ALARMS = 20
_UNKNOWN = "-"
_OPTIMIZERS = {"adamw": "AdamW", "muon": "Muon and AdamW"}


def write_run_page(folder: Path) -> Path:
    """Write `folder/report.html` from what the run left there. To be called by one rank, after the last step."""
    page = folder / PAGE
    page.write_text(run_page(read_run(folder)), encoding="utf-8")
    return page


def run_page(record: RunRecord) -> str:
    """The whole file's text."""
    facts = record.facts
    config = facts["config"]
    tokens = config["batch"] * config["sequence_length"]
    return render(
        "run.html.jinja",
        title=f"Training of {facts['model']}",
        subtitle=f"{plural(config['steps'], 'step')} of {plural(config['batch'], 'sequence')} of "
        f"{config['sequence_length']:,} tokens ({tokens:,} a step) on {plural(facts['num_ranks'], 'rank')}",
        headline=_headline(record),
        cards=_cards(record),
        facts=_facts(record),
        compared=[each.words() for each in comparisons(record)],
        alarms=[f"step {step}: {text}" for step, text in record.alarms[-MOST_ALARMS:]],
        num_alarms=len(record.alarms),
        sections=_sections(record),
        run_json=inside_script(facts),
    )


def _headline(record: RunRecord) -> str:
    if not record.steps:
        return "No step was logged"
    first, last = record.steps[0], record.steps[-1]
    held_out = f", held out {record.held_out[-1][1]:.3f}" if record.held_out else ""
    alarms = f"; {plural(len(record.alarms), 'alarm')}" if record.alarms else ""
    return f"Loss {first['loss']:.3f} → {last['loss']:.3f} nats a token at step {last['step'] + 1:,}{held_out}{alarms}"


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
class Comparison:
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


def comparisons(record: RunRecord) -> list[Comparison]:
    """Memory by the check before the first step; the rest by the plan, if the run obeyed one. MFU is by the plan's own
    peak, so it grows with tokens/s."""
    peak = max(record.curve("peak_rss_bytes")[1], default=None)
    used = None if peak is None else peak - record.facts["rss_before_bytes"]
    memory = Comparison("memory of a rank, less the runtime's", "bytes", record.facts["memory_need"]["total"], used)
    if record.facts["plan"] is None:
        return [memory]
    predicted = training_plan_from_json(record.facts["plan"]).predicted
    tokens_per_s = record.median("tokens_per_s")
    mfu = None if tokens_per_s is None else predicted.mfu * tokens_per_s / predicted.tokens_per_s
    return [
        Comparison("a step", "s", predicted.iteration_s, record.median("step_s")),
        Comparison("tokens/s", "tokens/s", predicted.tokens_per_s, tokens_per_s),
        Comparison("MFU", "of peak", predicted.mfu, mfu),
        Comparison("memory of a rank by the plan", "bytes", predicted.memory_bytes["total"], used),
        memory,
    ]


def _sections(record: RunRecord) -> list[dict[str, Any]]:
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
    return [
        {"id": title.split()[0].lower(), "title": title, "drawings": drawings}
        for title, drawings in drawn.items()
        if drawings
    ]

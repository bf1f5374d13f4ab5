"""The report of a training plan as one HTML file: the serving page's frame, with figures of its own.

1. words and rows come from the same `training_summary` as the terminal's
2. three figures: the step in parts, the fullest device's memory, MFU of the plan and of every alternative that fits

Rejected: a second template. Head, tables, figures and the embedded plan would be the same text twice.
"""

from typing import Any

from antiphon.report.figure_style import MARK, Figure, axis, figure
from antiphon.report.page import chart, render_page
from antiphon.report.training_summary import (
    LOSER_COLUMNS,
    SIZES,
    facts,
    fits,
    headline,
    hidden_summary,
    loser_row,
    memory_parts,
    memory_summary,
    search_summary,
    step_parts,
    strategy,
    subtitle,
    title,
)
from antiphon.report.words import milliseconds, number, time_unit
from antiphon.specs.training_plan import TrainingPlan, training_plan_to_json

STEP_COLOURS = {
    "work": "#0088cc",
    "pipeline bubble": "#999999",
    "exposed exchanges in layers": "#009e73",
    "exposed synchronisation": "#d55e00",
}
MEMORY_COLOURS = {
    "parameters": "#0088cc",
    "gradients": "#e69f00",
    "optimizer": "#009e73",
    "activations": "#cc79a7",
    "workspace": "#d55e00",
    "free": "rgba(150,150,150,0.25)",
}
LOSER_COLOUR = "#0088cc"
CAPTIONS = {
    "step": "The fullest stage: what computes, what stands, and what is waited for.",
    "memory": "Of the fullest device, without what the runtime keeps.",
    "mfu": "The plan, the best of every other way to divide a layer, and the plan with one thing changed. What does "
    "not fit in memory is left out.",
}
ONE_BAR_HEIGHT = 190
LINE_HEIGHT = 34


def training_page(plan: TrainingPlan) -> str:
    """The whole file's text."""
    figures: dict[str, Figure] = {}
    return render_page(
        figures,
        plan=training_plan_to_json(plan),
        plan_reader="",
        title=title(plan),
        subtitle=subtitle(plan),
        given=hidden_summary(plan.predicted).capitalize(),
        search=search_summary(plan),
        phases=[_phase(plan, figures)],
        loser_columns=LOSER_COLUMNS,
        charts=[],
        more_nodes=[],
    )


def _phase(plan: TrainingPlan, figures: dict[str, Figure]) -> dict[str, Any]:
    predicted = plan.predicted
    return {
        "name": "train",
        "title": "Train",
        "headline": headline(plan),
        "verdict": f"The fullest device holds {summary}" if (summary := memory_summary(plan)) else "",
        "cards": [
            ("a step", milliseconds(predicted.iteration_s)),
            ("tokens/s", number(predicted.tokens_per_s)),
            ("tokens/s per device", number(predicted.tokens_per_s_per_device)),
            ("MFU", f"{predicted.mfu:.1%}"),
            ("devices", f"{plan.layout.num_devices:,}"),
        ],
        "facts": facts(plan),
        "losers_title": "Other ways to train, and the plan with one thing changed",
        "losers_note": SIZES.capitalize(),
        "losers": [_unbroken(loser_row(rejected, plan)) for rejected in plan.rejected],
        "conditions": (),
        "notes": plan.notes,
        "charts": list(_charts(plan, figures)),
    }


def _unbroken(row: tuple[str, ...]) -> tuple[str, ...]:
    """Only the reason, the last cell, may take several lines."""
    return (*(cell.replace(" ", "\u00a0") for cell in row[:-1]), row[-1])


def _charts(plan: TrainingPlan, figures: dict[str, Figure]) -> list[dict[str, Any]]:
    drawn = [("step", "One step", step_figure(plan)), ("mfu", "Model FLOPs utilization", mfu_figure(plan))]
    if memory_summary(plan):
        drawn.insert(1, ("memory", "Memory of a device", memory_figure(plan)))
    return [chart(f"train-{name}", words, CAPTIONS[name], drawing, figures) for name, words, drawing in drawn]


def step_figure(plan: TrainingPlan) -> Figure:
    """One bar, as long as the step."""
    scale_s, unit = time_unit(plan.predicted.iteration_s)
    parts = [(part.name, part.seconds / scale_s) for part in step_parts(plan.predicted)]
    return _one_bar("step", parts, STEP_COLOURS, f"Time of one step ({unit})", unit)


def memory_figure(plan: TrainingPlan) -> Figure:
    """One bar, as long as the memory that can be used."""
    memory = plan.predicted.memory_bytes
    parts = [*memory_parts(plan.predicted), ("free", max(0.0, memory["usable"] - memory["total"]))]
    scaled = [(name, num_bytes / 1e9) for name, num_bytes in parts]
    return _one_bar(plan.device, scaled, MEMORY_COLOURS, "Memory of one device (GB)", "GB")


def mfu_figure(plan: TrainingPlan) -> Figure:
    """One bar per way to train, the plan's first."""
    alternatives = [
        (rejected.name, rejected.predicted.mfu)
        for rejected in plan.rejected
        if rejected.predicted is not None and fits(rejected)
    ]
    bars = [(f"plan: {strategy(plan.layout)}", plan.predicted.mfu), *alternatives]
    trace = {
        "type": "bar",
        "orientation": "h",
        "y": [name for name, _ in bars],
        "x": [100 * mfu for _, mfu in bars],
        "marker": {"color": [MARK] + [LOSER_COLOUR] * len(alternatives)},
        "hovertemplate": "%{y}<br>MFU %{x:.4g}%<extra></extra>",
    }
    lines, height = axis("", autorange="reversed"), 120 + LINE_HEIGHT * len(bars)
    return figure([trace], x=axis("MFU (%)", rangemode="tozero"), y=lines, height=height, bargap=0.35)


def _one_bar(category: str, parts: list[tuple[str, float]], colours: dict[str, str], words: str, unit: str) -> Figure:
    traces = [
        {
            "type": "bar",
            "orientation": "h",
            "name": name,
            "y": [category],
            "x": [value],
            "marker": {"color": colours[name]},
            "hovertemplate": f"{name}: %{{x:.4g}} {unit}<extra></extra>",
        }
        for name, value in parts
    ]
    return figure(traces, x=axis(words, tickformat=",~r"), y=axis(""), height=ONE_BAR_HEIGHT, barmode="stack")

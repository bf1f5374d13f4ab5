"""The report of a training plan as one HTML file: the serving page's frame, with figures of its own.

1. words and rows come from the same `training_summary` as the terminal's
2. three figures: the step in parts, the fullest device's memory, MFU of the plan and of every alternative that fits

Rejected: the serving plan's own template. It says much that a training plan does not have.
"""

from antiphon.report.chart import Axis, Block, BlockChart, Drawing, stacked
from antiphon.report.colours import FREE, MARK
from antiphon.report.draw import draw
from antiphon.report.page import inside_script, render
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
    "free": FREE,
}
LOSER_COLOUR = "#0088cc"
CAPTIONS = {
    "step": "The fullest stage: what computes, what stands, and what is waited for.",
    "memory": "Of the fullest device, without what the runtime keeps.",
    "mfu": "The plan, the best of every other way to divide a layer, and the plan with one thing changed. What does "
    "not fit in memory is left out.",
}
PLAN, ALTERNATIVE = "plan", "alternative"


def training_page(plan: TrainingPlan) -> str:
    """The whole file's text."""
    predicted = plan.predicted
    return render(
        "training.html.jinja",
        title=title(plan),
        subtitle=subtitle(plan),
        given=hidden_summary(predicted).capitalize(),
        search=search_summary(plan),
        headline=headline(plan),
        verdict=f"The fullest device holds {summary}" if (summary := memory_summary(plan)) else "",
        cards=[
            ("a step", milliseconds(predicted.iteration_s)),
            ("tokens/s per device", number(predicted.tokens_per_s_per_device)),
            ("MFU", f"{predicted.mfu:.1%}"),
        ],
        facts=facts(plan),
        losers_note=SIZES.capitalize(),
        loser_columns=LOSER_COLUMNS,
        losers=[_unbroken(loser_row(rejected, plan)) for rejected in plan.rejected],
        notes=plan.notes,
        drawings=_drawings(plan),
        plan_json=inside_script(training_plan_to_json(plan)),
    )


def _unbroken(row: tuple[str, ...]) -> tuple[str, ...]:
    """Only the reason, the last cell, may take several lines."""
    return (*(cell.replace(" ", "\u00a0") for cell in row[:-1]), row[-1])


def _drawings(plan: TrainingPlan) -> list[Drawing]:
    drawn = [("step", "One step", step_chart(plan)), ("mfu", "Model FLOPs utilization", mfu_chart(plan))]
    if memory_summary(plan):
        drawn.insert(1, ("memory", "Memory of a device", memory_chart(plan)))
    return [draw(f"train-{name}", words, CAPTIONS[name], chart) for name, words, chart in drawn]


def step_chart(plan: TrainingPlan) -> BlockChart:
    """One bar, as long as the step."""
    scale_s, unit = time_unit(plan.predicted.iteration_s)
    parts = {part.name: part.seconds / scale_s for part in step_parts(plan.predicted)}
    x = Axis(title=f"Time of one step ({unit})")
    return BlockChart(x=x, blocks=stacked({"": parts}, unit), colours=STEP_COLOURS)


def memory_chart(plan: TrainingPlan) -> BlockChart:
    """One bar, as long as the memory that can be used."""
    memory = plan.predicted.memory_bytes
    parts = dict(memory_parts(plan.predicted)) | {"free": max(0.0, memory["usable"] - memory["total"])}
    scaled = {name: num_bytes / 1e9 for name, num_bytes in parts.items()}
    colours = {name: MEMORY_COLOURS[name] for name in scaled}
    return BlockChart(
        x=Axis(title="Memory of one device (GB)"), blocks=stacked({plan.device: scaled}, "GB"), colours=colours
    )


def mfu_chart(plan: TrainingPlan) -> BlockChart:
    """One bar per way to train, the plan's first."""
    alternatives = [
        (rejected.name, rejected.predicted.mfu)
        for rejected in plan.rejected
        if rejected.predicted is not None and fits(rejected)
    ]
    bars = [(f"plan: {strategy(plan.layout)}", plan.predicted.mfu), *alternatives]
    blocks = tuple(
        Block(
            row=name,
            start=0.0,
            length=100 * mfu,
            group=ALTERNATIVE if index else PLAN,
            text=f"{mfu:.1%}",
            tip=f"{name}\nMFU {mfu:.1%}",
        )
        for index, (name, mfu) in enumerate(bars)
    )
    return BlockChart(x=Axis(title="MFU (%)"), blocks=blocks, colours={PLAN: MARK, ALTERNATIVE: LOSER_COLOUR})

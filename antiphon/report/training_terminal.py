"""The report of a training plan on a terminal: tables that fit 80 columns, everything else in lines.

1. the answer in a sentence, the chosen layout and its predicted rate
2. the step in parts, and the fullest device's memory in parts, as bars
3. the best of every other way to divide a layer, and why it lost
4. with `explain`: the plan with one thing changed at a time, and what was searched

Rejected: the serving report's tables. Nothing in them is a part of training but devices.
"""

from collections.abc import Iterator, Sequence

from rich.console import RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from antiphon.report.terminal import BAR_WIDTH, heading, plain_table
from antiphon.report.training_summary import (
    SIZES,
    facts,
    headline,
    hidden_summary,
    loser_row,
    memory_parts,
    memory_summary,
    other_strategies,
    search_summary,
    single_changes,
    step_parts,
    subtitle,
)
from antiphon.report.words import gigabytes, milliseconds
from antiphon.specs.training_plan import RejectedTraining, TrainingPlan, TrainingPredicted


def training_report(plan: TrainingPlan, *, explain: bool) -> Iterator[RenderableType]:
    """What to print, in order."""
    yield Text(subtitle(plan))
    yield Text(f"\n{headline(plan)}\n", style="bold")
    yield plain_table(["", "train"], facts(plan))
    yield heading("One step")
    yield step_table(plan.predicted)
    yield Text(f"work: computation, optimizer, hops between stages; {hidden_summary(plan.predicted)}")
    if summary := memory_summary(plan):
        yield heading(f"Memory of the fullest device: {summary}")
        yield memory_table(plan.predicted)
    if others := other_strategies(plan):
        yield heading("Other ways to divide a layer, the best of each")
        yield from _losers(others, plan)
    if explain and (changes := single_changes(plan)):
        yield heading("The plan with one thing changed")
        yield from _losers(changes, plan)
    for note in plan.notes:
        yield Text(f"note: {note}")
    if explain:
        yield Text(f"\n{search_summary(plan)}")


def step_table(predicted: TrainingPredicted) -> Table:
    """Bars are shares of the step."""
    rows = [
        [part.name, share_bar(part.share), milliseconds(part.seconds), f"{part.share:.1%}"]
        for part in step_parts(predicted)
    ]
    return plain_table(["", "", "time", "of step"], rows, right=(2, 3))


def memory_table(predicted: TrainingPredicted) -> Table:
    """Bars are shares of the memory that can be used."""
    usable = predicted.memory_bytes["usable"]
    rows = [
        [part, share_bar(num_bytes / usable), gigabytes(num_bytes), f"{num_bytes / usable:.1%}"]
        for part, num_bytes in memory_parts(predicted)
    ]
    return plain_table(["", "", "bytes", "of usable"], rows, right=(2, 3))


def share_bar(share: float) -> str:
    """Always `BAR_WIDTH` columns."""
    filled = min(BAR_WIDTH, max(0, round(BAR_WIDTH * share)))
    return "█" * filled + "·" * (BAR_WIDTH - filled)


def _losers(losers: Sequence[RejectedTraining], plan: TrainingPlan) -> Iterator[RenderableType]:
    """Numbers in a table; the reasons, which are sentences, below it."""
    yield Text(SIZES)
    rows = [loser_row(loser, plan)[:-1] for loser in losers]
    yield plain_table(["", "sizes", "step", "tokens/s", "MFU", "of plan"], rows, right=(2, 3, 4, 5))
    for loser in losers:
        yield Padding(Text(f"{loser.name}: {loser.reason}"), (0, 0, 0, 2))

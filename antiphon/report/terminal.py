"""The report on a terminal: tables that fit 80 columns, everything else in lines.

1. the answer in a sentence, and whether to separate attention from experts
2. the chosen plan, a column per phase; memory as bars; what each part of a layer waits for
3. the best of every other layout and why it lost
4. with `explain`: MegaScale-Infer's conditions with numbers, placement, one more node, what was searched

Rejected: one wide table of all candidates. Nobody reads it.
"""

from collections.abc import Iterator, Sequence

from rich.console import RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from antiphon.cost.parts import BOUND_NAMES
from antiphon.report.answer import scope
from antiphon.report.contents import MemoryUse, PhaseContents, Report
from antiphon.report.figures import PART_FIELDS
from antiphon.report.summary import (
    FACTS,
    facts,
    given,
    headline,
    loser_row,
    placement_summary,
    reasons,
    search_summary,
    subtitle,
    verdict,
)
from antiphon.report.words import OBJECTIVE_UNITS, PHASE_TITLES, gigabytes, milliseconds, number
from antiphon.specs.plan import Objective

BAR_WIDTH = 20


def terminal_report(report: Report, *, explain: bool) -> Iterator[RenderableType]:
    """What to print, in order."""
    objective = report.plan.objective
    yield Text(subtitle(report))
    yield Text(given(report))
    yield Text(scope(report))
    for contents in report.phases:
        yield Text(f"\n{headline(contents, objective)}", style="bold")
        if said := verdict(contents, objective):
            yield Text(said)
    yield Text("")
    yield facts_table(report)
    for contents in report.phases:
        yield from _phase(contents, objective, explain=explain)
    if explain:
        yield from _more_nodes(report)
        yield Text(f"\n{search_summary(report)}")


def _phase(contents: PhaseContents, objective: Objective, *, explain: bool) -> Iterator[RenderableType]:
    title = PHASE_TITLES[contents.name]
    if contents.memory:
        yield heading(f"{title}: memory of a device")
        yield memory_table(contents.memory)
    if contents.parts:
        yield heading(f"{title}: one layer and micro-batch")
        yield parts_table(contents)
    if contents.phase.rejected:
        yield heading(f"{title}: other layouts, the best of each, in {OBJECTIVE_UNITS[objective]}")
        yield losers_table(contents, objective)
        yield from why_they_lost(contents)
    if explain and contents.conditions:
        yield heading(f"{title}: conditions of the ping-pong pipeline (MegaScale-Infer, section 4.1)")
        yield conditions_table(contents)
    if explain and (placed := placement_summary(contents.phase)):
        yield heading(f"{title}: placement")
        yield Text(placed)
    for note in contents.phase.notes:
        yield Text(f"note: {note}")


def facts_table(report: Report) -> Table:
    """A column per phase; a phase without some fact has an empty cell."""
    columns = [dict(facts(contents.name, contents.phase)) for contents in report.phases]
    names = [name for name in FACTS if any(column.get(name) for column in columns)]
    names += [name for name in dict.fromkeys(name for column in columns for name in column) if name not in FACTS]
    titles = ["", *(PHASE_TITLES[contents.name].lower() for contents in report.phases)]
    return plain_table(titles, [[name, *(column.get(name, "") for column in columns)] for name in names])


def memory_table(memory: Sequence[MemoryUse]) -> Table:
    rows = [
        [
            f"{use.role}, {use.device}",
            memory_bar(use),
            gigabytes(use.weight_bytes),
            gigabytes(use.kv_bytes),
            gigabytes(use.capacity_bytes),
        ]
        for use in memory
    ]
    return plain_table(["", "█ weights ▓ KV ▒ reserve", "weights", "KV", "of"], rows, right=(2, 3, 4))


def memory_bar(use: MemoryUse) -> str:
    """Weights, KV and reserve as blocks in proportion, what is free as dots; always `BAR_WIDTH` columns."""
    ends = []
    filled = 0.0
    for part in (use.weight_bytes, use.kv_bytes, use.reserve_bytes):
        filled += part
        ends.append(min(BAR_WIDTH, round(BAR_WIDTH * filled / use.capacity_bytes)))
    weights, kv, reserve = ends
    return "█" * weights + "▓" * (kv - weights) + "▒" * (reserve - kv) + "·" * (BAR_WIDTH - reserve)


def parts_table(contents: PhaseContents) -> Table:
    """Each part's time and what it is made of, largest first; shares below one per cent are left out."""
    rows = []
    for name, part in contents.parts.items():
        total_s = float(part.total_s)
        values = {bound: float(getattr(part, field)) for bound, field in zip(BOUND_NAMES, PART_FIELDS, strict=True)}
        shares = sorted(values.items(), key=lambda item: -item[1])
        words = ", ".join(f"{bound} {value / total_s:.0%}" for bound, value in shares if value >= 0.01 * total_s > 0)
        rows.append([name, milliseconds(total_s), words])
    return plain_table(["", "time", "spent on"], rows, right=(1,))


def losers_table(contents: PhaseContents, objective: Objective) -> Table:
    """Without the reasons, which are sentences: they follow below it."""
    rows = []
    for loser in contents.phase.rejected:
        layout, sizes, devices, latency, rate, against = loser_row(loser, contents, objective)
        rows.append([layout, latency, rate, against, sizes, devices])
    latency_name = "TPOT" if contents.name == "decode" else "TTFT"
    return plain_table(["layout", latency_name, "rate", "of plan", "sizes", "devices"], rows, right=(1, 2, 3))


def why_they_lost(contents: PhaseContents) -> Iterator[RenderableType]:
    """Why each of them lost, indented."""
    for layouts, reason in reasons(contents.phase.rejected):
        yield Padding(Text(f"{layouts}: {reason}"), (0, 0, 0, 2))


def conditions_table(contents: PhaseContents) -> Table:
    rows = [[row.equation, row.says, row.numbers, "yes" if row.holds else "no"] for row in contents.conditions]
    return plain_table(["", "condition", "here", "holds"], rows)


def _more_nodes(report: Report) -> Iterator[RenderableType]:
    if report.more_nodes:
        yield heading("One more node of a kind, all of the cluster used")
        rows = [
            [more.phase, more.device, number(more.tokens_per_s), f"{more.gain:.3f} ×"] for more in report.more_nodes
        ]
        yield plain_table(["phase", "node of", "most tokens/s", "of now"], rows, right=(2, 3))


def heading(text: str) -> Text:
    """Over a table, with an empty line above."""
    return Text(f"\n{text}", style="bold")


def plain_table(columns: Sequence[str], rows: Sequence[Sequence[str]], *, right: Sequence[int] = ()) -> Table:
    """Without lines; `right`: columns of numbers."""
    result = Table(box=None, pad_edge=False, header_style="bold")
    for index, column in enumerate(columns):
        result.add_column(column, justify="right" if index in right else "left", overflow="fold")
    for row in rows:
        result.add_row(*(Text(cell) for cell in row))
    return result

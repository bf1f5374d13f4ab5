"""The report on a terminal: tables that fit 80 columns, everything else in lines.

1. the answer in a sentence, and whether to separate attention from experts
2. the chosen plan, a column per phase; memory as bars; what each part of a layer waits for
3. the best of every other layout and why it lost
4. with `explain`: MegaScale-Infer's conditions with numbers, placement, one more node, what was searched

Rejected: one wide table of all candidates. It is too long to read.

Two plans are compared as they are (`comparison_report`). Rejected: predicting both anew with the code at hand. A plan
that was measured or published should be compared as it is; `antiphon simulate` says how it would do now.
"""

from collections.abc import Iterator, Mapping, Sequence

from rich.console import RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from antiphon.cost.parts import BOUND_NAMES
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
    scope,
    search_summary,
    subtitle,
    verdict,
)
from antiphon.report.words import OBJECTIVE_UNITS, PHASE_TITLES, gigabytes, milliseconds, number, score
from antiphon.specs.plan import PHASES, Objective, PhaseName, PhasePlan, Plan, Predicted

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


RATIOS: tuple[tuple[str, str], ...] = (
    ("time per output token", "tpot_s"),
    ("time to first token", "ttft_s"),
    ("tokens/s", "tokens_per_s"),
    ("  per device", "per_gpu"),
    ("  per unit of price", "per_cost"),
    ("  per watt", "per_power"),
    ("attention, a layer", "t_a_s"),
    ("experts, a layer", "t_e_s"),
    ("exchange, one way", "t_c_s"),
)
NEARLY_EQUAL = 0.02


def comparison_report(first: Plan, second: Plan, names: tuple[str, str]) -> Iterator[RenderableType]:
    """What to print, in order. `names`: how the two are called."""
    shared = [name for name in PHASES if name in first.phases and name in second.phases]
    if differs := different_questions(first, second):
        yield Text(f"these plans answer different questions: {'; '.join(differs)}")
    for name in shared:
        yield Text(f"{PHASE_TITLES[name]}: {sentence(first, second, name, names)}", style="bold")
    for name, phases in ((name, (first.phases.get(name), second.phases.get(name))) for name in PHASES):
        if any(phases):
            yield heading(PHASE_TITLES[name])
            yield plain_table(["", *names, f"{names[1]} of {names[0]}"], _rows(name, *phases), right=(3,))


def different_questions(first: Plan, second: Plan) -> list[str]:
    """What the plans were asked that is not the same."""
    found = []
    for what, mine, theirs in (
        ("model", _about(first.model, first.model_config), _about(second.model, second.model_config)),
        ("cluster", _about(first.cluster, first.cluster_config), _about(second.cluster, second.cluster_config)),
        ("workload", _about(first.workload, first.workload_config), _about(second.workload, second.workload_config)),
        ("objective", _about(first.objective, {}), _about(second.objective, {})),
        ("precision", _about("", vars(first.precision)), _about("", vars(second.precision))),
    ):
        if mine[1] and theirs[1] and mine != theirs:
            keys = sorted(key for key in {*mine[1], *theirs[1]} if mine[1].get(key) != theirs[1].get(key))
            found.append(f"{what} ({', '.join(keys)})")
        elif mine[0] != theirs[0]:
            found.append(f"{what} ({mine[0]}, {theirs[0]})")
    return found


def _about(name: str, contents: Mapping[str, object]) -> tuple[str, dict[str, object]]:
    return name, dict(contents)


def sentence(first: Plan, second: Plan, name: PhaseName, names: tuple[str, str]) -> str:
    """Which of the two is better by the first one's objective, and by how much."""
    mine, theirs = (score(plan.phases[name].predicted, first.objective) for plan in (first, second))
    unit = OBJECTIVE_UNITS[first.objective]
    if not mine or not theirs:
        return f"{unit} are not known of both"
    better, worse = (names[1], names[0]) if theirs > mine else (names[0], names[1])
    ratio = max(mine, theirs) / min(mine, theirs)
    if ratio <= 1 + NEARLY_EQUAL:
        return f"{names[0]} and {names[1]} are within 2% of each other in {unit}: no model of costs tells them apart"
    return f"{better} gives {number(ratio)} times the {unit} of {worse}"


def _rows(name: PhaseName, first: PhasePlan | None, second: PhasePlan | None) -> list[list[str]]:
    told = [{} if phase is None else dict(facts(name, phase)) for phase in (first, second)]
    ratios = {} if first is None or second is None else _ratios(first.predicted, second.predicted)
    order = [*FACTS, *(key for each in told for key in each if key not in FACTS)]
    return [
        [key, told[0].get(key, "-"), told[1].get(key, "-"), ratios.get(key, "")]
        for key in dict.fromkeys(order)
        if any(key in each for each in told)
    ]


def _ratios(first: Predicted, second: Predicted) -> dict[str, str]:
    pairs = {key: (getattr(first, field), getattr(second, field)) for key, field in RATIOS}
    return {key: f"{theirs / mine:.2f} ×" for key, (mine, theirs) in pairs.items() if mine and theirs}

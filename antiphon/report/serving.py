"""Reports of serving: what a terminal and a page show of a plan, two plans beside each other, and a measured load.

Terminal:

1. the answer in a sentence, and whether to separate attention from experts
2. the chosen plan, a column per phase; memory as bars; what each part of a layer waits for
3. the best of every other layout and why it lost
4. with `explain`: MegaScale-Infer's conditions with numbers, placement, one more node, what was searched

The page adds figures, what the plan takes, what starts it, what-ifs and sources. Both take words and rows from
`summary`.

Two plans are compared as they are. Rejected: predicting both anew with the code at hand. A plan that was measured or
published should be compared as it is; `antiphon simulate` says how it would do now.
"""

from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from typing import Any

from antiphon.base.units import milliseconds, number
from antiphon.planner.explain import RESOURCES
from antiphon.report import serving_figures, summary
from antiphon.report.document import (
    BATCH_COLOURS,
    Axis,
    ChartLine,
    Columns,
    Drawing,
    Grid,
    LineChart,
    Notes,
    PageSection,
    Pairs,
    Piece,
    ReportDocument,
    Row,
    Sentence,
    bar,
)
from antiphon.report.draw import draw
from antiphon.report.gather import MemoryUse, PhaseContents, Report
from antiphon.report.serving_figures import deployment_drawing
from antiphon.report.words import LAYOUT_TITLES, OBJECTIVE_UNITS, PHASE_TITLES, gigabytes
from antiphon.specs.plan import PHASES, Objective, PhaseName, PhasePlan, Plan, Predicted, plan_to_json
from antiphon.specs.workload import SloSpec

CAPTIONS = {
    "frontier": "What each layout reaches at most within a latency. Up and to the left is better. Bars: where four of "
    "five measurements are expected.",
    "pipeline": "Simulated, a few layers. Numbers are layers, colours micro-batches; white space is waiting.",
    "stages": "Numbers and colours are micro-batches; all of them pass all stages.",
    "kinds": "Numbers are layers, colours kinds of work.",
    "memory": "The fullest device of each role. The reserve is for activations and the runtime.",
    "parts": "The widest colour is what bounds the part.",
    "sensitivity": "The best plan of each layout, found anew for each value. A gap: the layout cannot run.",
}
MORE_NODES = "One more node of a kind, all of the cluster used"
MORE_NODES_COLUMNS = ("phase", "node of", "most tokens/s", "of now")
FORMATS = "Weights in other formats, all of the cluster used"
FORMATS_COLUMNS = ("phase", "--precision", "weights", "most tokens/s", "of now")


def plan_pieces(report: Report, *, explain: bool) -> Iterator[Piece]:
    """For a terminal, in order."""
    objective = report.plan.objective
    yield from (Sentence(summary.subtitle(report)), Sentence(summary.given(report)), Sentence(summary.scope(report)))
    for contents in report.phases:
        yield Sentence(summary.headline(contents, objective), "heading")
        if said := summary.verdict(contents, objective):
            yield Sentence(said)
    for said in (summary.one_pool_or_two(report), summary.one_request(report)):
        if said:
            yield Sentence(said)
    yield from (Sentence(""), _facts_of_phases(report))
    for contents in report.phases:
        yield from _phase_pieces(contents, objective, explain=explain)
    if explain:
        if more := _more_nodes(report):
            yield from (Sentence(MORE_NODES, "heading"), Grid(columns=MORE_NODES_COLUMNS, rows=more, right=(2, 3)))
        if other := _formats(report):
            yield from (Sentence(FORMATS, "heading"), Grid(columns=FORMATS_COLUMNS, rows=other, right=(2, 3, 4)))
        yield from (Sentence(""), Sentence(summary.search_summary(report)))


def _phase_pieces(contents: PhaseContents, objective: Objective, *, explain: bool) -> Iterator[Piece]:
    title = PHASE_TITLES[contents.name]
    if contents.memory:
        yield from (Sentence(f"{title}: memory of a device", "heading"), _memory_grid(contents.memory))
    if contents.parts:
        yield from (Sentence(f"{title}: one layer and micro-batch", "heading"), _parts_grid(contents))
    if contents.phase.rejected:
        yield Sentence(f"{title}: other layouts, the best of each, in {OBJECTIVE_UNITS[objective]}", "heading")
        yield from (_losers_grid(contents, objective), Pairs(summary.reasons(contents.phase.rejected)))
    if explain and contents.accounts:
        yield Sentence(f"{title}: what a token takes, in {RESOURCES[objective][1]}", "heading")
        yield _accounts_grid(contents)
    if explain and contents.measured_like:
        yield Sentence(f"{title}: median time per token by constants fitted to measured servers", "heading")
        rows = [(name, *map(milliseconds, times)) for name, times in contents.measured_like.items()]
        yield Grid(columns=("engine", "time", "four of five from", "to"), rows=rows, right=(1, 2, 3))
    if explain and contents.conditions:
        yield Sentence(f"{title}: conditions of the ping-pong pipeline (MegaScale-Infer, section 4.1)", "heading")
        yield _conditions_grid(contents)
    if explain and (placed := summary.placement_summary(contents.phase)):
        yield from (Sentence(f"{title}: placement", "heading"), Sentence(placed))
    yield Notes(contents.phase.notes)


def _facts_of_phases(report: Report) -> Grid:
    """A column per phase; a phase without some fact has an empty cell."""
    columns = [summary.all_facts(contents.name, contents.phase) for contents in report.phases]
    titles = ["", *(PHASE_TITLES[contents.name].lower() for contents in report.phases)]
    rows = [[name, *(column.get(name, "") for column in columns)] for name in dict.fromkeys(chain(*columns))]
    return Grid(columns=titles, rows=[row for row in rows if any(row[1:])])


def _memory_grid(memory: Sequence[MemoryUse]) -> Grid:
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
    return Grid(columns=["", "█ weights ▓ KV ▒ reserve", "weights", "KV", "of"], rows=rows, right=(2, 3, 4))


def memory_bar(use: MemoryUse) -> str:
    """Weights, KV and reserve as blocks in proportion, what is free as dots."""
    return bar((use.weight_bytes, use.kv_bytes, use.reserve_bytes), use.capacity_bytes)


def _parts_grid(contents: PhaseContents) -> Grid:
    """Each part's time and what it is made of, largest first; shares below one per cent are left out."""
    rows = []
    for name, part in contents.parts.items():
        total_s = float(part.total_s)
        shares = sorted(part.seconds_by_bound().items(), key=lambda item: -item[1])
        words = ", ".join(f"{bound} {value / total_s:.0%}" for bound, value in shares if value >= 0.01 * total_s > 0)
        rows.append([name, milliseconds(total_s), words])
    return Grid(columns=["", "time", "spent on"], rows=rows, right=(1,))


def _losers_grid(contents: PhaseContents, objective: Objective) -> Grid:
    """The numbers of layouts that lost; the reasons, which are sentences, follow below."""
    rows = []
    for loser in contents.phase.rejected:
        layout, sizes, devices, latency, rate, against, band = summary.loser_row(loser, contents, objective)
        rows.append([layout, latency, rate, against, band, sizes, devices])
    latency_name = "TTFT" if contents.name == "prefill" else "TPOT"
    columns = ["layout", latency_name, "rate", "of plan", "four of five", "sizes", "devices"]
    return Grid(columns=columns, rows=rows, right=(1, 2, 3))


def _accounts_grid(contents: PhaseContents) -> Grid:
    """A column per layout, the plan's first; thousandths."""
    items = next(iter(contents.accounts.values()))
    rows = [[item, *(number(by_item.get(item, 0.0) * 1e3) for by_item in contents.accounts.values())] for item in items]
    columns = ["", *(LAYOUT_TITLES[layout] for layout in contents.accounts)]
    return Grid(columns=columns, rows=rows, right=tuple(range(1, len(columns))))


def _conditions_grid(contents: PhaseContents) -> Grid:
    return Grid(columns=["", "condition", "here", "holds"], rows=contents.conditions)


def _more_nodes(report: Report) -> list[Row]:
    return [
        (name, device, number(tokens_per_s), f"{gain:.3f} ×")
        for name, found in report.more_nodes.items()
        for device, tokens_per_s, gain in found
    ]


def _formats(report: Report) -> list[Row]:
    return [
        (name, called, gigabytes(num_bytes), *((number(rate), f"{gain:.3f} ×") if rate else ("does not fit", "")))
        for name, found in report.formats.items()
        for called, num_bytes, rate, gain in found
    ]


def plan_page(report: Report, launch: list[tuple[str, str]]) -> ReportDocument:
    """The page. `launch`: (what starts the plan, the commands)."""
    deployments = (deployment_drawing(contents.name, contents.phase, report.cluster) for contents in report.phases)
    pieces: list[Piece] = [
        Sentence(
            f"{summary.answer(report)}.",
            "answer",
            f"{summary.scope(report)}. Every number on this page is predicted by a cost model.",
        ),
        Pairs(summary.three_numbers(report), "cards"),
        Sentence(summary.subtitle(report), "soft"),
        Sentence(summary.given(report), "soft"),
        PageSection(
            "takes",
            "What it takes",
            [
                Grid(columns=("device", "how many", "price (relative)", "power"), rows=summary.totals(report)),
                *deployments,
            ],
        ),
        PageSection("launch", "To start it", [Pairs(launch, "commands")]),
        *(_phase_section(contents, report) for contents in report.phases),
    ]
    if what_if := _what_if(report):
        pieces.append(PageSection("what-if", "What if", what_if))
    searched = Sentence(f"{summary.search_summary(report)}.", "soft")
    pieces.append(PageSection("sources", "Where the numbers come from", [searched, Grid(rows=summary.sources(report))]))
    return ReportDocument(
        title=f"Plan for {report.plan.model} on {report.plan.cluster}",
        pieces=pieces,
        footer="The plan itself is in this page's source (element `plan`).",
        data_name="plan",
        data=plan_to_json(report.plan),
    )


def _phase_section(contents: PhaseContents, report: Report) -> PageSection:
    objective = report.plan.objective
    frontier, *others = _drawings(contents, objective, report.workload.slo)
    said = summary.verdict(contents, objective)
    pieces: list[Piece] = [Sentence(f"{summary.headline(contents, objective)}.{f' {said}.' if said else ''}"), frontier]
    if losers := contents.phase.rejected:
        rows = [summary.loser_row(loser, contents, objective) for loser in losers]
        pieces.append(Sentence("Other layouts, the best of each", "heading"))
        pieces += [Grid(columns=summary.PAGE_LOSER_COLUMNS, rows=rows, style="losers"), Pairs(summary.reasons(losers))]
    beside: list[Piece] = []
    if contents.conditions:
        heading = Sentence("Conditions of ping-pong (MegaScale-Infer, section 4.1)", "heading")
        beside += [heading, _conditions_grid(contents)]
    if notes := [*filter(None, [summary.placement_summary(contents.phase)]), *contents.phase.notes]:
        beside += [Sentence("Notes", "heading"), Notes(notes)]
    numbers: list[Piece] = [
        Sentence("The plan in numbers", "heading"),
        Grid(rows=summary.facts(contents.name, contents.phase)),
    ]
    return PageSection(contents.name, PHASE_TITLES[contents.name], [*pieces, Columns(numbers, beside), *others])


def _what_if(report: Report) -> list[Piece]:
    pieces: list[Piece] = []
    if more := _more_nodes(report):
        pieces += [Sentence(MORE_NODES, "heading"), Grid(columns=MORE_NODES_COLUMNS, rows=more)]
    if other := _formats(report):
        pieces += [Sentence(FORMATS, "heading"), Grid(columns=FORMATS_COLUMNS, rows=other)]
    caption, objective = CAPTIONS["sensitivity"], report.plan.objective
    for index, item in enumerate(report.sensitivity):
        pieces.append(
            draw(f"sensitivity-{index}", item.title, caption, serving_figures.sensitivity_chart(item, objective))
        )
    return pieces


def _drawings(contents: PhaseContents, objective: Objective, slo: SloSpec) -> list[Drawing]:
    has_layers, has_batches = (
        any(getattr(bar, name) >= 0 for bar in contents.bars) for name in ("layer", "micro_batch")
    )
    kind = "pipeline" if has_layers and has_batches else "kinds" if has_layers else "stages"
    drawn = (
        (
            "frontier",
            "frontier",
            "Throughput against latency",
            serving_figures.frontier_chart(contents, objective, slo),
        ),
        ("pipeline", kind, contents.bars_title, serving_figures.pipeline_chart(contents.bars)),
        ("memory", "memory", "Memory of a device", serving_figures.memory_chart(contents.memory)),
        ("parts", "parts", "What bounds each part", serving_figures.parts_chart(contents.parts)),
    )
    return [draw(f"{contents.name}-{name}", title, CAPTIONS[caption], chart) for name, caption, title, chart in drawn]


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
NO_DIFFERENCE = 0.02


def comparison_pieces(first: Plan, second: Plan, names: tuple[str, str]) -> Iterator[Piece]:
    """Two plans beside each other, for a terminal. `names`: how the two are called."""
    shared = [name for name in PHASES if name in first.phases and name in second.phases]
    if differs := different_questions(first, second):
        yield Sentence(f"these plans answer different questions: {'; '.join(differs)}")
    for name in shared:
        yield Sentence(f"{PHASE_TITLES[name]}: {sentence(first, second, name, names)}", "strong")
    for name, phases in ((name, (first.phases.get(name), second.phases.get(name))) for name in PHASES):
        if any(phases):
            yield Sentence(PHASE_TITLES[name], "heading")
            columns = ["", *names, f"{names[1]} of {names[0]}"]
            yield Grid(columns=columns, rows=_compared(name, *phases), right=(3,))


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
    mine, theirs = (plan.phases[name].predicted.score(first.objective) for plan in (first, second))
    unit = OBJECTIVE_UNITS[first.objective]
    if not mine or not theirs:
        return f"{unit} are not known of both"
    better, worse = (names[1], names[0]) if theirs > mine else (names[0], names[1])
    ratio = max(mine, theirs) / min(mine, theirs)
    if ratio <= 1 + NO_DIFFERENCE:
        return f"{names[0]} and {names[1]} are within 2% of each other in {unit}: no model of costs tells them apart"
    return f"{better} gives {number(ratio)} times the {unit} of {worse}"


def _compared(name: PhaseName, first: PhasePlan | None, second: PhasePlan | None) -> list[Row]:
    stated = [{} if phase is None else summary.all_facts(name, phase) for phase in (first, second)]
    ratios = {} if first is None or second is None else _ratios(first.predicted, second.predicted)
    return [
        [key, *(each.get(key) or "-" for each in stated), ratios.get(key, "")]
        for key in dict.fromkeys(chain(*stated))
        if any(each.get(key) for each in stated)
    ]


def _ratios(first: Predicted, second: Predicted) -> dict[str, str]:
    pairs = {key: (getattr(first, field), getattr(second, field)) for key, field in RATIOS}
    return {key: f"{theirs / mine:.2f} ×" for key, (mine, theirs) in pairs.items() if mine and theirs}


# --- the page of `antiphon bench serve --rate`: how latency and goodput go with the rate, a curve per contestant


LoadRows = Sequence[Mapping[str, Any]]
LATENCY_NAMES = {"ttft_s": "Time to first token", "tpot_s": "Time per output token", "itl_s": "Inter-token latency"}


def load_page(rows: LoadRows, model: str, workload: str, slo: SloSpec, table: Grid) -> ReportDocument:
    """`rows` as `bench serve --rate` has them; `table`: what the terminal shows of them."""
    promises = {"ttft_s": slo.ttft_s, "tpot_s": slo.tpot_s}
    latencies = []
    for name, title in LATENCY_NAMES.items():
        promise = promises.get(name)
        caption = "" if promise is None else f"The promise is {promise * 1e3:g} ms."
        for quantile in ("p50", "p99"):
            values = [row[name] and row[name][quantile] * 1e3 for row in rows]
            chart = _rate_chart(rows, values, "ms", is_logarithmic=True)
            latencies.append(draw(f"load-{name}-{quantile}", f"{title}, {quantile}", caption, chart))
    good = _rate_chart(rows, [row["goodput_requests_per_s"] for row in rows], "Requests/s")
    tokens = _rate_chart(rows, [row["output_tokens_per_s"] for row in rows], "Tokens/s")
    throughput = [
        draw("load-goodput", "Goodput", "Requests that kept every promise, a second.", good),
        draw("load-tokens", "Output tokens", "Those of all answered requests.", tokens),
    ]
    answer = Sentence(f"{model} under {workload}", "answer", "Requests come at their rate, whatever the server does.")
    return ReportDocument(
        title=f"Load on {model}",
        pieces=[
            answer,
            PageSection("throughput", "Throughput", throughput),
            PageSection("latency", "Latency", latencies),
            PageSection("figures", "Figures", [table]),
        ],
        footer="The rows are in this page's source (element `load`).",
        data_name="load",
        data=list(rows),
    )


def _rate_chart(
    rows: LoadRows, values: Sequence[float | None], unit: str, *, is_logarithmic: bool = False
) -> LineChart:
    """A curve over the rate for each contestant; a rate at which nothing was answered is a gap."""
    points: dict[str, list[tuple[float, float | None]]] = {}
    for row, value in zip(rows, values, strict=True):
        points.setdefault(row["engine"], []).append((row["rate"], value))
    lines = []
    for index, (engine, pairs) in enumerate(points.items()):
        x, y = zip(*sorted(pairs, key=lambda pair: pair[0]), strict=True)
        colour = BATCH_COLOURS[index % len(BATCH_COLOURS)]
        lines.append(ChartLine(name=engine, colour=colour, x=x, y=y, has_dots=True))
    axis = Axis(title=unit, low=None, is_logarithmic=True) if is_logarithmic else Axis(title=unit)
    return LineChart(x=Axis(title="Requests a second"), y=axis, lines=tuple(lines), height=280)

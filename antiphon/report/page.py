"""The report as one HTML file that opens anywhere: plotly.js, figures and the plan itself are inside it.

1. words, rows and figures come from the same `Report` as the terminal's
2. figures and plan are JSON elements of the page; a short script draws the figures, in light or dark
3. a content security policy forbids every load from elsewhere, so that the page cannot depend on a network

Rejected: plotly's own HTML writer. It makes one page per figure, and knows no text around them.
"""

import json
from importlib.resources import files
from typing import Any

from jinja2 import Environment, FunctionLoader, StrictUndefined
from plotly.offline import get_plotlyjs

from antiphon import __version__
from antiphon.report.contents import PhaseContents, Report, Sensitivity
from antiphon.report.figure_style import Figure
from antiphon.report.figures import gantt_figure, memory_figure, pareto_figure, parts_figure, sensitivity_figure
from antiphon.report.summary import LOSER_COLUMNS, facts, given, headline, loser_row, search_summary, subtitle, verdict
from antiphon.report.words import OBJECTIVE_UNITS, PHASE_TITLES, milliseconds, num_devices, number, score
from antiphon.specs.plan import Objective, plan_to_json
from antiphon.specs.workload import SloSpec

CAPTIONS = {
    "pareto": "Each dot is a candidate; lines join the best of a layout. Up and to the left is better. Click a "
    "layout in the legend to hide it.",
    "gantt": "Simulated, a few layers. Numbers are layers, colours micro-batches; white space is waiting.",
    "stages": "Numbers and colours are micro-batches; all of them pass all stages.",
    "kinds": "Numbers are layers, colours kinds of work.",
    "memory": "The fullest device of each role. The reserve is for activations and the runtime.",
    "parts": "The widest colour is what bounds the part.",
    "sensitivity": "The best plan of each layout, found anew for each value. A gap: the layout cannot run.",
}


def html_page(report: Report) -> str:
    """The whole file's text."""
    figures: dict[str, Figure] = {}
    objective = report.plan.objective
    return render_page(
        figures,
        plan=plan_to_json(report.plan),
        plan_reader="antiphon serve --plan",
        title=f"Plan for {report.plan.model} on {report.plan.cluster}",
        subtitle=subtitle(report),
        given=given(report),
        search=search_summary(report),
        phases=[_phase(contents, report, figures) for contents in report.phases],
        loser_columns=LOSER_COLUMNS,
        charts=[_sensitivity(index, item, objective, figures) for index, item in enumerate(report.sensitivity)],
        more_nodes=[
            (more.phase, more.device, number(more.tokens_per_s), f"{more.gain:.3f} ×") for more in report.more_nodes
        ],
    )


def render_page(figures: dict[str, Figure], *, plan: dict[str, Any], **contents: Any) -> str:
    """The page of a plan with `contents`; `figures` are those that `chart` placed while the contents were made."""
    return render("page.html.jinja", figures, plan_json=inside_script(plan), **contents)


def render(template: str, figures: dict[str, Figure], **contents: Any) -> str:
    """A template of this package, with what every page has: our version, plotly.js and the figures."""
    folder = files("antiphon.report")
    loader = FunctionLoader(lambda name: folder.joinpath(name).read_text(encoding="utf-8"))
    environment = Environment(loader=loader, autoescape=True, undefined=StrictUndefined, trim_blocks=True)
    return environment.get_template(template).render(
        **contents, version=__version__, plotly_js=get_plotlyjs(), figures_json=inside_script(figures)
    )


def inside_script(value: object) -> str:
    """JSON that no HTML parser can take for the end of its element."""
    return json.dumps(value, ensure_ascii=False, allow_nan=False).replace("</", "<\\/").replace("<!--", "<\\!--")


def _phase(contents: PhaseContents, report: Report, figures: dict[str, Figure]) -> dict[str, Any]:
    objective = report.plan.objective
    return {
        "name": contents.name,
        "title": PHASE_TITLES[contents.name],
        "headline": headline(contents, objective),
        "verdict": verdict(contents, objective),
        "cards": _cards(contents, objective),
        "facts": facts(contents.name, contents.phase),
        "losers_title": "Other layouts, the best of each",
        "losers_note": "",
        "losers": [loser_row(loser, contents, objective) for loser in contents.phase.rejected],
        "conditions": contents.conditions,
        "notes": contents.phase.notes,
        "charts": list(_phase_charts(contents, objective, report.workload.slo, figures)),
    }


def _cards(contents: PhaseContents, objective: Objective) -> list[tuple[str, str]]:
    predicted = contents.phase.predicted
    latency_s = predicted.tpot_s if contents.name == "decode" else predicted.ttft_s
    return [
        ("a token" if contents.name == "decode" else "to the first token", milliseconds(latency_s)),
        ("tokens/s", number(predicted.tokens_per_s)),
        (OBJECTIVE_UNITS[objective], number(score(predicted, objective))),
        ("devices", f"{num_devices(contents.phase):,}"),
        ("micro-batches", f"{contents.phase.micro_batches}"),
    ]


def _phase_charts(
    contents: PhaseContents, objective: Objective, slo: SloSpec, figures: dict[str, Figure]
) -> list[dict[str, Any]]:
    has_layers, has_batches = (
        any(getattr(bar, name) >= 0 for bar in contents.bars) for name in ("layer", "micro_batch")
    )
    kind = "gantt" if has_layers and has_batches else "kinds" if has_layers else "stages"
    drawn = (
        ("pareto", "pareto", "Throughput against latency, all layouts", pareto_figure(contents, objective, slo)),
        ("gantt", kind, contents.bars_title, gantt_figure(contents.bars)),
        ("memory", "memory", "Memory of a device", memory_figure(contents.memory)),
        ("parts", "parts", "What bounds each part", parts_figure(contents.parts)),
    )
    return [
        chart(f"{contents.name}-{name}", title, CAPTIONS[caption], drawing, figures)
        for name, caption, title, drawing in drawn
        if drawing["data"]
    ]


def _sensitivity(
    index: int, sensitivity: Sensitivity, objective: Objective, figures: dict[str, Figure]
) -> dict[str, Any]:
    drawing = sensitivity_figure(sensitivity, objective)
    return chart(f"sensitivity-{index}", sensitivity.title, CAPTIONS["sensitivity"], drawing, figures)


def chart(name: str, title: str, caption: str, drawing: Figure, figures: dict[str, Figure]) -> dict[str, Any]:
    """Place a figure: its data goes to the page's JSON, its frame into the text."""
    figures[name] = drawing
    return {"id": name, "title": title, "caption": caption, "height": drawing["layout"]["height"]}

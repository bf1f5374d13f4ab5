"""The report as one HTML file that opens anywhere: drawings and the plan itself are inside it.

1. words, rows and drawings come from the same `Report` as the terminal's
2. drawings are SVG, made here; a short script shows what is under the pointer and saves the plan
3. a content security policy forbids every load from elsewhere, so that the page cannot depend on a network

Rejected: figures that a library draws in the browser. It would be nine tenths of the file.
"""

import json
from importlib.resources import files
from typing import Any

from jinja2 import Environment, FunctionLoader, StrictUndefined

from antiphon import __version__
from antiphon.report.answer import answer, sources, three_numbers, totals
from antiphon.report.chart import Drawing
from antiphon.report.contents import PhaseContents, Report
from antiphon.report.deployment import deployment_drawing
from antiphon.report.draw import draw
from antiphon.report.figures import frontier_chart, memory_chart, parts_chart, pipeline_chart, sensitivity_chart
from antiphon.report.summary import (
    LOSER_COLUMNS,
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
from antiphon.report.words import PHASE_TITLES, number
from antiphon.specs.plan import Objective, plan_to_json
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


def html_page(report: Report, launch: list[tuple[str, str]]) -> str:
    """The whole file's text. `launch`: (what starts it, the commands)."""
    objective = report.plan.objective
    return render(
        "page.html.jinja",
        title=f"Plan for {report.plan.model} on {report.plan.cluster}",
        answer=answer(report),
        scope=scope(report),
        cards=three_numbers(report),
        subtitle=subtitle(report),
        given=given(report),
        search=search_summary(report),
        totals=totals(report),
        deployments=[deployment_drawing(contents.name, contents.phase, report.cluster) for contents in report.phases],
        launch=launch,
        phases=[_phase(contents, report) for contents in report.phases],
        loser_columns=LOSER_COLUMNS,
        drawings=[
            draw(f"sensitivity-{index}", item.title, CAPTIONS["sensitivity"], sensitivity_chart(item, objective))
            for index, item in enumerate(report.sensitivity)
        ],
        more_nodes=[
            (more.phase, more.device, number(more.tokens_per_s), f"{more.gain:.3f} ×") for more in report.more_nodes
        ],
        sources=sources(report),
        plan_json=inside_script(plan_to_json(report.plan)),
    )


def render(template: str, **contents: Any) -> str:
    """A template of this package."""
    folder = files("antiphon.report")
    loader = FunctionLoader(lambda name: folder.joinpath(name).read_text(encoding="utf-8"))
    environment = Environment(loader=loader, autoescape=True, undefined=StrictUndefined, trim_blocks=True)
    return environment.get_template(template).render(**contents, version=__version__)


def inside_script(value: object) -> str:
    """JSON that no HTML parser can take for the end of its element."""
    return json.dumps(value, ensure_ascii=False, allow_nan=False).replace("</", "<\\/").replace("<!--", "<\\!--")


def _phase(contents: PhaseContents, report: Report) -> dict[str, Any]:
    objective = report.plan.objective
    return {
        "name": contents.name,
        "title": PHASE_TITLES[contents.name],
        "headline": headline(contents, objective),
        "verdict": verdict(contents, objective),
        "facts": facts(contents.name, contents.phase),
        "losers": [loser_row(loser, contents, objective) for loser in contents.phase.rejected],
        "reasons": reasons(contents.phase.rejected),
        "conditions": contents.conditions,
        "notes": [*filter(None, [placement_summary(contents.phase)]), *contents.phase.notes],
        "drawings": _drawings(contents, objective, report.workload.slo),
    }


def _drawings(contents: PhaseContents, objective: Objective, slo: SloSpec) -> list[Drawing]:
    has_layers, has_batches = (
        any(getattr(bar, name) >= 0 for bar in contents.bars) for name in ("layer", "micro_batch")
    )
    kind = "pipeline" if has_layers and has_batches else "kinds" if has_layers else "stages"
    drawn = (
        ("frontier", "frontier", "Throughput against latency", frontier_chart(contents, objective, slo)),
        ("pipeline", kind, contents.bars_title, pipeline_chart(contents.bars)),
        ("memory", "memory", "Memory of a device", memory_chart(contents.memory)),
        ("parts", "parts", "What bounds each part", parts_chart(contents.parts)),
    )
    return [draw(f"{contents.name}-{name}", title, CAPTIONS[caption], chart) for name, caption, title, chart in drawn]

"""The page: nothing from elsewhere, figures that are the report's own numbers, the plan inside it."""

import json
import re
from html.parser import HTMLParser
from typing import Any

import plotly.graph_objects as go
import pytest

from antiphon.report.contents import Report
from antiphon.report.page import html_page
from antiphon.report.words import LAYOUT_TITLES
from antiphon.specs.plan import plan_from_json

LOADERS = {"src", "href", "srcset", "data", "poster", "action"}


class Page(HTMLParser):
    """What a browser would load, the text of JSON elements and styles, and the visible words."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.loads: list[str] = []
        self.elements: dict[str, str] = {}
        self.styles = ""
        self.words: list[str] = []
        self.ids: list[str] = []
        self.policy = ""
        self._inside: dict[str, str | None] = {}
        self._tag = ""
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = dict(attrs)
        self._tag, self._inside = tag, found
        self.loads += [f"{tag} {name}={value}" for name, value in attrs if name in LOADERS]
        if found.get("id"):
            self.ids.append(str(found["id"]))
        if found.get("http-equiv") == "Content-Security-Policy":
            self.policy = str(found["content"])

    def handle_endtag(self, tag: str) -> None:
        self._tag = ""

    def handle_data(self, data: str) -> None:
        if self._tag == "script":
            if self._inside.get("type") == "application/json":
                name = str(self._inside["id"])
                self.elements[name] = self.elements.get(name, "") + data
        elif self._tag == "style":
            self.styles += data
        elif data.strip():
            self.words.append(" ".join(data.split()))


@pytest.fixture(scope="module")
def page(report: Report) -> Page:
    return Page(html_page(report))


@pytest.fixture(scope="module")
def figures(page: Page) -> dict[str, Any]:
    found = json.loads(page.elements["figures"])
    assert isinstance(found, dict)
    return found


def test_nothing_is_loaded(page: Page) -> None:
    assert page.loads == []
    assert "url(" not in page.styles
    assert "@import" not in page.styles
    assert page.policy.startswith("default-src 'none';")
    assert "http" not in page.policy


def test_the_plan_is_inside_and_whole(page: Page, report: Report) -> None:
    assert plan_from_json(json.loads(page.elements["plan"])) == report.plan


def test_every_figure_has_its_place(page: Page, figures: dict[str, Any]) -> None:
    parts = ("pareto", "gantt", "memory", "parts")
    assert set(figures) == {f"{phase}-{part}" for phase in ("prefill", "decode") for part in parts} | {"sensitivity-0"}
    assert set(figures) <= set(page.ids)
    assert len(page.ids) == len(set(page.ids))


def test_plotly_knows_every_attribute(figures: dict[str, Any]) -> None:
    for figure in figures.values():
        assert go.Figure(figure).data


def test_every_axis_with_numbers_names_its_unit(figures: dict[str, Any]) -> None:
    for name, figure in figures.items():
        layout = figure["layout"]
        assert re.search(r"\((ms|µs|GB)\)$", layout["xaxis"]["title"]["text"]), name
        if "autorange" not in layout["yaxis"]:
            assert layout["yaxis"]["title"]["text"] == "Tokens/s per unit of price"


def test_the_pareto_figure_shows_the_candidates(figures: dict[str, Any], report: Report) -> None:
    contents = report.phases[1]
    traces = figures["decode-pareto"]["data"]
    fronts = [trace for trace in traces if trace.get("meta") == "front"]
    assert [trace["name"] for trace in fronts] == [LAYOUT_TITLES[front.layout] for front in contents.fronts]
    for trace, front in zip(fronts, contents.fronts, strict=True):
        assert trace["x"] == pytest.approx([1e3 * latency_s for latency_s in front.latency_s])
        assert trace["y"] == list(front.scores)
        assert trace["text"] == list(front.labels)
    clouds = [trace for trace in traces if trace["mode"] == "markers" and trace["name"] != "chosen plan"]
    assert [trace["y"] for trace in clouds] == [list(cloud.scores) for cloud in contents.clouds]
    (chosen,) = [trace for trace in traces if trace["name"] == "chosen plan"]
    assert (chosen["x"], chosen["y"]) == ([90.0], [contents.phase.predicted.per_cost])
    (line,) = figures["decode-pareto"]["layout"]["shapes"]
    assert line["x0"] == line["x1"] == 150.0
    (words,) = figures["decode-pareto"]["layout"]["annotations"]
    assert words["text"] == "target 150 ms"
    assert 10 ** words["x"] == pytest.approx(150.0)


def test_a_phase_without_a_target_has_no_line(figures: dict[str, Any]) -> None:
    assert "shapes" not in figures["prefill-pareto"]["layout"]
    assert figures["prefill-pareto"]["layout"]["xaxis"]["title"]["text"] == "Time to first token (ms)"


def test_the_gantt_chart_shows_every_bar(figures: dict[str, Any], report: Report) -> None:
    bars = report.phases[1].bars
    drawn = {
        (track, round(base, 6), round(base + length, 6), text, trace["name"])
        for trace in figures["decode-gantt"]["data"]
        for track, base, length, text in zip(trace["y"], trace["base"], trace["x"], trace["text"], strict=True)
    }
    assert drawn == {
        (
            bar.track,
            round(bar.start_s * 1e6, 6),
            round(bar.end_s * 1e6, 6),
            str(bar.layer + 1),
            f"micro-batch {bar.micro_batch + 1}",
        )
        for bar in bars
    }
    order = figures["decode-gantt"]["layout"]["yaxis"]["categoryarray"]
    assert order == ["attention", "to experts", "experts", "to attention"]


def test_the_memory_figure_adds_up_to_the_device(figures: dict[str, Any], report: Report) -> None:
    traces = {trace["name"]: trace for trace in figures["decode-memory"]["data"]}
    for index, use in enumerate(report.phases[1].memory):
        values = {name: trace["x"][index] for name, trace in traces.items()}
        assert values["weights"] == use.weight_bytes / 1e9
        assert values["KV cache"] == use.kv_bytes / 1e9
        assert values["reserve"] == use.reserve_bytes / 1e9
        assert sum(values.values()) == pytest.approx(use.capacity_bytes / 1e9)
        assert traces["weights"]["y"][index] == f"{use.role}, {use.device}"


def test_the_parts_figure_adds_up_to_each_parts_time(figures: dict[str, Any], report: Report) -> None:
    traces = {trace["name"]: trace for trace in figures["decode-parts"]["data"]}
    for index, (name, part) in enumerate(report.phases[1].parts.items()):
        assert traces["compute"]["y"][index] == name
        assert traces["compute"]["x"][index] == pytest.approx(1e6 * float(part.compute_s))
        assert traces["scale-out network"]["x"][index] == pytest.approx(1e6 * float(part.scale_out_s))
        assert sum(trace["x"][index] for trace in traces.values()) == pytest.approx(1e6 * float(part.total_s))


def test_the_sensitivity_figure_leaves_gaps(figures: dict[str, Any], report: Report) -> None:
    (sensitivity,) = report.sensitivity
    figure = figures["sensitivity-0"]
    assert [trace["y"] for trace in figure["data"]] == [list(scores) for scores in sensitivity.scores.values()]
    assert figure["data"][1]["y"][0] is None
    assert all(trace["x"] == list(sensitivity.values) for trace in figure["data"])
    assert figure["layout"]["shapes"][0]["x0"] == 150.0


def test_the_words_are_there(page: Page, report: Report) -> None:
    text = " ".join(page.words)
    for contents in report.phases:
        for loser in contents.phase.rejected:
            assert loser.reason in text
    assert "Disaggregate here: 1.41 times the best hybrid TP-EP in tokens/s per unit of price." in text
    assert "Do not disaggregate here: attention computes as long as experts do" in text
    assert "16 × H20 attention, 8 × L40S experts" in text
    assert "10,000 candidates considered in 1.25 s" in text
    assert "420 µs ≥ 540 µs" in text

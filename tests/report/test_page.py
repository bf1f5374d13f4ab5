"""The page: nothing from elsewhere, charts that are the report's own numbers, the plan inside it."""

import json
import re
from dataclasses import replace
from datetime import UTC, datetime
from html.parser import HTMLParser

import pytest

from antiphon.cost.profile import MachineFacts, Profile
from antiphon.report.document import LineChart, html
from antiphon.report.gather import Points, Report
from antiphon.report.serving import plan_page
from antiphon.report.serving_figures import frontier_chart, memory_chart, parts_chart, pipeline_chart, sensitivity_chart
from antiphon.report.summary import answer, sources, three_numbers
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


LAUNCH = [("This engine", "antiphon serve /models/mixtral --plan plan.json"), ("vLLM", "# lost: <all>")]


@pytest.fixture(scope="module")
def text(report: Report) -> str:
    return html(plan_page(report, LAUNCH))


@pytest.fixture(scope="module")
def page(text: str) -> Page:
    return Page(text)


def test_nothing_is_loaded(page: Page) -> None:
    assert page.loads == []
    assert "url(" not in page.styles
    assert "@import" not in page.styles
    assert page.policy.startswith("default-src 'none';")
    assert "http" not in page.policy


def test_the_plan_is_inside_and_whole(page: Page, report: Report) -> None:
    assert plan_from_json(json.loads(page.elements["plan"])) == report.plan


def test_every_figure_has_its_place(page: Page) -> None:
    parts = ("deployment", "frontier", "pipeline", "memory", "parts")
    figures = {f"{phase}-{part}" for phase in ("prefill", "decode") for part in parts} | {"sensitivity-0"}
    assert figures <= set(page.ids)
    assert len(page.ids) == len(set(page.ids))


def test_it_is_small_and_prints_no_exponents(text: str, page: Page, report: Report) -> None:
    assert len(text) < 200_000
    assert not re.search(r"[0-9]e[-+]?[0-9]", " ".join(page.words))
    many = tuple(range(1, 2000))
    front = Points(
        layout="hybrid",
        latency_s=tuple(0.001 * step for step in many),
        scores=tuple(float(step) for step in many),
        labels=tuple(f"A 16×TP1, E 16×TP1, PP2, batch {step}; 32 × H20" for step in many),
    )
    phases = tuple(replace(contents, fronts=(front,) * 4) for contents in report.phases)
    assert len(html(plan_page(replace(report, phases=phases), LAUNCH))) < 1_500_000


def decode_frontier(report: Report) -> LineChart:
    return frontier_chart(report.phases[1], "per-cost", report.workload.slo)


def test_the_frontier_marks_the_chosen_and_the_best_of_each_layout(report: Report) -> None:
    contents = report.phases[1]
    chart = decode_frontier(report)
    assert [line.name for line in chart.lines] == [LAYOUT_TITLES[front.layout] for front in contents.fronts]
    for line, front in zip(chart.lines, contents.fronts, strict=True):
        assert line.x == pytest.approx([1e3 * latency_s for latency_s in front.latency_s])
        assert line.y == front.scores
    chosen, *others = chart.spots
    assert (chosen.x, chosen.y, chosen.is_chosen) == (90.0, contents.phase.predicted.per_cost, True)
    assert [spot.words.split(",")[0] for spot in others] == ["runner-up: hybrid TP-EP", "TP + PP"]
    assert chart.mark == (150.0, "target 150 ms")
    assert chart.x.low == pytest.approx(72.0), "half the target, or left of a marked point"
    assert chart.x.high == 225.0
    assert not chart.x.is_logarithmic


def test_the_frontier_leaves_out_what_is_far_from_the_choice(report: Report) -> None:
    contents = report.phases[1]
    slow, *others = contents.phase.rejected
    assert slow.predicted is not None
    slow = replace(slow, predicted=replace(slow.predicted, tpot_s=1.0))
    far = replace(contents, phase=replace(contents.phase, rejected=(slow, *others)))
    chart = frontier_chart(far, "per-cost", report.workload.slo)
    assert len(chart.spots) == 2
    assert chart.x.high == 225.0


def test_a_phase_without_a_target_has_no_line(report: Report) -> None:
    chart = frontier_chart(report.phases[0], "per-cost", report.workload.slo)
    assert chart.mark is None
    assert chart.x.title == "Time to first token (ms)"


def test_the_pipeline_shows_every_bar(report: Report) -> None:
    bars = report.phases[1].bars
    chart = pipeline_chart(bars)
    drawn = {
        (block.row, round(block.start, 6), round(block.start + block.length, 6), block.text, block.group)
        for block in chart.blocks
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
    assert chart.rows == ["attention", "to experts", "experts", "to attention"]


def test_the_memory_chart_adds_up_to_the_device(report: Report) -> None:
    memory = report.phases[1].memory
    blocks = memory_chart(memory).blocks
    for use in memory:
        values = {block.group: block.length for block in blocks if block.row == f"{use.role}, {use.device}"}
        assert values["weights"] == use.weight_bytes / 1e9
        assert values["KV cache"] == use.kv_bytes / 1e9
        assert values["reserve"] == use.reserve_bytes / 1e9
        assert sum(values.values()) == pytest.approx(use.capacity_bytes / 1e9)


def test_the_parts_chart_adds_up_to_each_parts_time(report: Report) -> None:
    parts = report.phases[1].parts
    blocks = parts_chart(parts).blocks
    for name, part in parts.items():
        values = {block.group: block.length for block in blocks if block.row == name}
        assert values["compute"] == pytest.approx(1e6 * float(part.compute_s))
        assert values["scale-out network"] == pytest.approx(1e6 * float(part.scale_out_s))
        assert sum(values.values()) == pytest.approx(1e6 * float(part.total_s))
        ends = [block.start + block.length for block in blocks if block.row == name]
        assert ends[-1] == pytest.approx(1e6 * float(part.total_s)), "end to end"


def test_the_sensitivity_chart_leaves_gaps(report: Report) -> None:
    (sensitivity,) = report.sensitivity
    chart = sensitivity_chart(sensitivity, "per-cost")
    assert [line.y for line in chart.lines] == list(sensitivity.scores.values())
    assert chart.lines[1].y[0] is None
    assert all(line.x == sensitivity.values for line in chart.lines)
    assert chart.mark == (150.0, "this plan")


def test_the_answer_is_a_sentence_with_three_numbers(report: Report) -> None:
    alone = replace(report, phases=report.phases[1:])
    assert answer(alone) == (
        "Run decode with attention on 16 × H20 and experts on 8 × L40S: "
        "1.41 times the tokens/s per unit of price of the best hybrid TP-EP"
    )
    (decode,) = alone.phases
    wide = replace(decode.phase, predicted=replace(decode.phase.predicted, band=1.0))
    assert answer(replace(alone, phases=(replace(decode, phase=wide),))).endswith("hybrid TP-EP, too close to call")
    assert [value for _, value in three_numbers(alone)] == ["90 ms", "2,400", "62.5"]
    assert answer(report).endswith(": together they take 2.3 requests/s on 40 devices"), "2,160 / 941, not 2,400 / 219"
    assert [value for _, value in three_numbers(report)] == ["400 ms", "90 ms", "12.6"], "2.295 x 219 / 40"


def test_sources_have_an_age(report: Report) -> None:
    cluster = replace(report.cluster, calibrated="2026-01-02")
    machine = MachineFacts(name="my machine", num_cores=2, memory_bytes=2**30)
    profile = Profile(
        command="antiphon profile m", created="2026-01-31T10:00:00", machine=machine, model="m", dtype="bfloat16",
        attention=(), experts=(),
    )  # fmt: skip
    now = datetime(2026, 2, 1, 12, tzinfo=UTC)
    measured, calibration, *others = sources(replace(report, cluster=cluster, profile=profile), now)
    assert measured == ("measured", "on my machine, 2026-01-31T10:00:00, 1 day old; antiphon profile m")
    assert calibration == ("calibration of 2026-01-02, 30 days old", cluster.efficiency.source)
    assert [name for name, _ in others] == ["cluster msi-hetero", "H20", "L40S"]
    assert sources(replace(report, cluster=replace(cluster, calibrated="")), now)[0][0] == "calibration"


def test_the_words_are_there(page: Page, report: Report) -> None:
    text = " ".join(page.words)
    for contents in report.phases:
        for loser in contents.phase.rejected:
            assert loser.reason in text
    assert "Disaggregate here: 1.41 times the best hybrid TP-EP in tokens/s per unit of price." in text
    assert "Do not disaggregate here: attention computes as long as experts do" in text
    assert "End to end: prefill and decode" in text
    assert "16 × H20 attention, 8 × L40S experts" in text
    assert "10,000 candidates considered in 1.25 s" in text
    assert "420 µs ≥ 540 µs" in text
    assert LAUNCH[0][1] in text
    assert "# lost: <all>" in text
    assert report.cluster.efficiency.source in text
    assert "together 40 67.8 15.6 kW" in text


def test_one_phase_says_that_it_is_one(report: Report) -> None:
    assert "Decode only: prefill is not counted." in html(plan_page(replace(report, phases=report.phases[1:]), LAUNCH))
    assert "Prefill only: decode is not counted." in html(plan_page(replace(report, phases=report.phases[:1]), LAUNCH))

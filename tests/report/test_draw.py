"""Drawings: numbers land where the axes say, words do not lie on each other, odd data are drawn too."""

import json
import re
from dataclasses import replace
from itertools import pairwise
from xml.etree import ElementTree

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from antiphon.report.document import Axis, BlockChart, Chart, ChartBlock, ChartLine, HeatMap, LineChart, Spot
from antiphon.report.draw import Scale, apart, draw, tick_text


def drawn(chart: Chart) -> ElementTree.Element:
    """The picture, read as XML; nothing in it is not a number."""
    svg = draw("name", "A title", "", chart).svg
    assert "nan" not in svg
    assert "inf" not in svg
    return ElementTree.fromstring(svg)


def line_chart(y: tuple[float | None, ...], **more: object) -> LineChart:
    line = ChartLine(name="a & b", colour="#123456", x=tuple(map(float, range(len(y)))), y=y)
    return LineChart(x=Axis(title="x (s)"), y=Axis(title="y"), lines=(line,), **more)  # type: ignore[arg-type]


def path_of(chart: LineChart) -> str:
    (path,) = drawn(chart).iter("path")
    return path.attrib["d"]


def test_a_missing_value_is_a_gap() -> None:
    assert re.findall("[A-Z]", path_of(line_chart((1.0, None, 2.0, 3.0)))) == ["M", "M", "L"]


def test_steps_hold_until_the_next_point() -> None:
    line = ChartLine(name="a", colour="#123456", x=(1.0, 2.0), y=(1.0, 3.0), style="steps")
    chart = LineChart(x=Axis(title="x", high=4.0), y=Axis(title="y"), lines=(line,))
    assert re.findall("[A-Z]", path_of(chart)) == ["M", "H", "V", "H"]


def test_logarithmic_axes_leave_out_what_has_no_logarithm() -> None:
    line = ChartLine(name="a", colour="#123456", x=(1.0, 2.0, 3.0), y=(0.0, 1.0, 10.0))
    chart = LineChart(x=Axis(title="x"), y=Axis(title="y", low=None, is_logarithmic=True), lines=(line,))
    assert re.findall("[A-Z]", path_of(chart)) == ["M", "L"]


@pytest.mark.parametrize("y", [(), (None,), (0.0,), (5.0, 5.0), (1e-9, 2e-9), (1e12, 2e12), (-3.0, 4.0)])
def test_odd_data_are_drawn(y: tuple[float | None, ...]) -> None:
    drawn(line_chart(y))


def test_a_band_reaches_from_low_to_high_within_the_plot() -> None:
    spot = Spot(x=1.0, y=2.0, words="chosen", colour="#123456", low=1.0, high=9.0)
    chart = LineChart(x=Axis(title="x"), y=Axis(title="y", high=4.0), lines=(), spots=(spot,))
    (band,) = (group for group in drawn(chart).iter("g") if group.attrib.get("class") == "band")
    upright = next(iter(band))
    ends = float(upright.attrib["y1"]), float(upright.attrib["y2"])
    (dot,) = (each for each in drawn(chart).iter("circle"))
    assert ends[1] == pytest.approx(28.0), "cut off at the top of the plot"
    assert ends[0] > float(dot.attrib["cy"]) > ends[1]
    (without,) = [drawn(replace(chart, spots=(replace(spot, low=None),)))]
    assert not [group for group in without.iter("g") if group.attrib.get("class") == "band"]


def test_names_cannot_break_a_drawing() -> None:
    nasty = '<b>"&'
    block = ChartBlock(row=nasty, start=0.0, length=1.0, group=nasty, text=nasty, tip=f"{nasty}\nsecond line")
    picture = drawn(BlockChart(x=Axis(title=nasty), blocks=(block,), colours={nasty: "#123456"}))
    tips = [element.attrib["data-tip"] for element in picture.iter() if "data-tip" in element.attrib]
    assert tips == [f"{nasty}\nsecond line"]


def test_bars_are_in_proportion() -> None:
    blocks = (
        ChartBlock(row="a", start=0.0, length=1.0, group="one"),
        ChartBlock(row="a", start=1.0, length=3.0, group="two"),
        ChartBlock(row="b", start=0.0, length=0.0, group="one"),
    )
    picture = drawn(BlockChart(x=Axis(title="x"), blocks=blocks, colours={"one": "#111111", "two": "#222222"}))
    widths = [float(rect.attrib["width"]) for rect in picture.iter("rect")]
    assert widths[1] == pytest.approx(3 * widths[0], rel=0.01)
    assert len(widths) == 2, "nothing has no bar"


def test_a_heat_map_has_every_cell_once_and_its_values() -> None:
    values = ((0.0, 1.0, 2.0, 2.0), (9.0, -1.0, 1.0, 1.0))
    chart = HeatMap(
        column_name="step",
        columns=(1, 2, 3, 4),
        rows=("layer 0", "layer 1"),
        values=values,
        low=0.0,
        high=2.0,
        unit="×",
    )
    picture = drawn(chart)
    covered = [
        (int(row), column)
        for path in picture.iter("path")
        for start, row, width in re.findall(r"M(\d+) (\d+)h(\d+)", path.attrib["d"])
        for column in range(int(start), int(start) + int(width))
    ]
    assert sorted(covered) == [(row, column) for row in range(2) for column in range(4)]
    (cells,) = [element.attrib["data-cells"] for element in picture.iter() if "data-cells" in element.attrib]
    assert json.loads(cells)["values"] == [list(row) for row in values]


def test_only_several_colours_need_a_legend() -> None:
    assert draw("", "", "", line_chart((1.0,))).legend == ()


def test_words_beside_points_do_not_overlap() -> None:
    spots = tuple(Spot(x=1.0, y=1.0 + 0.001 * index, words=f"spot {index}", colour="#123456") for index in range(4))
    picture = drawn(line_chart((1.0, 2.0), spots=spots))
    heights = sorted(float(text.attrib["y"]) for text in picture.iter("text") if str(text.text).startswith("spot"))
    assert min(below - above for above, below in pairwise(heights)) >= 16


@settings(max_examples=80, deadline=None)
@given(wanted=st.lists(st.floats(0, 300), max_size=12))
def test_places_are_apart_and_inside(wanted: list[float]) -> None:
    found = apart(sorted(wanted), 17.0, 0.0, 300.0)
    assert len(found) == len(wanted)
    assert all(below - above >= 17.0 - 1e-6 for above, below in pairwise(found))
    assert all(place <= 300.0 for place in found)


@settings(max_examples=80, deadline=None)
@given(low=st.floats(-1e6, 1e6), width=st.floats(1e-3, 1e6))
def test_ticks_are_round_and_inside(low: float, width: float) -> None:
    scale = Scale(low=low, high=low + width, start=0.0, end=100.0)
    ticks = scale.ticks()
    assert 1 <= len(ticks) <= 10
    assert all(-0.1 <= scale(tick) <= 100.1 for tick in ticks)


@pytest.mark.parametrize(("value", "text"), [(20000.0, "20,000"), (0.00005, "0.00005"), (0.30000000000000004, "0.3")])
def test_ticks_have_no_exponents(value: float, text: str) -> None:
    assert tick_text(value) == text

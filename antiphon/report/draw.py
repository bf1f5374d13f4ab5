"""Charts as SVG text: elements, scales, ticks and axes, then the three kinds of chart.

Words beside points and bars are placed so that they do not lie on each other. Colours that change with light and dark
are classes (`soft`, `grid`) that the page's style sheet fills. `tip` is what its script shows beside the pointer.

A heat map's cells are one path a colour: a rectangle each would take ten times the bytes. Its script finds the cell
under the pointer in the values, which are an attribute.
"""

import json
import math
from dataclasses import dataclass
from html import escape

from antiphon.base.units import round_step
from antiphon.report.document import (
    HEAT_COLOURS,
    MARK,
    BlockChart,
    Chart,
    ChartBlock,
    ChartLine,
    Drawing,
    HeatMap,
    LineChart,
    Spot,
)

WIDTH = 960
FONT = 13
CHARACTER = 7.4
"""Pixels of a character, on average and generously: no font is at hand to measure with."""


def element(name: str, content: str = "", **attributes: object) -> str:
    """One element; `css` is its class, `tip` its words beside the pointer, underscores are dashes."""
    named = {"css": "class", "tip": "data-tip"}
    written = "".join(
        f' {named.get(key, key.replace("_", "-"))}="{_text(value)}"'
        for key, value in attributes.items()
        if value is not None and value != ""
    )
    return f"<{name}{written}>{content}</{name}>" if content else f"<{name}{written}/>"


def _text(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.1f}".removesuffix(".0")
    return escape(str(value)).replace("\n", "&#10;")


def label(x: float, y: float, words: str, **attributes: object) -> str:
    return element("text", escape(words), x=x, y=y, **attributes)


def width_of(words: str) -> float:
    return CHARACTER * len(words)


def picture(height: float, content: str, title: str) -> str:
    """A whole drawing: as wide as the page up to `WIDTH`, scrolled where a window is narrow."""
    return element(
        "svg", content, viewBox=f"0 0 {WIDTH} {height:.0f}", role="img", aria_label=title, font_size=FONT, css="drawing"
    )


@dataclass(frozen=True, kw_only=True)
class Scale:
    """Numbers from `low` to `high` at pixels from `start` to `end`."""

    low: float
    high: float
    start: float
    end: float
    is_logarithmic: bool = False

    def __call__(self, value: float) -> float:
        low, high, value = (math.log(number) if self.is_logarithmic else number for number in (*self._ends, value))
        return self.start + (value - low) / (high - low) * (self.end - self.start)

    @property
    def _ends(self) -> tuple[float, float]:
        return self.low, self.high if self.high > self.low else self.low + (abs(self.low) or 1.0)

    def ticks(self, most: int = 8) -> list[float]:
        """Round numbers inside."""
        low, high = self._ends
        if self.is_logarithmic:
            return _logarithmic_ticks(low, high, most)
        return _even_ticks(low, high, most)


def _even_ticks(low: float, high: float, most: int) -> list[float]:
    step = round_step((high - low) / most)
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [index * step for index in range(first, last + 1)]


def _logarithmic_ticks(low: float, high: float, most: int) -> list[float]:
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    found: list[float] = []
    for factors in ((1, 2, 5), (1,)):
        found = [factor * 10.0**power for power in powers for factor in factors]
        found = [value for value in found if low * (1 - 1e-9) <= value <= high * (1 + 1e-9)]
        if 2 <= len(found) <= most:
            return found
    return found if len(found) > 1 else _even_ticks(low, high, most)  # within less than a power of ten


def tick_text(value: float) -> str:
    """``20000`` -> ``"20,000"``, without an exponent."""
    return f"{value:,.9f}".rstrip("0").rstrip(".")


def ticks_below(scale: Scale, y: float, top: float, title: str, ticks: tuple[float, ...] = ()) -> str:
    """A horizontal axis under a plot that reaches from `top` to `y`."""
    parts = []
    for value in ticks or scale.ticks():
        x = scale(value)
        parts.append(element("line", x1=x, x2=x, y1=top, y2=y, css="grid"))
        parts.append(label(x, y + 18, tick_text(value), text_anchor="middle", css="soft"))
    middle = (scale.start + scale.end) / 2
    return "".join(parts) + label(middle, y + 40, title, text_anchor="middle", css="soft")


def ticks_left(scale: Scale, x: float, right: float, title: str) -> str:
    """A vertical axis at the left of a plot that reaches from `x` to `right`."""
    parts = []
    for value in scale.ticks(6):
        y = scale(value)
        parts.append(element("line", x1=x, x2=right, y1=y, y2=y, css="grid"))
        parts.append(label(x - 8, y + 4, tick_text(value), text_anchor="end", css="soft"))
    return "".join(parts) + label(0, scale.end - 12, title, css="soft")


BOTTOM = 50
LINE_HEIGHT = 17
RIGHT = 20
HEAT_ROW = (6, 26)
HEAT_HEIGHT = 520


def draw(name: str, title: str, caption: str, chart: Chart) -> Drawing:
    """The chart's picture, with its place in a page."""
    if isinstance(chart, LineChart):
        svg = _lines(chart, title)
    elif isinstance(chart, BlockChart):
        svg = _blocks(chart, title)
    else:
        svg = _heat_map(chart, title)
    return Drawing(name=name, title=title, caption=caption, svg=svg, legend=_legend(chart))


def _legend(chart: Chart) -> tuple[tuple[str, str], ...]:
    """What has several colours says what they mean."""
    if isinstance(chart, LineChart):
        named = tuple((line.name, line.colour) for line in chart.lines)
    else:
        named = tuple(chart.colours.items()) if isinstance(chart, BlockChart) else ()
    return named if len(named) > 1 else ()


def _lines(chart: LineChart, title: str) -> str:
    """Curves are cut off at the plot's edges by a picture inside the picture."""
    x, y = _scales(chart)
    axes = ticks_below(x, y.start, y.end, chart.x.title, chart.x.ticks) + ticks_left(y, x.start, x.end, chart.y.title)
    left, top, width, height = x.start, y.end - 8, x.end - x.start, y.start - y.end + 8
    view = f"{left:.1f} {top:.1f} {width:.1f} {height:.1f}"
    inside = "".join(_curve(line, x, y) for line in chart.lines)
    curves = element("svg", inside, viewBox=view, x=left, y=top, width=width, height=height)
    return picture(chart.height, axes + _mark(chart, x, y) + curves + _spots(chart.spots, x, y), title)


def _scales(chart: LineChart) -> tuple[Scale, Scale]:
    """The scales of both axes; the left edge leaves room for the numbers."""
    xs = [value for line in chart.lines for value in line.x] + [spot.x for spot in chart.spots]
    ys = [value for line in chart.lines for value in line.y if value is not None]
    ys += [spot.y for spot in chart.spots]
    top, bottom = 28.0, chart.height - BOTTOM
    y_low, y_high = _ends(chart.y.low, chart.y.high, ys, chart.y.is_logarithmic)
    y = Scale(low=y_low, high=y_high, start=bottom, end=top, is_logarithmic=chart.y.is_logarithmic)
    left = 18 + max(width_of(tick_text(value)) for value in y.ticks(6))
    x_low, x_high = _ends(chart.x.low, chart.x.high, xs, chart.x.is_logarithmic)
    return Scale(low=x_low, high=x_high, start=left, end=WIDTH - RIGHT, is_logarithmic=chart.x.is_logarithmic), y


def _ends(low: float | None, high: float | None, values: list[float], is_logarithmic: bool) -> tuple[float, float]:
    positive = [value for value in values if value > 0] if is_logarithmic else values
    found = positive or [1.0]
    low = min(found) if low is None or (is_logarithmic and low <= 0) else low
    return low, max(found) if high is None else high


def _curve(line: ChartLine, x: Scale, y: Scale) -> str:
    """A path, pieces of it where values are missing, and a dot per point that shows its words."""
    path, pen_is_down, last = "", False, 0.0
    dots = []
    for index, (value, height) in enumerate(zip(line.x, line.y, strict=True)):
        if height is None or (y.is_logarithmic and height <= 0):
            pen_is_down = False
            continue
        here_x, here_y = x(value), y(height)
        if pen_is_down and line.style == "steps":
            path += f"H{here_x:.1f}V{here_y:.1f}"
        else:
            path += f"{'L' if pen_is_down else 'M'}{here_x:.1f} {here_y:.1f}"
        pen_is_down, last = True, here_x
        if line.has_dots or line.tips:
            tip = line.tips[index] if line.tips else ""
            dots.append(element("circle", cx=here_x, cy=here_y, r=3.5 if line.has_dots else 6.0, tip=tip))
    if line.style == "steps" and path and last < x.end:
        path += f"H{x.end:.1f}"
    drawn = element("path", d=path, fill="none", stroke=line.colour, stroke_width=2, stroke_linejoin="round")
    return drawn + element("g", "".join(dots), fill=line.colour, opacity=None if line.has_dots else 0.0)


def _mark(chart: LineChart, x: Scale, y: Scale) -> str:
    """The dashed line, its words on the side with enough space."""
    if chart.mark is None:
        return ""
    place, words = x(chart.mark[0]), chart.mark[1]
    fits = place + 8 + width_of(words) < x.end
    dashed = element("line", x1=place, x2=place, y1=y.end - 8, y2=y.start, stroke=MARK, stroke_dasharray="6 4")
    anchor, shift = ("start", 6) if fits else ("end", -6)
    return dashed + label(place + shift, y.end - 12, words, fill=MARK, text_anchor=anchor)


def _spots(spots: tuple[Spot, ...], x: Scale, y: Scale) -> str:
    """Points with their words above the lines, apart by a line's height."""
    order = sorted(spots, key=lambda spot: y(spot.y))
    heights = apart([y(spot.y) - LINE_HEIGHT for spot in order], LINE_HEIGHT, y.end, y.start)
    return "".join(_spot(spot, x(spot.x), y, height) for spot, height in zip(order, heights, strict=True))


def _spot(spot: Spot, x: float, y: Scale, height: float) -> str:
    """The point, and its words at `height`, on the side with enough space, joined by a thin line."""
    middle = y(spot.y)
    is_right = x + 26 + width_of(spot.words) < WIDTH
    place, anchor = (x + 24, "start") if is_right else (x - 24, "end")
    leader = element("line", x1=x, y1=middle, x2=place - 2 if is_right else place + 2, y2=height, css="leader")
    size, outline, weight = (7.0, "white", "600") if spot.is_chosen else (4.5, "", "")
    dot = element("circle", cx=x, cy=middle, r=size, fill=spot.colour, stroke=outline)
    words = label(place, height + 4, spot.words, text_anchor=anchor, font_weight=weight)
    return _band(spot, x, y) + leader + dot + _behind(spot.words, place, height, is_right) + words


def _band(spot: Spot, x: float, y: Scale) -> str:
    """A bar from the lowest to the highest value expected, as far as the plot goes."""
    if spot.low is None or spot.high is None:
        return ""
    ends = [min(max(y(value), y.end), y.start) for value in (spot.low, spot.high)]
    bars = "".join(element("line", x1=x - 5, x2=x + 5, y1=end, y2=end) for end in ends)
    upright = element("line", x1=x, x2=x, y1=ends[0], y2=ends[1])
    return element("g", upright + bars, css="band", stroke=spot.colour, stroke_width=1.5)


def _behind(words: str, place: float, height: float, is_right: bool) -> str:
    """What keeps lines from striking the words out."""
    width = 0.95 * width_of(words)
    left = place - 2 if is_right else place - width + 2
    return element("rect", x=left, y=height - 7, width=width, height=15, css="behind")


def apart(wanted: list[float], gap: float, low: float, high: float) -> list[float]:
    """Sorted places moved as little as need be so that none is nearer to the next than `gap`."""
    placed: list[float] = []
    for place in wanted:
        placed.append(max(place, placed[-1] + gap) if placed else max(place, low))
    limit = high
    for index in range(len(placed) - 1, -1, -1):
        placed[index] = min(placed[index], limit)
        limit = placed[index] - gap
    return placed


def _blocks(chart: BlockChart, title: str) -> str:
    rows = chart.rows
    left = 12 + max((width_of(row) for row in rows), default=0)
    bottom = 8 + chart.row_height * len(rows)
    ends = [block.start + block.length for block in chart.blocks]
    low, high = _ends(chart.x.low, chart.x.high, ends, False)
    x = Scale(low=low, high=high, start=left, end=WIDTH - RIGHT)
    tops = {row: 6.0 + chart.row_height * index for index, row in enumerate(rows)}
    names = (label(left - 8, top + chart.row_height / 2 + 4, row, text_anchor="end") for row, top in tops.items())
    drawn = "".join(_block(block, x, tops[block.row], chart) for block in chart.blocks if block.length > 0)
    return picture(bottom + BOTTOM, ticks_below(x, bottom, 4, chart.x.title) + "".join(names) + drawn, title)


def _block(block: ChartBlock, x: Scale, top: float, chart: BlockChart) -> str:
    start, end = x(block.start), x(block.start + block.length)
    height = chart.row_height * 0.76
    y = top + (chart.row_height - height) / 2
    bar = element(
        "rect", x=start, y=y, width=end - start, height=height, fill=chart.colours[block.group], tip=block.tip
    )
    if not block.text or end - start < width_of(block.text) + 4:
        return bar
    middle = {"x": (start + end) / 2, "y": y + height / 2 + 4}
    return bar + label(**middle, words=block.text, text_anchor="middle", fill="white", pointer_events="none")


def _heat_map(chart: HeatMap, title: str) -> str:
    """Cells in a space of one unit a cell, stretched to the plot."""
    left = 12 + max(map(width_of, chart.rows))
    row_height = max(HEAT_ROW[0], min(HEAT_ROW[1], HEAT_HEIGHT / len(chart.rows)))
    width, height = WIDTH - RIGHT - left, row_height * len(chart.rows)
    stretch = f"translate({left:.1f} 8) scale({width / len(chart.columns):.4f} {row_height:.2f})"
    named = label(left + width / 2, height + 46, chart.column_name.capitalize(), text_anchor="middle", css="soft")
    values = {
        "column": chart.column_name,
        "columns": chart.columns,
        "rows": chart.rows,
        "unit": chart.unit,
        "values": [[round(value, 2) for value in row] for row in chart.values],
    }
    area = element("rect", x=left, y=8.0, width=width, height=height, fill="transparent", data_cells=json.dumps(values))
    drawn = element("g", _cells(chart), transform=stretch) + _heat_names(chart, left, width, row_height)
    return picture(height + 90, drawn + named + area + _scale_bar(chart, left, height + 62), title)


def _heat_names(chart: HeatMap, left: float, width: float, row_height: float) -> str:
    """The names of as many rows and columns as have room."""
    every = max(1, round(FONT / row_height + 0.49))
    rows = [
        label(left - 8, 12 + row_height * (index + 0.5), row, text_anchor="end")
        for index, row in enumerate(chart.rows)
        if index % every == 0
    ]
    count, bottom = len(chart.columns), 26 + row_height * len(chart.rows)
    columns = []
    for index in range(0, count, max(1, -(-count * 60 // int(width)))):
        middle = left + width * (index + 0.5) / count
        columns.append(label(middle, bottom, f"{chart.columns[index]:,}", text_anchor="middle", css="soft"))
    return "".join(rows + columns)


def _cells(chart: HeatMap) -> str:
    """A path for each colour; equal neighbours of a row are one rectangle."""
    paths: dict[int, str] = {}
    for row, values in enumerate(chart.values):
        shades = [_shade(value, chart) for value in values]
        start = 0
        for column in range(1, len(shades) + 1):
            if column == len(shades) or shades[column] != shades[start]:
                paths[shades[start]] = paths.get(shades[start], "") + f"M{start} {row}h{column - start}v1H{start}z"
                start = column
    return "".join(element("path", d=d, fill=HEAT_COLOURS[shade]) for shade, d in sorted(paths.items()))


def _shade(value: float, chart: HeatMap) -> int:
    share = (value - chart.low) / (chart.high - chart.low)
    return min(len(HEAT_COLOURS) - 1, max(0, int(share * len(HEAT_COLOURS))))


def _scale_bar(chart: HeatMap, left: float, top: float) -> str:
    """The colours from low to high with their ends."""
    size = 18.0
    parts = [label(left, top + 14, tick_text(chart.low), css="soft")]
    start = left + 8 + width_of(tick_text(chart.low))
    for index, colour in enumerate(HEAT_COLOURS):
        parts.append(element("rect", x=start + size * index, y=top + 2, width=size, height=14.0, fill=colour))
    end = start + size * len(HEAT_COLOURS) + 8
    return "".join(parts) + label(end, top + 14, f"{tick_text(chart.high)} {chart.unit}", css="soft")

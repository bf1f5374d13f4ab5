"""SVG as text: elements, a scale from numbers to pixels, round ticks, and the frame of an axis.

Colours that change with light and dark are classes (`soft`, `grid`) that the page's style sheet fills. `tip` is what
the page's script shows beside the pointer.
"""

import math
from dataclasses import dataclass
from html import escape

WIDTH = 960
FONT = 13
CHARACTER = 7.5
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
        step = _round_step((high - low) / most)
        first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
        return [index * step for index in range(first, last + 1)]


def _round_step(least: float) -> float:
    """The first of 1, 2, 5 times a power of ten that is not below `least`."""
    power = 10.0 ** math.floor(math.log10(least))
    return next(factor * power for factor in (1, 2, 5, 10) if factor * power >= least * (1 - 1e-9))


def _logarithmic_ticks(low: float, high: float, most: int) -> list[float]:
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    found: list[float] = []
    for factors in ((1, 2, 5), (1,)):
        found = [factor * 10.0**power for power in powers for factor in factors]
        found = [value for value in found if low * (1 - 1e-9) <= value <= high * (1 + 1e-9)]
        if 2 <= len(found) <= most:
            return found
    return found or [low, high]


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

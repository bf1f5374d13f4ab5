"""Draws a piece of recorded timelines, one band per trace, as an SVG: who worked when, for which micro-batch.

    python benchmarks/timeline_figure.py out/m1.json out/m3.json --svg docs/figures/ping_pong.svg --milliseconds 12

The traces are those that `--timeline` writes. Each band shows the same length of time from the middle of a decode step.
"""

import argparse
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from xml.sax.saxutils import escape

WIDTH, LEFT, LANE, GAP, TOP = 1000, 110, 34, 30, 34
COLOURS = ("#3b6fb6", "#e08a2e", "#4a9d5b", "#a3539b", "#c0504d", "#7f7f7f")
DRAWN = {"attention": 1.0, "dispatch": 0.55, "experts": 1.0, "reply": 0.55}


@dataclass(frozen=True)
class Band:
    """One trace: its title, its lanes (worker -> spans) and where its window begins, in µs."""

    title: str
    lanes: dict[str, list[dict[str, Any]]]
    begin: float


def read_band(path: Path, window_us: float) -> Band:
    """The window starts at a layer's first attention span in the middle of the longest run of equal steps."""
    events = json.loads(path.read_text(encoding="utf-8"))["traceEvents"]
    names = {e["pid"]: e["args"]["name"] for e in events if e["ph"] == "M" and e["name"] == "process_name"}
    spans = [e for e in events if e["ph"] == "X" and e["name"] in DRAWN and "layer" in e["args"]]
    attention = [e for e in spans if e["name"] == "attention" and e["args"]["micro_batch"] == 0]
    steps = sorted({e["args"]["step"] for e in attention})
    middle = steps[3 * len(steps) // 4]
    begin = min(e["ts"] for e in attention if e["args"]["step"] == middle and e["args"]["layer"] == 3)
    lanes: dict[str, list[dict[str, Any]]] = {name: [] for name in sorted(names.values())}
    for event in spans:
        if event["ts"] + event["dur"] > begin and event["ts"] < begin + window_us:
            lanes[names[event["pid"]]].append(event)
    num_micro_batches = 1 + max(e["args"]["micro_batch"] for e in spans if e["args"]["step"] == middle)
    return Band(f"m = {num_micro_batches}", lanes, begin)


def draw(bands: list[Band], window_us: float) -> str:
    """All bands under one time axis."""
    scale = (WIDTH - LEFT - 10) / window_us
    parts: list[str] = []
    y = TOP
    for band in bands:
        parts.append(f'<text x="{LEFT}" y="{y - 8}" class="title">{escape(band.title)}</text>')
        for name, spans in band.lanes.items():
            parts.append(f'<text x="{LEFT - 8}" y="{y + LANE / 2 + 4}" text-anchor="end">{escape(name)}</text>')
            parts.append(f'<rect x="{LEFT}" y="{y}" width="{WIDTH - LEFT - 10}" height="{LANE - 6}" fill="#f2f2f2"/>')
            parts.extend(_box(event, band.begin, window_us, scale, y) for event in spans)
            y += LANE
        y += GAP
    parts.append(_axis(window_us, scale, y - GAP + 4))
    style = "text{font:13px sans-serif;fill:#333}.title{font-weight:bold}.tag{font-size:11px;fill:#fff}"
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {y + 4}" width="{WIDTH}">'
    return "\n".join(
        [head, f"<style>{style}</style>", '<rect width="100%" height="100%" fill="#fff"/>', *parts, "</svg>"]
    )


def _box(event: dict[str, Any], begin: float, window_us: float, scale: float, y: float) -> str:
    start = max(0.0, event["ts"] - begin)
    end = min(window_us, event["ts"] + event["dur"] - begin)
    colour = COLOURS[event["args"]["micro_batch"] % len(COLOURS)]
    x, width = LEFT + start * scale, max(0.6, (end - start) * scale)
    box = (
        f'<rect x="{x:.1f}" y="{y}" width="{width:.1f}" height="{LANE - 6}" fill="{colour}" '
        f'fill-opacity="{DRAWN[event["name"]]}"/>'
    )
    if width > 24 and event["name"] in ("attention", "experts"):
        tag = f"{event['args']['layer']}"
        box += f'<text x="{x + width / 2:.1f}" y="{y + LANE / 2 + 2}" text-anchor="middle" class="tag">{tag}</text>'
    return box


def _axis(window_us: float, scale: float, y: float) -> str:
    step = next(s for s in (500, 1000, 2000, 5000, 10000, 20000, 50000) if window_us / s <= 10)
    labels = []
    for tick in range(0, int(window_us) + 1, step):
        anchor = "end" if tick + step > window_us else "middle"  # the last one would not fit if it were centred
        x = LEFT + tick * scale
        labels.append(f'<text x="{x:.0f}" y="{y + 12}" text-anchor="{anchor}">{tick / 1000:g} ms</text>')
    return "\n".join(labels)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("traces", type=Path, nargs="+")
    parser.add_argument("--svg", type=Path, required=True)
    parser.add_argument("--milliseconds", type=float, default=12.0)
    arguments = parser.parse_args()
    window_us = arguments.milliseconds * 1000
    arguments.svg.parent.mkdir(parents=True, exist_ok=True)
    arguments.svg.write_text(draw([read_band(trace, window_us) for trace in arguments.traces], window_us))
    print(f"wrote {arguments.svg}")


if __name__ == "__main__":
    main()

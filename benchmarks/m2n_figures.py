"""The M2N figures of MegaScale-Infer on this machine: measures their grids and draws them, the paper's claims beneath.

    python benchmarks/m2n_figures.py                           # all three: out/m2n_*.json, docs/figures/m2n_*.svg
    python benchmarks/m2n_figures.py --figures sizes --transport shm,tcp,libfabric
    python benchmarks/m2n_figures.py --draw-only               # from the JSON of an earlier run

Each figure has three panels: median, 99th percentile, throughput. The paper gives no tables, so what stands beneath are
the gains its text states (over NCCL, one 200 Gbit/s NIC per GPU), and the same gains here (over gloo).
"""

import argparse
import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from xml.sax.saxutils import escape

from antiphon.base.system import cpu_name
from antiphon.base.units import format_bytes, format_seconds
from antiphon.bench.harness.contest import Row
from antiphon.bench.m2n.cases import choose_contestants, figure_cases
from antiphon.bench.m2n.contest import Settings, bench_m2n
from antiphon.cli.output import provenance

WIDTH, PANEL_HEIGHT, TOP, LEFT, GAP = 1000, 220, 64, 62, 46
COLOURS = {
    "shm": "#3b6fb6",
    "shm in place": "#86aee0",
    "tcp": "#4a9d5b",
    "tcp in place": "#97cba2",
    "libfabric": "#a3539b",
    "libfabric in place": "#cf9cca",
    "gloo": "#c0504d",
    "gloo-all-to-all": "#e08a2e",
    "memcpy": "#7f7f7f",
    "mpi": "#b59b00",
}
LEGEND_STEP = 128
STYLE = "text{font:12px sans-serif;fill:#333}.title{font-weight:bold;font-size:14px}.note{font-size:11px;fill:#555}"


@dataclass(frozen=True, kw_only=True)
class Figure:
    """One of the paper's figures: its horizontal axis, what its text says of it, and the position it says it of."""

    title: str
    position: Callable[[Row], str]
    claim: str
    highlight: str = ""


FIGURES = {
    "one-to-n": Figure(
        title="One sender, N receivers, 128 KiB to each (MegaScale-Infer, Figure 5)",
        position=lambda row: f"1 x {row['receivers']}",
        claim="Paper: NCCL lies far above a plain RDMA client at the median, and surges at P99 from 8 to 32 receivers.",
    ),
    "sizes": Figure(
        title="8 senders, 8 receivers, by message size (MegaScale-Infer, Figure 10)",
        position=lambda row: format_bytes(row["message_bytes"]).replace(".0", ""),
        claim="Paper: at 256 KB median -68.2%, P99 -92.9%, throughput x4.2; at most -80.8%, -96.2%, x9.9.",
        highlight="256 KiB",
    ),
    "m-equals-n": Figure(
        title="As many senders as receivers, 256 KiB messages (MegaScale-Infer, Figure 11)",
        position=lambda row: f"{row['senders']} x {row['receivers']}",
        claim="Paper: P99 -54.7% to -96.9%, throughput x3.3 to x5.8.",
    ),
}


@dataclass(frozen=True, kw_only=True)
class Panel:
    """One quantity on a logarithmic axis."""

    title: str
    value: Callable[[Row], float]
    tick: Callable[[float], str]


def _tick_seconds(value: float) -> str:
    return format_seconds(value).replace(".00", "")


PANELS = (
    Panel(title="median", value=lambda row: float(row["median_s"]), tick=_tick_seconds),
    Panel(title="99th percentile", value=lambda row: float(row["p99_s"]), tick=_tick_seconds),
    Panel(
        title="throughput",
        value=lambda row: float(row["throughput_bytes_per_s"]),
        tick=lambda value: f"{value / 1e9:g} GB/s",
    ),
)


def series_name(row: Row) -> str:
    return str(row["transport"]) + (" in place" if row["in_place"] else "")


def draw(figure: Figure, rows: Sequence[Row], footer: str) -> str:
    """The figure as SVG."""
    positions = list(dict.fromkeys(figure.position(row) for row in rows))
    names = list(dict.fromkeys(series_name(row) for row in rows))
    width = (WIDTH - LEFT - 14 - 2 * (LEFT + GAP - 30)) / 3
    parts = [f'<text x="14" y="20" class="title">{escape(figure.title)}</text>', _legend(names)]
    for number, panel in enumerate(PANELS):
        left = LEFT + number * (width + LEFT + GAP - 30)
        parts.append(_panel(panel, figure, rows, names, positions, left, width))
    below = TOP + PANEL_HEIGHT + 56
    notes = [figure.claim, *claims_here(figure, rows), footer]
    parts += [f'<text x="14" y="{below + 16 * i}" class="note">{escape(note)}</text>' for i, note in enumerate(notes)]
    height = below + 16 * len(notes)
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}">'
    ground = '<rect width="100%" height="100%" fill="#fff"/>'
    return "\n".join([head, f"<style>{STYLE}</style>", ground, *parts, "</svg>"])


def _legend(names: Sequence[str]) -> str:
    return "\n".join(
        f'<rect x="{14 + i * LEGEND_STEP}" y="30" width="14" height="4" fill="{COLOURS[name]}"/>'
        + f'<text x="{32 + i * LEGEND_STEP}" y="36">{escape(name)}</text>'
        for i, name in enumerate(names)
    )


def _panel(
    panel: Panel,
    figure: Figure,
    rows: Sequence[Row],
    names: Sequence[str],
    positions: Sequence[str],
    left: float,
    width: float,
) -> str:
    values = [panel.value(row) for row in rows]
    low, high = math.floor(math.log10(min(values))), math.ceil(math.log10(max(values)))
    high = max(high, low + 1)

    def x_of(position: str) -> float:
        return left + width * (positions.index(position) + 0.5) / len(positions)

    def y_of(value: float) -> float:
        return TOP + PANEL_HEIGHT * (high - math.log10(value)) / (high - low)

    parts = [f'<text x="{left:.0f}" y="{TOP - 8}">{panel.title}</text>']
    for power in range(low, high + 1):
        y = y_of(10.0**power)
        parts.append(f'<line x1="{left:.1f}" x2="{left + width:.1f}" y1="{y:.1f}" y2="{y:.1f}" stroke="#ddd"/>')
        parts.append(f'<text x="{left - 6:.1f}" y="{y + 4:.1f}" text-anchor="end">{panel.tick(10.0**power)}</text>')
    for position in positions:
        x, y = x_of(position), TOP + PANEL_HEIGHT + 10
        anchor = f'transform="rotate(-25 {x:.1f} {y})" text-anchor="end"'
        parts.append(f'<text x="{x:.1f}" y="{y}" {anchor}>{escape(position)}</text>')
    for name in names:
        points = [(x_of(figure.position(r)), y_of(panel.value(r))) for r in rows if series_name(r) == name]
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        parts.append(f'<polyline points="{path}" fill="none" stroke="{COLOURS[name]}" stroke-width="1.8"/>')
        parts += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="2.6" fill="{COLOURS[name]}"/>' for x, y in points]
    return "\n".join(parts)


def claims_here(figure: Figure, rows: Sequence[Row]) -> list[str]:
    """One line per transport of ours: what the paper states of its own, against gloo instead of NCCL."""
    lines = []
    for name in dict.fromkeys(series_name(row) for row in rows if row["waiting"] is not None):
        ours = [row for row in rows if series_name(row) == name and row["ratio_to_gloo_median"] is not None]
        if ours:
            highlighted = [row for row in ours if figure.position(row) == figure.highlight]
            there = f"at {figure.highlight} {_gains(highlighted)}; over all " if highlighted else ""
            lines.append(f"Here, {name} against gloo: {there}{_gains(ours)}.")
    return lines


def _gains(rows: Sequence[Row]) -> str:
    """``median -80.1% to -90.2%, P99 ..., throughput ...``, from the smallest gain to the largest."""

    def span(key: str, show: Callable[[float], str], *, best: Callable[..., float], worst: Callable[..., float]) -> str:
        values = [float(row[key]) for row in rows]
        ends = dict.fromkeys([show(worst(values)), show(best(values))])
        return " to ".join(ends)

    def less(ratio: float) -> str:
        return f"{ratio - 1:+.1%}"

    median = span("ratio_to_gloo_median", less, best=min, worst=max)
    tail = span("ratio_to_gloo_p99", less, best=min, worst=max)
    rate = span("speedup_over_gloo_median", lambda ratio: f"x{ratio:.1f}", best=max, worst=min)
    return f"median {median}, P99 {tail}, throughput {rate}"


def measure(name: str, transports: Sequence[str], baselines: Sequence[str], repetitions: int) -> dict[str, Any]:
    """What `antiphon bench m2n --figure NAME --json` writes; in place for shm only, the one that saves a copy by it."""
    contestants = [
        contestant
        for contestant in choose_contestants(transports, baselines, in_place=True, waiting="auto")
        if contestant.name not in ("tcp in place", "libfabric in place")
    ]
    rows, _ = bench_m2n(contestants, figure_cases(name), Settings(num_repetitions=repetitions))
    return {"bench": "m2n", **provenance(cpu=cpu_name()), "rows": rows}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--figures", default=",".join(FIGURES), help="some of: %(default)s")
    parser.add_argument("--transport", default="shm,tcp,libfabric")
    parser.add_argument("--against", default="gloo,memcpy")
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--data", type=Path, default=Path("out"), help="folder of the JSON files")
    parser.add_argument("--svg", type=Path, default=Path("docs/figures"), help="folder of the figures")
    parser.add_argument("--draw-only", action="store_true", help="draw what an earlier run measured")
    arguments = parser.parse_args()
    for folder in (arguments.data, arguments.svg):
        folder.mkdir(parents=True, exist_ok=True)
    for name in arguments.figures.split(","):
        data = arguments.data / f"m2n_{name}.json"
        if not arguments.draw_only:
            found = measure(name, arguments.transport.split(","), arguments.against.split(","), arguments.repetitions)
            data.write_text(json.dumps(found, indent=2))
        found = json.loads(data.read_text())
        machine = found["machine"]
        footer = f"{machine['cpus']} cores of {machine['cpu']}, loopback, commit {found['commit'][:7]}; log axes."
        target = arguments.svg / f"m2n_{name.replace('-', '_')}.svg"
        target.write_text(draw(FIGURES[name], found["rows"], footer))
        print(f"wrote {target}")


if __name__ == "__main__":
    main()

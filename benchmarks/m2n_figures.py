"""The M2N figures of MegaScale-Infer on this machine: measures their grids and draws them, the paper's claims beneath.

    python benchmarks/m2n_figures.py                           # all three: out/m2n_*.json, docs/figures/m2n_*.svg
    python benchmarks/m2n_figures.py --figures sizes --transport shm,tcp,libfabric
    python benchmarks/m2n_figures.py --draw-only               # from the JSON of an earlier run

Each figure has three charts: median, 99th percentile, throughput. The paper gives no tables, so what stands beneath are
the gains its text states (over NCCL, one 200 Gbit/s NIC per GPU), and the same gains here (over gloo).
"""

import argparse
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from antiphon.base.system import cpu_name
from antiphon.bench.harness.contest import Row
from antiphon.bench.m2n.cases import choose_contestants, figure_cases
from antiphon.bench.m2n.contest import Settings, bench_m2n
from antiphon.cli.output import provenance
from antiphon.report.charts import Axis, ChartLine, LineChart
from antiphon.report.draw import WIDTH, element, label
from antiphon.report.draw import draw as draw_chart

CHART_HEIGHT, TOP, LEGEND_STEP = 260, 64, 110
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
STYLE = "text{font:12px sans-serif;fill:#333}.title{font-weight:bold;font-size:14px}.soft{fill:#555}.grid{stroke:#ddd}"


@dataclass(frozen=True, kw_only=True)
class Figure:
    """One of the paper's figures: its horizontal axis, what its text says of it, and the position it says it of."""

    title: str
    axis: str
    position: Callable[[Row], int]
    claim: str
    highlight: int = 0


FIGURES = {
    "one-to-n": Figure(
        title="One sender, N receivers, 128 KiB to each (MegaScale-Infer, Figure 5)",
        axis="receivers",
        position=lambda row: int(row["receivers"]),
        claim="Paper: NCCL lies far above a plain RDMA client at the median, and surges at P99 from 8 to 32 receivers.",
    ),
    "sizes": Figure(
        title="8 senders, 8 receivers, by message size (MegaScale-Infer, Figure 10)",
        axis="KiB",
        position=lambda row: int(row["message_bytes"]) // 1024,
        claim="Paper: at 256 KB median -68.2%, P99 -92.9%, throughput x4.2; at most -80.8%, -96.2%, x9.9.",
        highlight=256,
    ),
    "m-equals-n": Figure(
        title="As many senders as receivers, 256 KiB messages (MegaScale-Infer, Figure 11)",
        axis="senders and receivers",
        position=lambda row: int(row["senders"]),
        claim="Paper: P99 -54.7% to -96.9%, throughput x3.3 to x5.8.",
    ),
}
CHARTS: dict[str, Callable[[Row], float]] = {
    "median, ms": lambda row: float(row["median_s"]) * 1e3,
    "99th percentile, ms": lambda row: float(row["p99_s"]) * 1e3,
    "throughput, GB/s": lambda row: float(row["throughput_bytes_per_s"]) / 1e9,
}


def series_name(row: Row) -> str:
    return str(row["transport"]) + (" in place" if row["in_place"] else "")


def draw(figure: Figure, rows: Sequence[Row], footer: str) -> str:
    """The figure as SVG."""
    names = list(dict.fromkeys(series_name(row) for row in rows))
    parts = [element("style", STYLE), element("rect", width="100%", height="100%", fill="#fff")]
    parts.append(label(14, 20, figure.title, css="title"))
    for number, name in enumerate(names):
        left = 14 + number * LEGEND_STEP
        parts.append(element("rect", x=left, y=32, width=14, height=4, fill=COLOURS[name]))
        parts.append(label(left + 18, 38, name))
    for number, (title, value) in enumerate(CHARTS.items()):
        svg = draw_chart(title, title, "", _chart(figure, rows, names, title, value)).svg
        parts.append(element("svg", svg, y=TOP + number * CHART_HEIGHT, width=WIDTH, height=CHART_HEIGHT))
    below = TOP + len(CHARTS) * CHART_HEIGHT + 16
    notes = [figure.claim, *claims_here(figure, rows), footer]
    parts += [label(14, below + 16 * number, note, css="soft") for number, note in enumerate(notes)]
    size = {"viewBox": f"0 0 {WIDTH} {below + 16 * len(notes)}", "width": WIDTH}
    return element("svg", "\n".join(parts), xmlns="http://www.w3.org/2000/svg", **size)


def _chart(
    figure: Figure, rows: Sequence[Row], names: Sequence[str], title: str, value: Callable[[Row], float]
) -> LineChart:
    """A quantity over the figure's axis, both logarithmic, a curve for each contestant."""
    lines = []
    for name in names:
        points = sorted((float(figure.position(row)), value(row)) for row in rows if series_name(row) == name)
        x, y = zip(*points, strict=True)
        lines.append(ChartLine(name=name, colour=COLOURS[name], x=x, y=y, has_dots=True))
    ticks = tuple(sorted({float(figure.position(row)) for row in rows}))
    across = Axis(title=figure.axis, low=None, is_logarithmic=True, ticks=ticks)
    up = Axis(title=title, low=None, is_logarithmic=True)
    return LineChart(x=across, y=up, lines=tuple(lines), height=CHART_HEIGHT)


def claims_here(figure: Figure, rows: Sequence[Row]) -> list[str]:
    """One line per transport of ours: what the paper states of its own, against gloo instead of NCCL."""
    lines = []
    for name in dict.fromkeys(series_name(row) for row in rows if row["waiting"] is not None):
        ours = [row for row in rows if series_name(row) == name and row["ratio_to_gloo_median"] is not None]
        if ours:
            highlighted = [row for row in ours if figure.position(row) == figure.highlight]
            there = f"at {figure.highlight} {figure.axis} {_gains(highlighted)}; over all " if highlighted else ""
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

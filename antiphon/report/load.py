"""The page of `antiphon bench serve --rate`: how latency and goodput go with the rate, a curve per contestant."""

from collections.abc import Mapping, Sequence
from typing import Any

from antiphon.report.charts import BATCH_COLOURS, Axis, ChartLine, LineChart
from antiphon.report.document import Grid, PageSection, ReportDocument, Sentence
from antiphon.report.draw import draw
from antiphon.specs.workload import SloSpec

Rows = Sequence[Mapping[str, Any]]
NAMES = {"ttft_s": "Time to first token", "tpot_s": "Time per output token", "itl_s": "Inter-token latency"}


def load_page(rows: Rows, model: str, workload: str, slo: SloSpec, table: Grid) -> ReportDocument:
    """`rows` as `bench serve --rate` has them; `table`: what the terminal shows of them."""
    promises = {"ttft_s": slo.ttft_s, "tpot_s": slo.tpot_s}
    latencies = []
    for name, title in NAMES.items():
        promise = promises.get(name)
        caption = "" if promise is None else f"The promise is {promise * 1e3:g} ms."
        for quantile in ("p50", "p99"):
            values = [row[name] and row[name][quantile] * 1e3 for row in rows]
            chart = _chart(rows, values, "ms", is_logarithmic=True)
            latencies.append(draw(f"load-{name}-{quantile}", f"{title}, {quantile}", caption, chart))
    good = _chart(rows, [row["goodput_requests_per_s"] for row in rows], "Requests/s")
    tokens = _chart(rows, [row["output_tokens_per_s"] for row in rows], "Tokens/s")
    throughput = [
        draw("load-goodput", "Goodput", "Requests that kept every promise, a second.", good),
        draw("load-tokens", "Output tokens", "Those of all answered requests.", tokens),
    ]
    answer = Sentence(f"{model} under {workload}", "answer", "Requests come at their rate, whatever the server does.")
    return ReportDocument(
        title=f"Load on {model}",
        pieces=[
            answer,
            PageSection("throughput", "Throughput", throughput),
            PageSection("latency", "Latency", latencies),
            PageSection("figures", "Figures", [table]),
        ],
        footer="The rows are in this page's source (element `load`).",
        data_name="load",
        data=list(rows),
    )


def _chart(rows: Rows, values: Sequence[float | None], unit: str, *, is_logarithmic: bool = False) -> LineChart:
    """A curve over the rate for each contestant; a rate at which nothing was answered is a gap."""
    points: dict[str, list[tuple[float, float | None]]] = {}
    for row, value in zip(rows, values, strict=True):
        points.setdefault(row["engine"], []).append((row["rate"], value))
    lines = []
    for index, (engine, pairs) in enumerate(points.items()):
        x, y = zip(*sorted(pairs, key=lambda pair: pair[0]), strict=True)
        colour = BATCH_COLOURS[index % len(BATCH_COLOURS)]
        lines.append(ChartLine(name=engine, colour=colour, x=x, y=y, has_dots=True))
    axis = Axis(title=unit, low=None, is_logarithmic=True) if is_logarithmic else Axis(title=unit)
    return LineChart(x=Axis(title="Requests a second"), y=axis, lines=tuple(lines), height=280)

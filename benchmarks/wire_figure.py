"""The figure of `benchmarks/wire_ping_pong.py`: throughput for m micro-batches over slow wires, measured and predicted.

    python benchmarks/wire_figure.py out/wire.json --out docs/figures/wire_ping_pong.svg

One panel for each share T_c / T_f. Bars: measured tokens/s; lines: what max(m T_f, T_a + T_e + 2 T_c) says.
"""

import argparse
import json
from functools import partial
from pathlib import Path
from typing import Any

from antiphon.bench.ladder.figure import BUSY, GRID, LINE, picture, text

PANEL_WIDTH, PANEL_HEIGHT, MARGIN = 230, 190, 48
BAR_WIDTH = 30
centred = partial(text, anchor="middle")


def predicted_rate(row: dict[str, Any]) -> float:
    """Tokens/s if a layer took as long as the formula says."""
    return float(row["tokens_per_s"] * row["layer_s"] / row["predicted_layer_s"])


def panel(rows: list[dict[str, Any]], left: float, top: float, highest: float) -> list[str]:
    """One share's bars and predictions."""
    share, mbit = rows[0]["share"], rows[0]["mbit"]
    exchange_ms = rows[0]["exchange_s"] * 1e3
    bottom = top + PANEL_HEIGHT
    parts = [centred(left + PANEL_WIDTH / 2, top - 22, f"T_c = {share:g} T_f   ({mbit:.0f} Mbit/s)", size=12)]
    parts.append(centred(left + PANEL_WIDTH / 2, top - 8, f"T_c measured {exchange_ms:.2f} ms", size=10))
    for tick in range(5):
        y = bottom - tick * PANEL_HEIGHT / 4
        parts.append(f'<line x1="{left}" x2="{left + PANEL_WIDTH}" y1="{y:.1f}" y2="{y:.1f}" stroke="{GRID}"/>')
        parts.append(text(left - 4, y + 4, f"{highest * tick / 4:.0f}", anchor="end", size=10))
    step = PANEL_WIDTH / len(rows)
    for index, row in enumerate(rows):
        x = left + (index + 0.5) * step
        height = PANEL_HEIGHT * row["tokens_per_s"] / highest
        parts.append(
            f'<rect x="{x - BAR_WIDTH / 2:.1f}" y="{bottom - height:.1f}" width="{BAR_WIDTH}" height="{height:.1f}" '
            f'fill="{BUSY}"/>'
        )
        y = bottom - PANEL_HEIGHT * predicted_rate(row) / highest
        reach = BAR_WIDTH / 2 + 5
        parts.append(
            f'<line x1="{x - reach:.1f}" x2="{x + reach:.1f}" y1="{y:.1f}" y2="{y:.1f}" stroke="{LINE}" '
            'stroke-width="2.5"/>'
        )
        parts.append(centred(x, bottom + 14, f"m = {row['micro_batches']}"))
        parts.append(centred(x, bottom + 27, f"×{row['gain']:.2f}", size=10))
        parts.append(centred(x, bottom + 39, f"×{row['predicted_gain']:.2f}", size=10, color=LINE))
    return parts


def draw(rows: list[dict[str, Any]], title: str) -> str:
    """The whole figure as SVG."""
    shares = sorted({row["share"] for row in rows})
    highest = 1.1 * max(max(row["tokens_per_s"], predicted_rate(row)) for row in rows)
    width = MARGIN + len(shares) * (PANEL_WIDTH + MARGIN)
    height = PANEL_HEIGHT + 150
    parts = [
        centred(width / 2, 20, title, size=13),
        text(MARGIN, 40, "decode tokens/s of the layers", size=10),
    ]
    for index, share in enumerate(shares):
        chosen = sorted((row for row in rows if row["share"] == share), key=lambda row: row["micro_batches"])
        parts += panel(chosen, MARGIN + index * (PANEL_WIDTH + MARGIN), 80, highest)
    parts.append(text(MARGIN, height - 12, "bars, first gain: measured", size=10, color=BUSY))
    second = "lines, second gain: max(m T_f, T_a + T_e + 2 T_c)"
    parts.append(text(MARGIN + 170, height - 12, second, size=10, color=LINE))
    return picture(width, height, parts)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("json", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--title", default="Ping-pong over a slow wire: gain over m = 1 at constant micro-batch size")
    arguments = parser.parse_args()
    rows = json.loads(arguments.json.read_text())["rows"]
    arguments.out.write_text(draw(rows, arguments.title))


if __name__ == "__main__":
    main()

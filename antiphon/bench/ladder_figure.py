"""A ladder as a figure: for each variant the median step as a bar, its waiting in another colour, and what the
simulation says as a line."""

from typing import Any
from xml.sax.saxutils import escape

LEFT, WIDTH, ROW, TOP = 190, 480, 34, 64
BUSY, WAITING, LINE, WORDS, GRID = "#4878a8", "#d9a441", "#c0504d", "#333333", "#dddddd"


def draw(rows: list[dict[str, Any]], title: str) -> str:
    """The figure as SVG."""
    longest_s = 1.08 * max(max(row["step_s_median"], row["predicted_step_s"] or 0.0) for row in rows)
    height = TOP + ROW * len(rows) + 60
    total = LEFT + WIDTH + 130
    parts = [
        text(12, 22, title, size=13),
    ]
    for tick in range(5):
        x = LEFT + WIDTH * tick / 4
        parts.append(f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{TOP - 8}" y2="{height - 52}" stroke="{GRID}"/>')
        parts.append(text(x, TOP - 14, f"{longest_s * tick / 4:.2f} s", anchor="middle", size=10))
    for index, row in enumerate(rows):
        parts += _bar(row, TOP + index * ROW, WIDTH / longest_s, rows[0]["step_s_median"])
    parts.append(text(LEFT, height - 30, "blue: computing and what runs beside it", color=BUSY, size=10))
    parts.append(text(LEFT, height - 16, "yellow: waiting for other ranks", color=WAITING, size=10))
    parts.append(text(LEFT + 260, height - 30, "red line: simulated", color=LINE, size=10))
    return picture(total, height, parts)


def _bar(row: dict[str, Any], y: float, scale: float, first_s: float) -> list[str]:
    step_s = row["step_s_median"]
    waiting_s = min(step_s, row["exposed_comm_s"])
    busy, waiting = (step_s - waiting_s) * scale, waiting_s * scale
    parts = [
        text(LEFT - 8, y + 16, row["variant"], anchor="end", size=12),
        f'<rect x="{LEFT}" y="{y}" width="{busy:.1f}" height="22" fill="{BUSY}"/>',
        f'<rect x="{LEFT + busy:.1f}" y="{y}" width="{waiting:.1f}" height="22" fill="{WAITING}"/>',
        text(LEFT + busy + waiting + 6, y + 15, f"{step_s:.2f} s   ×{first_s / step_s:.2f}", size=11),
    ]
    if row["predicted_step_s"] is not None:
        x = LEFT + row["predicted_step_s"] * scale
        parts.append(f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{y - 4}" y2="{y + 26}" stroke="{LINE}" stroke-width="2.5"/>')
    return parts


def picture(width: float, height: float, parts: list[str]) -> str:
    """A file of SVG on white ground."""
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {width} {height}" '
        'font-family="sans-serif">'
    )
    return "\n".join([head, f'<rect width="{width}" height="{height}" fill="white"/>', *parts, "</svg>\n"])


def text(x: float, y: float, words: str, *, anchor: str = "start", size: int = 11, color: str = WORDS) -> str:
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" font-size="{size}" fill="{color}">{escape(words)}</text>'
    )

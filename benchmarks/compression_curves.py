"""Loss curves with and without compression: the demo model on its own text, the same batches in the same order.

    python examples/demo-moe/chats.py out/demo-moe-chats.jsonl
    python benchmarks/compression_curves.py --steps 2000 --figure docs/figures/compression_curves.svg

Every variant is a run of `antiphon train --nproc 2` with the experts on both ranks, so gradients of attention and rows
of experts both travel. A gap is that of a variant's loss to the uncompressed one's: at the end, as the mean of the last
tenth of the steps, and on the held-out documents. Small differences of rounding grow with the steps, so another seed of
the uncompressed run shows which gaps mean nothing.
"""

import argparse
import statistics
import subprocess
import sys
from pathlib import Path

from antiphon.report.charts import BATCH_COLOURS, Axis, ChartLine, LineChart
from antiphon.report.draw import draw
from antiphon.report.run import RunRecord, read_run

FILE = Path(__file__).resolve().parents[1] / "examples" / "demo-moe" / "train.toml"
PLAIN = "uncompressed"
VARIANTS = {
    PLAIN: (),
    "gradients in BF16": ("communication.gradients=bfloat16",),
    "+ rows in FP8": ("communication.gradients=bfloat16", "communication.activations=float8"),
    "uncompressed, another seed": ("seed=1",),
}
LEGEND_X = (400, 540, 660)
BLOCKS = 50  # points of a curve, each the mean of a block of steps


def train(folder: Path, steps: int, batch: int, length: int, changes: tuple[str, ...]) -> RunRecord:
    """A run from its first step, or the rest of one that was stopped."""
    settings = [
        f"steps={steps}",
        f"batch={batch}",
        f"sequence_length={length}",
        "parallel.expert=2",
        "output.log_every=5",
        f"output.evaluate_every={steps}",
        f"output.folder={folder}",
        *changes,
    ]
    command = [sys.executable, "-m", "antiphon.cli.main", "train", str(FILE), "--nproc", "2"]
    subprocess.run([*command, *(part for each in settings for part in ("--set", each))], check=True)
    return read_run(folder)


def end_loss(record: RunRecord) -> float:
    losses = record.curve("loss")[1]
    return statistics.fmean(losses[-max(1, len(losses) // 10) :])


def figure(records: dict[str, RunRecord]) -> str:
    """A file of SVG: each variant's loss minus the uncompressed run's, in blocks of steps."""
    steps, plain = records[PLAIN].curve("loss")
    size = max(1, len(steps) // BLOCKS)
    lines = []
    for (name, record), colour in zip(records.items(), BATCH_COLOURS, strict=False):
        if name == PLAIN:
            continue
        gaps = [loss - base for loss, base in zip(record.curve("loss")[1], plain, strict=True)]
        ends = range(size, len(gaps) + 1, size)
        x = tuple(float(steps[end - 1]) for end in ends)
        y = tuple(statistics.fmean(gaps[end - size : end]) for end in ends)
        lines.append(ChartLine(name=name, colour=colour, x=x, y=y))
    chart = LineChart(
        x=Axis(title="Step"),
        y=Axis(title="Loss minus the uncompressed run's (nats a token)", low=None),
        lines=tuple(lines),
        height=340,
    )
    svg = draw("compression", "Loss with compression", "", chart).svg
    svg = svg.replace("<svg ", '<svg xmlns="http://www.w3.org/2000/svg" width="960" font-family="sans-serif" ', 1)
    names = "".join(
        f'<text x="{x}" y="16" fill="{line.colour}">{line.name}</text>' for x, line in zip(LEGEND_X, lines, strict=True)
    )
    style = "<style>.grid { stroke: #e5e5e5 } .soft { fill: #555 }</style>"
    return svg.replace(">", f'>{style}<rect width="960" height="340" fill="white"/>{names}', 1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--batch", type=int, default=4, help="sequences of a step")
    parser.add_argument("--sequence-length", type=int, default=128)
    parser.add_argument("--work", type=Path, default=Path("out/compression-curves"), help="folder of the runs")
    parser.add_argument("--figure", type=Path, help="write this SVG")
    asked = parser.parse_args()
    records = {
        name: train(asked.work.resolve() / str(number), asked.steps, asked.batch, asked.sequence_length, changes)
        for number, (name, changes) in enumerate(VARIANTS.items())
    }
    base = records[PLAIN]
    print("| variant | loss at the end | gap | held-out loss | gap | MiB a step |\n|---|---|---|---|---|---|")
    for name, record in records.items():
        end, held_out = end_loss(record), record.held_out[-1][1]
        sent = sum(record.mean("collective_bytes").values()) / 2**20
        others = any(change.startswith("seed=") for change in VARIANTS[name])  # a seed holds out other documents
        held_out_gap = "" if others else f"{held_out - base.held_out[-1][1]:+.4f}"
        print(f"| {name} | {end:.4f} | {end - end_loss(base):+.4f} | {held_out:.4f} | {held_out_gap} | {sent:.1f} |")
    if asked.figure is not None:
        asked.figure.write_text(figure(records), encoding="utf-8")


if __name__ == "__main__":
    main()

"""Credits ahead of bulk data, or behind it: the M2N library over tcp between two nodes of a cluster in a box.

    python benchmarks/box_m2n.py --mbit 100,400 --json out/box_m2n.json --svg docs/figures/m2n_priority.svg

A sender on node 0 writes one message at a time to node 1 and waits for its credit. Meanwhile node 1 floods node 0, so
that the credits share their way with bulk data (MegaScale-Infer, section 5: acknowledgements queue behind data). Three
cases: no flood; a flood with credits marked, as the library does by default; the same flood with unmarked credits.
"""

import argparse
import json
import statistics
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from xml.sax.saxutils import escape

from antiphon import _m2n
from antiphon.base.errors import PeerLost
from antiphon.base.progress import progress
from antiphon.base.system import cpu_name
from antiphon.base.units import format_bytes, format_seconds
from antiphon.bench.box import Box, box_unavailable
from antiphon.cli.output import provenance
from antiphon.comm.m2n.rendezvous import Rendezvous

PORT = 7710
PATIENCE_S = 60.0
FLOOD_BYTES, FLOOD_SLOTS = 256 * 1024, 8
CASES = {"no flood": (False, True), "credits ahead": (True, True), "credits behind": (True, False)}
COLOURS = {"no flood": "#7f7f7f", "credits ahead": "#3b6fb6", "credits behind": "#c0504d"}


@dataclass(frozen=True, kw_only=True)
class Part:
    """One process in the box: `measure` and `sink` are a pair, `flood` and `drain` another."""

    role: str
    address: str  # its own node's
    meeting: str
    message_bytes: int
    rounds: int
    marked: bool
    flooded: bool

    def endpoint(self) -> _m2n.Endpoint:
        options = _m2n.TransportOptions()
        if not self.marked:
            options.credit_type_of_service = 0
            options.credit_priority = 0
        return _m2n.Endpoint(self.role, "tcp", host=self.address, options=options)


def receive(part: Part, slots: int, slot_bytes: int) -> None:
    """Release whatever arrives, until the sender goes."""
    endpoint = part.endpoint()
    inbox = endpoint.inbox(1, slots, slot_bytes)
    Rendezvous(part.meeting, timeout_s=PATIENCE_S).publish(part.role, endpoint.ticket(inbox))
    inbox.wait_connected(1, PATIENCE_S)
    with suppress(PeerLost):
        while True:
            if (step := inbox.wait_complete(PATIENCE_S)) is not None:
                inbox.release(step)


def measure(part: Part) -> None:
    """Times from the write to the credit; prints them."""
    meeting = Rendezvous(part.meeting, serve=True, timeout_s=PATIENCE_S)
    endpoint = part.endpoint()
    outbox = endpoint.connect(meeting.collect(["sink"], PATIENCE_S)["sink"], 0, PATIENCE_S)
    if part.flooded:
        meeting.collect(["flood"], PATIENCE_S)
    payload = bytes(part.message_bytes)
    times = []
    for step in range(part.rounds):
        started = time.perf_counter()
        outbox.send(step, payload, participants=1, timeout_s=PATIENCE_S)
        outbox.wait_credits(1, PATIENCE_S)
        times.append(time.perf_counter() - started)
    print(json.dumps(times), flush=True)


def flood(part: Part) -> None:
    """As much as the wire takes, until stopped."""
    meeting = Rendezvous(part.meeting, timeout_s=PATIENCE_S)
    endpoint = part.endpoint()
    outbox = endpoint.connect(meeting.collect(["drain"], PATIENCE_S)["drain"], 0, PATIENCE_S)
    payload, step = bytes(FLOOD_BYTES), 0
    while True:
        outbox.send(step, payload, participants=1, timeout_s=PATIENCE_S)
        step += 1
        if step == 4 * FLOOD_SLOTS:  # credits have come back: the wire is as full as it will be
            meeting.publish("flood", b"under way")


def run_part(part: Part) -> None:
    if part.role == "measure":
        measure(part)
    elif part.role == "flood":
        flood(part)
    elif part.role == "sink":
        receive(part, 1, part.message_bytes)
    else:
        receive(part, FLOOD_SLOTS, FLOOD_BYTES)


def run_case(mbit: float, message_bytes: int, rounds: int, name: str) -> list[float]:
    """The times of one case, in a box of its own."""
    flooded, marked = CASES[name]
    with Box(num_nodes=2, mbit=mbit) as box:

        def command(role: str, node: int) -> list[str]:
            part = {
                "role": role,
                "address": box.address(node),
                "meeting": f"{box.address(0)}:{PORT}",
                "message_bytes": message_bytes,
                "rounds": rounds,
                "marked": marked,
                "flooded": flooded,
            }
            return [sys.executable, __file__, "--part", json.dumps(part)]

        env = {"PYTHONPATH": str(Path.cwd())}
        others = [("sink", 1)] + ([("drain", 0), ("flood", 1)] if flooded else [])
        for role, node in others:
            box.start(node, command(role, node), env=env, stdout=subprocess.DEVNULL)
        done = box.run(0, command("measure", 0), timeout_s=120.0, env=env)
    if done.returncode != 0:
        raise SystemExit(f"{name} at {mbit:g} Mbit/s failed:\n{done.stderr[-2000:]}")
    times: list[float] = json.loads(done.stdout.splitlines()[-1])
    return times


def percentile(times: list[float], share: float) -> float:
    return sorted(times)[min(len(times) - 1, int(share * len(times)))]


def sweep(rates: list[float], sizes: list[int], rounds: int, repetitions: int) -> list[dict[str, Any]]:
    """Rows for the report; the cases of one rate and size take turns."""
    rows = []
    with progress("cases") as report:
        total, done = len(rates) * len(sizes) * repetitions * len(CASES), 0
        for mbit in rates:
            for size in sizes:
                times: dict[str, list[float]] = {name: [] for name in CASES}
                for _ in range(repetitions):
                    for name in CASES:
                        times[name] += run_case(mbit, size, rounds, name)
                        done += 1
                        report(done, total)
                rows += [
                    {
                        "case": name,
                        "mbit": mbit,
                        "message_bytes": size,
                        "wire_s": size * 8e-6 / mbit,
                        "median_s": statistics.median(found),
                        "p99_s": percentile(found, 0.99),
                        "iterations": len(found),
                    }
                    for name, found in times.items()
                ]
    return rows


def draw(rows: list[dict[str, Any]]) -> str:
    """Bars for the medians, whiskers up to the 99th percentile, one group for each rate and size."""
    groups = list(dict.fromkeys((row["mbit"], row["message_bytes"]) for row in rows))
    height, top, bar, gap = 240, 70, 26, 44
    left, width = 64, 64 + len(groups) * (3 * bar + gap) + 20
    highest = max(row["p99_s"] for row in rows) * 1.05
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height + top + 60}" width="{width}">',
        '<style>text{font:11px sans-serif;fill:#333}</style><rect width="100%" height="100%" fill="#fff"/>',
        '<text x="14" y="20" style="font-weight:bold">From write to credit while the other way is flooded</text>',
        '<text x="14" y="36">bars: median; lines: 99th percentile</text>',
    ]
    for index, name in enumerate(CASES):
        parts.append(f'<rect x="{14 + 120 * index}" y="46" width="12" height="8" fill="{COLOURS[name]}"/>')
        parts.append(f'<text x="{30 + 120 * index}" y="54">{escape(name)}</text>')
    for tick in range(5):
        y = top + height * (1 - tick / 4)
        parts.append(f'<line x1="{left}" x2="{width - 10}" y1="{y:.1f}" y2="{y:.1f}" stroke="#ddd"/>')
        parts.append(f'<text x="{left - 6}" y="{y + 4:.1f}" text-anchor="end">{highest * tick / 4 * 1e3:.0f} ms</text>')
    for number, (mbit, size) in enumerate(groups):
        start = left + 14 + number * (3 * bar + gap)
        chosen = [row for row in rows if (row["mbit"], row["message_bytes"]) == (mbit, size)]
        for index, row in enumerate(chosen):
            x = start + index * bar
            y, tail = (top + height * (1 - row[key] / highest) for key in ("median_s", "p99_s"))
            parts.append(
                f'<rect x="{x}" y="{y:.1f}" width="{bar - 4}" height="{top + height - y:.1f}" '
                f'fill="{COLOURS[row["case"]]}"/>'
                f'<line x1="{x + bar / 2 - 2}" x2="{x + bar / 2 - 2}" y1="{tail:.1f}" y2="{y:.1f}" stroke="#333"/>'
            )
        middle = start + 1.5 * bar
        parts.append(f'<text x="{middle}" y="{top + height + 16}" text-anchor="middle">{format_bytes(size)}</text>')
        parts.append(f'<text x="{middle}" y="{top + height + 30}" text-anchor="middle">{mbit:g} Mbit/s</text>')
    return "\n".join([*parts, "</svg>\n"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mbit", default="100,400")
    parser.add_argument("--bytes", default="16384,65536,262144")
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--svg", type=Path)
    parser.add_argument("--part", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.part:
        run_part(Part(**json.loads(arguments.part)))
        return
    if reason := box_unavailable():
        raise SystemExit(f"no cluster in a box here: {reason}")
    rates = [float(rate) for rate in arguments.mbit.split(",")]
    sizes = [int(size) for size in arguments.bytes.split(",")]
    rows = sweep(rates, sizes, arguments.rounds, arguments.repetitions)
    print("Mbit/s    message  case              median       p99   wire alone")
    for row in rows:
        words = "  ".join(f"{format_seconds(row[key]):>9}" for key in ("median_s", "p99_s", "wire_s"))
        print(f"{row['mbit']:6.0f}  {format_bytes(row['message_bytes']):>9}  {row['case']:<14}  {words}")
    if arguments.json:
        arguments.json.parent.mkdir(parents=True, exist_ok=True)
        found = {"bench": "box_m2n", **provenance(cpu=cpu_name()), "rows": rows}
        arguments.json.write_text(json.dumps(found, indent=1) + "\n")
    if arguments.svg:
        arguments.svg.write_text(draw(rows))


if __name__ == "__main__":
    main()

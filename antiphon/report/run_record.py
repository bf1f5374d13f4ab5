"""What a training run left in its output folder: `run.json` and `metrics.jsonl`, read for its page.

Rejected: taking it from the trainer. A page can be made of a run that was killed, and of one that still runs.
"""

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from antiphon.base.errors import UserError
from antiphon.train.metrics import FILE


@dataclass(frozen=True, kw_only=True)
class RunRecord:
    """`steps`: the logged ones, each a dictionary of metrics. `held_out`: (step, nats a token). `alarms`: (step, text).
    `facts`: `run.json`."""

    facts: dict[str, Any]
    steps: list[dict[str, Any]] = field(default_factory=list)
    held_out: list[tuple[int, float]] = field(default_factory=list)
    alarms: list[tuple[int, str]] = field(default_factory=list)

    def curve(self, name: str) -> tuple[list[int], list[float]]:
        """(steps, values) of a metric that is a number."""
        rows = [row for row in self.steps if name in row]
        return [row["step"] for row in rows], [row[name] for row in rows]

    def mean(self, name: str) -> dict[str, float]:
        """Mean over steps of a metric that is numbers by name; a name that is missing counts as 0. The first logged
        step, which warms up, is left out where there are others."""
        rows = [row[name] for row in self.steps if name in row]
        rows = rows[1:] or rows
        names = dict.fromkeys(key for row in rows for key in row)
        return {key: sum(row.get(key, 0.0) for row in rows) / len(rows) for key in names}

    def median(self, name: str) -> float | None:
        """The median of a metric that is a number; None if no step has it."""
        values = sorted(self.curve(name)[1])
        return values[len(values) // 2] if values else None


def read_run(folder: Path) -> RunRecord:
    """The record of the run whose `output.folder` is `folder`; `UserError` if there is none."""
    try:
        facts = json.loads((folder / FILE).read_text(encoding="utf-8"))
        lines = (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    except (OSError, ValueError) as error:
        raise UserError(f"{folder}: not the output of a training run ({error}): name a run's output.folder") from error
    record = RunRecord(facts=facts)
    for line in lines:
        try:
            row = json.loads(line)
        except ValueError:  # a kill cut it off
            continue
        if "alarm" in row:
            record.alarms.append((row["step"], row["alarm"]))
        elif "held_out_loss" in row:
            record.held_out.append((row["step"], row["held_out_loss"]))
        else:
            record.steps.append(row)
    return record

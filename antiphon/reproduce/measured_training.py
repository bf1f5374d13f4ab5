"""Training that was measured here, beside what the papers print: values of `data/measured_training.toml`.

Each value has the commit and the command that gave it, and how the machine differs from the paper's; the rows of the
papers' files name it. Rejected: running it when a row is asked for. A curve takes an hour, and a row a second.
"""

from dataclasses import dataclass
from functools import cache
from pathlib import Path

from antiphon.base.errors import UserError
from antiphon.specs.checked import did_you_mean, read, read_mapping

FILE = Path(__file__).parent / "data" / "measured_training.toml"


@dataclass(frozen=True, kw_only=True)
class MeasuredRun:
    """`loss`: at its end, mean of its last tenth, nats a token."""

    loss: float
    commit: str
    command: str


@cache
def measured_runs() -> dict[str, MeasuredRun]:
    """By name."""
    return {name: read(MeasuredRun, entry, f"{FILE}: {name}") for name, entry in read_mapping(FILE)["runs"].items()}


def loss_over(name: str, plain: str) -> float:
    """The loss at the end of one run over that of another."""
    runs = measured_runs()
    for each in (name, plain):
        if each not in runs:
            raise UserError(f"{FILE} has no run {each!r}: {did_you_mean(each, runs)}")
    return runs[name].loss / runs[plain].loss

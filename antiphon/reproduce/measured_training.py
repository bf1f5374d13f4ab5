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


def measured_run(name: str) -> MeasuredRun:
    """`UserError` for a name that is not in the file."""
    if name not in measured_runs():
        raise UserError(f"{FILE} has no run {name!r}: {did_you_mean(name, measured_runs())}")
    return measured_runs()[name]


def loss_over(name: str, plain: str) -> float:
    """The loss at the end of one run over that of another."""
    return measured_run(name).loss / measured_run(plain).loss


def origin(name: str, plain: str) -> str:
    """What a row says of two runs: the command of the first, and of the other where it was not the same one."""
    first, second = measured_run(name), measured_run(plain)
    text = f"measured at commit {first.commit}: {first.command}"
    return text if second.command == first.command else f"{text}; over {second.command}"

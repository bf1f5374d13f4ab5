"""Ablations that were measured here, beside what the papers print: values of `data/measured_serving.toml`.

Each value has the machine, the commit and the command that gave it, and how that differs from the paper's; rows of the
papers' files name it, and get all of that as their note. Rejected: running them when a row is asked for. They need
minutes, and a machine on which nothing else runs.
"""

from dataclasses import dataclass
from functools import cache
from pathlib import Path

from antiphon.base.errors import UserError
from antiphon.specs.checked import did_you_mean, read, read_mapping

SERVING_FILE = Path(__file__).parent / "data" / "measured_serving.toml"


@dataclass(frozen=True, kw_only=True)
class MeasuredEffect:
    """`value`: a ratio or a share. `differs`: how machine and case are others than the paper's."""

    value: float
    machine: str
    commit: str
    command: str
    differs: str

    @property
    def note(self) -> str:
        """What a row says of it."""
        return f"measured at commit {self.commit}: {self.command}; {self.machine}. {self.differs}"


@cache
def _effects() -> dict[str, MeasuredEffect]:
    mapping = read_mapping(SERVING_FILE)
    shared = mapping.get("shared", {})
    return {
        name: read(MeasuredEffect, {**shared.get(entry.pop("like", ""), {}), **entry}, f"{SERVING_FILE}: {name}")
        for name, entry in mapping["effects"].items()
    }


def measured_effect(name: str) -> MeasuredEffect:
    """`UserError` for a name that is not in the file."""
    if name not in _effects():
        raise UserError(f"{SERVING_FILE} has no effect {name!r}: {did_you_mean(name, _effects())}")
    return _effects()[name]

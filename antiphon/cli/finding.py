"""One line of what `antiphon doctor` reports."""

from dataclasses import dataclass
from typing import Literal

Status = Literal["ok", "info", "missing", "broken"]


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One line of the report. `mend` says what to do about it, empty when there is nothing to do."""

    area: str
    name: str
    status: Status
    detail: str
    mend: str = ""

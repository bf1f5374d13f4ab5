"""What the small programs share. It lies beside them, so that any environment's Python finds it.

Each is run as `PROGRAM URL MODEL`, in an environment with its library; an exception or a failed check ends it with exit
code 1.
"""

import sys
from collections.abc import Callable
from typing import Any

from pydantic import BaseModel, ConfigDict

URL, MODEL = sys.argv[1:]
OPENAI_URL = f"{URL}/v1"
HELLO: Any = [{"role": "user", "content": "bada do"}]
TOO_LONG: Any = [{"role": "user", "content": "bada do " * 20_000}]


class Verdict(BaseModel):
    """An opinion, which models are asked for."""

    model_config = ConfigDict(extra="forbid")
    good: bool


def check(holds: bool, what: str) -> None:
    """Say that `what` is fine; exit code 1 if it does not hold."""
    if not holds:
        raise SystemExit(f"failed: {what}")
    print(f"{what}: ok")


def check_refused(call: Callable[[], object], error: type[Exception], what: str, words: str = "") -> Any:
    """The error that `call` must end with, and that must have these words in it."""
    try:
        call()
    except error as caught:
        check(words in str(caught), what)
        return caught
    raise SystemExit(f"failed: {what}: it was not refused")

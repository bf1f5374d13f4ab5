"""Tests wait for what another thread or process does."""

import time
from collections.abc import Callable

PATIENCE_S = 120.0  # for what comes at once, on a machine that is busy with other things


def wait_until(condition: Callable[[], bool], what: str, patience_s: float = PATIENCE_S) -> None:
    """Look again and again until `condition` holds."""
    deadline = time.monotonic() + patience_s
    while not condition():
        assert time.monotonic() < deadline, f"not within {patience_s:.0f} s: {what}"
        time.sleep(0.005)

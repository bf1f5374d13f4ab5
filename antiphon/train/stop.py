"""Ends a run at the end of a step: at SIGTERM, at Ctrl-C, or when its time is up.

All ranks agree behind each step, so that they save the same one. A second signal ends the process at once. Launchers
pass on what the terminal sent to the ranks as well, so with several ranks the same signal within a second is one.
"""

import os
import signal
import threading
import time
from types import FrameType
from typing import Any

import torch

from antiphon.base.logging import get_logger
from antiphon.comm.collectives import AllReduce, run
from antiphon.comm.mesh import Group
from antiphon.train.device import HOST

_SAME_S = 1.0
MAX_HOURS = "--max-hours"
_REASONS = ("SIGTERM", "SIGINT", MAX_HOURS)
_log = get_logger("train")


class StopRequest:
    """Listens between `__enter__` and `__exit__`. `max_hours`: from now on; None: no limit."""

    def __init__(self, ranks: Group, max_hours: float | None = None) -> None:
        self._ranks = ranks
        self._deadline_s = None if max_hours is None else time.monotonic() + 3600 * max_hours
        self._received: dict[str, float] = {}
        self._before: dict[int, Any] = {}

    def __enter__(self) -> "StopRequest":
        if threading.current_thread() is threading.main_thread():  # elsewhere Python takes no handlers
            for name in _REASONS[:2]:
                number = getattr(signal, name)
                self._before[number] = signal.signal(number, self._receive)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _receive(self, number: int, _: FrameType | None) -> None:
        name, now_s = signal.Signals(number).name, time.monotonic()
        if self._ranks.size > 1 and now_s - self._received.get(name, -_SAME_S) < _SAME_S:
            return
        if self._received:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
            return
        self._received[name] = now_s
        if self._ranks.index == 0:
            _log.warning("%s: the run saves and ends behind this step; once more ends it at once", name)

    def reason(self) -> str:
        """Why to end now; empty: go on. All ranks call it together and get the same."""
        is_late = self._deadline_s is not None and time.monotonic() > self._deadline_s
        flags = [name in self._received or (name == MAX_HOURS and is_late) for name in _REASONS]
        if self._ranks.size > 1:
            own = torch.tensor(flags, dtype=torch.float32, device=HOST)
            flags = run(AllReduce(self._ranks, "barrier"), own).bool().tolist()
        return next((name for name, is_set in zip(_REASONS, flags, strict=True) if is_set), "")

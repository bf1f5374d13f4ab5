"""What the system refused the engine's thread where nothing expects it: one round is lost, and the next begins.

The calls that are known to fail have their own answers, near them (`fleet`, `workforce`). This is for the others: an
error with no answer costs the round in which it came. If no worker can be heard any more, because every round ends that
way, the engine gives up after `_GIVE_UP_S`. Rejected: to end with the first such error, as with a bug. A system that
has no descriptor or no memory for a moment would then take all streams with it.
"""

import time

from antiphon.base.errors import ResourceError
from antiphon.base.logging import Occasional, get_logger

_log = get_logger("engine")
_GIVE_UP_S = 30.0
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.01, 0.5
_SAY_S = 10.0


class Setbacks:
    """Used by the engine's thread only."""

    def __init__(self) -> None:
        self._since_s: float | None = None  # the first one after the last progress
        self._pause_s = 0.0
        self._saying = Occasional(_SAY_S)

    def note(self, error: OSError | MemoryError) -> None:
        """Call while it is handled. Pauses when there were others before, at most half a second. `ResourceError` when
        it has gone on for too long."""
        now_s = time.monotonic()
        if (num_unsaid := self._saying.count()) is not None:
            others = f", and {num_unsaid} others since the last that was said" if num_unsaid else ""
            _log.exception("the system refused the engine something: the round is lost, the next begins%s", others)
        if self._since_s is None:
            self._since_s = now_s
        elif now_s - self._since_s > _GIVE_UP_S:
            raise ResourceError(
                f"for {_GIVE_UP_S:.0f} s the system has refused what the engine needs ({error or type(error).__name__})"
            ) from error
        time.sleep(self._pause_s)
        self._pause_s = min(max(2 * self._pause_s, _FIRST_PAUSE_S), _LONGEST_PAUSE_S)

    def note_progress(self) -> None:
        """A round ended well, or a worker was heard in it."""
        self._since_s, self._pause_s = None, 0.0

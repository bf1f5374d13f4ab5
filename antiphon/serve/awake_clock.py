"""A clock that runs while this process does: for how long a worker has been silent, stopped or hanging.

Somebody may stop the whole server and let it go on later: ^Z, a benchmark that gives the cores to another engine, a
machine that is suspended. Its workers must not be found hanging then. So what passes between two ticks counts for at
most a second. Rejected: the system's clock of process time, which stands still while the process only waits.
"""

import time

_LONGEST_TICK_S = 1.0


class AwakeClock:
    """`tick` more often than once a second, in one thread; the rest may be used by any."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.paused = False  # the clock stands still: the workers were stopped on purpose
        self._ticked_s = time.monotonic()

    def tick(self) -> None:
        """Let the time since the last tick count."""
        ticked_s = time.monotonic()
        if not self.paused:
            self.now_s += min(ticked_s - self._ticked_s, _LONGEST_TICK_S)
        self._ticked_s = ticked_s

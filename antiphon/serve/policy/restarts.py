"""When a worker that died is started again. One rule, for a worker that serves and for one that never came up:

1. The first death in a row is answered at once: a single death costs no more than the start-up.
2. After that the worker waits 1, 2, 4, … up to 30 s, and goes on trying without end. The count begins anew after a step
   that was finished, after one that failed (its requests answer for it, see `suspects`), and after ten seconds of being
   ready.
3. A worker that has been ready once and is killed from outside waits at most 1 s. Nothing says that it is broken, and
   streams wait for it. The kernel kills by the same signal when memory is short; then each try costs one loading. The
   same holds if the system refuses another process: a try costs next to nothing then.
4. A worker that has never been ready is given up after six deaths in a row: no client is served yet, and the person who
   started the server should hear of it.

Rejected: giving up after a number of deaths once the server serves (six kills of a worker would end serving for good),
and one back-off for all deaths (half a minute of waiting after the last of many kills).
"""

_FIRST_DELAY_S = 0.0
_SECOND_DELAY_S = 1.0  # before the second restart in a row; twice that before the next
_LONGEST_DELAY_S = 30.0
_LONGEST_DELAY_AFTER_KILL_S = 1.0
_SOUND_S = 10.0  # ready for this long: the next death is the first again
_MAX_FIRST_DEATHS = 5  # in a row, of a worker that has never been ready


class Restarts:
    """The deaths of one worker in a row. Times are seconds on one clock."""

    def __init__(self) -> None:
        self.num_deaths = 0
        self.last_reason = ""
        self.due_s: float | None = None  # when it is to be started again; None: it has been started
        self._ready_s: float | None = None
        self._was_ready = False
        self._delay_s = 0.0

    @property
    def hopeless(self) -> bool:
        """It has died too often without ever having been ready."""
        return not self._was_ready and self.num_deaths > _MAX_FIRST_DEATHS

    def note_ready(self, now_s: float) -> None:
        self._was_ready = True
        self._ready_s = now_s

    def begin_count(self) -> None:
        """The worker works: what came before does not count any more."""
        self.num_deaths = 0

    def note_death(self, now_s: float, reason: str, *, from_outside: bool) -> None:
        """It died, or could not be started; `due_s` then says when to start it. `from_outside`: it
        was killed, or the system did not let it start."""
        if self._ready_s is not None and now_s - self._ready_s >= _SOUND_S:
            self.begin_count()
        self._ready_s = None
        self.num_deaths += 1
        self.last_reason = reason
        self._delay_s = min(2.0 * self._delay_s, _LONGEST_DELAY_S) if self.num_deaths > 2 else _SECOND_DELAY_S
        longest_s = _LONGEST_DELAY_AFTER_KILL_S if from_outside and self._was_ready else _LONGEST_DELAY_S
        self.due_s = now_s + (min(self._delay_s, longest_s) if self.num_deaths > 1 else _FIRST_DELAY_S)

    def note_start(self) -> None:
        self.due_s = None

    def describe(self, now_s: float) -> str:
        """``restart in 3.2 s, died 4 times: killed by SIGKILL``, or ``loading, …`` once it has been started."""
        doing = "loading" if self.due_s is None else f"restart in {max(0.0, self.due_s - now_s):.1f} s"
        if not self.num_deaths:
            return doing
        times = "once" if self.num_deaths == 1 else f"{self.num_deaths} times"
        return f"{doing}, died {times}: {self.last_reason}"

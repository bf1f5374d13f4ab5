"""Two micro-batches of a step in turns: while one waits for an exchange, the other one computes.

    turns.together([first, second])      # each a forward and a backward of its own
    ...
    turns.give_way()                     # within them, before each wait

Each runs in a thread of its own, one at a time: a thread goes on until it gives way or ends. So which one runs when
depends on the schedule and not on time, and all ranks begin their collectives in the same order. Others call this
dual-batch overlap.

Rejected: generators. Backward runs within autograd, which cannot be left and entered again.
"""

import threading
from collections.abc import Callable, Sequence


class Turns:
    """The turns of one model. `together` is called by the thread that trains, `give_way` by those it starts; by others
    it does nothing."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._working: list[int] = []  # those that have not ended; the first one's turn it is
        self._own = threading.local()
        self._is_over = False

    def together(self, works: Sequence[Callable[[], None]]) -> None:
        """Until all have ended. Raises what the first one raised that failed; the others go on to their end."""
        errors: list[BaseException] = []
        self._working, self._is_over = list(range(len(works))), False

        def run(number: int, work: Callable[[], None]) -> None:
            self._own.number = number
            try:
                self._await_turn(number)
                work()
            except BaseException as error:
                errors.append(error)
            finally:
                with self._changed:
                    self._working.remove(number)
                    self._changed.notify_all()

        threads = [
            threading.Thread(target=run, args=(number, work), name=f"micro-batch {number}", daemon=True)
            for number, work in enumerate(works)
        ]
        for thread in threads:
            thread.start()
        try:
            for thread in threads:
                thread.join()
        except BaseException:  # Ctrl-C: Python cannot end while they compute
            self._is_over = True
            for thread in threads:
                thread.join()
            raise
        if errors:
            raise errors[0]

    def give_way(self) -> None:
        """Let the others go on until they give way in their turn."""
        number = getattr(self._own, "number", None)
        if number is None:
            return
        with self._changed:
            self._working.append(self._working.pop(0))
            self._changed.notify_all()
        self._await_turn(number)
        if self._is_over:
            raise RuntimeError("the step was given up")

    def _await_turn(self, number: int) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._working[0] == number)

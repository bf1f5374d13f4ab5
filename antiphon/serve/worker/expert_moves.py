"""How experts move to a worker while it serves: it loads what a coming placement wants of it, and lets go later.

    prepare   a thread reads the missing experts from the checkpoint into free slots, a part of the time
    prepared  they count from now on; rows may come by the old map and by the new one
    retire    the engine says that no more rows come by older maps: their slots are free again

Slots are given and freed on the worker's own thread only; the loading thread writes weights that are not read yet.
Loading competes with batches for cores and memory. After each expert the thread rests four times as long as that took.
So it takes the same part of a fast worker and of a slow one, whose experts take longer to load.

Rejected: a copy from another worker. The checkpoint is mapped into memory and shared by all processes of a machine.
Rejected: a limit in bytes/s. A worker with a fifth of a core never reached it, and its steps took 3.3 times as long.
Rejected: a low priority for the thread. It holds the interpreter's lock at times, and batches would wait for it.
"""

import time
import traceback
from threading import Event, Thread

from antiphon import _native
from antiphon.base.errors import UserError
from antiphon.base.logging import get_logger
from antiphon.models.expert_half import FREE, ExpertHalf, LoadExpert
from antiphon.serve.worker.expert_prefetch import PrefetchSlots
from antiphon.specs.placement import ExpertPlacement

_log = get_logger("worker")
LOADING_SHARE = 0.2  # of the time that a move takes; the thread rests in between


class ExpertMoves:
    """`load` reads an expert into a slot. One placement is prepared at a time. Not thread-safe.

    `num_prefetched`: of the slots of each layer, the last ones are for copies that no placement names."""

    def __init__(
        self, index: int, half: ExpertHalf, load: LoadExpert, placement: ExpertPlacement, num_prefetched: int = 0
    ) -> None:
        self._index = index
        self._half = half
        self._load = load
        self.prefetched = PrefetchSlots(half, load, num_prefetched)
        self._placements = [placement]  # by which rows may come, oldest first
        self._coming: ExpertPlacement | None = None
        self._wanted: list[tuple[int, int, int]] = []  # layer, expert, slot
        self._thread: Thread | None = None
        self._stop = Event()
        self._failure: str | None = None

    def prepare(self, placement: ExpertPlacement) -> None:
        """Begin to load what `placement` wants here and is missing; forgets one that was being prepared."""
        self._stop_loading()
        del self._placements[1:]  # they were given up: else the engine would have moved on to them
        self._free_unnamed()
        self._stop = Event()
        self._coming, self._failure, self._wanted = placement, None, []
        for layer, ids in placement.experts_of(self._index).items():
            if layer not in self._half.expert_ids:
                continue  # of another stage
            own = self._own_slots(layer)
            free = [slot for slot, expert in enumerate(own) if expert == FREE]
            missing = [expert for expert in ids if expert not in own]
            if len(missing) > len(free):
                self._failure = f"layer {layer}: {len(missing)} experts are to come, {len(free)} slots are free"
                return
            self._wanted += [(layer, expert, slot) for expert, slot in zip(missing, free, strict=False)]
        thread = Thread(target=self._run, args=(self._stop,), name="expert-moves", daemon=True)
        try:
            thread.start()
        except RuntimeError as error:  # the system has no room for a thread
            self._failure = str(error)
            return
        self._thread = thread

    def _run(self, stop: Event) -> None:
        _native.work_alone()  # packing weights must not take the kernels' threads from the running batch
        try:
            for layer, expert, slot in self._wanted:
                started = time.monotonic()
                self._load(layer, expert, slot)
                if stop.wait((time.monotonic() - started) * (1 / LOADING_SHARE - 1)):
                    return
        except (UserError, OSError) as error:
            self._failure = str(error)
        except Exception as error:  # whatever it is, the experts are not there
            _log.error("loading experts failed:\n%s", traceback.format_exc())
            self._failure = f"{type(error).__name__}: {error}"

    def finished(self) -> tuple[int, str | None] | None:
        """(version, why it could not be prepared or None) when a preparation has ended, once; its experts count now."""
        coming = self._coming
        if coming is None or (self._thread is not None and self._thread.is_alive()):
            return None
        self._coming, self._thread = None, None
        if self._failure is None:
            for layer, expert, slot in self._wanted:
                self._half.hold(layer, slot, expert)
            self._placements.append(coming)
        return coming.version, self._failure

    @property
    def under_way(self) -> bool:
        """A preparation has not been reported as ended."""
        return self._coming is not None

    def named(self, version: int) -> ExpertPlacement:
        """A placement that this process has prepared and did not let go."""
        return next(each for each in self._placements if each.version == version)

    def retire(self, version: int) -> None:
        """No rows come any more by placements older than `version`: what only they name is let go."""
        self._placements = [each for each in self._placements if each.version >= version]
        self._free_unnamed()

    def _free_unnamed(self) -> None:
        """Let go what none of the placements names."""
        kept = [each.experts_of(self._index) for each in self._placements]
        for layer in self._half.expert_ids:
            for slot, expert in enumerate(self._own_slots(layer)):
                if expert != FREE and not any(expert in of_layers[layer] for of_layers in kept):
                    self._half.hold(layer, slot, FREE)

    def _own_slots(self, layer: int) -> tuple[int, ...]:
        """What is in the slots that placements fill."""
        ids = self._half.expert_ids[layer]
        return ids[: len(ids) - self.prefetched.num_slots]

    def check(self, versions: tuple[int, int]) -> None:
        """Rows came by placements from the first to the second version: a bug unless this worker knows them."""
        known = self._placements[0].version, self._placements[-1].version
        message = f"rows by placements {versions}, {known} are held"
        assert known[0] <= versions[0], message
        assert versions[1] <= known[1], message

    def close(self) -> None:
        """Stop loading; blocks until the expert under way is read."""
        self._stop_loading()
        self.prefetched.close()

    def _stop_loading(self) -> None:
        self._stop.set()
        if self._thread is not None:
            self._thread.join()
            self._thread = None

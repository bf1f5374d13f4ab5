"""What the engine says, read by a thread of its own: an `Abort` must reach a worker that waits for a peer.

Everything else waits in a queue until the worker asks. If the engine goes away, however that happens, the socket closes
and the process ends: by itself at its next order, or by this thread if it is loading, computing or waiting then.
"""

import os
import queue
import threading
import time
from collections.abc import Callable

from antiphon.base.errors import PeerLost
from antiphon.serve.worker.channel import Channel
from antiphon.serve.worker.messages import Abort

_FOREVER_S = 365.0 * 86400
_LAST_WORDS_S = 1.0  # to exit in order, once the engine is gone


class Orders:
    """`start` begins to read; from then on nobody else may. `on_abort` is called on the reading thread."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._queue: queue.SimpleQueue[object] = queue.SimpleQueue()
        self._lost: PeerLost | None = None
        self.on_abort: Callable[[int], None] | None = None

    def start(self) -> None:
        threading.Thread(target=self._read, name="orders", daemon=True).start()

    def _read(self) -> None:
        try:
            while True:
                message = self._channel.receive(_FOREVER_S)
                if isinstance(message, Abort):
                    if self.on_abort is not None:
                        self.on_abort(message.epoch)
                else:
                    self._queue.put(message)
        except PeerLost as error:
            self._lost = error
            self._queue.put(None)
            time.sleep(_LAST_WORDS_S)
            os._exit(0)

    def next(self) -> object:
        """The next order; waits for it. `PeerLost` when the engine is gone."""
        return self._checked(self._queue.get())

    def poll(self) -> object | None:
        """An order if there is one."""
        try:
            return self._checked(self._queue.get_nowait())
        except queue.Empty:
            return None

    def _checked(self, message: object | None) -> object:
        if message is None:
            assert self._lost is not None, "only the end of the channel is queued as None"
            raise self._lost
        return message

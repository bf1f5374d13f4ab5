"""Wakes a thread that sleeps on sockets: a socket pair that its selector watches like any other."""

import contextlib
import socket


class WakeUp:
    """`wake` from any thread; the rest is for the thread that sleeps."""

    def __init__(self) -> None:
        self._receiver, self._sender = socket.socketpair()
        self._receiver.setblocking(False)
        self._sender.setblocking(False)

    def fileno(self) -> int:
        """Becomes readable when somebody calls `wake`."""
        return self._receiver.fileno()

    def wake(self) -> None:
        with contextlib.suppress(OSError):  # many wake-ups are pending, or it is closed and nobody sleeps
            self._sender.send(b"x")

    def drain(self) -> None:
        """Forget the wake-ups so far."""
        with contextlib.suppress(BlockingIOError):
            while self._receiver.recv(4096):
                pass

    def close(self) -> None:
        self._receiver.close()
        self._sender.close()

"""Framed messages between the engine and one worker: four bytes of length, then MessagePack.

MessagePack through `msgspec` decodes into declared types only, so bytes from a peer can never run code (rejected:
pickle). One channel has one reader thread at most; the socket never blocks, so reading and writing do not disturb each
other. Several threads may `send`, or one may `enqueue`.

Who may wait sends with `send`. Who may not (the engine's thread, which serves all workers) uses `enqueue`: what the
kernel does not take now stays here, until `flush` is called because the socket takes more. Rejected: a thread for each
channel; the one that enqueues would still have to ask whether the peer reads at all.
"""

import contextlib
import errno
import socket
import struct
import threading
import time
from typing import Any

import msgspec

from antiphon.base.errors import PeerLost, PeerTimeout
from antiphon.base.system import wait_ready

MAX_MESSAGE_BYTES = 1 << 30
MAX_UNSENT_BYTES = 1 << 28
_LENGTH = struct.Struct("<I")
_NO_MEMORY = (errno.ENOBUFS, errno.ENOMEM)  # of the kernel: it may have some in a moment
_PAUSE_S = 0.001


class Channel:
    """One end of a stream socket; `peer` is the other end's name in errors."""

    def __init__(
        self, stream: socket.socket, peer: str, receives: Any, max_message_bytes: int = MAX_MESSAGE_BYTES
    ) -> None:
        self._socket = stream
        self._socket.setblocking(False)
        self.peer = peer
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder(receives)
        self._buffer = bytearray()
        self._unsent = bytearray()
        self._sending = threading.Lock()
        self._taken_s = 0.0
        self._max_message_bytes = max_message_bytes

    def speak(self, peer: str, receives: Any) -> None:
        """From the next message on, expect others: the opening of the connection is over."""
        self.peer = peer
        self._decoder = msgspec.msgpack.Decoder(receives)
        self._max_message_bytes = MAX_MESSAGE_BYTES

    def fileno(self) -> int:
        return self._socket.fileno()

    def enqueue(self, message: msgspec.Struct) -> None:
        """Send a message as far as the kernel takes it, and keep the rest; never waits.

        `PeerLost` if the peer is gone, or if it leaves `MAX_UNSENT_BYTES` of earlier messages unread."""
        if len(self._unsent) > MAX_UNSENT_BYTES:
            raise PeerLost(self.peer, f"does not read: {len(self._unsent)} bytes wait, at most {MAX_UNSENT_BYTES} may")
        if not self._unsent:
            self._taken_s = time.monotonic()
        payload = self._encoder.encode(message)
        self._unsent += _LENGTH.pack(len(payload))
        self._unsent += payload
        self.flush()

    def flush(self) -> bool:
        """Send what was kept, as far as the kernel takes it; never waits. True: nothing is left."""
        while self._unsent:
            try:
                num_taken = self._socket.send(self._unsent)
            except (BlockingIOError, InterruptedError):
                return False
            except OSError as error:
                self._raise_unless_passing(error)
                return False
            del self._unsent[:num_taken]
            self._taken_s = time.monotonic()
        return True

    @property
    def has_unsent(self) -> bool:
        return bool(self._unsent)

    @property
    def stalled_s(self) -> float:
        """For how long the peer has taken nothing of what waits for it; 0 if nothing waits."""
        return time.monotonic() - self._taken_s if self._unsent else 0.0

    def send(self, message: msgspec.Struct, timeout_s: float = 30.0) -> None:
        """Hand a message to the kernel; blocks while the peer does not read. `PeerLost` if it is gone; after
        `PeerTimeout` the rest of the message is kept, and goes out before any other."""
        deadline = time.monotonic() + timeout_s
        with self._sending:
            self.enqueue(message)
            while not self.flush():
                remaining = deadline - time.monotonic()
                if remaining <= 0 or not wait_ready(self._socket, remaining, to_write=True):
                    raise PeerTimeout("send", [self.peer], timeout_s)

    def receive(self, timeout_s: float) -> Any:
        """The next message; `PeerTimeout` when none came in time, `PeerLost` when the peer closed or died."""
        deadline = time.monotonic() + timeout_s
        while (message := self.poll()) is None:
            remaining = deadline - time.monotonic()
            if remaining <= 0 or not wait_ready(self._socket, remaining):
                raise PeerTimeout("receive", [self.peer], timeout_s)
        return message

    def poll(self) -> Any | None:
        """A message if one is complete, else None; never waits. `PeerLost` when the peer closed or died."""
        while True:
            if len(self._buffer) >= _LENGTH.size:
                (length,) = _LENGTH.unpack_from(self._buffer)
                if length > self._max_message_bytes:
                    raise PeerLost(self.peer, f"sent a frame of {length} bytes, more than {self._max_message_bytes}")
                if len(self._buffer) >= _LENGTH.size + length:
                    payload = bytes(self._buffer[_LENGTH.size : _LENGTH.size + length])
                    del self._buffer[: _LENGTH.size + length]
                    return self._decode(payload)
            if not self._fill():
                return None

    def _decode(self, payload: bytes) -> Any:
        try:
            return self._decoder.decode(payload)
        except (msgspec.DecodeError, RecursionError) as error:
            raise PeerLost(self.peer, f"sent a message that cannot be read: {error}") from error

    def _fill(self) -> bool:
        """Take what the kernel holds. False when nothing is there."""
        try:
            chunk = self._socket.recv(1 << 20)
        except (BlockingIOError, InterruptedError):
            return False
        except OSError as error:
            self._raise_unless_passing(error)
            return False
        if not chunk:
            raise PeerLost(self.peer, "connection closed")
        self._buffer += chunk
        return True

    def _raise_unless_passing(self, error: OSError) -> None:
        """`PeerLost` because of `error`. A kernel without memory is asked again, after a pause too short to matter."""
        if error.errno not in _NO_MEMORY:
            raise PeerLost(self.peer, f"connection closed ({error.strerror or error})") from error
        time.sleep(_PAUSE_S)

    @property
    def has_ended(self) -> bool:
        """The peer is gone. Only for one that is not to say anything now."""
        try:
            return not self._socket.recv(1, socket.MSG_PEEK)
        except (BlockingIOError, InterruptedError):
            return False
        except OSError:
            return True

    def hang_up(self) -> None:
        """End the conversation; both sides then read the end."""
        with contextlib.suppress(OSError):  # it has ended already
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._socket.close()

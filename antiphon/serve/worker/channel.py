"""Framed messages between the engine and one worker: four bytes of length, then MessagePack.

MessagePack through `msgspec` decodes into declared types only, so bytes from a peer can never run code (rejected:
pickle). One channel has one reader and one writer thread at most.
"""

import select
import socket
import struct
import time
from typing import Any

import msgspec

from antiphon.base.errors import PeerLost, PeerTimeout

MAX_MESSAGE_BYTES = 1 << 30
_LENGTH = struct.Struct("<I")


class Channel:
    """One end of a stream socket; `peer` is the other end's name in errors."""

    def __init__(self, stream: socket.socket, peer: str, receives: Any) -> None:
        self._socket = stream
        self._socket.setblocking(True)
        self.peer = peer
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder(receives)
        self._buffer = bytearray()

    def fileno(self) -> int:
        return self._socket.fileno()

    def send(self, message: msgspec.Struct, timeout_s: float = 30.0) -> None:
        """Queue a message with the kernel; blocks while the peer does not read. `PeerLost` if it is gone."""
        payload = self._encoder.encode(message)
        self._socket.settimeout(timeout_s)
        try:
            self._socket.sendall(_LENGTH.pack(len(payload)) + payload)
        except TimeoutError as error:
            raise PeerTimeout("send", [self.peer], timeout_s) from error
        except OSError as error:
            raise PeerLost(self.peer, f"connection closed ({error.strerror or error})") from error

    def receive(self, timeout_s: float) -> Any:
        """The next message; `PeerTimeout` when none came in time, `PeerLost` when the peer closed or died."""
        deadline = time.monotonic() + timeout_s
        while (message := self.poll()) is None:
            remaining = deadline - time.monotonic()
            if remaining <= 0 or not select.select([self._socket], [], [], remaining)[0]:
                raise PeerTimeout("receive", [self.peer], timeout_s)
        return message

    def poll(self) -> Any | None:
        """A message if one is complete, else None; never waits. `PeerLost` when the peer closed or died."""
        while True:
            if len(self._buffer) >= _LENGTH.size:
                (length,) = _LENGTH.unpack_from(self._buffer)
                if length > MAX_MESSAGE_BYTES:
                    raise PeerLost(self.peer, f"sent a frame of {length} bytes, more than {MAX_MESSAGE_BYTES}")
                if len(self._buffer) >= _LENGTH.size + length:
                    payload = bytes(self._buffer[_LENGTH.size : _LENGTH.size + length])
                    del self._buffer[: _LENGTH.size + length]
                    return self._decode(payload)
            if not self._fill():
                return None

    def _decode(self, payload: bytes) -> Any:
        try:
            return self._decoder.decode(payload)
        except msgspec.DecodeError as error:
            raise PeerLost(self.peer, f"sent a message that cannot be read: {error}") from error

    def _fill(self) -> bool:
        """Take what the kernel holds. False when nothing is there."""
        self._socket.settimeout(0.0)
        try:
            chunk = self._socket.recv(1 << 20)
        except (BlockingIOError, InterruptedError):
            return False
        except OSError as error:
            raise PeerLost(self.peer, f"connection closed ({error.strerror or error})") from error
        if not chunk:
            raise PeerLost(self.peer, "connection closed")
        self._buffer += chunk
        return True

    def close(self) -> None:
        self._socket.close()

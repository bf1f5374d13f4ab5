"""Workers of other machines come to the engine: they connect to its address, prove that they know the secret, and say
what they want to be. The engine proves the same to them, because they will obey it.

Opening: engine -> `Challenge` (nonce); worker -> `Join` (role, where others reach it, its own nonce, proof); engine ->
`Accepted` (proof) or `TurnedAway` (words). A proof is an HMAC-SHA256 of both nonces and all fields under the secret.
After that the connection is the worker's channel. Each opening has a thread of its own for at most `_OPENING_S`, so a
stranger that says nothing delays nobody. Rejected: pickled handles, and trust in all that reach the port.
"""

import contextlib
import hashlib
import hmac
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass
from ipaddress import IPv6Address, ip_address
from pathlib import Path
from typing import Literal, get_args

import msgspec

from antiphon.base.errors import PeerLost, PeerTimeout, Refused, ResourceError, UserError
from antiphon.base.logging import get_logger
from antiphon.comm.m2n.rendezvous import split_address
from antiphon.serve.worker.channel import Channel

_log = get_logger("join")
_OPENING_S = 5.0
_RETRY_S = 0.5
_MAX_OPENINGS = 64  # at once; more strangers are closed unheard
_MAX_OPENING_BYTES = 4096
_SECRET_VARIABLE = "ANTIPHON_JOIN_SECRET"
_MIN_SECRET_BYTES = 16
_DEAD_AFTER_S = 3  # a machine or network that says nothing for so long is gone

JoinRole = Literal["attention", "experts", "replica"]


def is_wildcard(host: str) -> bool:
    """Whether `host` is written as an address that means "all of this machine's": a place to listen.

    Every spelling counts (`0.0.0.0`, `::`, `0`, `::ffff:0.0.0.0`), so the address is parsed, not compared. Names are
    not looked up: what a name means is the other machine's affair."""
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM, flags=socket.AI_NUMERICHOST)
    except (OSError, UnicodeError):
        return False  # a name
    address = ip_address(str(found[0][4][0]).partition("%")[0])
    mapped = address.ipv4_mapped if isinstance(address, IPv6Address) else None
    return (mapped or address).is_unspecified


def refuse_wildcard(option: str, value: str, host: str) -> None:
    """`UserError` that names the option if nobody can dial the host it gives."""
    if is_wildcard(host):
        raise UserError(
            f"{option} is {value}: nobody can dial that; name the address by which the other machines reach this one"
        )


class Challenge(msgspec.Struct, tag=True, frozen=True):
    nonce: bytes


class Join(msgspec.Struct, tag=True, frozen=True, kw_only=True):
    """`host`: where other workers reach this one; empty: the address this connection comes from."""

    role: JoinRole
    name: str
    host: str
    pid: int
    nonce: bytes
    proof: bytes


class Accepted(msgspec.Struct, tag=True, frozen=True):
    proof: bytes


class TurnedAway(msgspec.Struct, tag=True, frozen=True):
    reason: str


@dataclass(frozen=True)
class JoinedPeer:
    """A worker that has proved itself, and the channel to it."""

    role: JoinRole
    name: str
    host: str
    pid: int
    channel: Channel


def _prove(secret: bytes, side: str, *fields: bytes) -> bytes:
    """Fields go in with their lengths, so that no two lists of fields look the same."""
    message = b"".join(len(field).to_bytes(4, "little") + field for field in (side.encode(), *fields))
    return hmac.digest(secret, message, hashlib.sha256)


def watch_for_dead_machine(stream: socket.socket) -> None:
    """Let the kernel close the connection when the other machine does not answer any more."""
    stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    stream.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in (
        ("TCP_KEEPIDLE", 1),
        ("TCP_KEEPINTVL", 1),
        ("TCP_KEEPCNT", _DEAD_AFTER_S - 1),
        ("TCP_USER_TIMEOUT", _DEAD_AFTER_S * 1000),
    ):
        if hasattr(socket, option):
            stream.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)


class JoinListener:
    """The engine's door. `on_join` is called on a thread of the listener's for every worker that proved itself."""

    def __init__(
        self,
        address: str,
        secret: bytes,
        on_join: Callable[[JoinedPeer], None],
        *,
        roles: Collection[str] = get_args(JoinRole),
    ) -> None:
        """`roles`: others are turned away."""
        self._roles = roles
        self._address = address
        self._secret = secret
        self._on_join = on_join
        self._server: socket.socket | None = None
        self._openings = threading.BoundedSemaphore(_MAX_OPENINGS)
        self.num_rejected = 0

    def start(self) -> str:
        """Listen; returns `HOST:PORT`. `ResourceError` if the address cannot be had."""
        host, port = split_address(self._address)
        try:
            family = socket.AF_INET6 if ":" in host else socket.AF_INET
            self._server = socket.create_server((host, port), family=family)
        except OSError as error:
            raise ResourceError(
                f"cannot listen at {self._address}: {error.strerror or error}; choose another --join-address"
            ) from error
        threading.Thread(target=self._accept, name="join", daemon=True).start()
        return f"{host}:{self._server.getsockname()[1]}"

    def close(self) -> None:
        """Take no more workers."""
        if self._server is not None:
            with contextlib.suppress(OSError):
                self._server.shutdown(socket.SHUT_RDWR)  # wakes the thread out of accept
            self._server.close()

    def _accept(self) -> None:
        assert self._server is not None, "start() comes first"
        while True:
            try:
                stream, peer = self._server.accept()
            except OSError:
                if self._server.fileno() < 0:
                    return
                time.sleep(_RETRY_S)  # out of descriptors, say: nothing tells when others become free
                continue
            if not self._openings.acquire(blocking=False):
                self.num_rejected += 1
                stream.close()
                continue
            threading.Thread(target=self._open, args=(stream, peer[0]), name="join-opening", daemon=True).start()

    def _open(self, stream: socket.socket, peer_host: str) -> None:
        try:
            watch_for_dead_machine(stream)
            joined = self._shake_hands(stream, peer_host)
        except (PeerLost, PeerTimeout, Refused, OSError) as error:
            self.num_rejected += 1
            _log.warning("turned away a connection from %s: %s", peer_host, error)
            stream.close()
        else:
            _log.info("%s joined from %s", joined.name, peer_host)
            self._on_join(joined)
        finally:
            self._openings.release()

    def _shake_hands(self, stream: socket.socket, peer_host: str) -> JoinedPeer:
        channel = Channel(stream, peer_host, Join, max_message_bytes=_MAX_OPENING_BYTES)
        nonce = secrets.token_bytes(32)
        channel.send(Challenge(nonce), _OPENING_S)
        join: Join = channel.receive(_OPENING_S)
        fields = (nonce, join.nonce, join.role.encode(), join.name.encode(), join.host.encode())
        if len(join.nonce) != 32 or not hmac.compare_digest(join.proof, _prove(self._secret, "worker", *fields)):
            channel.send(TurnedAway("the secret is not the one the engine has"), _OPENING_S)
            raise Refused(f"{join.name} does not know the secret")
        if is_wildcard(join.host):
            channel.send(TurnedAway(f"nobody can dial {join.host}, where it says it can be reached"), _OPENING_S)
            raise Refused(f"{join.name} says it can be reached at {join.host}, which nobody can dial")
        if join.role not in self._roles:
            has = " or ".join(sorted(self._roles))
            channel.send(TurnedAway(f"workers that join here are {has}, not {join.role}: use --role {has}"), _OPENING_S)
            raise Refused(f"{join.name} is of role {join.role}, for which there is no place")
        channel.send(Accepted(_prove(self._secret, "engine", *fields)), _OPENING_S)
        return JoinedPeer(join.role, join.name, join.host or peer_host, join.pid, channel)


def join_engine(
    address: str, secret: bytes, *, role: JoinRole, name: str, host: str, pid: int, patience_s: float
) -> Channel:
    """Connect to an engine, trying for `patience_s` until it is there; returns the channel to it.

    `PeerTimeout` if nobody answers, `Refused` if either side does not know the secret."""
    engine_host, engine_port = split_address(address)
    deadline = time.monotonic() + patience_s
    while True:
        try:
            stream = socket.create_connection((engine_host, engine_port), timeout=_OPENING_S)
            break
        except OSError as error:
            if time.monotonic() + _RETRY_S > deadline:
                raise PeerTimeout(f"join {address}", [f"the engine ({error})"], patience_s) from error
            time.sleep(_RETRY_S)  # nothing tells when a machine begins to listen
    watch_for_dead_machine(stream)
    channel = Channel(stream, "engine", Challenge | Accepted | TurnedAway, max_message_bytes=_MAX_OPENING_BYTES)
    challenge = channel.receive(_OPENING_S)
    nonce = secrets.token_bytes(32)
    if not isinstance(challenge, Challenge):
        raise Refused(f"{address} does not speak as an engine does")
    fields = (challenge.nonce, nonce, role.encode(), name.encode(), host.encode())
    proof = _prove(secret, "worker", *fields)
    channel.send(Join(role=role, name=name, host=host, pid=pid, nonce=nonce, proof=proof), _OPENING_S)
    answer = channel.receive(_OPENING_S)
    if isinstance(answer, TurnedAway):
        raise Refused(f"{address} turned this worker away: {answer.reason}")
    if not isinstance(answer, Accepted) or not hmac.compare_digest(answer.proof, _prove(secret, "engine", *fields)):
        raise Refused(f"{address} does not know the secret: it is not our engine")
    return channel


def exchange_secret(join_secret: bytes) -> bytes:
    """The secret of the exchange between workers, made from the one that all machines have."""
    return hmac.digest(join_secret, b"antiphon exchange", hashlib.sha256)


def read_join_secret(path: Path | None) -> bytes:
    """The file's content without white space around it, else the variable's. `UserError` if neither is there.

    Never read from the command line, which everybody on the machine can see."""
    if path is not None:
        try:
            secret = path.read_bytes().strip()
        except OSError as error:
            raise UserError(f"--secret-file {path}: {error.strerror}") from error
    else:
        secret = os.environ.get(_SECRET_VARIABLE, "").strip().encode()
        if not secret:
            raise UserError(
                f"no secret to join with: give --secret-file FILE or set {_SECRET_VARIABLE} (for example the output of "
                "'openssl rand -hex 32'), the same for the engine and all workers"
            )
    if len(secret) < _MIN_SECRET_BYTES:
        raise UserError(f"the secret has {len(secret)} bytes: it must have at least {_MIN_SECRET_BYTES}")
    return secret

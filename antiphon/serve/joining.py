"""How a worker of another machine joins the engine: it connects to its address, proves that it knows the secret, and
says which role it has. The engine proves the same to it, because the worker will obey it.

Opening: engine -> `Challenge` (nonce); worker -> `Join` (role, where others reach it, its own nonce, proof); engine ->
`Accepted` (proof) or `TurnedAway` (words). A proof is an HMAC-SHA256 of both nonces and all fields under the secret.
After that the connection is the worker's channel. The worker's side is `worker/joined`.

The engine's side is one thread that hears every connection (`JoinListener`). Most connections to an open port are
strangers: scanners, health checks, floods. A worker with the secret must get in beside hundreds of them a second, so:

1. No connection is waited for. One selector watches all openings, each for `OPENING_S` at most.
2. The next one always gets a place. When all places for openings are taken, the oldest one of the address that has most
   of them is turned away. So a flood turns itself out, and connections from elsewhere are not touched. What the oldest
   has said is heard before: a worker that answers its challenge at once is never turned out.
3. Strangers cost one log line a second, with their number.

Rejected: pickled handles, and trust in all that reach the port; a thread for each opening (sixty-four silent strangers
then keep workers out for five seconds, and a machine that refuses a thread keeps them out for good); a limit for each
address, which locks out workers that share one with a stranger.
"""

import contextlib
import errno
import hashlib
import hmac
import os
import secrets
import selectors
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection
from dataclasses import dataclass
from ipaddress import IPv6Address, ip_address
from pathlib import Path
from typing import Literal, get_args

import msgspec

from antiphon import __version__
from antiphon.base.errors import PeerLost, Refused, ResourceError, UserError, with_fix
from antiphon.base.logging import Occasional, get_logger
from antiphon.base.system import limit
from antiphon.base.units import check_host, split_address
from antiphon.serve.worker.channel import Channel
from antiphon.specs.checked import read_bytes

_log = get_logger("join")
_MAX_OPENINGS = 256
_SHARE_OF_DESCRIPTORS = 8  # openings may take one in eight of this process's descriptors
_BACKLOG = 4096
_ACCEPTS_IN_A_ROW = 64  # then the openings are heard again
_PAUSE_S = 0.1  # when the system cannot give what an opening needs
_SAY_S = 1.0
_SHOWN_REASONS, _MAX_REASON_CHARACTERS = 3, 120
OPENING_S = 5.0
MAX_OPENING_BYTES = 4096
_SECRET_VARIABLE = "ANTIPHON_JOIN_SECRET"
_MIN_SECRET_BYTES = 16
_DEAD_AFTER_S = 3  # a machine or network that is silent for this long is gone
_TYPE_OF_SERVICE = 0x10  # IP_TOS "low delay", as for control messages of the exchange

JoinRole = Literal["attention", "experts", "replica"]


def roles_of(layout: str, num_attention: int, num_experts: int) -> list[str]:
    """The role of each process of a layout: first those of attention workers or replicas, then those of expert
    workers."""
    attention = "attention" if layout == "disaggregated" else "replica"
    return [attention] * num_attention + ["experts"] * num_experts


def is_wildcard(host: str) -> bool:
    """Whether `host` is written as an address that means "all of this machine's": a place to listen.

    Every spelling counts (`0.0.0.0`, `::`, `0`, `::ffff:0.0.0.0`), so the address is parsed, not compared. Names are
    not looked up: the other machine resolves them."""
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM, flags=socket.AI_NUMERICHOST)
    except (OSError, UnicodeError):
        return False  # a name
    address = ip_address(str(found[0][4][0]).partition("%")[0])
    mapped = address.ipv4_mapped if isinstance(address, IPv6Address) else None
    return (mapped or address).is_unspecified


def refuse_wildcard(option: str, value: str, host: str) -> None:
    """`UserError` that names the option if its host cannot be dialled."""
    check_host(option, host)
    if is_wildcard(host):
        raise UserError(
            f"{option} is {value}: it cannot be dialled; name the address by which the other machines reach this one"
        )


class Challenge(msgspec.Struct, tag=True, frozen=True):
    nonce: bytes


class Join(msgspec.Struct, tag=True, frozen=True, kw_only=True):
    """`host`: where other workers reach this one; empty: the address this connection comes from. `version`: of
    Antiphon; empty: one from before it was said."""

    role: JoinRole
    name: str
    host: str
    pid: int
    nonce: bytes
    proof: bytes
    version: str = ""


class Accepted(msgspec.Struct, tag=True, frozen=True):
    proof: bytes


class TurnedAway(msgspec.Struct, tag=True, frozen=True):
    reason: str


def prove(secret: bytes, side: str, *fields: bytes) -> bytes:
    """Fields go in with their lengths, so that no two lists of fields look the same."""
    message = b"".join(len(field).to_bytes(4, "little") + field for field in (side.encode(), *fields))
    return hmac.digest(secret, message, hashlib.sha256)


def set_stream_options(stream: socket.socket) -> None:
    """Orders and results go at once, ahead of keys, values and rows on the same link where the network obeys IP_TOS;
    the kernel closes the connection when the other machine does not answer any more."""
    stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    if stream.family == socket.AF_INET6:
        stream.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_TCLASS, _TYPE_OF_SERVICE)
    else:
        stream.setsockopt(socket.IPPROTO_IP, socket.IP_TOS, _TYPE_OF_SERVICE)
    stream.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in (
        ("TCP_KEEPIDLE", 1),
        ("TCP_KEEPINTVL", 1),
        ("TCP_KEEPCNT", _DEAD_AFTER_S - 1),
        ("TCP_USER_TIMEOUT", _DEAD_AFTER_S * 1000),
    ):
        if hasattr(socket, option):
            stream.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)


def exchange_secret(join_secret: bytes) -> bytes:
    """The secret of the exchange between workers, made from the one that all machines have."""
    return hmac.digest(join_secret, b"antiphon exchange", hashlib.sha256)


def read_join_secret(path: Path | None) -> bytes:
    """The file's content without white space around it, else the variable's. `UserError` if neither is there.

    Never read from the command line, which all users of the machine can see."""
    if path is not None:
        try:
            secret = read_bytes(path).strip()
        except UserError as error:
            raise UserError(f"--secret-file {error}") from error
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


@dataclass(frozen=True)
class JoinedPeer:
    """A worker that has proved itself, and the channel to it."""

    role: JoinRole
    name: str
    host: str
    pid: int
    channel: Channel


@dataclass(frozen=True, eq=False)
class _Opening:
    """A connection that has been challenged and has not answered yet."""

    channel: Channel
    host: str
    nonce: bytes
    deadline_s: float


class JoinListener:
    """`on_join` is called on the listener's thread for every worker that proved itself; it must not wait."""

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
        self._thread = threading.Thread(target=self._listen, name="join", daemon=True)
        self._selector: selectors.BaseSelector | None = None
        self._server: socket.socket | None = None
        self._resume_s: float | None = None  # when to accept again
        self._closing = False
        self._openings: dict[_Opening, None] = {}  # oldest first
        self._hosts: Counter[str] = Counter()  # addresses of the openings
        self._max_openings = _MAX_OPENINGS
        self._turned_away: Counter[str] = Counter()  # by reason, since it was said last
        self._last_host = ""
        self._said_s = -_SAY_S
        self._failing = Occasional(_SAY_S)
        self.num_rejected = 0

    def start(self) -> str:
        """Listen; returns `HOST:PORT`. `ResourceError` if the address cannot be had."""
        host, port = split_address(self._address)
        try:
            family = socket.AF_INET6 if ":" in host else socket.AF_INET
            self._server = socket.create_server((host, port), family=family, backlog=_BACKLOG)
            self._server.setblocking(False)
            self._selector = selectors.DefaultSelector()
            self._selector.register(self._server, selectors.EVENT_READ)
        except OSError as error:
            raise ResourceError(
                f"cannot listen at {self._address}: {error.strerror or error}; choose another --join-address"
            ) from error
        self._max_openings = max(1, min(_MAX_OPENINGS, limit() // _SHARE_OF_DESCRIPTORS))
        self._thread.start()
        return f"{host}:{self._server.getsockname()[1]}"

    def close(self) -> None:
        """Take no more workers. Waits for the thread, two seconds at most."""
        self._closing = True
        if self._server is not None and self._thread.is_alive():
            with contextlib.suppress(OSError):
                self._server.shutdown(socket.SHUT_RDWR)  # wakes the thread
            self._thread.join(2 * _SAY_S)

    # --- the listener's thread ---------------------------------------------------------------------------------------

    def _listen(self) -> None:
        assert self._server is not None, "start() comes first"
        assert self._selector is not None, "start() comes first"
        while not self._closing:
            try:
                self._go_round(self._server, self._selector)
            except Exception:  # no stranger and no system in need may end the listener
                if self._failing.count() is not None:
                    _log.exception("the listener for workers goes on after an error")
                time.sleep(_PAUSE_S)
        self._say_who_came(float("inf"))
        for opening in self._openings:
            opening.channel.close()
        self._selector.close()
        self._server.close()

    def _go_round(self, server: socket.socket, selector: selectors.BaseSelector) -> None:
        someone_waits = False
        for key, _ in selector.select(self._longest_wait_s()):
            if key.data is None:
                someone_waits = True
            else:
                self._hear(key.data)
        now_s = time.monotonic()
        if someone_waits:
            self._accept(server, now_s)
        elif self._resume_s is not None and now_s >= self._resume_s:
            self._resume_s = None
            selector.register(server, selectors.EVENT_READ)
        for opening in [each for each in self._openings if each.deadline_s <= now_s]:
            self._turn_away(opening, f"nothing to be believed within {OPENING_S:.0f} s")
        self._say_who_came(now_s)

    def _longest_wait_s(self) -> float:
        if self._resume_s is not None:
            return _PAUSE_S
        oldest = next(iter(self._openings), None)
        if oldest is None and not self._turned_away:
            return _SAY_S
        due_s = [oldest.deadline_s] if oldest is not None else []
        due_s += [self._said_s + _SAY_S] if self._turned_away else []
        return min(max(0.0, min(due_s) - time.monotonic()), _SAY_S)

    def _accept(self, server: socket.socket, now_s: float) -> None:
        for _ in range(_ACCEPTS_IN_A_ROW):
            try:
                stream, peer = server.accept()
            except BlockingIOError:
                return
            except (ConnectionAbortedError, PermissionError):  # gone again, or a firewall's doing
                continue
            except OSError as error:
                if not self._openings or error.errno not in (errno.EMFILE, errno.ENFILE):
                    self._pause(server, error)
                    return
                self._make_room()
            else:
                self._challenge(stream, str(peer[0]), now_s)

    def _pause(self, server: socket.socket, error: OSError) -> None:
        """The system has nothing left for another connection: new ones wait in the backlog."""
        if self._closing:
            return
        if self._failing.count() is not None:
            _log.error("no worker can join now: %s", with_fix(error.strerror or str(error)))
        assert self._selector is not None, "start() comes first"
        self._selector.unregister(server)
        self._resume_s = time.monotonic() + _PAUSE_S

    def _challenge(self, stream: socket.socket, host: str, now_s: float) -> None:
        assert self._selector is not None, "start() comes first"
        if len(self._openings) >= self._max_openings:
            self._make_room()
        try:
            set_stream_options(stream)
            channel = Channel(stream, host, Join, max_message_bytes=MAX_OPENING_BYTES)
            opening = _Opening(channel, host, secrets.token_bytes(32), now_s + OPENING_S)
            channel.enqueue(Challenge(opening.nonce))
            self._selector.register(channel, selectors.EVENT_READ, opening)
        except (PeerLost, OSError) as error:
            stream.close()
            self._count_stranger(host, str(error))
        else:
            self._openings[opening] = None
            self._hosts[host] += 1

    def _make_room(self) -> None:
        """The oldest opening of the address that has most of them ends, one way or the other."""
        ((crowd, _),) = self._hosts.most_common(1)
        oldest = next(each for each in self._openings if each.host == crowd)
        self._hear(oldest)
        if oldest in self._openings:
            self._turn_away(oldest, "made room for others")

    def _hear(self, opening: _Opening) -> None:
        if opening not in self._openings:
            return
        try:
            join = opening.channel.poll()
            joined = None if join is None else self._examine(opening, join)
        except (PeerLost, Refused) as error:
            self._turn_away(opening, error.reason if isinstance(error, PeerLost) else str(error))
        except Exception as error:
            self._turn_away(opening, f"{type(error).__name__} over what it said")
        else:
            if joined is not None:
                self._forget(opening)
                _log.info("%s joined from %s", joined.name, opening.host)
                self._on_join(joined)

    def _examine(self, opening: _Opening, join: Join) -> JoinedPeer:
        """Its answer to the challenge: `Accepted`, or `TurnedAway` and `Refused`. Names of strangers are not shown."""
        channel = opening.channel
        fields = (opening.nonce, join.nonce, join.role.encode(), join.name.encode(), join.host.encode())
        if len(join.nonce) != 32 or not hmac.compare_digest(join.proof, prove(self._secret, "worker", *fields)):
            channel.enqueue(TurnedAway("the secret is not the one the engine has"))
            raise Refused("does not know the secret")
        if join.version != __version__:
            others = join.version or "an older version"
            channel.enqueue(TurnedAway(f"the engine is Antiphon {__version__}, the worker {others}: install the same"))
            raise Refused(f"{join.name} is Antiphon {others}, not {__version__}")
        if is_wildcard(join.host):
            channel.enqueue(TurnedAway(f"{join.host}, where it says it can be reached, cannot be dialled"))
            raise Refused(f"{join.name} says it can be reached at {join.host}, which cannot be dialled")
        if join.role not in self._roles:
            has = " or ".join(sorted(self._roles))
            channel.enqueue(TurnedAway(f"workers that join here are {has}, not {join.role}: use --role {has}"))
            raise Refused(f"{join.name} is of role {join.role}, for which there is no place")
        channel.enqueue(Accepted(prove(self._secret, "engine", *fields)))
        return JoinedPeer(join.role, join.name, join.host or opening.host, join.pid, channel)

    def _turn_away(self, opening: _Opening, reason: str) -> None:
        self._forget(opening)
        opening.channel.close()
        self._count_stranger(opening.host, reason)

    def _forget(self, opening: _Opening) -> None:
        assert self._selector is not None, "start() comes first"
        del self._openings[opening]
        self._hosts[opening.host] -= 1
        self._hosts += Counter()  # drops those that have none left
        self._selector.unregister(opening.channel)

    def _count_stranger(self, host: str, reason: str) -> None:
        self.num_rejected += 1
        self._last_host = host
        self._turned_away[" ".join(reason.split())[:_MAX_REASON_CHARACTERS]] += 1

    def _say_who_came(self, now_s: float) -> None:
        if not self._turned_away or now_s - self._said_s < _SAY_S:
            return
        self._said_s = now_s
        reasons = self._turned_away.most_common(_SHOWN_REASONS)
        shown = "; ".join(reason if count == 1 else f"{reason} ({count})" for reason, count in reasons)
        more = "; …" if len(self._turned_away) > len(reasons) else ""
        count = self._turned_away.total()
        what = "a connection from" if count == 1 else f"{count} connections, the last from"
        _log.warning("turned away %s %s: %s%s", what, self._last_host, shown, more)
        self._turned_away.clear()

"""How a worker of another machine joins the engine: it connects to its address, proves that it knows the secret, and
says which role it has. The engine proves the same to it, because the worker will obey it.

Opening: engine -> `Challenge` (nonce); worker -> `Join` (role, where others reach it, its own nonce, proof); engine ->
`Accepted` (proof) or `TurnedAway` (words). A proof is an HMAC-SHA256 of both nonces and all fields under the secret.
After that the connection is the worker's channel. The engine's side is `join_listener`. Rejected: pickled handles, and
trust in all that reach the port.
"""

import hashlib
import hmac
import os
import random
import secrets
import socket
import time
from ipaddress import IPv6Address, ip_address
from pathlib import Path
from typing import Literal

import msgspec

from antiphon.base.errors import PeerLost, PeerTimeout, Refused, UserError
from antiphon.comm.m2n.rendezvous import split_address
from antiphon.serve.worker.channel import Channel

OPENING_S = 5.0
_FIRST_RETRY_S, _LONGEST_RETRY_S = 0.05, 0.5
MAX_OPENING_BYTES = 4096
_SECRET_VARIABLE = "ANTIPHON_JOIN_SECRET"
_MIN_SECRET_BYTES = 16
_DEAD_AFTER_S = 3  # a machine or network that is silent for this long is gone

JoinRole = Literal["attention", "experts", "replica"]


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


def prove(secret: bytes, side: str, *fields: bytes) -> bytes:
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


def join_engine(
    address: str, secret: bytes, *, role: JoinRole, name: str, host: str, pid: int, patience_s: float
) -> Channel:
    """Connect to an engine, trying for `patience_s` until it is there and has heard us; returns the channel to it.

    `PeerTimeout` if no engine answers, `Refused` if either side does not know the secret."""
    split_address(address)  # a mistake in it is not worth waiting for
    deadline = time.monotonic() + patience_s
    pause_s = _FIRST_RETRY_S
    while True:
        try:
            return _open_channel(address, secret, role=role, name=name, host=host, pid=pid)
        except Refused:
            raise
        except (PeerLost, OSError) as error:  # not there yet, or so busy with strangers that it took us for one
            if time.monotonic() + pause_s > deadline:
                raise PeerTimeout(f"join {address}", [f"the engine ({error})"], patience_s) from error
        time.sleep(pause_s * random.uniform(0.5, 1.0))  # nothing tells when a machine begins to listen
        pause_s = min(2 * pause_s, _LONGEST_RETRY_S)


def _open_channel(address: str, secret: bytes, *, role: JoinRole, name: str, host: str, pid: int) -> Channel:
    """One try of `join_engine`."""
    stream = socket.create_connection(split_address(address), timeout=OPENING_S)
    try:
        watch_for_dead_machine(stream)
        channel = Channel(stream, "engine", Challenge | Accepted | TurnedAway, max_message_bytes=MAX_OPENING_BYTES)
        challenge = channel.receive(OPENING_S)
        nonce = secrets.token_bytes(32)
        if not isinstance(challenge, Challenge):
            raise Refused(f"{address} does not speak as an engine does")
        fields = (challenge.nonce, nonce, role.encode(), name.encode(), host.encode())
        proof = prove(secret, "worker", *fields)
        channel.send(Join(role=role, name=name, host=host, pid=pid, nonce=nonce, proof=proof), OPENING_S)
        answer = channel.receive(OPENING_S)
        if isinstance(answer, TurnedAway):
            raise Refused(f"{address} turned this worker away: {answer.reason}")
        if not isinstance(answer, Accepted) or not hmac.compare_digest(answer.proof, prove(secret, "engine", *fields)):
            raise Refused(f"{address} does not know the secret: it is not our engine")
    except BaseException:
        stream.close()
        raise
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

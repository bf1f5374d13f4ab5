"""A worker that joins an engine on another machine: what `antiphon worker` runs, and what other launchers start.

    python -m antiphon.serve.worker.joined        # a `TetheredJob` as one line of JSON on standard input

Launched that way the worker is tethered: it lives no longer than the process that holds the other end of its standard
input, whatever ends that one. The secret comes the same way, because arguments and environments of a process can be
read from outside. Signals to a whole group or service are the engine's affair, as for workers it starts itself.
"""

import hmac
import io
import os
import platform
import random
import secrets
import socket
import sys
import threading
import time
from collections.abc import Callable

import msgspec

from antiphon import __version__
from antiphon.base.allowance import allowance, share_of_threads
from antiphon.base.errors import PeerLost, PeerTimeout, Refused, UserError
from antiphon.base.logging import get_logger
from antiphon.base.system import ignore_ending_signals, raise_limit
from antiphon.base.units import split_address
from antiphon.serve.joining import (
    MAX_OPENING_BYTES,
    OPENING_S,
    Accepted,
    Challenge,
    Join,
    JoinRole,
    TurnedAway,
    exchange_secret,
    prove,
    refuse_wildcard,
    set_stream_options,
)
from antiphon.serve.worker.channel import Channel
from antiphon.serve.worker.messages import Configure, ToWorker
from antiphon.serve.worker.process import run_worker

_log = get_logger("worker")
EXIT_ADRIFT = 3  # the process at the other end of standard input is gone
_FIRST_RETRY_S, _LONGEST_RETRY_S = 0.05, 0.5


class JoinOrder(msgspec.Struct, frozen=True, kw_only=True):
    """Which engine to join, as what. Empty or 0: `host` as the engine sees it, `model` the engine's own path,
    `num_threads` as `share_of_threads`, of this machine."""

    address: str
    role: JoinRole
    host: str = ""
    model: str = ""
    num_threads: int = 0
    patience_s: float = 60.0


TetheredJob = tuple[JoinOrder, bytes]  # an order and the secret: what a launcher writes to a worker's standard input


def join_engine(
    address: str, secret: bytes, *, role: JoinRole, name: str, host: str, pid: int, patience_s: float
) -> Channel:
    """Connect to an engine, trying for `patience_s` until it is there and has heard us; returns the channel to it.

    `PeerTimeout` if no engine answers, `Refused` if either side does not know the secret."""
    if split_address(address)[1] == 0:  # a mistake in it is not worth waiting for
        raise UserError(f"cannot join {address}: 0 means any free port; the server's log names the port it has")
    deadline = time.monotonic() + patience_s
    pause_s = _FIRST_RETRY_S
    while True:
        try:
            return _open_channel(address, secret, role=role, name=name, host=host, pid=pid)
        except Refused:
            raise
        except (PeerLost, OSError) as error:  # not there yet, or so busy with strangers that it took us for one
            if time.monotonic() + pause_s > deadline:
                raise PeerTimeout.from_message(
                    f"join {address}: no engine within {patience_s:.1f} s ({error}): compare with --join-address of "
                    "the server, or raise --patience",
                    ["engine"],
                ) from error
            if pause_s == _FIRST_RETRY_S:
                _log.info("no engine at %s yet (%s): trying for %.1f s", address, error, patience_s)
        time.sleep(pause_s * random.uniform(0.5, 1.0))  # nothing tells when a machine begins to listen
        pause_s = min(2 * pause_s, _LONGEST_RETRY_S)


def _open_channel(address: str, secret: bytes, *, role: JoinRole, name: str, host: str, pid: int) -> Channel:
    """One try of `join_engine`."""
    stream = socket.create_connection(split_address(address), timeout=OPENING_S)
    try:
        set_stream_options(stream)
        channel = Channel(stream, "engine", Challenge | Accepted | TurnedAway, max_message_bytes=MAX_OPENING_BYTES)
        challenge = channel.receive(OPENING_S)
        nonce = secrets.token_bytes(32)
        if not isinstance(challenge, Challenge):
            raise Refused(f"{address} does not speak as an engine does")
        fields = (challenge.nonce, nonce, role.encode(), name.encode(), host.encode())
        proof = prove(secret, "worker", *fields)
        channel.send(
            Join(role=role, name=name, host=host, pid=pid, nonce=nonce, proof=proof, version=__version__), OPENING_S
        )
        answer = channel.receive(OPENING_S)
        if isinstance(answer, TurnedAway):
            raise Refused(f"{address} turned this worker away: {answer.reason}")
        if not isinstance(answer, Accepted) or not hmac.compare_digest(answer.proof, prove(secret, "engine", *fields)):
            raise Refused(f"{address} does not know the secret: it is not our engine")
    except BaseException:
        stream.close()
        raise
    return channel


def run_joined_worker(order: JoinOrder, secret: bytes, on_joined: Callable[[], None] = lambda: None) -> int:
    """Join, work until the engine ends; returns the exit code. `PeerTimeout` and `Refused` as `join_engine`."""
    refuse_wildcard("--host", order.host, order.host)
    raise_limit()
    channel = join_engine(
        order.address,
        secret,
        role=order.role,
        name=f"{order.role} on {platform.node()}",
        host=order.host,
        pid=os.getpid(),
        patience_s=order.patience_s,
    )
    on_joined()

    def adapt(configure: Configure) -> Configure:
        exchange, num_threads = configure.exchange, order.num_threads or share_of_threads()
        if exchange is not None:
            exchange = msgspec.structs.replace(exchange, secret=exchange_secret(secret))
        kv = configure.kv
        if kv is not None:
            kv = msgspec.structs.replace(kv, secret=exchange_secret(secret))
        return msgspec.structs.replace(
            configure,
            model=order.model or configure.model,
            num_threads=num_threads,
            spins=allowance().may_spin(num_threads),
            cores=[],
            exchange=exchange,
            kv=kv,
        )

    channel.speak("engine", ToWorker)
    return run_worker(channel, adapt)


def _end_with(tether: io.FileIO) -> None:
    """End this process when the other end of `tether` is closed, which its owner's death does too."""
    while tether.read(4096):
        pass
    os._exit(EXIT_ADRIFT)


def main() -> int:
    """A tethered worker; the exit code. What goes wrong before it has joined is one line on standard error."""
    ignore_ending_signals()
    tether = io.FileIO(sys.stdin.fileno(), closefd=False)  # no buffer: its lock would be held when Python ends
    order, secret = msgspec.json.decode(tether.readline(), type=TetheredJob)
    threading.Thread(target=_end_with, args=(tether,), name="tether", daemon=True).start()
    try:
        return run_joined_worker(order, secret)
    except (UserError, PeerTimeout, PeerLost, Refused) as error:
        _log.error("%s", error)
        return error.exit_code if isinstance(error, UserError) else 1


if __name__ == "__main__":
    sys.exit(main())

"""Where peers that do not know each other yet leave their tickets: one address, served by PyTorch's `TCPStore`.

Every peer publishes its ticket under its name and collects those it needs. While it waits it says who is missing, and
when the time is up it fails with that list. Tickets hold no secret: a reader of one must still prove, to the endpoint
it leads to, that it knows the shared secret. Rejected: a file or an environment variable, which need a shared disk or
an operator who knows all addresses beforehand.
"""

import socket
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

from torch.distributed import TCPStore  # type: ignore[attr-defined]  # public, but not named in __all__

from antiphon.base.errors import PeerLost, PeerTimeout, UserError
from antiphon.base.logging import get_logger
from antiphon.base.units import split_address

_log = get_logger("rendezvous")
_LOOK_S = 0.02
_MOST_S = 1e6
_SAY_S = 5.0  # say who is missing this often


class Rendezvous:
    """One peer's view of the meeting place. The one with `serve` set keeps it; the others connect to `address`."""

    def __init__(self, address: str, *, serve: bool = False, timeout_s: float = 60.0) -> None:
        """Connects; blocks at most `timeout_s`. A server listens at the given host only; `address` names its port.

        Later calls wait for the server, `collect` its time besides; `PeerLost` once it is gone."""
        host, port = split_address(address)
        _check_timeout(timeout_s)
        self._listener: socket.socket | None = None
        if serve:
            family = socket.AF_INET6 if ":" in host else socket.AF_INET
            self._listener = socket.create_server((host, port), family=family)
            port = self._listener.getsockname()[1]
        self.address = f"{host}:{port}"
        try:
            self._store = TCPStore(
                host,
                port,
                is_master=serve,
                timeout=timedelta(seconds=timeout_s),
                wait_for_workers=False,
                master_listen_fd=self._listener.detach() if self._listener is not None else None,
            )
        except (RuntimeError, TimeoutError) as error:
            raise PeerTimeout("rendezvous", [self.address], timeout_s) from error

    def publish(self, name: str, ticket: bytes) -> None:
        """Leave a ticket under a name; a later one replaces it (the peer was started again)."""
        self._ask(self._store.set, f"ticket {name}", ticket.hex())

    def number(self, name: str) -> int:
        """How many have asked for this name's numbers before: those who come to one meeting tell themselves apart."""
        return int(self._ask(self._store.add, f"number {name}", 1)) - 1

    def collect(self, names: Sequence[str], timeout_s: float) -> dict[str, bytes]:
        """The tickets of all `names`; waits for those that are not there yet. `PeerTimeout` lists the missing."""
        _check_timeout(timeout_s)
        if isinstance(names, str):
            raise UserError(f"names are {names!r}: give a list of them")
        names = list(names)
        started = said = time.monotonic()
        found: dict[str, bytes] = {}
        while missing := [name for name in names if name not in found]:
            for name in missing:
                if self._ask(self._store.check, [f"ticket {name}"]):
                    found[name] = bytes.fromhex(self._ask(self._store.get, f"ticket {name}").decode())
            missing = [name for name in names if name not in found]
            now = time.monotonic()
            if missing and now - started > timeout_s:
                raise PeerTimeout(f"rendezvous at {self.address}", missing, timeout_s)
            if missing and now - said > _SAY_S:
                said = now
                _log.info("%s: waiting for %s", self.address, ", ".join(missing))
            if missing:
                time.sleep(_LOOK_S)
        return found

    def _ask(self, call: Callable[..., Any], *arguments: object) -> Any:
        try:
            return call(*arguments)
        except RuntimeError as error:
            raise PeerLost(f"rendezvous at {self.address}", str(error).partition("\n")[0]) from error


def _check_timeout(timeout_s: float) -> None:
    if not 0 <= timeout_s <= _MOST_S:
        raise UserError(f"a timeout of {timeout_s} s: it must be 0 to {_MOST_S:g}")

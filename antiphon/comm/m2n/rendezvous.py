"""Where peers that do not know each other yet leave their tickets: one address, served by PyTorch's `TCPStore`.

Every peer publishes its ticket under its name and collects those it needs. While it waits it says who is missing, and
when the time is up it fails with that list. Tickets hold no secret: a reader of one must still prove, to the endpoint
it leads to, that it knows the shared secret. Rejected: a file or an environment variable, which need a shared disk or
an operator who knows all addresses beforehand.
"""

import socket
import time
from collections.abc import Sequence
from datetime import timedelta

from torch.distributed import TCPStore  # type: ignore[attr-defined]  # public, but not named in __all__

from antiphon.base.errors import PeerTimeout
from antiphon.base.logging import get_logger
from antiphon.base.units import split_address

_log = get_logger("rendezvous")
_LOOK_S = 0.02
_SAY_S = 5.0  # say who is missing this often


class Rendezvous:
    """One peer's view of the meeting place. The one with `serve` set keeps it; the others connect to `address`."""

    def __init__(self, address: str, *, serve: bool = False, timeout_s: float = 60.0) -> None:
        """Connects; blocks at most `timeout_s`. A server listens at the given host only; `address` names its port."""
        host, port = split_address(address)
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
        self._store.set(name, ticket.hex())

    def number(self, name: str) -> int:
        """How many have asked for this name's numbers before: those who come to one meeting tell themselves apart."""
        return int(self._store.add(name, 1)) - 1

    def collect(self, names: Sequence[str], timeout_s: float) -> dict[str, bytes]:
        """The tickets of all `names`; waits for those that are not there yet. `PeerTimeout` lists the missing."""
        started = said = time.monotonic()
        found: dict[str, bytes] = {}
        while missing := [name for name in names if name not in found]:
            for name in missing:
                if self._store.check([name]):
                    found[name] = bytes.fromhex(self._store.get(name).decode())
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

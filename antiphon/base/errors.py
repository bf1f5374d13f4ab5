"""Errors that people see: one line that names the value, the limit and the fix.

`UserError` and its subclasses are the caller's to fix; commands print them without a traceback and exit 2 or 1.
Everything else that escapes is a bug and keeps its traceback.
"""


class UserError(ValueError):
    """A mistake in what was asked for. The message names the value, the limit and what to do about it."""

    exit_code = 2


class CheckpointError(UserError):
    """A checkpoint folder is missing something, is damaged, or does not fit its own `config.json`."""

    exit_code = 1


class ResourceError(UserError):
    """The machine or the stated budget is too small for what was asked; the message says by how much."""

    exit_code = 1


class StartFailed(UserError):
    """A worker process cannot start; the message and the exit code are the worker's own."""

    def __init__(self, message: str, exit_code: int) -> None:
        super().__init__(message)
        self.exit_code = exit_code


class PeerLost(RuntimeError):
    """A process we exchange data with is gone. `peer` names it, for example ``experts[1]``."""

    def __init__(self, peer: str, reason: str) -> None:
        super().__init__(f"lost {peer}: {reason}")
        self.peer = peer
        self.reason = reason


class PeerTimeout(TimeoutError):
    """A wait passed its deadline. `peers` lists whom we were still waiting for."""

    def __init__(self, what: str, peers: list[str], timeout_s: float) -> None:
        super().__init__(f"{what}: nothing from {', '.join(peers)} within {timeout_s:.1f} s")
        self.peers = peers

    @classmethod
    def from_message(cls, message: str, peers: list[str]) -> "PeerTimeout":
        """One whose message is already written."""
        error = cls.__new__(cls)
        TimeoutError.__init__(error, message)
        error.peers = peers
        return error


class NoCredit(PeerTimeout):
    """All slots of a pair are in use: the receiver has released none of them in time. Nothing was sent."""


class Refused(ConnectionError):
    """A peer turned the connection down, in its own words; or one of the two does not know the shared secret."""


class Interrupted(RuntimeError):
    """A wait ended early because this process asked it to."""


def native_error(code: str, message: str, peers: list[str], reason: str) -> Exception:
    """The exception for an error of the native communication library (`csrc/m2n/types.h`)."""
    if code == "peer_lost":
        return PeerLost(peers[0] if peers else "a peer", reason)
    if code in ("timeout", "no_credit"):
        return (PeerTimeout if code == "timeout" else NoCredit).from_message(message, peers)
    plain: dict[str, type[Exception]] = {"invalid": UserError, "refused": Refused, "interrupted": Interrupted}
    return plain.get(code, OSError)(message)

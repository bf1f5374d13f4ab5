"""Errors that people see: one line that names the value, the limit and the fix.

`UserError` and its subclasses are the caller's to fix; commands print them without a traceback and exit 2 or 1.
Everything else that escapes is a bug and keeps its traceback.
"""

import errno
import os
import resource

_MOST_VALUE, _MOST_MESSAGE = 80, 4000  # characters


def shortened(text: str, most: int = _MOST_VALUE) -> str:
    """`text`, or its two ends with the number of characters between them if it is longer than `most`: a value of a
    megabyte is no help in an error."""
    if len(text) <= most:
        return text
    end = most // 2
    return f"{text[:end]}… {len(text) - 2 * end:,} more characters …{text[-end:]}"


def shortened_message(text: str) -> str:
    """The same for a whole message, whose ends are its subject and its fix."""
    return shortened(text, _MOST_MESSAGE)


class UserError(ValueError):
    """A mistake in what was asked for. The message names the value, the limit and what to do about it."""

    exit_code = 2

    def __init__(self, message: str) -> None:
        super().__init__(shortened_message(message))


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


_LIMITS = {  # by an error of the system: the limit that it may be of, and what is wrong, with the limit's value
    errno.EAGAIN: (
        resource.RLIMIT_NPROC,
        "threads or processes are limited{}, or memory: raise it (ulimit -u, pids.max of a control group, ulimit -v)",
    ),
    errno.EFBIG: (resource.RLIMIT_FSIZE, "the size of a file is limited{}, raise it (ulimit -f unlimited)"),
    errno.EMFILE: (resource.RLIMIT_NOFILE, "the open files of a process are limited{}, raise them (ulimit -n)"),
    errno.ENFILE: (None, "all open files of the system are in use, raise fs.file-max"),
    errno.ENOMEM: (resource.RLIMIT_AS, "memory or addresses are limited{}, use less or raise them (ulimit -v)"),
    errno.ENOSPC: (None, "the file system is full, make room (for /dev/shm in a container: docker run --shm-size=1g)"),
}


# What the linker, Python and torch say in place of the system's words.
_ALSO = {
    errno.EAGAIN: ("can't start new thread",),
    errno.ENOMEM: ("failed to map segment", "can't allocate memory", "MemoryError", "std::bad_alloc"),
}


def with_fix(message: str) -> str:
    """`message` with the limit and the fix behind the system's words for an error. They are found by these words: of
    errors in other processes there are only words."""
    for code, (limit, fix) in _LIMITS.items():
        words = (os.strerror(code), *_ALSO.get(code, ()))
        if any(each in message for each in words) and fix.partition("{")[0] not in message:
            value = resource.RLIM_INFINITY if limit is None else resource.getrlimit(limit)[0]
            return f"{message}: {fix.format('' if value == resource.RLIM_INFINITY else f' to {value:,} here')}"
    return message


def why_unwritten(words: str) -> str:
    """The system's `words` for what it did not write, with the limit behind them where that is not the disk's room."""
    return words if os.strerror(errno.ENOSPC) in words else with_fix(words)


def native_error(code: str, message: str, peers: list[str], reason: str) -> Exception:
    """The exception for an error of the native communication library (`csrc/m2n/types.h`)."""
    message, reason = with_fix(message), with_fix(reason)
    if code == "peer_lost":
        return PeerLost(peers[0] if peers else "a peer", reason)
    if code in ("timeout", "no_credit"):
        return (PeerTimeout if code == "timeout" else NoCredit).from_message(message, peers)
    plain: dict[str, type[Exception]] = {"invalid": UserError, "refused": Refused, "interrupted": Interrupted}
    return plain.get(code, OSError)(message)

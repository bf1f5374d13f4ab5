"""Descriptors: as many as this process may have, and waiting for one of them to become ready.

A server with many clients has descriptors beyond 1,023, and hands such numbers on to the processes it starts.
`select.select` refuses those, so everything that waits for one descriptor waits here, by `poll`. Rejected: a selector
for each wait, which costs a descriptor in the very moment in which there are none left.
"""

import contextlib
import resource
import select
import time
from typing import Protocol

_MOST = 1 << 20  # where the system sets no limit; nobody has more connections
_LONGEST_S = 86400.0  # of one call: `poll` counts milliseconds in 32 bits
_PAUSE_S = 0.01


class HasDescriptor(Protocol):
    def fileno(self) -> int: ...


def raise_limit() -> None:
    """Let this process, and those that it starts from now on, open as many files as the system allows them."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = _MOST if hard == resource.RLIM_INFINITY else min(hard, _MOST)
    if soft != resource.RLIM_INFINITY and soft < most:
        with contextlib.suppress(OSError, ValueError):  # a system that has a lower limit than it says
            resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))


def limit() -> int:
    """How many descriptors this process may have now."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return _MOST if soft == resource.RLIM_INFINITY else soft


def wait_ready(file: HasDescriptor, timeout_s: float, *, to_write: bool = False) -> bool:
    """Wait until reading (or writing) does not block, the other end's hanging up included; False after `timeout_s`."""
    deadline = time.monotonic() + timeout_s
    watched = select.poll()
    watched.register(file.fileno(), select.POLLOUT if to_write else select.POLLIN)
    while True:
        remaining = deadline - time.monotonic()
        try:
            if watched.poll(1000.0 * max(0.0, min(remaining, _LONGEST_S))):
                return True
        except OSError:  # the kernel has no memory for it now
            time.sleep(_PAUSE_S)
        if remaining <= 0.0:
            return False

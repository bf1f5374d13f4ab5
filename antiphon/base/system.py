"""What this process asks of the system: descriptors, memory given back, the processor's name, how our programs start,
files replaced whole, signals.

A server with many clients has descriptors beyond 1,023, and hands such numbers on to the processes it starts.
`select.select` refuses those, so everything that waits for one descriptor waits here, by `poll`. Rejected: a selector
for each wait, which costs a descriptor at the moment when there are none left.

`python -m` looks for modules in the working folder first. A `json.py` there, of the user or of others who share the
folder, would be run by every worker in the place of Python's own. `-P` leaves that folder out, unless it is where this
program came from. Rejected: `-I`, which drops `PYTHONPATH` and what users have installed for themselves.

A terminal's Ctrl-C or end and a service manager's signals reach a whole process group: the server decides alone. A
child starts with them blocked (`ending_signals_blocked`), because it needs a moment until it can ignore them
(`ignore_ending_signals`).
"""

import asyncio
import contextlib
import ctypes
import fcntl
import os
import resource
import select
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import IO

import psutil

from antiphon.base.errors import UserError
from antiphon.base.logging import get_logger

_log = get_logger("base")
_MOST = 1 << 20  # where the system sets no limit; no server has more connections
_LONGEST_S = 86400.0  # of one call: `poll` counts milliseconds in 32 bits
_PAUSE_S = 0.01
_ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


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


def wait_ready(file: socket.socket | IO[bytes], timeout_s: float, *, to_write: bool = False) -> bool:
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
            time.sleep(max(0.0, min(_PAUSE_S, remaining)))
        if remaining <= 0.0:
            return False


def give_memory_back() -> None:
    """Return freed memory to the system (glibc; others do so by themselves or have no way).

    Takes milliseconds, without the interpreter's lock."""
    with suppress(AttributeError, OSError):
        ctypes.CDLL(None).malloc_trim(0)


def keep_freed_memory() -> bool:
    """Have this process keep what it frees, for as long as it lives; for one that allocates the same again and again.

    glibc gives the end of its heap back as soon as it is large, and blocks above 32 MiB at once; each page that comes
    again costs a fault and zeros. Returns whether it was done: not with other C libraries, and not where the user has
    set glibc's allocator (`MALLOC_…`, `GLIBC_TUNABLES`)."""
    if any(name.startswith(("MALLOC_", "GLIBC_TUNABLES")) for name in os.environ):
        return False
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError):
        return False
    return bool(mallopt(_M_TRIM_THRESHOLD, 2**31 - 1) and mallopt(_M_MMAP_MAX, 0))


_M_TRIM_THRESHOLD, _M_MMAP_MAX = -1, -4  # malloc.h


_TRIM_AFTER_S = 2.0


class MemoryTrimmer:
    """Trims in a thread, at most every few seconds, and only after large requests.

    glibc keeps what is freed, and the largest request a server ever saw then decides how much it holds. Rejected:
    trimming after every large request, which takes milliseconds and locks, with the next one right behind it; and
    `MALLOC_TRIM_THRESHOLD_`, which must be set before the process starts and slows every large allocation.
    """

    def __init__(self) -> None:
        self._planned = False

    def note_large_input(self) -> None:
        """Something large is being worked on: trim in some seconds. Called from the event loop."""
        if not self._planned:
            self._planned = True
            asyncio.get_running_loop().call_later(_TRIM_AFTER_S, self._trim)

    def _trim(self) -> None:
        self._planned = False
        asyncio.get_running_loop().run_in_executor(None, give_memory_back)


def address_space_bytes() -> int:
    """What the addresses of this process take now; 16 GiB where `/proc` does not say."""
    try:
        return int(psutil.Process().memory_info().vms)
    except (psutil.Error, OSError):
        return 16 * 1024**3


CPUINFO = Path("/proc/cpuinfo")


def cpu_fields(path: Path = CPUINFO) -> dict[str, str]:
    """By their names in `/proc/cpuinfo`, those of the first core."""
    fields: dict[str, str] = {}
    for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else []:
        key, _, value = line.partition(":")
        fields.setdefault(key.strip(), value.strip())
    return fields


def cpu_name() -> str:
    """The processor's own name, where the system tells."""
    return cpu_fields().get("model name") or "unknown"


def cpu_generation(path: Path = CPUINFO) -> str:
    """Family and model by number: virtual machines may show a name that all generations have. Empty where unknown."""
    fields = cpu_fields(path)
    known = "cpu family" in fields and "model" in fields
    return f"family {fields['cpu family']}, model {fields['model']}" if known else ""


_SOURCES = Path(__file__).resolve().parents[2]


def python_module(module: str, *arguments: str) -> list[str]:
    """The command that runs `module`."""
    runs_from_sources = False
    with suppress(OSError):  # a working folder that was deleted
        runs_from_sources = Path.cwd() == _SOURCES
    return [sys.executable, *([] if runs_from_sources else ["-P"]), "-m", module, *arguments]


def replace_text(file: Path, text: str) -> None:
    """Write `text` in the place of what `file` holds; a kill, or a disk that is full, leaves the old text or the new
    one."""
    partial = file.with_suffix(".partial")
    try:
        partial.write_text(text, encoding="utf-8")
        partial.replace(file)
    finally:
        partial.unlink(missing_ok=True)


@contextmanager
def one_writer(folder: Path, refusal: str, wait_s: float = 0.0) -> Iterator[None]:
    """Makes `folder`, `UserError` if that cannot be; within it, others that ask for the same are refused as by `lock`.
    The lock is on the folder itself, so nothing is left behind."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(folder, os.O_RDONLY)
    except OSError as error:
        raise UserError(f"{folder} cannot be written ({error.strerror}): make room, or name another folder") from error
    try:
        lock(descriptor, folder, refusal, wait_s)
        yield
    finally:
        os.close(descriptor)


def lock(descriptor: int, path: Path, refusal: str, wait_s: float = 0.0) -> None:
    """Keep others from writing the folder or file at `path`, which is open, until it is closed or this process ends.
    `UserError` with `path` and `refusal`, after `wait_s`, if another has it. The lock is the kernel's. Some network
    file systems have none; then the log says so."""
    end_s = time.monotonic() + wait_s
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            if time.monotonic() >= end_s:
                raise UserError(f"{path}: {refusal}") from None
            time.sleep(_PAUSE_S)  # the kernel's own wait for a lock has no limit of time
        except OSError as error:
            _log.warning("%s cannot be locked (%s): start no second run in it", path, error.strerror)
            return


def resident_bytes() -> int:
    """What this process has in memory now; 0 where the system does not say."""
    try:
        return int(psutil.Process().memory_info().rss)
    except (psutil.Error, OSError):
        return 0


@contextmanager
def ending_signals_blocked() -> Iterator[None]:
    """Within it, this thread starts children that are not ended by these signals before they call
    `ignore_ending_signals`."""
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, _ENDING)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def signal_name(number: int) -> str:
    """``SIGKILL``; the real-time ones have only numbers."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def memory_kills() -> int:
    """How many processes the kernel has ended since it started because memory was short, in this machine or in a
    control group; 0 where it does not say."""
    with contextlib.suppress(OSError, ValueError, StopIteration):
        lines = Path("/proc/vmstat").read_text(encoding="ascii").splitlines()
        return int(next(line for line in lines if line.startswith("oom_kill ")).split()[1])
    return 0


def ignore_ending_signals() -> None:
    """In the child's main thread: ignore them from now on, those that came meanwhile too."""
    for number in _ENDING:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _ENDING)


def end_when_asked() -> None:
    """From now on SIGTERM, SIGINT and a closed terminal (SIGHUP) end this process, whatever started it. SIGHUP does
    what SIGTERM does, whatever handles that by then.

    Supervisors leave signals blocked, or SIGTERM ignored, in what they start; and the kernel drops a SIGTERM that the
    first process of a container does not handle. What is ignored on purpose stays so: SIGHUP by `nohup`, SIGINT by a
    shell in what it runs in the background."""
    if signal.getsignal(signal.SIGTERM) is signal.SIG_IGN or os.getpid() == 1:
        signal.signal(signal.SIGTERM, _exit)
    if signal.getsignal(signal.SIGHUP) is signal.SIG_DFL:
        signal.signal(signal.SIGHUP, lambda _number, _frame: signal.raise_signal(signal.SIGTERM))
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _ENDING)


@contextmanager
def interruptible() -> Iterator[None]:
    """Within it, Ctrl-C and the end of the terminal end the process at once, without a word: for the main thread, in a
    long call of a library, with nothing to close. Python would run its own handlers only after the call."""
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGHUP)}
    is_main = threading.current_thread() is threading.main_thread()
    if not is_main or before[signal.SIGINT] is not signal.default_int_handler:
        yield  # handlers belong to the main thread, and one that was set by others stays
        return
    for number, handler in before.items():
        if handler is not signal.SIG_IGN:
            signal.signal(number, signal.SIG_DFL)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def sigterm_exits() -> Iterator[None]:
    """Within it, SIGTERM ends the program as `sys.exit` does, so that what has to be closed is closed; a second one
    meanwhile is ignored. For the main thread of a command that has no other way to end."""
    before = signal.signal(signal.SIGTERM, _exit)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _exit(number: int, _frame: FrameType | None) -> None:
    signal.signal(number, signal.SIG_IGN)
    raise SystemExit(128 + number)

"""Descriptors beyond 1,023, and the limit on their number; folders with one writer."""

import errno
import fcntl
import os
import platform
import resource
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from antiphon.base import system
from antiphon.base.errors import UserError
from antiphon.base.system import limit, one_writer, wait_ready

RAISED = """
import os, resource, subprocess, sys, time
from antiphon.base.system import limit, raise_limit
soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
resource.setrlimit(resource.RLIMIT_NOFILE, (64, hard))
assert limit() == 64
raise_limit()
assert limit() == (1 << 20 if hard == resource.RLIM_INFINITY else min(hard, 1 << 20)), limit()
started = time.process_time()
subprocess.run([sys.executable, "-c", "import resource; print(resource.getrlimit(resource.RLIMIT_NOFILE)[0])"])
assert time.process_time() - started < 0.2, "nobody looks at a million descriptors"
"""


END_WITH_TERMINAL = """
import os, signal, sys
from antiphon.base.system import end_when_asked, sigterm_exits
end_when_asked()
with sigterm_exits():
    try:
        os.kill(os.getpid(), signal.SIGHUP)
    finally:
        print("closed", flush=True)
"""


@pytest.mark.parametrize(("before", "code", "said"), [("", 143, "closed"), ("trap '' HUP; ", 0, "closed")])
def test_a_closed_terminal_ends_a_program_as_sigterm_does(before: str, code: int, said: str) -> None:
    """But for one that was started to outlive it."""
    command = ["sh", "-c", f'{before}exec "$0" -c "$1"', sys.executable, END_WITH_TERMINAL]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout.strip(), done.stderr) == (code, said, "")


END_WHEN_ASKED = """
import os, signal, sys
from antiphon.base.system import end_when_asked
end_when_asked()
os.kill(os.getpid(), getattr(signal, sys.argv[1]))
print("goes on")
"""


@pytest.mark.parametrize(
    ("before", "number", "code"),
    [
        ("pthread_sigmask(SIG_BLOCK, {SIGTERM, SIGINT})", "SIGTERM", -signal.SIGTERM),
        ("pthread_sigmask(SIG_BLOCK, {SIGTERM, SIGINT})", "SIGINT", -signal.SIGINT),
        ("signal(SIGTERM, SIG_IGN)", "SIGTERM", 128 + signal.SIGTERM),
        ("signal(SIGINT, SIG_IGN)", "SIGINT", 0),  # what a shell started in the background
    ],
)
def test_a_program_ends_when_asked_whatever_started_it(before: str, number: str, code: int) -> None:
    start = "import os, sys; from signal import *; " + before + "; os.execv(sys.executable, [sys.executable, '-c', "
    command = [sys.executable, "-c", f"{start}{END_WHEN_ASKED!r}, {number!r}])"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout.strip()) == (code, "" if code else "goes on"), done.stderr


def test_the_limit_is_raised_as_far_as_the_system_allows_and_children_have_it() -> None:
    done = subprocess.run([sys.executable, "-c", RAISED], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert int(done.stdout) >= 64


@pytest.mark.skipif(resource.getrlimit(resource.RLIMIT_NOFILE)[1] < 1100, reason="too few descriptors")
def test_a_descriptor_beyond_those_of_select_is_waited_for() -> None:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(limit(), 1100), before[1]))
    reading, writing = os.pipe()
    try:
        os.dup2(reading, 1090)
        with open(1090, "rb", buffering=0) as far, open(writing, "wb", buffering=0) as pipe:  # noqa: PTH123
            assert not wait_ready(far, 0.01)
            assert wait_ready(pipe, 20.0, to_write=True)
            pipe.write(b"x")
            assert wait_ready(far, 20.0)
            assert far.read(1) == b"x"
        with open(reading, "rb", buffering=0) as near:  # noqa: PTH123
            assert wait_ready(near, 1e9), "the other end's hanging up counts, and a year is not too long"
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


def test_a_system_without_memory_is_asked_again_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    answers: list[object] = [OSError(12, "no memory"), [(0, 1)]]

    def poll(milliseconds: float) -> object:
        if isinstance(answer := answers.pop(0), OSError):
            raise answer
        return answer

    waits: list[float] = []
    monkeypatch.setattr(system.select, "poll", lambda: SimpleNamespace(register=lambda *_: None, poll=poll))
    monkeypatch.setattr(system.time, "sleep", waits.append)
    with open(os.devnull, "rb", buffering=0) as file:  # noqa: PTH123
        assert wait_ready(file, 5.0)
    assert waits == [0.01]


KEPT = """
import resource, sys
from antiphon.base.system import keep_freed_memory
def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    bytearray(100 << 20)[::4096] = b"x" * (25 << 10)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
given = [faults() for _ in range(3)]
done = keep_freed_memory()
faults()
print(done, min(given), max(faults() for _ in range(3)))
"""


def kept(**environment: str) -> tuple[bool, int, int]:
    """(whether it was done, pages that a large block costs before it, and behind it)."""
    own = {name: value for name, value in os.environ.items() if not name.startswith(("MALLOC_", "GLIBC_"))}
    done = subprocess.run(
        [sys.executable, "-c", KEPT], env=own | environment, capture_output=True, text=True, timeout=60, check=True
    )
    was_done, before, behind = done.stdout.split()
    return was_done == "True", int(before), int(behind)


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another C library has no such settings")
def test_freed_memory_is_kept_where_that_was_asked_for() -> None:
    was_done, before, behind = kept()
    assert was_done
    assert behind < before / 4


def test_what_the_user_has_set_for_the_allocator_stays() -> None:
    assert not kept(MALLOC_TRIM_THRESHOLD_="100000")[0]


def test_one_writer_of_a_folder(tmp_path: Path) -> None:
    """The second waits a moment, is refused, and has it afterwards; nothing is left in the folder."""
    folder = tmp_path / "a/b"
    with one_writer(folder, "wait"):
        with pytest.raises(UserError, match="b: wait for it"), one_writer(folder, "wait for it", 0.05):
            pass
        with one_writer(tmp_path / "a", "wait"):
            pass
    with one_writer(folder, "wait"):
        assert list(folder.iterdir()) == []


def test_a_file_system_without_locks_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def none(descriptor: int, how: int) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", none)
    with one_writer(tmp_path, "wait"):
        assert "cannot be locked (No locks available): start no second run in it" in caplog.text

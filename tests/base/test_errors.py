"""What people see of errors: values of any length, and the limits behind the system's words."""

import errno
import os
import re

import pytest

from antiphon.base.errors import Refused, UserError, native_error, shortened, why_unwritten, with_fix


def test_a_long_value_is_cut_in_its_middle_and_its_length_is_said() -> None:
    assert shortened("a" * 80) == "a" * 80
    assert shortened("a" * 50 + "b" * 50) == f"{'a' * 40}… 20 more characters …{'b' * 40}"


def test_an_error_never_repeats_a_megabyte() -> None:
    message = str(UserError(f"--host is {'a' * 10**6}: name an address"))
    assert len(message) < 5000
    assert message.startswith("--host is a")
    assert message.endswith("a: name an address")
    assert "more characters" in message


def test_an_error_of_the_system_names_the_limit_and_the_fix() -> None:
    words = f"experts[0] refused: reserving 274560 shared bytes: {os.strerror(errno.EFBIG)}"
    error = native_error("refused", words, ["experts[0]"], "")
    assert isinstance(error, Refused)
    assert str(error).startswith(words)
    assert "ulimit -f" in str(error)


def test_what_is_not_written_names_a_limit_that_is_not_the_disks() -> None:
    assert "raise it (ulimit -f unlimited)" in why_unwritten(f"I/O error: {os.strerror(errno.EFBIG)} (os error 27)")
    assert why_unwritten(os.strerror(errno.ENOSPC)) == os.strerror(errno.ENOSPC)


@pytest.mark.parametrize(
    "words",
    [
        "ImportError: libtorch_cpu.so: failed to map segment from shared object",
        "RuntimeError: [enforce fail at alloc_cpu.cpp:121] err == 0. DefaultCPUAllocator: can't allocate memory",
        "MemoryError: no further message",
    ],
)
def test_libraries_that_lack_memory_get_the_systems_fix(words: str) -> None:
    assert with_fix(words).startswith(f"{words}: memory or addresses are limited")
    assert with_fix(words).endswith("use less or raise them (ulimit -v)")
    assert with_fix(with_fix(words)) == with_fix(words)


@pytest.mark.parametrize("words", ["RuntimeError: can't start new thread", os.strerror(errno.EAGAIN)])
def test_a_thread_or_process_that_is_refused_names_the_limits(words: str) -> None:
    """Memory was blamed alone, where a container allows few processes."""
    assert re.match(rf"{words}: threads or processes are limited.* \(ulimit -u, pids\.max", with_fix(words))
    assert with_fix(with_fix(words)) == with_fix(words)

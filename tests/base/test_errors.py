"""What people see of errors: values of any length, and the limits behind the system's words."""

import errno
import os

from antiphon.base.errors import Refused, UserError, native_error, shortened


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

"""One line a record: what it looks like, which level, who gets it."""

import logging
import os
import re
import subprocess
import sys

import pytest

from antiphon.base.errors import UserError
from antiphon.base.logging import Occasional, get_logger, parse_level

SAY = (
    "from antiphon.base.logging import get_logger\n"
    "log = get_logger('antiphon.serve.engine')\n"
    "log.debug('quiet'); log.info('ready on %d', 8000); log.warning('careful')\n"
)


def run(source: str, level: str = "") -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "ANTIPHON_LOG": level}
    command = [sys.executable, "-c", source]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=False)


def test_a_line_has_time_level_component_and_message() -> None:
    lines = run(SAY).stderr.splitlines()
    assert len(lines) == 2
    assert re.fullmatch(r"\d\d:\d\d:\d\d\.\d{3} INFO    serve\.engine: ready on 8000", lines[0])
    assert re.fullmatch(r"\d\d:\d\d:\d\d\.\d{3} WARNING serve\.engine: careful", lines[1])


def test_the_environment_sets_the_level() -> None:
    assert len(run(SAY, "debug").stderr.splitlines()) == 3
    assert len(run(SAY, "WARNING").stderr.splitlines()) == 1
    assert run(SAY, "error").stderr == ""


def test_an_unknown_level_is_refused_with_the_choices() -> None:
    with pytest.raises(UserError, match=r"ANTIPHON_LOG is 'loud': use one of debug, info, warning, error"):
        parse_level("loud")


def test_an_unknown_level_does_not_end_an_import() -> None:
    said = run(SAY, "loud")
    assert said.returncode == 0
    assert [line.split(" ", 1)[1].split()[0] for line in said.stderr.splitlines()] == ["WARNING", "INFO", "WARNING"]


def test_an_application_that_configured_logging_gets_each_record_once() -> None:
    configured = "import logging\nlogging.basicConfig(format='APP %(message)s')\n" + SAY
    assert run(configured).stderr.splitlines() == ["APP ready on 8000", "APP careful"]


def test_short_and_full_names_are_the_same_logger() -> None:
    assert get_logger("serve.engine") is get_logger("antiphon.serve.engine")
    assert isinstance(get_logger("x"), logging.Logger)


@pytest.mark.parametrize(
    "spoil", ["os.dup2(os.open('/dev/full', os.O_WRONLY), 2)", "sys.stderr.close()", "sys.stderr = None"]
)
def test_who_logs_goes_on_when_nothing_can_be_written(spoil: str) -> None:
    """A full disk behind standard error, or none at all."""
    source = f"import os, sys\n{SAY}\n{spoil}\nfor number in range(1000): log.error('%d', number)\nprint('went on')"
    assert run(source).stdout == "went on\n"


def test_what_happens_often_is_said_now_and_then(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = 100.0
    monkeypatch.setattr("time.monotonic", lambda: now_s)
    saying = Occasional(5.0)
    assert [saying.count() for _ in range(4)] == [0, None, None, None]
    now_s += 5.0
    assert [saying.count() for _ in range(2)] == [3, None], "and how often it happened meanwhile"

"""One line a record: what it looks like, which level, who gets it."""

import logging
import os
import re
import subprocess
import sys

import pytest

from antiphon.base.errors import UserError
from antiphon.base.logging import get_logger, parse_level

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


def test_an_application_that_configured_logging_gets_each_record_once() -> None:
    configured = "import logging\nlogging.basicConfig(format='APP %(message)s')\n" + SAY
    assert run(configured).stderr.splitlines() == ["APP ready on 8000", "APP careful"]


def test_short_and_full_names_are_the_same_logger() -> None:
    assert get_logger("serve.engine") is get_logger("antiphon.serve.engine")
    assert isinstance(get_logger("x"), logging.Logger)

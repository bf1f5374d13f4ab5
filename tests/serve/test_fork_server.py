"""What the fork server of the tests says itself never reaches a test, unless it has ended."""

import sys
from pathlib import Path

import pytest

from tests.serve.fork_server import ForkServer


def test_what_it_says_is_kept_until_it_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "loud.py").write_text("import sys\nprint('a warning', file=sys.stderr)\nWORD = 'hello'\n")
    (tmp_path / "fatal.py").write_text("import os, sys\nprint('no more', file=sys.stderr, flush=True)\nos._exit(3)\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    server = ForkServer()
    try:
        ended = server.run([sys.executable, "-c", "from loud import WORD\nprint(WORD)"], timeout=60.0)
        assert (ended.returncode, ended.stdout, ended.stderr) == (0, b"hello\n", b"")
        with pytest.raises(RuntimeError, match="the fork server ended: a warning\nno more\n"):
            server.run([sys.executable, "-c", "from fatal import WORD"], timeout=60.0)
    finally:
        server.close()
    assert capfd.readouterr().err == ""

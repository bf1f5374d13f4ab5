"""Hostile request bodies, by `benchmarks/fuzz_bodies.py`: no 5xx, nobody else stalls, memory comes back.

The script sends 10,000 and holds a parallel request to 250 ms; here, beside other tests, are fewer bodies and more
patience.
"""

import importlib
import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType

import pytest

from tests.serve.server_harness import ROOT, serve

NUM_BODIES = 1000
MAX_STALL_S = 5.0  # what one body did to others before they were refused by size: up to 18 s


@pytest.fixture(scope="module")
def script() -> Iterator[ModuleType]:
    """The script; its senders are processes that import it from this path too."""
    folder = str(ROOT / "benchmarks")
    sys.path.insert(0, folder)
    yield importlib.import_module("fuzz_bodies")
    sys.path.remove(folder)


def test_a_seed_gives_the_same_bodies(script: ModuleType) -> None:
    bodies = [script.random_body(random.Random(seed)) for seed in range(60)]
    assert bodies == [script.random_body(random.Random(seed)) for seed in range(60)]
    assert len({content for _, content in bodies}) == 60


@pytest.mark.parametrize("fails", [False, True])
def test_a_problem_is_shown_with_the_end_of_the_servers_log(
    fails: bool, script: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    @contextmanager
    def attacked(_: Path, folder: Path, *__: str) -> Iterator[dict[str, object]]:
        (folder / "server.log").write_text("the traceback")
        yield {"url": "http://nobody", "pid": 0}

    findings = script.Findings(waits_s=[0.001], failures=["500"] if fails else [], well=True)
    monkeypatch.setattr(script, "serving_here", attacked)
    monkeypatch.setattr(script, "fuzz", lambda *_: findings)
    monkeypatch.setattr(sys, "argv", ["fuzz_bodies.py", "model", "--only", "bodies"])
    assert script.main() == fails
    assert capsys.readouterr().err == ("the end of the server's log:\nthe traceback\n" if fails else "")


@pytest.mark.slow
def test_hostile_bodies_disturb_nobody(script: ModuleType, checkpoint: Path, tmp_path: Path) -> None:
    with serve(checkpoint, tmp_path, "--layout", "disaggregated") as server:
        findings = script.fuzz(server.url, server.process.pid, NUM_BODIES, seed=0)
        print(findings.summary())
        assert findings.problems(max_stall_s=MAX_STALL_S) == []
        assert findings.statuses[200] > NUM_BODIES // 50, "hardly a body was good: the fuzzer tests nothing"

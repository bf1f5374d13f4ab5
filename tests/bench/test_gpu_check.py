"""`make gpu-check` without a GPU: every part says why it skips; a part that fails, hangs or writes half a file hides no
other; the parts that time run at tiny sizes."""

import importlib.util
import json
import subprocess
import sys
import time
from pathlib import Path
from types import ModuleType

import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def gpu_check() -> ModuleType:
    spec = importlib.util.spec_from_file_location("gpu_check", ROOT / "benchmarks" / "gpu_check.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["gpu_check"] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def part(gpu_check: ModuleType, name: str, program: str, **changes: object) -> object:
    settings = {"name": name, "what": f"is {name}", "commands": [["-c", program]], "limit_s": 60.0} | changes
    return gpu_check.GpuPart(**settings)


def test_a_part_that_ends_badly_hides_no_other(gpu_check: ModuleType, tmp_path: Path) -> None:
    started_s = time.monotonic()
    parts = [
        part(gpu_check, "wrong", "print('why it failed'); raise SystemExit(3)"),
        part(gpu_check, "crash", "import os, signal; os.kill(os.getpid(), signal.SIGSEGV)"),
        part(gpu_check, "hang", "import time; time.sleep(600)", limit_s=1.5),
        part(
            gpu_check,
            "half",
            "import sys; open(sys.argv[1], 'w').write('{')",
            commands=[["-c", "open(r'{json}', 'w').write('[')"]],
        ),
        part(gpu_check, "absent", "", skip="there is no such device"),
        part(gpu_check, "good", "", commands=[["-c", WRITES_ROWS, "{json}"]]),
        part(gpu_check, "second", "", commands=[["-c", "raise SystemExit(1)"], ["-c", "print('never')"]]),
    ]
    outcomes = gpu_check.check(parts, tmp_path, 2.0, "invented")
    assert [each.outcome for each in outcomes] == [
        "failed",
        "failed",
        "stopped",
        "passed",
        "skipped",
        "passed",
        "failed",
    ]
    assert time.monotonic() - started_s < 60
    assert outcomes[0].last_lines == ["why it failed"]
    assert outcomes[5].rows == [{"kernel": "gate", "us": 1.5}]
    written = json.loads((tmp_path / "gpu_check.json").read_text())
    assert [each["name"] for each in written["parts"]] == [each.name for each in parts]
    page = (tmp_path / "gpu_check.md").read_text()
    assert "| hang | is hang | stopped: its limit of 2 s |" in page
    assert "| absent | is absent | skipped: there is no such device |" in page
    assert "|gate|1.5|" in page
    assert "why it failed" in page


WRITES_ROWS = "import json, sys; json.dump({'rows': [{'kernel': 'gate', 'us': 1.5}]}, open(sys.argv[1], 'w'))"


def test_no_time_left_is_said(gpu_check: ModuleType, tmp_path: Path) -> None:
    (outcome,) = gpu_check.check([part(gpu_check, "late", "print()")], tmp_path, 0.001, "invented")
    assert (outcome.outcome, outcome.reason) == ("not run", "no time was left")


def test_a_part_that_the_end_of_everything_stopped_is_not_blamed(gpu_check: ModuleType, tmp_path: Path) -> None:
    slow = part(gpu_check, "slow", "import time; time.sleep(600)")
    (outcome,) = gpu_check.check([slow], tmp_path, 0.03, "invented")
    assert (outcome.outcome, outcome.reason) == ("stopped", "the time for everything ended after 2 of its 60 s")


def test_parts_that_were_not_run_are_no_success(
    gpu_check: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OUT", str(tmp_path))
    monkeypatch.setattr(sys, "argv", ["gpu_check.py", "--device", "cpu", "--parts", "limits", "--minutes", "0.001"])
    assert gpu_check.main() == 1


def test_parts_can_be_run_alone(gpu_check: ModuleType) -> None:
    parts = gpu_check.parts_of("cpu")
    assert [each.name for each in gpu_check.chosen_parts(parts, "limits,streams")] == ["streams", "limits"]
    with pytest.raises(SystemExit, match="no part is called fast; there are kernels, graphs"):
        gpu_check.chosen_parts(parts, "fast")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_without_a_gpu_every_part_says_why_it_skips(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "benchmarks/gpu_check.py"],
        cwd=ROOT,
        env={"OUT": str(tmp_path), "PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
        check=False,
        timeout=200,
    )
    assert done.returncode == 0, done.stderr
    written = json.loads((tmp_path / "gpu_check.json").read_text())
    assert len(written["parts"]) == 14
    for each in written["parts"]:
        assert each["outcome"] == "skipped"
        assert "CUDA" in each["reason"]


def test_parts_have_forms_for_cpus(tmp_path: Path) -> None:
    """What times runs at tiny sizes, sums of ranks over gloo; what needs the device says so."""
    done = subprocess.run(
        [sys.executable, "benchmarks/gpu_check.py", "--device", "cpu", "--parts", "graphs,sums,kernel-times"],
        cwd=ROOT,
        env={"OUT": str(tmp_path), "PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout + (tmp_path / "gpu_check.md").read_text()
    graphs, sums, times = json.loads((tmp_path / "gpu_check.json").read_text())["parts"]
    assert (graphs["outcome"], graphs["reason"]) == ("skipped", "it has no form for CPUs")
    assert sums["outcome"] == "passed"
    assert sums["tests"]["tests"] >= 5
    assert {row["kernel"] for row in times["rows"]} == {"gate with its product", "experts", "decode attention, 48 keys"}
    assert all(row["us"] > 0 for row in times["rows"])

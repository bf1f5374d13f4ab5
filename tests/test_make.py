"""What `make` says to somebody whose machine or arguments are not as they should be: one line, before anything is made.

In a copy of the files that `make setup` reads first; nothing is downloaded, because each of these ends before that.
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
pytestmark = pytest.mark.skipif(shutil.which("make") is None, reason="no make on this machine")


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """In a folder whose path has a space."""
    folder = tmp_path / "my projects" / "antiphon"
    shutil.copytree(ROOT / "scripts", folder / "scripts")
    for name in ("Makefile", "requirements.lock"):
        shutil.copy(ROOT / name, folder)
    return folder


def program(path: Path, text: str) -> Path:
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return path


def refuses(project: Path, message: str, *arguments: str) -> None:
    """`make setup` fails and says just this, but for what make itself adds."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(("MAKE", "PYTHON"))}
    ended = subprocess.run(
        ["make", "setup", *arguments],
        cwd=project,
        env=inherited,
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    said = [line for line in ended.stderr.splitlines() if not line.startswith("make: ***")]
    assert ended.returncode == 2
    assert said == [message], ended.stderr
    assert ended.stdout in {"", "== environment in .venv\n"}
    assert not list(project.glob(".venv/*"))


EXAMPLE = "name another, for example: make setup PYTHON=python3.12"


def test_a_python_that_is_none(project: Path) -> None:
    refuses(project, f"error: PYTHON is /nope: there is no such program; {EXAMPLE}", "PYTHON=/nope")
    true = program(project / "true", "exit 0")
    refuses(project, f"error: PYTHON is {true}: it does not run as a Python; {EXAMPLE}", f"PYTHON={true}")
    fails = program(project / "fails", "echo no >&2; exit 3")
    refuses(project, f"error: PYTHON is {fails}: it does not run as a Python; {EXAMPLE}", f"PYTHON={fails}")


def test_a_python_that_is_too_old(project: Path) -> None:
    old = program(project / "python3.9", 'case "$2" in *exit*) exit 1 ;; *) echo 3.9 ;; esac')
    refuses(project, f"error: PYTHON is {old}: it is Python 3.9, 3.11 or newer is needed; {EXAMPLE}", f"PYTHON={old}")


def test_a_python_without_venv(project: Path) -> None:
    modules = project / "modules"
    modules.mkdir()
    (modules / "venv.py").write_text("raise ImportError('left out')\n")
    python = program(project / "python3", f'PYTHONPATH="{modules}" exec "{sys.executable}" "$@"')
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    hint = f"run: sudo apt-get install python{version}-venv"
    if shutil.which("apt-get") is None:
        hint = "install your system's Python venv package"
    refuses(project, f"error: PYTHON is {python}: it has no venv module; {hint}", f"PYTHON={python}")


def test_a_folder_that_cannot_be_written(project: Path) -> None:
    message = f"error: cannot write to {project}/.venv: copy the project to a folder of your own, or change its owner"
    (project / ".venv").write_text("a file where the environment belongs")  # stops root too
    refuses(project, message, f"PYTHON={sys.executable}")
    if os.geteuid() != 0:
        (project / ".venv").unlink()
        project.chmod(0o555)
        try:
            refuses(project, message, f"PYTHON={sys.executable}")
        finally:
            project.chmod(0o755)


@pytest.mark.parametrize("torch", ["nonsense", "2.12.1", "torch>=2.12", "torch==2.12.1 numpy", "torch==2.119.0", ""])
def test_a_torch_that_is_none_of_ours(project: Path, torch: str) -> None:
    ended = subprocess.run(
        ["make", "setup", f"TORCH={torch}"], cwd=project, capture_output=True, text=True, check=False, timeout=60
    )
    assert ended.returncode == 2
    (line,) = ended.stderr.splitlines()
    assert f"TORCH is '{torch}': write torch==VERSION with a version from 2.11 to 2.13, for example" in line


@pytest.mark.parametrize("torch", ["torch==2.11.0", "torch==2.13.0+cpu", "torch==2.12"])
def test_the_torches_that_are(project: Path, torch: str) -> None:
    ended = subprocess.run(
        ["make", "help", f"TORCH={torch}"], cwd=project, capture_output=True, text=True, check=False, timeout=60
    )
    assert (ended.returncode, ended.stderr) == (0, "")

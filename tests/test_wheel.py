"""The wheel that `pip install .` makes, without `make`: everything is in it, and it works outside the checkout.

Built incrementally, in the folder where the development build is; with the packages of this environment, so that
nothing is downloaded. Slow where the native code has to be compiled anew.
"""

import fcntl
import json
import os
import site
import subprocess
import sys
import venv
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
pytestmark = [pytest.mark.slow, pytest.mark.timeout(1500)]


def run(command: list[object], cwd: Path, timeout_s: float = 300) -> str:
    """Its standard output."""
    tools = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"  # cmake and ninja
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | {"PATH": tools}
    ended = subprocess.run(
        list(map(str, command)),
        cwd=cwd,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=timeout_s,
    )
    assert ended.returncode == 0, ended.stdout[-2000:] + ended.stderr[-2000:]
    return ended.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check"]
    (ROOT / "build").mkdir(exist_ok=True)
    with (ROOT / "build" / "wheel.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # another test process may be building in the same folder
        run([*pip, "wheel", ROOT, "--no-deps", "--no-build-isolation", "--wheel-dir", folder], folder, 1400)
    (made,) = folder.glob("antiphon-*.whl")
    return made


@pytest.fixture(scope="module")
def installed(wheel: Path) -> Path:
    """The programs of an environment that has the wheel, and sees the packages of this one."""
    folder = wheel.parent / "environment"
    venv.create(folder)
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--python", folder / "bin" / "python"]
    run([*pip, "install", "--no-deps", "--no-index", wheel], wheel.parent)
    (packages,) = folder.glob("lib/python*/site-packages")
    shared = [path for path in sys.path if path.endswith("site-packages")] or site.getsitepackages()
    (packages / "shared.pth").write_text("\n".join(shared) + "\n")
    return folder / "bin"


def test_every_file_of_the_package_is_in_it_and_nothing_else(wheel: Path) -> None:
    tracked = run(["git", "ls-files", "antiphon"], ROOT).split()
    with zipfile.ZipFile(wheel) as archive:
        names = [name for name in archive.namelist() if ".dist-info/" not in name]
    native = [name for name in names if name.endswith(".so")]
    assert sorted(set(names) - set(native)) == sorted(tracked)
    assert sorted(Path(name).name.partition(".")[0] for name in native) == ["_m2n", "_native"]


def test_it_has_the_libfabric_back_end_and_is_not_the_checkout(installed: Path, tmp_path: Path) -> None:
    source = (
        "import json, antiphon._m2n as m; print(json.dumps([m.__file__, m.libfabric_info()['built'], m.transports()]))"
    )
    file, built, transports = json.loads(run([installed / "python", "-c", source], tmp_path))
    assert Path(file).is_relative_to(installed.parent)
    assert built
    assert "libfabric" in transports


def test_its_commands_work_outside_the_checkout(installed: Path, tmp_path: Path) -> None:
    antiphon = installed / "antiphon"
    assert "Ready." in run([antiphon, "doctor"], tmp_path)
    assert run([antiphon, "serve", "--help"], tmp_path).startswith("Usage: antiphon serve [OPTIONS]")
    assert "dbrx" in run([antiphon, "plan", "dbrx", "--cluster", "msi-ampere"], tmp_path)
    model = ROOT / "examples" / "demo-moe"
    options = ("--token-ids", "1,2", "--max-tokens", "3", "--ignore-eos", "--layout", "disaggregated")
    assert len(run([antiphon, "generate", model, *options], tmp_path).split()) == 3

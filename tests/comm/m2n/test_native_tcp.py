"""The tcp back-end, tested in C++: compiled here, run plain and under the sanitizers.

The program drives `Transport`, `Landing` and `Link` alone, with an acceptor thread in place of the control plane, so a
fault of the back-end is not hidden by the core above it. `native_tcp/main.cpp` lists the cases.
"""

import os
import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
PROGRAM = ROOT / "tests/comm/m2n/native_tcp"
SOURCES = ("csrc/m2n/bell.cpp", "csrc/m2n/error.cpp", "csrc/base/wait_word.cpp", "csrc/base/huge_buffer.cpp")
BUILDS = {
    "plain": [],
    "address": ["-fsanitize=address,undefined", "-fno-sanitize-recover=all"],
    "thread": ["-fsanitize=thread"],
}


def run(command: list[str], timeout_s: float) -> str:
    """What `command` printed; the test fails with it if the command fails."""
    done = subprocess.run(command, capture_output=True, text=True, timeout=timeout_s, check=False)
    if done.returncode != 0:
        pytest.fail(f"{' '.join(command)} ended with {done.returncode}:\n{done.stdout}{done.stderr}")
    return done.stdout


def compile_program(folder: Path, flags: list[str]) -> Path:
    """Builds the test program in `folder`; fails with the compiler's words, also for a warning."""
    compiler = os.environ.get("CXX", "c++").split()
    if shutil.which(compiler[0]) is None:
        pytest.skip(f"no C++ compiler ({compiler[0]})")
    warnings = ["-Wall", "-Wextra", "-Werror"]
    common = [*compiler, "-std=c++20", "-O1", "-g", "-pthread", *warnings, "-I", str(ROOT / "csrc"), *flags]
    sources = [*ROOT.glob("csrc/m2n/tcp*.cpp"), *(ROOT / source for source in SOURCES), *PROGRAM.glob("*.cpp")]

    def compile_one(source: Path) -> str:
        made = folder / (source.stem + ".o")
        run([*common, "-c", str(source), "-o", str(made)], timeout_s=240)
        return str(made)

    with ThreadPoolExecutor(max_workers=2) as pool:
        objects = list(pool.map(compile_one, sources))
    program = folder / "native_tcp"
    run([*common, *objects, "-o", str(program)], timeout_s=120)
    return program


@pytest.mark.parametrize("build", list(BUILDS))
def test_native_tcp(build: str, tmp_path: Path) -> None:
    """Every case of the program."""
    program = compile_program(tmp_path, BUILDS[build])
    assert run([str(program)], timeout_s=240).endswith("all ok\n")

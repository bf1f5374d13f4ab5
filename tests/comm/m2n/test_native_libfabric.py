"""The libfabric back-end, tested in C++: compiled here, run plain and under two sanitizers.

A test of its own because it needs neither Python nor a peer on another machine, only libfabric's headers and a library;
without them it skips. `ANTIPHON_LIBFABRIC` and `ANTIPHON_LIBFABRIC_INCLUDE` name others than those of the environment.
"""

import os
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
PROGRAM = ROOT / "tests/comm/m2n/native_libfabric"
SHARED_SOURCES = ("csrc/m2n/error.cpp", "csrc/base/wait_word.cpp", "csrc/base/huge_buffer.cpp")
PACKAGED = Path(sys.prefix) / "libfabric"
BUILDS = {"plain": ["-O1"], "sanitized": ["-O1", "-fsanitize=address,undefined", "-fno-sanitize-recover=undefined"]}
NOT_THERE = 77  # the program's exit status without a library or provider
# What libfabric itself keeps until the process ends is not ours to free.
LEAKS_OF_LIBRARIES = "leak:libfabric.so\nleak:-fi.so\nleak:libfabric/\n"


def include_folder() -> Path:
    """The folder with rdma/fabric.h; skips if there is none."""
    named = os.environ.get("ANTIPHON_LIBFABRIC_INCLUDE")
    folders = [Path(named)] if named else [PACKAGED / "include", Path("/usr/include"), Path("/usr/local/include")]
    for folder in folders:
        if (folder / "rdma/fabric.h").is_file():
            return folder
    pytest.skip("no rdma/fabric.h: run scripts/fetch_libfabric.sh .venv/libfabric")


def compile_program(folder: Path, flags: list[str]) -> Path:
    """Builds the test program in `folder`; fails with the compiler's words, also for a warning."""
    compiler = os.environ.get("CXX", "c++").split()
    if shutil.which(compiler[0]) is None:
        pytest.skip(f"no C++ compiler ({compiler[0]})")
    include = include_folder()
    # The system's own folder must not be named again: it would come before the compiler's.
    includes = ["-I", str(ROOT / "csrc")] + ([] if include == Path("/usr/include") else ["-isystem", str(include)])
    warnings = ["-Wall", "-Wextra", "-Werror"]
    common = [*compiler, "-std=c++20", "-g", *warnings, "-DANTIPHON_HAVE_LIBFABRIC", *includes, *flags]
    sources = [*ROOT.glob("csrc/m2n/libfabric_*.cpp"), *PROGRAM.glob("*.cpp"), *(ROOT / s for s in SHARED_SOURCES)]

    def compile_one(source: Path) -> Path:
        made = folder / (source.stem + ".o")
        run([*common, "-c", str(source), "-o", str(made)], timeout_s=240)
        return made

    with ThreadPoolExecutor(max_workers=2) as pool:
        objects = [str(made) for made in pool.map(compile_one, sources)]
    program = folder / "test"
    run([*common, *objects, "-ldl", "-lpthread", "-o", str(program)], timeout_s=120)
    return program


def run(command: list[str], timeout_s: float, **environment: str) -> subprocess.CompletedProcess[str]:
    """Runs `command`; the test fails with its output if it fails, other than by saying that something is not there."""
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=timeout_s, check=False, env={**os.environ, **environment}
    )
    if done.returncode not in {0, NOT_THERE}:
        pytest.fail(f"{' '.join(command)} ended with {done.returncode}:\n{done.stdout}{done.stderr}")
    return done


@pytest.fixture(scope="module", params=list(BUILDS))
def program(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The test program, once per build."""
    return compile_program(tmp_path_factory.mktemp(f"libfabric-{request.param}"), BUILDS[request.param])


@pytest.mark.parametrize("provider", ["tcp", "shm"])
def test_native_libfabric(program: Path, provider: str, tmp_path: Path) -> None:
    """Every test of the program, over one provider."""
    suppressions = tmp_path / "leaks"
    suppressions.write_text(LEAKS_OF_LIBRARIES)
    done = run(
        [str(program), provider],
        timeout_s=240,
        LSAN_OPTIONS=f"suppressions={suppressions}:print_suppressions=0",
        ANTIPHON_LIBFABRIC_PACKAGED=os.environ.get("ANTIPHON_LIBFABRIC_PACKAGED", str(PACKAGED / "lib")),
    )
    if done.returncode == NOT_THERE:
        pytest.skip(done.stdout.strip())
    assert "ok killed_receiver" in done.stdout


def test_a_build_without_headers_says_what_is_missing(tmp_path: Path) -> None:
    """Without ANTIPHON_HAVE_LIBFABRIC the back-end compiles, and refuses with the mend."""
    source = tmp_path / "without.cpp"
    source.write_text(
        '#include "m2n/error.h"\n#include "m2n/transports.h"\n#include <iostream>\n'
        "int main() {\n"
        "    try { antiphon::m2n::make_libfabric({}); } catch (const antiphon::m2n::Error& error) {\n"
        "        std::cout << error.what();\n"
        "        return 0;\n"
        "    }\n"
        "    return 1;\n"
        "}\n"
    )
    compiler = os.environ.get("CXX", "c++").split()
    if shutil.which(compiler[0]) is None:
        pytest.skip(f"no C++ compiler ({compiler[0]})")
    program = tmp_path / "without"
    sources = [source, ROOT / "csrc/m2n/libfabric_transport.cpp", ROOT / "csrc/m2n/error.cpp"]
    command = [*compiler, "-std=c++20", "-I", str(ROOT / "csrc"), *map(str, sources), "-o", str(program)]
    run(command, timeout_s=120)
    assert "scripts/fetch_libfabric.sh" in run([str(program)], timeout_s=20).stdout

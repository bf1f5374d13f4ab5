"""The libfabric back-end, tested in C++: compiled here, run plain and under two sanitizers.

A test of its own because it needs neither Python nor a peer on another machine, only libfabric's headers and a library;
without them it skips. `ANTIPHON_LIBFABRIC` and `ANTIPHON_LIBFABRIC_INCLUDE` name others than those of the environment.
"""

import os
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.comm.m2n.compile import ROOT, Build

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

SHARED = (
    *("m2n/socket.cpp", "m2n/waiting.cpp"),
    *("base/wait_word.cpp", "base/huge_buffer.cpp"),
)
SOURCES = [
    *sorted(ROOT.glob("csrc/m2n/libfabric_*.cpp")),
    *sorted(Path(__file__).parent.glob("native_libfabric/*.cpp")),
    *(ROOT / "csrc" / name for name in SHARED),
]
PACKAGED = Path(sys.prefix) / "libfabric"
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


@pytest.mark.parametrize("provider", ["tcp", "shm"])
@pytest.mark.parametrize("sanitizer", ["plain", "address"])
def test_native_libfabric(native_build: Callable[[str], Build], sanitizer: str, provider: str, tmp_path: Path) -> None:
    """Every test of the program, over one provider."""
    include = include_folder()
    # The system's own folder must not be named again: it would come before the compiler's.
    includes = [] if include == Path("/usr/include") else ["-isystem", str(include)]
    build = native_build(sanitizer)
    program = build.program("native_libfabric", SOURCES, ["-DANTIPHON_HAVE_LIBFABRIC", *includes])
    suppressions = tmp_path / "leaks"
    suppressions.write_text(LEAKS_OF_LIBRARIES)
    environment = {
        "LSAN_OPTIONS": f"suppressions={suppressions}:print_suppressions=0",
        "ANTIPHON_LIBFABRIC_PACKAGED": os.environ.get("ANTIPHON_LIBFABRIC_PACKAGED", str(PACKAGED / "lib")),
    }
    done = build.run(program, provider, timeout_s=240.0, environment=environment, may_end_with=NOT_THERE)
    if done.returncode == NOT_THERE:
        pytest.skip(done.stdout.strip())
    assert "ok killed_receiver" in done.stdout


def test_a_build_without_headers_says_what_is_missing(native_build: Callable[[str], Build], tmp_path: Path) -> None:
    """Without ANTIPHON_HAVE_LIBFABRIC the back-end compiles, and says how to get it."""
    source = tmp_path / "without.cpp"
    source.write_text(
        '#include "m2n/types.h"\n#include "m2n/transport.h"\n#include <iostream>\n'
        "int main() {\n"
        "    try { antiphon::m2n::make_libfabric({}); } catch (const antiphon::m2n::Error& error) {\n"
        "        std::cout << error.what();\n"
        "        return 0;\n"
        "    }\n"
        "    return 1;\n"
        "}\n"
    )
    build = native_build("plain")
    sources = [source, ROOT / "csrc/m2n/libfabric_transport.cpp"]
    assert (
        "built without libfabric's headers: install them"
        in build.run(build.program("without", sources), timeout_s=20.0).stdout
    )

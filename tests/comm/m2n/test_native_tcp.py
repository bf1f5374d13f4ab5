"""The tcp back-end, tested in C++: compiled here, run plain and under the sanitizers.

The program drives `Transport`, `Landing` and `Link` alone, with an acceptor thread in place of the control plane, so a
fault of the back-end is not hidden by the core above it. `native_tcp/main.cpp` lists the cases.
"""

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.comm.m2n.compile import ROOT, SANITIZERS, Build

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

SOURCES = [
    *sorted(ROOT.glob("csrc/m2n/tcp*.cpp")),
    *(ROOT / "csrc/m2n" / name for name in ("socket.cpp", "waiting.cpp")),
    *(ROOT / "csrc/base" / name for name in ("wait_word.cpp", "huge_buffer.cpp")),
    *sorted(Path(__file__).parent.glob("native_tcp/*.cpp")),
]


@pytest.mark.parametrize("sanitizer", SANITIZERS)
def test_native_tcp(native_build: Callable[[str], Build], sanitizer: str) -> None:
    """Every case of the program."""
    build = native_build(sanitizer)
    assert build.run(build.program("native_tcp", SOURCES), timeout_s=240.0).stdout.endswith("all ok\n")

"""The core of the M2N library as a C++ program under sanitizers: endpoints in threads, over shm, tcp and loopback.

`native_core/main.cpp` lists the cases. They flood, come and go, interrupt and lie to each other; what the Python suite
(test_conformance.py) sees from outside is here watched from inside.
"""

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.comm.m2n.compile import ROOT, Build

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

# libfabric has a test program of its own; without its headers its front only says that it is not there.
SOURCES = [
    ROOT / "csrc/base/wait_word.cpp",
    ROOT / "csrc/base/huge_buffer.cpp",
    ROOT / "csrc/m2n/libfabric_transport.cpp",
    *(path for path in sorted(ROOT.glob("csrc/m2n/*.cpp")) if not path.name.startswith("libfabric_")),
    *sorted(Path(__file__).parent.glob("native_core/*.cpp")),
]


@pytest.mark.parametrize("sanitizer", ["address", "thread"])
def test_native_core(native_build: Callable[[str], Build], sanitizer: str) -> None:
    """Every case of the program."""
    build = native_build(sanitizer)
    printed = build.run(build.program("native_core", SOURCES), timeout_s=300.0).stdout
    started, ended = re.findall(r"^(\S+)$", printed, re.MULTILINE), re.findall(r"^ok (\S+)", printed, re.MULTILINE)
    assert started == ended
    assert printed.endswith(f"{len(ended)} cases, all ok\n")
    assert {"lies_in_headers", "comings_and_goings[shm]", "many_to_many[tcp]", "dispatch_and_combine[shuffled]"} <= {
        *ended
    }
    assert {"ends_that_are_dropped", "dispatch_and_combine_in_streams[shm]"} <= {*ended}  # csrc/m2n/stream_core.h

"""The core of the M2N library as a C++ program under sanitizers: endpoints in threads, over shm, tcp and loopback.

`native_core/main.cpp` lists the cases. They flood, come and go, interrupt and lie to each other; what the Python suite
(test_conformance.py) sees from outside is here watched from inside.
"""

import re
from pathlib import Path

import pytest

from tests.comm.m2n.compile import ROOT, SANITIZERS, Build, usable_build

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

# libfabric has a test program of its own; without its headers its front only says that it is not there.
SOURCES = [
    ROOT / "csrc/base/wait_word.cpp",
    ROOT / "csrc/base/huge_buffer.cpp",
    ROOT / "csrc/m2n/libfabric_transport.cpp",
    *(path for path in sorted(ROOT.glob("csrc/m2n/*.cpp")) if not path.name.startswith("libfabric_")),
    *sorted(Path(__file__).parent.glob("native_core/*.cpp")),
]


@pytest.fixture(scope="session", params=list(SANITIZERS))
def program(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Build, Path]:
    """The test program, once for each sanitizer."""
    build = usable_build(request.param, tmp_path_factory.mktemp(f"core-{request.param}"))
    return build, build.program("native_core", SOURCES)


def test_native_core(program: tuple[Build, Path]) -> None:
    """Every case of the program."""
    build, path = program
    printed = build.run(path, timeout_s=300.0)
    started, ended = re.findall(r"^(\S+)$", printed, re.MULTILINE), re.findall(r"^ok (\S+)", printed, re.MULTILINE)
    assert started == ended
    assert printed.endswith(f"{len(ended)} cases, all ok\n")
    assert {"lies_in_headers", "comings_and_goings[shm]", "many_to_many[tcp]", "dispatch_and_combine[shuffled]"} <= {
        *ended
    }

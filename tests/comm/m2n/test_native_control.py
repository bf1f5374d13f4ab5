"""The control plane of the M2N library, as C++ programs under sanitizers.

The programs in `native/` are compiled with the control plane's sources and nothing else: no Python, no transports. One
build has AddressSanitizer and UndefinedBehaviorSanitizer, one ThreadSanitizer. Testing through the Python module was
rejected: strangers, dead machines and races need raw sockets, and a sanitizer does not load into a plain Python.
"""

import hashlib
import hmac
import random
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.comm.m2n.compile import ROOT, Build

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

PROGRAMS = Path(__file__).parent / "native"
SOURCES = [
    ROOT / "csrc" / path
    for path in (
        "base/wait_word.cpp",
        "m2n/sha256.cpp",
        "m2n/socket.cpp",
        "m2n/wire.cpp",
        "m2n/handshake.cpp",
        "m2n/control_thread.cpp",
        "m2n/control_connections.cpp",
    )
]
PEERS = ["openings_test", "strangers_test", "deaths_test", "races_test"]


def run(build: Build, name: str, *arguments: str, stdin: str = "") -> str:
    """What the program printed."""
    program = build.program(name, [*SOURCES, PROGRAMS / f"{name}.cpp"])
    return build.run(program, *arguments, stdin=stdin, timeout_s=200.0).stdout


def hash_vectors() -> str:
    """Lines "key message sha256 hmac" in hex, around every edge of the 64-byte blocks."""
    chance = random.Random(20)
    lines = []
    for length in [*range(130), 1000, 70_000]:
        key, message = chance.randbytes(chance.randrange(140)), chance.randbytes(length)
        digests = [hashlib.sha256(message).hexdigest(), hmac.new(key, message, "sha256").hexdigest()]
        lines.append(" ".join([key.hex() or "-", message.hex() or "-", *digests]))
    return "\n".join(lines)


def test_formats(native_build: Callable[[str], Build]) -> None:
    assert "vectors 132\n" in run(native_build("address"), "formats_test", stdin=hash_vectors())


@pytest.mark.parametrize("program", PEERS)
@pytest.mark.parametrize("sanitizer", ["address", "thread"])
def test_connections(native_build: Callable[[str], Build], sanitizer: str, program: str) -> None:
    assert "ok " in run(native_build(sanitizer), program)


def test_fuzz(native_build: Callable[[str], Build]) -> None:
    assert run(native_build("address"), "wire_fuzz", "100000", "1").startswith("100000 iterations")

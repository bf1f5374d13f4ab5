"""The control plane of the M2N library, as C++ programs under sanitizers.

The programs in `native/` are compiled with the control plane's sources and nothing else: no Python, no transports. One
build has AddressSanitizer and UndefinedBehaviorSanitizer, one ThreadSanitizer. Testing through the Python module was
rejected: strangers, dead machines and races need raw sockets, and a sanitizer does not load into a plain Python.
"""

import hashlib
import hmac
import os
import random
import shutil
import subprocess
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

ROOT = Path(__file__).resolve().parents[3]
PROGRAMS = Path(__file__).parent / "native"
SOURCES = [
    ROOT / "csrc" / path
    for path in (
        "base/wait_word.cpp",
        "m2n/error.cpp",
        "m2n/sha256.cpp",
        "m2n/socket.cpp",
        "m2n/wire.cpp",
        "m2n/ticket.cpp",
        "m2n/handshake.cpp",
        "m2n/control.cpp",
        "m2n/control_thread.cpp",
        "m2n/control_connections.cpp",
    )
]
FLAGS = ["-std=c++20", "-O1", "-g1", "-Wall", "-Wextra", "-Werror", "-pthread"]
SANITIZERS = {
    "address": ["-fsanitize=address,undefined", "-fno-sanitize-recover=all"],
    "thread": ["-fsanitize=thread"],
}


@dataclass(frozen=True, kw_only=True)
class Build:
    """Compiles and runs programs with one sanitizer, in a folder of its own."""

    compiler: str
    flags: Sequence[str]
    folder: Path
    launcher: Sequence[str]  # what the programs must be started through on this machine

    def compile(self, source: Path, *arguments: str) -> Path:
        """One source to an object, or with objects as `arguments` to a program."""
        output = self.folder / (source.stem if arguments else f"{source.stem}.o")
        includes = ["-I", str(ROOT / "csrc"), "-I", str(PROGRAMS)]
        inputs = [str(source), *arguments] if arguments else ["-c", str(source)]
        command = [self.compiler, *FLAGS, *self.flags, *includes, *inputs, "-o", str(output)]
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
        assert done.returncode == 0, f"{source.name} does not compile:\n{done.stderr}"
        return output

    def run(self, program: str, *arguments: str, stdin: str = "") -> str:
        """What the program printed; it must succeed."""
        command = [*self.launcher, str(self.folder / program), *arguments]
        # ThreadSanitizer would let every dying peer sleep for a second.
        environment = {**os.environ, "TSAN_OPTIONS": "atexit_sleep_ms=0"}
        done = subprocess.run(
            command, input=stdin, capture_output=True, text=True, check=False, timeout=200, env=environment
        )
        assert done.returncode == 0, f"{program} failed ({done.returncode}):\n{done.stdout}\n{done.stderr}"
        return done.stdout


def usable_build(sanitizer: str, folder: Path) -> Build:
    """A build whose programs run here, or a skip that says what is missing."""
    compiler = shutil.which(os.environ.get("CXX", "g++")) or shutil.which("c++")
    if compiler is None:
        pytest.skip("no C++ compiler: neither g++ nor c++ is on the PATH")
    empty = folder / "empty.cpp"
    empty.write_text("int main() { return 0; }\n")
    command = [compiler, *SANITIZERS[sanitizer], str(empty), "-o", str(folder / "empty")]
    if (done := subprocess.run(command, capture_output=True, text=True, check=False, timeout=100)).returncode != 0:
        pytest.skip(f"the compiler has no {sanitizer} sanitizer: {done.stderr.strip()[-200:]}")
    # Older sanitizers cannot place their shadow where the kernel scatters mappings widely.
    launchers: list[list[str]] = [[]]
    if (setarch := shutil.which("setarch")) is not None:
        launchers.append([setarch, "-R"])
    for launcher in launchers:
        done = subprocess.run(
            [*launcher, str(folder / "empty")], capture_output=True, text=True, check=False, timeout=100
        )
        if done.returncode == 0:
            return Build(compiler=compiler, flags=SANITIZERS[sanitizer], folder=folder, launcher=launcher)
    pytest.skip(f"programs with the {sanitizer} sanitizer do not run here: {done.stderr.strip()[-200:]}")


def build_programs(build: Build, names: Sequence[str]) -> Build:
    with ThreadPoolExecutor(max_workers=os.cpu_count() or 1) as workers:
        objects = [str(path) for path in workers.map(build.compile, SOURCES)]
        list(workers.map(lambda name: build.compile(PROGRAMS / f"{name}.cpp", *objects), names))
    return build


@pytest.fixture(scope="module")
def address_build(tmp_path_factory: pytest.TempPathFactory) -> Build:
    build = usable_build("address", tmp_path_factory.mktemp("address"))
    names = ["formats_test", "openings_test", "strangers_test", "deaths_test", "races_test", "wire_fuzz"]
    return build_programs(build, names)


@pytest.fixture(scope="module")
def thread_build(tmp_path_factory: pytest.TempPathFactory) -> Build:
    build = usable_build("thread", tmp_path_factory.mktemp("thread"))
    return build_programs(build, ["openings_test", "strangers_test", "deaths_test", "races_test"])


def hash_vectors() -> str:
    """Lines "key message sha256 hmac" in hex, around every edge of the 64-byte blocks."""
    chance = random.Random(20)
    lines = []
    for length in [*range(130), 1000, 70_000]:
        key, message = chance.randbytes(chance.randrange(140)), chance.randbytes(length)
        digests = [hashlib.sha256(message).hexdigest(), hmac.new(key, message, "sha256").hexdigest()]
        lines.append(" ".join([key.hex() or "-", message.hex() or "-", *digests]))
    return "\n".join(lines)


def test_formats(address_build: Build) -> None:
    assert "vectors 132\n" in address_build.run("formats_test", stdin=hash_vectors())


@pytest.mark.parametrize("program", ["openings_test", "strangers_test", "deaths_test", "races_test"])
def test_memory(address_build: Build, program: str) -> None:
    assert "ok " in address_build.run(program)


@pytest.mark.parametrize("program", ["openings_test", "strangers_test", "deaths_test", "races_test"])
def test_threads(thread_build: Build, program: str) -> None:
    assert "ok " in thread_build.run(program)


def test_fuzz(address_build: Build) -> None:
    assert address_build.run("wire_fuzz", "100000", "1").startswith("100000 iterations")

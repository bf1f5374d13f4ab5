"""Launches of kernels compiled for a GPU that is not there, and what each needs of one.

Types, alignments and tiles are those of a real launch (`antiphon.kernels.triton.launch`), so what is checked without a
GPU is what would run on one. Registers and spills are read from the assembler's own output.
"""

import re
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget

from antiphon.kernels.triton import interprets
from antiphon.kernels.triton.launch import launching

MAX_SHARED_BYTES = {80: 163 * 1024, 90: 227 * 1024}  # of one block, CUDA C Programming Guide, table 27


@dataclass(frozen=True, kw_only=True)
class CompiledLaunch:
    """What one launch needs of a GPU. `stack_bytes`: local memory a thread, 0 if no register is spilled."""

    kernel: str
    capability: int
    num_registers: int
    stack_bytes: int
    shared_bytes: int
    num_wgmma: int

    @property
    def fits(self) -> bool:
        return self.stack_bytes == 0 and self.shared_bytes <= MAX_SHARED_BYTES[self.capability]


@contextmanager
def compiling(capability: int) -> Iterator[dict[str, CompiledLaunch]]:
    """Launches within are compiled for `capability` (80 or 90) and listed, not run. Needs no driver."""
    assert not interprets(), "with TRITON_INTERPRET=1 nothing is compiled"
    drivers = triton.runtime.driver
    found: dict[str, CompiledLaunch] = {}

    def compiled(kernel: Any, grid: tuple[int, ...], arguments: tuple[Any, ...], options: dict[str, Any]) -> None:
        binary = kernel.warmup(*arguments, grid=tuple(max(1, size) for size in grid), **options)
        if binary.hash not in found:
            found[binary.hash] = _measure(kernel.__name__.strip("_"), capability, binary)

    drivers.set_active(_NoDriver(capability))
    try:
        with launching(capability, compiled):
            yield found
    finally:
        with suppress(RuntimeError):  # there is no other driver
            drivers.reset_active()


class _NoDriver:
    """What Triton asks of a driver before it compiles."""

    def __init__(self, capability: int) -> None:
        self.capability = capability

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self.capability, 32)

    def get_current_device(self) -> int:
        return self.capability

    def get_current_stream(self, device: int) -> int:
        return 0


def _measure(name: str, capability: int, binary: Any) -> CompiledLaunch:
    """Registers and stack as the assembler wrote them into the binary."""
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    cubin = _written(binary)
    shown = subprocess.run([tool, "--dump-resource-usage", cubin], capture_output=True, text=True, check=True).stdout
    usage = dict(re.findall(r"(REG|STACK|LOCAL):(\d+)", shown))
    return CompiledLaunch(
        kernel=name,
        capability=capability,
        num_registers=int(usage["REG"]),
        stack_bytes=int(usage["STACK"]) + int(usage["LOCAL"]),
        shared_bytes=int(binary.metadata.shared),
        num_wgmma=len(re.findall(r"wgmma\.mma_async", binary.asm["ptx"])),
    )


def _written(binary: Any) -> Path:
    """The file that Triton's cache keeps the binary in."""
    name = f"{binary.metadata.name}.cubin"
    return Path(next(path for key, path in binary.metadata_group.items() if key == name))

"""Launching kernels, or compiling the same launches for a GPU that is not there.

Every kernel is launched by `launch`. Within `compiling(...)` it compiles instead, for the compute capability asked for:
types, alignments and tiles are those of a real launch, so what is checked without a GPU is what would run on one.
Rejected: signatures written beside each kernel for such checks; they would come to differ from the launches.
"""

import re
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.backends.compiler import GPUTarget

from antiphon.kernels.triton import interprets

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


_COMPILED: ContextVar[tuple[int, dict[str, CompiledLaunch]] | None] = ContextVar("compiled", default=None)


def launch(kernel: Any, grid: tuple[int, ...], *arguments: Any, **options: Any) -> None:
    """Run `kernel` over `grid` on the device of its first argument, a tensor; an empty grid does nothing."""
    compiling_for = _COMPILED.get()
    if compiling_for is None:
        if all(grid):
            with torch.cuda.device_of(arguments[0]):
                kernel[grid](*arguments, **options)
        return
    capability, found = compiling_for
    binary = kernel.warmup(*arguments, grid=tuple(max(1, size) for size in grid), **options)
    if binary.hash not in found:
        found[binary.hash] = _measure(kernel.__name__.strip("_"), capability, binary)


def capability_of(device: torch.device) -> int:
    """80 or 90, or what else launches are for."""
    compiling_for = _COMPILED.get()
    if compiling_for is not None:
        return compiling_for[0]
    if device.type != "cuda":
        return 90
    major, minor = torch.cuda.get_device_capability(device)
    return int(10 * major + minor)


@contextmanager
def compiling(capability: int) -> Iterator[dict[str, CompiledLaunch]]:
    """Launches within are compiled for `capability` (80 or 90) and listed, not run. Needs no driver."""
    assert not interprets(), "with TRITON_INTERPRET=1 nothing is compiled"
    drivers = triton.runtime.driver
    found: dict[str, CompiledLaunch] = {}
    drivers.set_active(_NoDriver(capability))
    token = _COMPILED.set((capability, found))
    try:
        yield found
    finally:
        _COMPILED.reset(token)
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


def power_of_two(number: int, least: int = 1) -> int:
    """The least power of two that is neither below `number` nor `least`."""
    return max(least, 1 << max(0, number - 1).bit_length())


def wide_products(dtype: torch.dtype) -> bool:
    """Whether matrix products take float32 operands: for float32, and in the interpreter, which multiplies the bits of
    bfloat16 as if they were integers."""
    return dtype == torch.float32 or interprets()


def rows_of(x: Tensor) -> Tensor:
    """[rows, width], contiguous."""
    return x.reshape(-1, x.shape[-1]).contiguous()


@triton.jit
def product(a, b, sums, WIDE: tl.constexpr):
    """a @ b + sums, summed in float32."""
    if WIDE:
        return tl.dot(a.to(tl.float32), b.to(tl.float32), sums, input_precision="ieee")
    else:  # noqa: RET505  what follows a return is compiled too
        return tl.dot(a, b, sums)

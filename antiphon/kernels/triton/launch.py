"""Launching kernels, and what several of them share.

Every kernel is launched by `launch`. `instead` puts something else in its place, for a compute capability that need not
be there: `antiphon.bench.tile_search` compiles the same launches, types, alignments and tiles, without a GPU. Rejected:
signatures written beside each kernel for such checks; they would come to differ from the launches.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from antiphon.kernels.triton import interprets

Instead = Callable[[Any, tuple[int, ...], tuple[Any, ...], dict[str, Any]], None]
_INSTEAD: ContextVar[tuple[int, Instead] | None] = ContextVar("instead", default=None)


def launch(kernel: Any, grid: tuple[int, ...], *arguments: Any, **options: Any) -> None:
    """Run `kernel` over `grid` on the device of its first argument, a tensor; an empty grid does nothing. None stands
    for a tensor that the kernel does not read: the first takes its place."""
    arguments = tuple(arguments[0] if each is None else each for each in arguments)
    instead = _INSTEAD.get()
    if instead is not None:
        instead[1](kernel, grid, arguments, options)
    elif all(grid):
        with torch.cuda.device_of(arguments[0]):
            kernel[grid](*arguments, **options)


@contextmanager
def launching(capability: int, instead: Instead) -> Iterator[None]:
    """Launches within are given to `instead`, as those for a GPU of this compute capability (80 or 90)."""
    token = _INSTEAD.set((capability, instead))
    try:
        yield
    finally:
        _INSTEAD.reset(token)


def capability_of(device: torch.device) -> int:
    """80 or 90, or what else launches are for."""
    if (instead := _INSTEAD.get()) is not None:
        return instead[0]
    if device.type != "cuda":
        return 90
    major, minor = torch.cuda.get_device_capability(device)
    return int(10 * major + minor)


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

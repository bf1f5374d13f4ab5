"""Differentiable operators, and which kernels each runs: Triton's on a GPU, native ones on a CPU, or PyTorch's own.

Both modules have functions of the same names; what neither takes (float64, other devices) runs in PyTorch, which is
also what both are tested against."""

from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from antiphon.kernels import native_rows, triton

CPU_ALONE = ("attention", "heads", "products")
PRODUCTS = ("attention", "products")
SLOWER = (("plain",), ("plain", "amx"))  # than PyTorch's products: float32, bfloat16 (it uses AMX's tiles)


def kernels_for(x: Tensor, name: str, *, native: bool = True) -> ModuleType | None:
    """The module with the kernels `name` for an operator on `x`; None: PyTorch's operators. `native`: whether CPUs use
    theirs, which the reference back-end does not."""
    if x.is_cuda:
        return None if name in CPU_ALONE else triton.kernels_for(x, name)
    if name in PRODUCTS and native_rows.isa() in SLOWER[x.dtype == torch.bfloat16]:
        return None
    return native_rows if native and native_rows.takes(x) else None


def differentiable(forward: Callable[..., Any], backward: Callable[..., Any]) -> Callable[..., Any]:
    """The operator of autograd that these two functions make. Both take autograd's context first, in which `forward`
    leaves what `backward` needs; see `torch.autograd.Function`."""
    functions = {"forward": staticmethod(forward), "backward": staticmethod(backward)}
    operator: Any = type(forward.__name__, (torch.autograd.Function,), functions)
    apply: Callable[..., Any] = operator.apply
    return apply

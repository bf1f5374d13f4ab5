"""Which kernels a differentiable operator runs: Triton's on a GPU, native ones on a CPU, or PyTorch's own operators.

Both modules have functions of the same names; what neither takes (float64, other devices) runs in PyTorch, which is
also what both are tested against."""

from types import ModuleType

import torch
from torch import Tensor

from antiphon.kernels import native_rows, triton

NATIVE = ("activation", "attention", "cross_entropy", "heads", "norm", "products", "rotary", "rows")
CPU_ALONE = ("attention", "heads", "products")
PRODUCTS = ("attention", "products")


def kernels_for(x: Tensor, name: str, *, native: bool = True) -> ModuleType | None:
    """The module with the kernels `name` for an operator on `x`; None: PyTorch's operators. `native`: whether CPUs use
    theirs, which the reference back-end does not."""
    if x.is_cuda:
        return None if name in CPU_ALONE else triton.kernels_for(x, name)
    if x.dtype == torch.bfloat16 and name in PRODUCTS and native_rows.isa() == "amx":  # PyTorch uses the tiles
        return None
    return native_rows if native and name in NATIVE and native_rows.takes(x) else None

"""Gated feed-forwards over rows in order of expert: grouped products, the activation between them, and their memory.

Rejected: padding every expert's rows to the fullest one's (a batched product, but as slow as the worst skew); one
product an expert under autograd (a node and a slice an expert each way).

Routers send a rank another number of rows each time. Tensors of ever new sizes fit no block that was freed before, so
memory splits up, and allocating it takes time that other ranks wait for (MegaScale-MoE, section 7: stragglers). So rows
may lie in `RowBuffers`, which are used again:

1. A buffer is as long as its first rows need, rounded up to an eighth of a power of two.
2. Rows get the smallest free buffer that is long enough and at most twice as long as they need.
3. A buffer is free as soon as the last tensor over it is gone, views and what autograd saved included.
4. Where none fits, a free one that is too short makes place for the new one: as many stay as were in use at once.

Hosts only: PyTorch's allocator for GPUs rounds sizes itself (`PYTORCH_CUDA_ALLOC_CONF=roundup_power2_divisions:8`).
Rejected: one buffer of a fixed budget for each layer. It holds for every layer what only the fullest needs.

Letters: R rows in order of expert, E experts, I inputs of a product, O its outputs, J = 2 * width of gate and up.
"""

import threading
import weakref
from types import ModuleType
from typing import Any, cast

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from antiphon.kernels.api import ExpertShape
from antiphon.kernels.ops import differentiable, kernels_for
from antiphon.specs.model import FeedForwardSpec

DIVISIONS = 8
_Memory = np.ndarray[tuple[int], np.dtype[np.uint8]]


class RowBuffers:
    """The buffers of one process. `num_bytes`: of all; `num_made`: how often memory was allocated."""

    def __init__(self) -> None:
        self._free: list[_Memory] = []
        self._lock = threading.RLock()  # a tensor may end within `empty`, in the same thread
        self.num_bytes = 0
        self.num_made = 0

    def empty(self, num_rows: int, width: int, dtype: torch.dtype) -> Tensor:
        """[num_rows, width] of unknown numbers, on the host."""
        needed = num_rows * width * dtype.itemsize
        if not needed:
            return torch.empty(num_rows, width, dtype=dtype, device="cpu")
        with self._lock:
            memory = self._take(needed)
        lent = memory[:needed]  # the tensor holds this view, and ends with it
        weakref.finalize(lent, self._give_back, memory).atexit = False
        return torch.from_numpy(lent).view(dtype).view(num_rows, width)

    def _take(self, needed: int) -> _Memory:
        fitting = [each for each in self._free if needed <= each.nbytes <= 2 * rounded_up(needed)]
        if fitting:
            chosen = min(fitting, key=lambda each: each.nbytes)
            self._free = [each for each in self._free if each is not chosen]
            return chosen
        shorter = [each for each in self._free if each.nbytes < needed]
        if shorter:
            gone = max(shorter, key=lambda each: each.nbytes)
            self._free = [each for each in self._free if each is not gone]
            self.num_bytes -= gone.nbytes
        made = np.empty(rounded_up(needed), dtype=np.uint8)
        self.num_bytes += made.nbytes
        self.num_made += 1
        return made

    def _give_back(self, memory: _Memory) -> None:
        with self._lock:
            self._free.append(memory)


def rounded_up(num_bytes: int) -> int:
    """The next eighth of a power of two.

    >>> rounded_up(1000), rounded_up(1025)
    (1024, 1152)
    """
    step = max(1, (1 << (num_bytes - 1).bit_length() >> 1) // DIVISIONS)
    return -(-num_bytes // step) * step


Widths = FeedForwardSpec | ExpertShape  # says which formula, and its numbers


def activate(gate_up_RJ: Tensor, widths: Widths, *, native: bool = True) -> Tensor:
    """act(gate) * up from rows [gate | up]; the formulas are in `FeedForwardSpec`. `native`: as in `kernels_for`."""
    kernels = kernels_for(gate_up_RJ, "rowwise", native=native)
    if widths.activation == "silu" and kernels is None:
        hidden: Tensor = _silu_times_up(gate_up_RJ)
    else:
        hidden = _activation(gate_up_RJ, widths, kernels)
    return hidden


def _formula(gate_up_RJ: Tensor, widths: Widths) -> Tensor:
    gate, up = gate_up_RJ.chunk(2, dim=-1)
    if widths.activation == "swiglu_oai":
        gate, up = gate.clamp(max=widths.limit), up.clamp(-widths.limit, widths.limit)
        return (up + 1) * (gate * torch.sigmoid(widths.alpha * gate))
    if widths.activation != "gelu":
        raise ValueError(f"activation '{widths.activation}' is not known: use silu, gelu or swiglu_oai")
    return F.gelu(gate) * up


def _activation_forward(ctx: Any, gate_up_RJ: Tensor, widths: Widths, kernels: ModuleType | None) -> Tensor:
    """Only the rows themselves are kept: the formula's steps are made again in backward, or one kernel has its
    derivatives."""
    ctx.save_for_backward(gate_up_RJ)
    ctx.widths, ctx.kernels = widths, kernels
    if kernels is not None:
        return cast(Tensor, kernels.activate(gate_up_RJ, widths))
    return _formula(gate_up_RJ, widths)


def _activation_backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
    (gate_up_RJ,) = ctx.saved_tensors
    if ctx.kernels is not None:
        return ctx.kernels.activate_gradient(grad, gate_up_RJ, ctx.widths), None, None
    with torch.enable_grad():
        rows = gate_up_RJ.detach().requires_grad_()
        hidden = _formula(rows, ctx.widths)
    return torch.autograd.grad(hidden, rows, grad)[0], None, None


_activation = differentiable(_activation_forward, _activation_backward)


def _silu_times_up_forward(ctx: Any, gate_up_RJ: Tensor) -> Tensor:
    """Only the rows themselves are kept, and both gradients are written where they belong."""
    ctx.save_for_backward(gate_up_RJ)
    gate, up = gate_up_RJ.chunk(2, dim=-1)
    return F.silu(gate).mul_(up)


def _silu_times_up_backward(ctx: Any, grad: Tensor) -> Tensor:
    (gate_up_RJ,) = ctx.saved_tensors
    gate, up = gate_up_RJ.chunk(2, dim=-1)
    grad_gate_up_RJ = torch.empty_like(gate_up_RJ)
    grad_gate, grad_up = grad_gate_up_RJ.chunk(2, dim=-1)
    torch.mul(F.silu(gate), grad, out=grad_up)
    torch.ops.aten.silu_backward.grad_input(grad * up, gate, grad_input=grad_gate)
    return grad_gate_up_RJ


_silu_times_up = differentiable(_silu_times_up_forward, _silu_times_up_backward)


def linear(x: Tensor, weight_OI: Tensor) -> Tensor:
    """[..., O]: each row of x [..., I] times the matrix."""
    if kernels_for(x, "products") is None or weight_OI.dtype != x.dtype:
        return F.linear(x, weight_OI)
    y: Tensor = _linear(x, weight_OI)
    return y


def input_gradient(grad: Tensor, weight_OI: Tensor) -> Tensor:
    """[..., I]: the gradient of `linear`'s rows."""
    if (kernels := kernels_for(grad, "products")) is None:
        return grad @ weight_OI
    rows = kernels.matrix_product(grad.reshape(-1, grad.shape[-1]), weight_OI)
    return cast(Tensor, rows.view(*grad.shape[:-1], weight_OI.shape[1]))


def weight_gradient(grad_RO: Tensor, x_RI: Tensor) -> Tensor:
    """[O, I]: the gradient of `linear`'s matrix."""
    if (kernels := kernels_for(grad_RO, "products")) is None:
        return grad_RO.t() @ x_RI
    return cast(Tensor, kernels.matrix_product(grad_RO.t(), x_RI))


def _linear_forward(ctx: Any, x: Tensor, weight_OI: Tensor) -> Tensor:
    ctx.save_for_backward(x, weight_OI)
    kernels = kernels_for(x, "products")
    assert kernels is not None
    rows = kernels.matrix_product(x.reshape(x.shape[:-1].numel(), x.shape[-1]), weight_OI.t())
    return cast(Tensor, rows.view(*x.shape[:-1], weight_OI.shape[0]))


def _linear_backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None]:
    x, weight_OI = ctx.saved_tensors
    needs_x, needs_weight = ctx.needs_input_grad
    of_x = input_gradient(grad, weight_OI) if needs_x else None
    return of_x, weight_gradient(grad.flatten(0, -2), x.flatten(0, -2)) if needs_weight else None


_linear = differentiable(_linear_forward, _linear_backward)


def grouped_product(
    x_RI: Tensor, weight_EOI: Tensor, counts_E: tuple[int, ...], buffers: RowBuffers | None = None
) -> Tensor:
    """[R, O]: each row times the matrix of its expert. `counts_E`: rows of each expert, in order; their sum is R.
    `buffers`: where results lie, those of its backward too; None: in memory of their own.

    An expert without rows gets a gradient of zeros."""
    if sum(counts_E) != x_RI.shape[0] or min(counts_E, default=0) < 0:
        raise ValueError(f"{sum(counts_E)} rows are counted, {x_RI.shape[0]} given")
    y_RO: Tensor = _grouped_product(x_RI, weight_EOI, counts_E, buffers)
    return y_RO


def grouped_input_gradient(
    grad_RO: Tensor, weight_EOI: Tensor, counts_E: tuple[int, ...], buffers: RowBuffers | None = None
) -> Tensor:
    """[R, I]: the gradient of `grouped_product`'s rows, in one of `buffers` if there are any."""
    if _has_grouped_mm(grad_RO, weight_EOI):
        return torch._grouped_mm(grad_RO, weight_EOI, offs=_ends(counts_E, grad_RO.device))
    grad_x_RI = _empty_rows(grad_RO, weight_EOI.shape[2], buffers)
    if (kernels := kernels_for(grad_RO, "products")) is not None:
        return cast(Tensor, kernels.grouped_input_gradient(grad_RO, weight_EOI, counts_E, grad_x_RI))
    for expert, rows in _groups(counts_E):
        torch.mm(grad_RO[rows], weight_EOI[expert], out=grad_x_RI[rows])
    return grad_x_RI


def grouped_weight_gradient(grad_RO: Tensor, x_RI: Tensor, counts_E: tuple[int, ...]) -> Tensor:
    """[E, O, I]: the gradient of `grouped_product`'s matrices."""
    shape = len(counts_E), grad_RO.shape[1], x_RI.shape[1]
    if _has_grouped_mm(x_RI, grad_RO.new_empty(()).expand(shape)):
        grad_EOI = torch._grouped_mm(grad_RO.t(), x_RI, offs=_ends(counts_E, x_RI.device))
        if 0 in counts_E:
            grad_EOI[[expert for expert, count in enumerate(counts_E) if not count]] = 0
        return grad_EOI
    grad_EOI = grad_RO.new_empty(shape)
    if (kernels := kernels_for(grad_RO, "products")) is not None:
        return cast(Tensor, kernels.grouped_weight_gradient(grad_RO, x_RI, counts_E, grad_EOI))
    for expert, count in enumerate(counts_E):
        if not count:
            grad_EOI[expert].zero_()
    for expert, rows in _groups(counts_E):
        torch.mm(grad_RO[rows].t(), x_RI[rows], out=grad_EOI[expert])
    return grad_EOI


def grouped_bias_gradient(grad_RO: Tensor, counts_E: tuple[int, ...]) -> Tensor:
    """[E, O]: the sum over each expert's rows."""
    return torch.stack([rows.sum(0) for rows in torch.split(grad_RO, list(counts_E))])


def _grouped_product_forward(
    ctx: Any, x_RI: Tensor, weight_EOI: Tensor, counts_E: tuple[int, ...], buffers: RowBuffers | None
) -> Tensor:
    ctx.save_for_backward(x_RI, weight_EOI)
    ctx.counts_E, ctx.buffers = counts_E, buffers
    if _has_grouped_mm(x_RI, weight_EOI):
        return torch._grouped_mm(x_RI, weight_EOI.transpose(1, 2), offs=_ends(counts_E, x_RI.device))
    y_RO = _empty_rows(x_RI, weight_EOI.shape[1], buffers)
    if (kernels := kernels_for(x_RI, "products")) is not None:
        return cast(Tensor, kernels.grouped_forward(x_RI, weight_EOI, counts_E, y_RO))
    for expert, rows in _groups(counts_E):
        torch.mm(x_RI[rows], weight_EOI[expert].t(), out=y_RO[rows])
    return y_RO


def _grouped_product_backward(ctx: Any, grad_RO: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
    x_RI, weight_EOI = ctx.saved_tensors
    grad_RO, counts_E = grad_RO.contiguous(), ctx.counts_E
    needs_x = ctx.needs_input_grad[0]
    grad_x_RI = grouped_input_gradient(grad_RO, weight_EOI, counts_E, ctx.buffers) if needs_x else None
    grad_weight_EOI = grouped_weight_gradient(grad_RO, x_RI, counts_E) if ctx.needs_input_grad[1] else None
    return grad_x_RI, grad_weight_EOI, None, None


_grouped_product = differentiable(_grouped_product_forward, _grouped_product_backward)


def _empty_rows(like_R: Tensor, width: int, buffers: RowBuffers | None) -> Tensor:
    if buffers is None:
        return like_R.new_empty(like_R.shape[0], width)
    return buffers.empty(like_R.shape[0], width, like_R.dtype)


def _groups(counts_E: tuple[int, ...]) -> list[tuple[int, slice]]:
    """(expert, its rows) of every expert that has rows."""
    groups, start = [], 0
    for expert, count in enumerate(counts_E):
        if count:
            groups.append((expert, slice(start, start + count)))
        start += count
    return groups


def _ends(counts_E: tuple[int, ...], device: torch.device) -> Tensor:
    return torch.tensor(counts_E, device=device).cumsum(0).to(torch.int32)


def _has_grouped_mm(x_RI: Tensor, weight_EOI: Tensor) -> bool:
    """Whether `torch._grouped_mm` pays and takes these: on a GPU, bfloat16, both widths multiples of 16 bytes."""
    widths_fit = all(width % 8 == 0 for width in weight_EOI.shape[1:])
    return x_RI.device.type == "cuda" and x_RI.dtype == torch.bfloat16 and widths_fit

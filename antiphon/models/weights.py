"""Moving weights from a checkpoint to a back-end, one tensor at a time.

Every tensor is read, copied to where it stays, and its pages released before the next one is touched: a loading
process holds what it keeps, plus the tensor in hand, plus one fused projection while its parts are put together.
All but the experts' matrices is looked through for NaN and infinity on the way.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from antiphon.base.errors import CheckpointError
from antiphon.kernels.api import KernelBackend, PackedExperts, PackedLinear
from antiphon.models.checkpoint import Checkpoint
from antiphon.models.tensors import ExpertRefs, LoadPlan, TensorRef

ReportProgress = Callable[[int, int], None]


class WeightReader:
    """Reads planned tensors for one back-end and reports (bytes done, bytes total) after each."""

    def __init__(
        self, checkpoint: Checkpoint, backend: KernelBackend, total_bytes: int, progress: ReportProgress | None
    ) -> None:
        self.checkpoint = checkpoint
        self.backend = backend
        self.total_bytes = total_bytes
        self.done_bytes = 0
        self.progress = progress

    @contextmanager
    def stored(self, ref: TensorRef, *, checked: bool = True) -> Iterator[Tensor]:
        """The tensor as stored (scaled float8 and MXFP4: multiplied out), valid inside the block only.

        `checked`: `CheckpointError` if it holds NaN or infinity, for one more pass over it."""
        tensor = self.checkpoint.read(ref.name, rows=ref.rows, cut=ref.cut, dequantize_to=self.backend.dtype)
        if checked:
            check_finite(tensor, ref.name, self.checkpoint.file_of(ref.name))
        yield tensor
        del tensor
        self.checkpoint.release(ref.name, ref.rows)
        self.done_bytes += self.checkpoint.stored_bytes(ref.name, ref.rows, ref.cut)
        if self.progress is not None:
            self.progress(self.done_bytes, self.total_bytes)

    def tensor(self, refs: Sequence[TensorRef], dtype: torch.dtype | None = None) -> Tensor:
        """The tensors stacked along their rows: a copy on the back-end's device, in its dtype or in `dtype`."""
        return self._stacked(refs, self.backend.device, dtype or self.backend.dtype)

    def optional(self, plan: LoadPlan, purpose: str, dtype: torch.dtype | None = None) -> Tensor | None:
        return self.tensor(plan[purpose], dtype) if purpose in plan else None

    def linear(self, plan: LoadPlan, purpose: str) -> PackedLinear:
        """The packed projection of `purpose`. Its bias may cover the last rows only: the first get zeros."""
        refs = plan[purpose]
        bias = None
        if bias_refs := plan.get(purpose + "_bias"):
            bias = torch.zeros(sum(ref.local_shape[0] for ref in refs), dtype=self.backend.dtype)
            given = self._stacked(bias_refs, torch.device("cpu"), self.backend.dtype)
            bias[bias.shape[0] - given.shape[0] :] = given
        if len(refs) == 1:
            with self.stored(refs[0]) as weight:
                return self.backend.pack_linear(weight, bias)
        return self.backend.pack_linear(self._stacked(refs, torch.device("cpu"), self.backend.dtype), bias)

    def expert(self, experts: PackedExperts, index: int, refs: ExpertRefs) -> None:
        """Copy one expert into place. Experts are nearly all of a checkpoint: their numbers are not looked at."""
        with self.stored(refs.gate_up[0], checked=False) as first, self.stored(refs.down, checked=False) as down:
            if refs.layout in ("separate", "rows"):
                with self.stored(refs.gate_up[1], checked=False) as up:
                    down_HI = down.t() if refs.layout == "rows" else _matrix(down)
                    experts.set_expert(index, _matrix(first), _matrix(up), down_HI)
            elif refs.layout == "fused":
                shape = experts.shape.intermediate, experts.shape.hidden
                gate_IH, up_IH = first.view(2, *shape).unbind(0)
                experts.set_expert(index, gate_IH, up_IH, down.view(shape[::-1]))
            else:
                gate_up, down_HI = (first[0].t(), down[0].t()) if refs.layout == "columns" else (first[0], down[0])
                experts.set_expert(index, gate_up[0::2], gate_up[1::2], down_HI)
        if refs.biases:
            with self.stored(refs.biases[0]) as gate_up:
                experts.set_bias(index, gate_up[0, 0::2], gate_up[0, 1::2], self._down_bias(experts, refs))

    def _down_bias(self, experts: PackedExperts, refs: ExpertRefs) -> Tensor:
        """Zeros where another rank adds it."""
        if len(refs.biases) == 1:
            return torch.zeros(experts.shape.hidden)
        with self.stored(refs.biases[1]) as down:
            return down[0].clone()

    def _stacked(self, refs: Sequence[TensorRef], device: torch.device, dtype: torch.dtype) -> Tensor:
        num_rows = sum(ref.local_shape[0] for ref in refs)
        out = torch.empty((num_rows, *refs[0].local_shape[1:]), dtype=dtype, device=device)
        first = 0
        for ref in refs:
            with self.stored(ref) as part:
                out[first : first + part.shape[0]].copy_(part)
                first += part.shape[0]
        return out


def _matrix(tensor: Tensor) -> Tensor:
    """Without the axis of one expert that stacked tensors have."""
    return tensor[0] if tensor.ndim == 3 else tensor


def check_finite(tensor: Tensor, name: str, file: str) -> None:
    """`CheckpointError` that names tensor, file and place if a number is NaN or infinite. `tensor` is on the CPU.

    One such number in a norm or an embedding makes every answer nonsense. A sum is finite only if every number is, and
    takes one pass at the speed of memory. A sum that is not finite may just be too large for its dtype: then the
    smallest and the largest number decide (`aminmax` hands NaN on), and only where they are not finite does a slow pass
    look for the place. Rejected: `isfinite().all()`, which writes a mask first and takes seventy times as long on
    bfloat16."""
    if tensor.numel() == 0 or torch.isfinite(tensor.sum()):
        return
    low, high = torch.aminmax(tensor)
    if torch.isfinite(low) and torch.isfinite(high):
        return
    place = torch.isfinite(tensor).logical_not().nonzero()[0].tolist()
    value = float(tensor[tuple(place)])
    raise CheckpointError(
        f"{file}: tensor {name} holds {value} at {place}: the weights are damaged, download the file again"
    )

"""Moving weights from a checkpoint to a back-end, one tensor at a time.

Every tensor is read, copied to where it stays, and its pages released before the next one is touched: a loading
process holds what it keeps, plus the tensor in hand, plus one fused projection while its parts are put together.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from antiphon.kernels.api import KernelBackend, PackedExperts, PackedLinear
from antiphon.models.checkpoint import Checkpoint
from antiphon.models.tensors import ExpertRefs, Plan, TensorRef

Progress = Callable[[int, int], None]


class WeightReader:
    """Reads planned tensors for one back-end and reports (bytes done, bytes total) after each."""

    def __init__(
        self, checkpoint: Checkpoint, backend: KernelBackend, total_bytes: int, progress: Progress | None
    ) -> None:
        self.checkpoint = checkpoint
        self.backend = backend
        self.total_bytes = total_bytes
        self.done_bytes = 0
        self.progress = progress

    @contextmanager
    def stored(self, ref: TensorRef) -> Iterator[Tensor]:
        """The tensor as stored (block-scaled float8: multiplied out), valid inside the block only."""
        if ref.rows is None:
            tensor = self.checkpoint.read(ref.name, dequantize_to=self.backend.dtype)
        else:
            tensor = self.checkpoint.read_slice(ref.name, *ref.rows, dequantize_to=self.backend.dtype)
        yield tensor
        del tensor
        self.checkpoint.release(ref.name, ref.rows)
        self.done_bytes += self.checkpoint.stored_bytes(ref.name, ref.rows)
        if self.progress is not None:
            self.progress(self.done_bytes, self.total_bytes)

    def tensor(self, refs: Sequence[TensorRef], dtype: torch.dtype | None = None) -> Tensor:
        """The tensors stacked along their rows: a copy on the back-end's device, in its dtype unless told."""
        return self._stacked(refs, self.backend.device, dtype or self.backend.dtype)

    def optional(self, plan: Plan, purpose: str, dtype: torch.dtype | None = None) -> Tensor | None:
        return self.tensor(plan[purpose], dtype) if purpose in plan else None

    def linear(self, plan: Plan, purpose: str) -> PackedLinear:
        """The packed projection of `purpose`. Its bias may cover the last rows only: the first get zeros."""
        refs = plan[purpose]
        bias = None
        if bias_refs := plan.get(purpose + "_bias"):
            bias = torch.zeros(sum(ref.shape[0] for ref in refs), dtype=self.backend.dtype)
            given = self._stacked(bias_refs, torch.device("cpu"), self.backend.dtype)
            bias[bias.shape[0] - given.shape[0] :] = given
        if len(refs) == 1:
            with self.stored(refs[0]) as weight:
                return self.backend.pack_linear(weight, bias)
        return self.backend.pack_linear(self._stacked(refs, torch.device("cpu"), self.backend.dtype), bias)

    def expert(self, experts: PackedExperts, index: int, refs: ExpertRefs) -> None:
        """Copy one routed expert into place."""
        with self.stored(refs.gate_up[0]) as first, self.stored(refs.down) as down:
            down_HI = down.t() if refs.transposed_down else down.view(experts.hidden, experts.intermediate)
            if len(refs.gate_up) == 2:
                with self.stored(refs.gate_up[1]) as up_IH:
                    experts.set_expert(index, first, up_IH, down_HI)
                    return
            gate_IH, up_IH = first.view(2, experts.intermediate, experts.hidden).unbind(0)
            experts.set_expert(index, gate_IH, up_IH, down_HI)

    def _stacked(self, refs: Sequence[TensorRef], device: torch.device, dtype: torch.dtype) -> Tensor:
        num_rows = sum(ref.shape[0] for ref in refs)
        out = torch.empty((num_rows, *refs[0].shape[1:]), dtype=dtype, device=device)
        first = 0
        for ref in refs:
            with self.stored(ref) as part:
                out[first : first + ref.shape[0]].copy_(part)
            first += ref.shape[0]
        return out

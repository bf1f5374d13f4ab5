"""What all layers know of a micro-batch: rotations, masks, and how positions and heads are shared."""

from dataclasses import dataclass

from torch import Tensor

from antiphon.kernels.ops.attention import attention_mask
from antiphon.specs.model import ModelSpec
from antiphon.train.sequence_parallel import SequenceParallel


@dataclass(frozen=True)
class Sequences:
    """Rotations are those of the positions that this rank projects; `masks`: by sliding window, over all positions, see
    `attention_mask`."""

    parallel: SequenceParallel
    cos_BsR: Tensor
    sin_BsR: Tensor
    masks: dict[int | None, Tensor | None]

    @staticmethod
    def of(
        spec: ModelSpec,
        parallel: SequenceParallel,
        cos_PR: Tensor,
        sin_PR: Tensor,
        positions_BS: Tensor,
        documents_BS: Tensor | None,
    ) -> "Sequences":
        """`positions_BS` count within documents; `documents_BS` None: one document a sequence."""
        windows = {spec.attention.window_of(layer) for layer in range(spec.num_layers)}
        masks = {
            window: attention_mask(documents_BS, positions_BS.shape[1], window, positions_BS.device)
            for window in windows
        }
        positions_Bs = positions_BS[:, slice(*parallel.gathered)]
        return Sequences(parallel, cos_PR[positions_Bs], sin_PR[positions_Bs], masks)

    @property
    def tensors(self) -> list[Tensor]:
        """All of them: not a layer's own."""
        return [self.cos_BsR, self.sin_BsR, *(mask for mask in self.masks.values() if mask is not None)]

"""Which tokens the samples of a run are, by their global number: the same on every rank.

Sample g is window `order[g mod n]` of pass `g // n` over the n windows of the stream; each pass has its own order, from
the seed. So a run that resumes on another number of ranks sees exactly what was not seen yet.

Letters: B sequences, S positions.
"""

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import numpy as np
import torch

from antiphon.base.errors import UserError
from antiphon.comm.mesh import Mesh
from antiphon.kernels.ops.cross_entropy import IGNORED
from antiphon.train.config import TrainConfig
from antiphon.train.model import Batch
from antiphon.train.tokens import TokenFile


class Samples:
    """Windows of `length` tokens and their targets. `shuffled` False: in the order of the text."""

    def __init__(
        self, tokens: TokenFile, length: int, *, seed: int, document_masks: bool, shuffled: bool = True
    ) -> None:
        self.num_windows = max(0, (tokens.ids.shape[0] - 1) // length)
        if not self.num_windows:
            raise UserError(
                f"the text has {tokens.ids.shape[0]} tokens, sequence_length is {length}: "
                "give more text or shorten the sequences"
            )
        self._tokens = tokens
        self._length = length
        self._document_masks = document_masks
        self._order = lru_cache(maxsize=2)(lambda turn: self._shuffle(turn, seed) if shuffled else None)

    @staticmethod
    def of(config: TrainConfig, tokens: TokenFile, *, shuffled: bool) -> "Samples":
        """The samples that a run of `config` sees."""
        masks = config.data.document_masks
        return Samples(tokens, config.sequence_length, seed=config.seed, document_masks=masks, shuffled=shuffled)

    def _shuffle(self, turn: int, seed: int) -> Any:
        return np.random.default_rng((seed, turn)).permutation(self.num_windows)

    def batch(self, numbers: Sequence[int], device: torch.device) -> Batch:
        """The samples with these global numbers."""
        begins = [self._begin(number) for number in numbers]
        ids = np.stack([self._tokens.ids[begin : begin + self._length + 1] for begin in begins]).astype(np.int64)
        inputs, targets = torch.from_numpy(ids[:, :-1]), torch.from_numpy(ids[:, 1:].copy())
        positions_S = np.arange(self._length)
        if not self._document_masks:
            positions = torch.from_numpy(np.broadcast_to(positions_S, inputs.shape).copy())
            return Batch(inputs.to(device), targets.to(device), positions.to(device), None)
        places = np.asarray(begins)[:, None] + positions_S
        documents = np.searchsorted(self._tokens.starts, places, side="right") - 1
        first = np.maximum(self._tokens.starts[documents], np.asarray(begins)[:, None])
        following = np.searchsorted(self._tokens.starts, places + 1, side="right") - 1
        targets[torch.from_numpy(following != documents)] = IGNORED  # no document knows what the next begins with
        positions = torch.from_numpy(places - first)
        several = bool((documents != documents[:, :1]).any())
        masks = torch.from_numpy(documents).to(device) if several else None
        return Batch(inputs.to(device), targets.to(device), positions.to(device), masks)

    def _begin(self, number: int) -> int:
        turn, place = divmod(number, self.num_windows)
        order = self._order(turn)
        return (place if order is None else int(order[place])) * self._length


def numbers_of_rank(config: TrainConfig, mesh: Mesh, first: int) -> list[range]:
    """The samples of this rank in each pass of a step that begins with sample `first`."""
    size = config.batch // config.micro_batches
    own = size // mesh.sizes.data
    begin = first + mesh.sizes.place(mesh.rank, "data") * own
    return [range(begin + each, begin + each + own) for each in range(0, config.batch, size)]

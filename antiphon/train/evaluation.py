"""The loss on documents that are never trained on."""

import torch

from antiphon.comm.mesh import Mesh
from antiphon.kernels.ops.cross_entropy import IGNORED
from antiphon.train.config import TrainConfig
from antiphon.train.model import Batch
from antiphon.train.passes import Passes
from antiphon.train.samples import Samples
from antiphon.train.shards import Shards
from antiphon.train.tokens import TokenFile


def held_out_loss(config: TrainConfig, mesh: Mesh, tokens: TokenFile, passes: Passes, shards: Shards) -> float | None:
    """Nats a target over the first sequences of `tokens`; None if there is no whole one. All ranks call it together."""
    if tokens.ids.shape[0] <= config.sequence_length:
        return None
    samples = Samples.of(config, tokens, shuffled=False)
    num = min(samples.num_windows, config.output.evaluate_sequences)
    own = list(range(mesh.sizes.place(mesh.rank, "data"), num, mesh.sizes.data))
    size = max(1, config.batch // mesh.sizes.data)
    steps = -(-num // mesh.sizes.data)  # as many on every rank
    batches = [_batch(samples, own[first : first + size]) for first in range(0, steps, size)]
    shards.begin_step()
    loss = passes.mean_loss(batches)
    shards.end_step()
    return loss


def _batch(samples: Samples, numbers: list[int]) -> Batch:
    """These samples; without any, one that counts nothing."""
    batch = samples.batch(numbers or [0], torch.device("cpu"))
    if not numbers:
        batch.targets_BS.fill_(IGNORED)
    return batch

"""The loss on documents that are never trained on, with its error, over all of them and by source.

Windows are spread evenly over the whole held-out text of each source: the first ones of a corpus are its first files,
which say little about the rest. Losses are weighted by their targets. The error is that of a mean over blocks of
windows (their ratio estimate), so it counts how much texts differ. Rejected: a loss a window and their plain mean; a
window of short documents has fewer targets than another.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from antiphon.base.logging import get_logger
from antiphon.comm.mesh import Mesh
from antiphon.kernels.ops.cross_entropy import IGNORED
from antiphon.train.config import TrainConfig
from antiphon.train.device import HOST
from antiphon.train.model import Batch
from antiphon.train.passes import Passes
from antiphon.train.samples import Samples
from antiphon.train.shards import Shards
from antiphon.train.tokens import SourceTokens, TokenFile

_LEAST_BLOCKS = 16  # of a source, for an error that means something
_log = get_logger("train")


@dataclass(frozen=True, kw_only=True)
class HeldOutLoss:
    """Nats a target, the standard error of that (None: a single block has none), targets looked at, and the parts by
    source where there are several. `by_set`: of evaluation sets, which do not count in it."""

    loss: float
    error: float | None
    num_targets: int
    by_source: dict[str, "HeldOutLoss"] = field(default_factory=dict)
    by_set: dict[str, "HeldOutLoss"] = field(default_factory=dict)

    def metrics(self) -> dict[str, Any]:
        """The values under their names in a run's metrics."""
        values: dict[str, Any] = {"held_out_loss": self.loss, "held_out_targets": self.num_targets}
        if self.error is not None:
            values["held_out_error"] = self.error
        if self.by_source:
            values["held_out_loss_by_source"] = {name: each.loss for name, each in self.by_source.items()}
        if self.by_set:
            values["evaluation_loss"] = {name: each.loss for name, each in self.by_set.items()}
        return values

    def __str__(self) -> str:
        error = "" if self.error is None else f" ± {self.error:.4f}"
        return f"{self.loss:.4f}{error} nats a token, over {self.num_targets:,} tokens"


def held_out_loss(
    config: TrainConfig, mesh: Mesh, tokens: TokenFile, passes: Passes, shards: Shards
) -> HeldOutLoss | None:
    """The loss on `tokens`; None if there are none. All ranks call it together."""
    if tokens.ids.shape[0] < 2:
        return None
    samples, sources = Samples.of(config, tokens, shuffled=False), tokens.all_sources()
    sizes = np.bincount(samples.sources, minlength=len(sources)).tolist()
    data, place = mesh.sizes.data, mesh.sizes.place(mesh.rank, "data")
    largest = max(1, config.batch // data)
    blocks = [
        (source, block)
        for source, windows in enumerate(_chosen(sizes, sources, config.output.evaluate_sequences))
        for block in _blocks(windows, largest, data)
    ]
    own = [place + data * turn for turn in range(-(-len(blocks) // data))]  # as many on every rank
    device = passes.model.device
    batches = [_batch(samples, blocks[number][1] if number < len(blocks) else [], device) for number in own]
    shards.begin_step()
    sums = passes.losses_of(batches, own, len(blocks))
    shards.end_step()
    of_blocks = torch.tensor([source for source, _ in blocks], device=HOST)
    parts = {each.name: _mean(sums[of_blocks == source]) for source, each in enumerate(sources)}
    is_set = torch.tensor([sources[source].is_evaluation for source, _ in blocks], device=HOST)
    whole = _mean(sums[~is_set]) or _mean(sums)  # with sets alone, over all of them
    if whole is None:
        _log.warning("the held-out text has no target: raise data.held_out, or give more text")
        return None
    found = [(each, part) for each in sources if (part := parts[each.name]) is not None]
    by_source = {each.name: part for each, part in found if not each.is_evaluation}
    return replace(
        whole,
        by_source=by_source if len(by_source) > 1 else {},
        by_set={each.name: part for each, part in found if each.is_evaluation},
    )


def _chosen(sizes: Sequence[int], sources: Sequence[SourceTokens], wanted: int) -> list[list[int]]:
    """Windows of each source by number, evenly spread; `wanted` of all together, 0: all. Each source is looked at in
    proportion to its size, and has one window at least. Of an evaluation set, `wanted` of its own."""
    both, first, found = list(zip(sizes, sources, strict=True)), 0, list[list[int]]()
    of_sources = sum(size for size, each in both if not each.is_evaluation)
    for size, each in both:
        total = size if each.is_evaluation else of_sources
        num = size if not wanted or wanted >= total else min(size, max(1, round(wanted * size / total)))
        found.append([first + (2 * place + 1) * size // (2 * num) for place in range(num)])
        first += size
    return found


def _blocks(windows: Sequence[int], largest: int, ranks: int) -> list[Sequence[int]]:
    """`windows` in blocks, each a pass of one rank: enough of them for an error."""
    size = max(1, min(largest, len(windows) // max(_LEAST_BLOCKS, ranks)))
    return [windows[first : first + size] for first in range(0, len(windows), size)]


def _mean(sums: Tensor) -> HeldOutLoss | None:
    """The loss of [blocks, 2], sums of nats and targets; None without a target."""
    nats, targets = sums[sums[:, 1] > 0].T
    blocks, num_targets = targets.numel(), float(targets.sum())
    if not blocks:
        return None
    loss = float(nats.sum()) / num_targets
    spread = float((nats - loss * targets).square().sum())
    error = math.sqrt(spread * blocks / (blocks - 1)) / num_targets if blocks > 1 else None
    return HeldOutLoss(loss=loss, error=error, num_targets=int(num_targets))


def _batch(samples: Samples, numbers: Sequence[int], device: torch.device) -> Batch:
    """These samples; without any, one that counts nothing."""
    batch = samples.batch(numbers or [0], device)
    if not numbers:
        batch.targets_BS.fill_(IGNORED)
    return batch

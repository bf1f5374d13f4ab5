"""All ways to divide a number of devices for training: degrees as arrays, one value per candidate.

1. Model parallelism n: up to 16 devices or any divisor of a scale-up domain, and two and four whole domains. A group
   never straddles a domain's edge: of a domain of 8 devices, groups of 3 use 6.
2. Pipeline: of the stage counts with the same longest stage only the smallest, which has the smallest bubble.
3. Virtual stages: only where micro-batches divide by stages, which interleaving needs.
   Experts may lie over several data-parallel copies (expert parallelism over more ranks than share a layer).
4. Data parallelism times micro-batch must divide the batch; what remains are the micro-batches of a pipeline.
5. The space of more devices contains that of fewer, so a plan never gets slower by offering more.

Rejected: only layouts that use every device. With 7 devices or 13 nodes the best layout leaves some idle.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from antiphon.base.errors import UserError
from antiphon.cost.training.setup import AttentionParallel, ExpertParallel
from antiphon.planner.candidates import MOST_PINNED
from antiphon.specs.model import ModelSpec

IntArray = NDArray[np.int64]
VIRTUAL_STAGES = (1, 2, 3, 4, 6, 8)
MICRO_BATCHES = (1, 2, 4, 8, 16)
MOST_MODEL_PARALLEL = 16
PIN_NAMES = ("n", "pp", "chunks", "dp", "micro_batch", "shared")
"""Devices that share a layer, stages, virtual stages of each, copies, sequences of a micro-batch, copies that share one
set of experts."""
EXPERT_COPIES = (1, 2, 4, 8, 16, 32, 64)


def parse_training_pins(texts: Sequence[str]) -> dict[str, int]:
    """``["n=8", "pp=15"]``; `UserError` names what is not known or given twice."""
    found: dict[str, int] = {}
    for text in texts:
        name, _, written = text.partition("=")
        name = name.strip()
        if name not in PIN_NAMES:
            raise UserError(f"--pin {text!r}: {name!r} is none of {', '.join(PIN_NAMES)}")
        if not (written.strip().isdecimal() and 1 <= int(written) <= MOST_PINNED):
            raise UserError(f"--pin {text!r}: write a whole number from 1 to {MOST_PINNED:,}, for example {name}=4")
        if name in found:
            raise UserError(f"--pin {text!r}: {name} is given twice: leave one of them out")
        found[name] = int(written)
    return found


def _pinned(name: str, value: int, tried: Sequence[int], num_layers: int) -> Sequence[int]:
    """The value alone, where it can be run at all. Stages need not be the fewest of their length."""
    if name == "pp":
        return [value] if value <= num_layers else []
    return [value] if value in tried or name in ("chunks", "micro_batch") else []


@dataclass(frozen=True, kw_only=True)
class TrainingDegrees:
    """Columns of candidates."""

    model_parallel: IntArray
    pipeline: IntArray
    virtual_stages: IntArray
    data_parallel: IntArray
    micro_batch: IntArray
    expert_copies: IntArray

    def __len__(self) -> int:
        return len(self.model_parallel)

    def where(self, keep: NDArray[np.bool_]) -> "TrainingDegrees":
        """The candidates that are kept."""
        return TrainingDegrees(
            model_parallel=self.model_parallel[keep],
            pipeline=self.pipeline[keep],
            virtual_stages=self.virtual_stages[keep],
            data_parallel=self.data_parallel[keep],
            micro_batch=self.micro_batch[keep],
            expert_copies=self.expert_copies[keep],
        )

    def at(self, index: int) -> tuple[int, int, int, int, int, int]:
        """(model parallel, pipeline, virtual stages, data parallel, micro-batch, expert copies) of one candidate."""
        return (
            int(self.model_parallel[index]),
            int(self.pipeline[index]),
            int(self.virtual_stages[index]),
            int(self.data_parallel[index]),
            int(self.micro_batch[index]),
            int(self.expert_copies[index]),
        )


def divisors(number: int) -> list[int]:
    """All divisors, ascending."""
    small = [value for value in range(1, math.isqrt(number) + 1) if number % value == 0]
    return sorted({*small, *(number // value for value in small)})


def model_parallel_degrees(
    model: ModelSpec, domain: int, attention: AttentionParallel, experts: ExpertParallel
) -> list[int]:
    """Degrees a strategy can use: heads for each rank, an expert (or a column of each) for each rank."""
    wanted = {*range(1, min(domain, MOST_MODEL_PARALLEL) + 1), *divisors(domain), 2 * domain, 4 * domain}
    most = model.attention.num_heads
    most = min(most, model.router.num_experts if experts == "expert" else model.feed_forward.intermediate)
    if attention == "tensor" and model.num_moe_layers < model.num_layers:
        most = min(most, model.feed_forward.dense_intermediate)
    return sorted(degree for degree in wanted if degree <= most)


def num_groups(num_devices: int, domain: int, degree: int) -> int:
    """Model-parallel groups that fit: none straddles a domain, wide ones consist of whole domains."""
    if degree > domain:
        return num_devices // domain // (degree // domain)
    full, rest = divmod(num_devices, domain)
    return full * (domain // degree) + rest // degree


def stage_counts(num_layers: int) -> list[int]:
    """Pipeline stages worth trying: the fewest for each length of the longest stage."""
    fewest: dict[int, int] = {}
    for stages in range(1, num_layers + 1):
        fewest.setdefault(-(-num_layers // stages), stages)
    return sorted(fewest.values())


def candidates(
    model: ModelSpec,
    *,
    domain: int,
    num_devices: int,
    batch: int,
    attention: AttentionParallel,
    experts: ExpertParallel,
    shares_experts: bool = False,
    pins: Mapping[str, int] | None = None,
) -> TrainingDegrees:
    """Everything that can be run, memory aside. `shares_experts`: whether copies may share experts, which is worth it
    where a token goes to a rank once; `pins`: degrees that are fixed, by the names of `PIN_NAMES`."""
    axes: list[Sequence[int]] = [
        model_parallel_degrees(model, domain, attention, experts),
        stage_counts(model.num_layers),
        VIRTUAL_STAGES,
        divisors(batch),
        [size for size in MICRO_BATCHES if batch % size == 0],
        EXPERT_COPIES if shares_experts and experts == "expert" else EXPERT_COPIES[:1],
    ]
    for place, name in enumerate(PIN_NAMES):
        if pins and name in pins:
            axes[place] = _pinned(name, pins[name], axes[place], model.num_layers)
    grid = np.meshgrid(*(np.asarray(axis, dtype=np.int64) for axis in axes), indexing="ij")
    degree, pipeline, chunks, data, micro, shared = (axis.reshape(-1) for axis in grid)
    groups = np.asarray([num_groups(num_devices, domain, value) for value in axes[0]], dtype=np.int64)
    room = groups[np.searchsorted(np.asarray(axes[0]), degree)]
    count = batch // (data * micro)
    keep = (
        (pipeline * data <= room)
        & (batch % (data * micro) == 0)
        & (pipeline * chunks <= model.num_layers)
        & (data % shared == 0)
        & ((shared == 1) | (degree * shared <= model.router.num_experts))
        & ((chunks == 1) | ((pipeline > 1) & (count % pipeline == 0)))
    )
    every = TrainingDegrees(
        model_parallel=degree,
        pipeline=pipeline,
        virtual_stages=chunks,
        data_parallel=data,
        micro_batch=micro,
        expert_copies=shared,
    )
    return every.where(keep)

"""Order of communication in training: all-to-all first, all-reduce in small pieces (Lina section 4). Plain Python."""

from antiphon.comm.micro_ops.packing import PackingStep, choose_experts_per_device
from antiphon.comm.micro_ops.partition import DEFAULT_CHUNK_BYTES, partition
from antiphon.comm.micro_ops.scheduler import MicroOp, MicroOpScheduler, Traffic

__all__ = [
    "DEFAULT_CHUNK_BYTES",
    "MicroOp",
    "MicroOpScheduler",
    "PackingStep",
    "Traffic",
    "choose_experts_per_device",
    "partition",
]

"""How ranks send gradients and rows: formats, levels, order. Everything is off by default."""

import os
from dataclasses import dataclass
from typing import Literal

from antiphon.base.errors import UserError
from antiphon.comm.float8 import Format
from antiphon.comm.launcher import CollectiveLauncher
from antiphon.comm.micro_ops import DEFAULT_CHUNK_BYTES, MicroOpScheduler
from antiphon.specs.strict_table import CountFromZero, Positive

_WIDEST_BYTES = 8


@dataclass(frozen=True, kw_only=True)
class CommunicationConfig:
    """`gradients`: their format between ranks that hold the same parameters; they are added in float32 either way.
    `hierarchical`: these sums go inside each node first, then one copy between nodes. `node_size`: ranks of a node (0:
    as many as torchrun started on this machine).

    `activations`: rows and their gradients on the way to experts and back: "float8" all of them, "float8_permutation"
    only those that all-to-alls move, which add nothing. `gate_weights`: where a result is multiplied by its choice's
    weight: "combine", behind the experts, or "experts", before their second product.

    `sums`: when gradients are summed: "behind" backward; "fixed", as soon as a layer's are known, beside whatever else
    travels; "priority", the same, but what computation waits for goes first (Lina, section 4). `partition`: these sums
    go in equal chunks of at most `chunk_bytes`. `pipeline_experts`: rows travel to experts and back in such chunks too,
    and experts begin with the first. `packing`: fewer ranks share the experts where these wait for rows (`train.
    packing`). `timeout_s`: how long a rank waits for others before it names those that hang, and ends."""

    gradients: Literal["float32", "bfloat16"] = "float32"
    hierarchical: bool = False
    node_size: CountFromZero = 0
    activations: Format = "plain"
    gate_weights: Literal["combine", "experts"] = "combine"
    sums: Literal["behind", "fixed", "priority"] = "behind"
    partition: bool = False
    pipeline_experts: bool = False
    packing: bool = False
    timeout_s: Positive = 600.0
    chunk_bytes: int = DEFAULT_CHUNK_BYTES

    def __post_init__(self) -> None:
        if self.partition and self.sums == "behind":
            raise UserError(
                "partition is true and sums is 'behind', where nothing runs beside a sum: set sums to 'priority' or "
                "'fixed', or partition to false"
            )
        if self.packing and self.sums != "priority":
            raise UserError(
                f"packing is true and sums is {self.sums!r}: it needs the times of exchanges, which only sums "
                "'priority' takes: set it, or packing to false"
            )
        if self.chunk_bytes < _WIDEST_BYTES:
            raise UserError(
                f"chunk_bytes is {self.chunk_bytes}: a chunk holds a number at least, so {_WIDEST_BYTES}; try "
                f"{DEFAULT_CHUNK_BYTES}"
            )

    def launcher(self) -> CollectiveLauncher | None:
        """What takes sums beside backward; None where they are made behind it."""
        if self.sums == "behind":
            return None
        return CollectiveLauncher(MicroOpScheduler(self.chunk_bytes if self.partition else None))

    def check_dispatch(self, dispatch: str) -> None:
        """`UserError` where a switch would do nothing with this way of rows."""
        if dispatch != "all_to_all" and self.activations == "float8_permutation":
            raise UserError(
                "communication.activations is 'float8_permutation', which is about all-to-alls, and parallel.dispatch "
                f"is {dispatch}, which has none or may have none: use dispatch all_to_all, or another value"
            )
        if dispatch == "auto" and self.packing:
            raise UserError(
                "communication.packing is true and parallel.dispatch is auto, which measures anew whenever other ranks "
                "share the experts: use dispatch all_to_all or gather_scatter"
            )

    def ranks_per_node(self, world_size: int) -> int:
        """For hierarchical sums; 0: they are off. `UserError` where there are no two levels."""
        if not self.hierarchical or world_size == 1:
            return 0
        size = self.node_size or int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        if world_size % size or size in (1, world_size):
            raise UserError(
                f"communication: hierarchical sums with nodes of {size} ranks, of {world_size} in all: set node_size "
                "to a divisor between these, or hierarchical to false"
            )
        return size

"""How ranks send gradients and rows: formats, levels, order. Everything is off by default."""

import os
from dataclasses import dataclass
from typing import Literal

from antiphon.base.errors import UserError
from antiphon.specs.strict_table import CountFromZero


@dataclass(frozen=True, kw_only=True)
class CommunicationConfig:
    """`gradients`: their format between ranks that hold the same parameters; they are added in float32 either way.
    `hierarchical`: these sums go inside each node first, then one copy between nodes. `node_size`: ranks of a node (0:
    as many as torchrun started on this machine)."""

    gradients: Literal["float32", "bfloat16"] = "float32"
    hierarchical: bool = False
    node_size: CountFromZero = 0

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

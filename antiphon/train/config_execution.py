"""How ranks share a run's work, what they send each other, what they keep, and what runs beside what, as frozen data.

What ranks send, keep and reorder is off by default.
"""

import os
from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import Field

from antiphon.base.errors import UserError
from antiphon.comm.float8 import Format
from antiphon.comm.launcher import CollectiveLauncher
from antiphon.comm.micro_ops import DEFAULT_CHUNK_BYTES, MicroOpScheduler
from antiphon.comm.replicas import LEVEL_CHUNKS
from antiphon.comm.tile_flight import check_tile_rows
from antiphon.specs.checked import Count, CountFromZero, Flag, NotNegative, Positive, Whole, checked

_WIDEST_BYTES = 8  # of a number: a chunk holds one at least


@checked("")
@dataclass(frozen=True, kw_only=True)
class ParallelConfig:
    """How many ranks share what. `pipeline` ranks have different layers, `virtual_stages` runs of them each. Attention:
    `sequence` ranks share positions and heads (Ulysses), `tensor` ranks heads and weights. Experts: `expert` ranks have
    different experts, `expert_tensor` ranks slices of the same. The product of `pipeline` and either pair divides the
    number of ranks; what is left is data parallel. `zero`: what ranks that hold the same keep in shards: 1 the
    optimizer's state, 2 gradients too, 3 parameters too.

    `dispatch`: how rows reach experts; "two_level" across nodes first and then inside, a row once to each; "auto"
    measures which way is faster here. `deduplicate`: an all-to-all sends a
    row once to a rank. `row_budget`: rows that a rank's experts may hold, over their share at even use; what is over it
    is worked on again in backward (0: no limit)."""

    pipeline: Count = 1
    virtual_stages: Count = 1
    sequence: Count = 1
    tensor: Count = 1
    expert: Count = 1
    expert_tensor: Count = 1
    zero: Annotated[CountFromZero, Field(le=3)] = 0
    dispatch: Literal["all_to_all", "gather_scatter", "two_level", "auto"] = "all_to_all"
    deduplicate: Flag = True
    row_budget: NotNegative = 1.1

    def __post_init__(self) -> None:
        if self.dispatch == "two_level" and (self.expert_tensor > 1 or not self.deduplicate):
            raise UserError(
                f"dispatch is 'two_level', expert_tensor is {self.expert_tensor}, deduplicate is {self.deduplicate}: "
                "rows go to whole experts, once to a node: set expert_tensor to 1 and deduplicate to true, or use "
                "dispatch all_to_all"
            )


@checked("")
@dataclass(frozen=True, kw_only=True)
class CommunicationConfig:
    """`gradients`: their format between ranks that hold the same parameters; they are added in float32 either way.
    `hierarchical`: these sums go inside each node first, then one copy between nodes, in up to `level_chunks` chunks
    that hide each other. `node_size`: ranks of a node (0: as many as torchrun started on this machine).

    `activations`: rows and their gradients on the way to experts and back: "float8" all of them, "float8_permutation"
    only those that all-to-alls move, which add nothing. `attention`: rows that tensor ranks gather before attention and
    add up behind it. `gate_weights`: where its choice's weight multiplies a result: "combine", behind the experts, or
    "experts", before their second product.

    `sums`: when gradients are summed: "behind" backward; "baseline", as soon as a layer's are known, beside whatever
    else travels (what Lina compares with); "between", only between a MoE layer's two exchanges and the next one's
    (Lina's fixed schedule); "priority", as soon as they are known, but what computation waits for goes first (Lina,
    section 4). `partition`: these sums go in equal chunks of at most `chunk_bytes`. `pipeline_experts`: rows travel to
    experts and back in such chunks too, and experts begin with the first. `packing`: fewer ranks share the experts
    where these wait for rows (`train.packing`). `timeout_s`: how long a rank waits for others before it names those
    that hang, and ends."""

    gradients: Literal["float32", "bfloat16"] = "float32"
    hierarchical: Flag = False
    level_chunks: Annotated[Whole, Field(ge=1, le=64)] = LEVEL_CHUNKS
    node_size: CountFromZero = 0
    activations: Format = "plain"
    attention: Literal["plain", "float8"] = "plain"
    gate_weights: Literal["combine", "experts"] = "combine"
    sums: Literal["behind", "baseline", "between", "priority"] = "behind"
    partition: Flag = False
    pipeline_experts: Flag = False
    packing: Flag = False
    timeout_s: Positive = 600.0
    chunk_bytes: Annotated[Whole, Field(ge=_WIDEST_BYTES)] = DEFAULT_CHUNK_BYTES

    def __post_init__(self) -> None:
        if self.partition and self.sums == "behind":
            raise UserError(
                "partition is true and sums is 'behind', where nothing runs beside a sum: set sums to 'priority', "
                "'between' or 'baseline', or partition to false"
            )
        if self.level_chunks != LEVEL_CHUNKS and not self.hierarchical:
            raise UserError(f"level_chunks is {self.level_chunks} and hierarchical false: set that, or leave this out")
        if self.packing and self.sums != "priority":
            raise UserError(
                f"packing is true and sums is {self.sums!r}: it needs the times of exchanges, which only sums "
                "'priority' takes: set it, or packing to false"
            )

    def launcher(self) -> CollectiveLauncher | None:
        """What takes sums beside backward; None where they are made behind it."""
        if self.sums == "behind":
            return None
        chunk_bytes = self.chunk_bytes if self.partition else None
        return CollectiveLauncher(MicroOpScheduler(chunk_bytes, between_pairs=self.sums == "between"))

    @property
    def orders_exchanges(self) -> bool:
        """Whether exchanges of rows go through the launcher too, because sums are ordered around them."""
        return self.sums in ("between", "priority")

    def check_attention(self, tensor: int) -> None:
        """`UserError` where `attention` would do nothing."""
        if self.attention != "plain" and tensor == 1:
            raise UserError(
                "communication.attention is 'float8' and parallel.tensor is 1, so no rank gathers rows before "
                "attention: raise tensor, or leave attention 'plain'"
            )

    def check_dispatch(self, parallel: ParallelConfig) -> None:
        """`UserError` where a switch would do nothing, or not what it says, with this way of rows."""
        dispatch = parallel.dispatch
        if self.sums == "between" and (dispatch == "two_level" or (parallel.expert > 1 and parallel.expert_tensor > 1)):
            raise UserError(
                f"communication.sums is 'between', parallel.dispatch is {dispatch!r} and expert_tensor is "
                f"{parallel.expert_tensor}: rows travel twice each way then, and sums would begin between these: use "
                "another dispatch with expert_tensor 1, or sums 'priority'"
            )
        if dispatch not in ("all_to_all", "two_level") and self.activations == "float8_permutation":
            raise UserError(
                "communication.activations is 'float8_permutation', which is about all-to-alls, and parallel.dispatch "
                f"is {dispatch}, which has none or may have none: use dispatch all_to_all, or another value"
            )
        if dispatch == "two_level" and (self.packing or self.pipeline_experts):
            raise UserError(
                "parallel.dispatch is 'two_level', whose rows travel twice between fixed ranks: set "
                "communication.packing and pipeline_experts to false, or use dispatch all_to_all"
            )
        if dispatch == "auto" and self.packing:
            raise UserError(
                "communication.packing is true and parallel.dispatch is auto, which measures anew whenever other ranks "
                "share the experts: use dispatch all_to_all or gather_scatter"
            )

    @property
    def node_ranks(self) -> int:
        """Ranks of a node."""
        return self.node_size or int(os.environ.get("LOCAL_WORLD_SIZE", "1"))

    def ranks_per_node(self, world_size: int) -> int:
        """For hierarchical sums; 0: they are off. `UserError` where there are no two levels."""
        if not self.hierarchical or world_size == 1:
            return 0
        size = self.node_ranks
        if world_size % size or size in (1, world_size):
            raise UserError(
                f"communication: hierarchical sums with nodes of {size} ranks, of {world_size} in all: set node_size "
                "to a divisor between these, or hierarchical to false"
            )
        return size


@dataclass(frozen=True, kw_only=True)
class MemoryConfig:
    """What a layer keeps between forward and backward (`train.layer_plan`); the rest is made, or received, again.

    `remake`: "none" keeps all that backward reads, "selective" makes norms, activations and exchanges again (MegaScale-
    MoE, section 4.1), "full" keeps the layer's input and its routing. `keep`: instead, the tensors to keep, by name.
    `again`: instead, what to make again, in the words of a plan (`cost.training.rematerialize`). `activation_bytes`:
    instead, a limit to what a rank keeps; what is cheapest for its bytes is made again until the rest fits (0: no
    limit).

    `offload`: AdamW's "moments", or with them the "experts" parameters, lie in a mapped file and are fetched a layer
    ahead (`train.offload`). `offload_folder`: on which disk (empty: the output's). `reuse_rows`: what experts' products
    make lies in memory that is used again (`kernels.ops.feed_forward`)."""

    remake: Literal["none", "selective", "full"] = "none"
    keep: tuple[str, ...] = ()
    again: tuple[str, ...] = ()
    activation_bytes: CountFromZero = 0
    offload: Literal["none", "moments", "experts"] = "none"
    offload_folder: str = ""
    reuse_rows: bool = False

    def __post_init__(self) -> None:
        if self.offload_folder and self.offload == "none":
            raise UserError(
                f"offload_folder is {self.offload_folder} and offload is 'none', so nothing would lie there: set "
                "offload to 'moments' or 'experts', or leave offload_folder out"
            )
        given = [
            name
            for name, is_given in (
                ("remake", self.remake != "none"),
                ("keep", bool(self.keep)),
                ("again", bool(self.again)),
                ("activation_bytes", bool(self.activation_bytes)),
            )
            if is_given
        ]
        if len(given) > 1:
            raise UserError(f"{' and '.join(given)} are given: each decides what is kept, so give one of them")


@dataclass(frozen=True, kw_only=True)
class OverlapConfig:
    """`schedule`: a file with the order of a layer's operators, as `train.layer_schedule` reads it (empty: its default
    one). `search`: find an order from times measured before the first step. `beside` False: the default order, but
    each exchange is waited for where it is started.

    `inside`: experts' products begin with the rows that are there, and rows leave as soon as they are made, in tiles of
    `tile_rows` (MegaScale-MoE, section 4.2; `train.tiled`). `pairs`: two micro-batches of a step in turns, one computes
    while the other one waits (`train.layer_run`). `tiles_first`: links that obey marks carry tiles ahead of all other
    traffic (`comm.m2n.tile_links`)."""

    schedule: str = ""
    search: Flag = False
    beside: Flag = True
    inside: Flag = False
    pairs: Flag = False
    tile_rows: Whole = 256
    tiles_first: Flag = False

    def __post_init__(self) -> None:
        check_tile_rows(self.tile_rows)
        if self.inside and (self.search or not self.beside):
            raise UserError(
                "inside is true: a search measures exchanges and products apart, and without beside nothing overlaps: "
                "leave out search and beside, or inside"
            )
        if self.tiles_first and not self.inside:
            raise UserError("tiles_first is true and inside is false, so there are no tiles: set inside to true too")
        if not self.beside and (self.schedule or self.search):
            raise UserError(
                "beside is false, so nothing runs beside an exchange: leave out schedule and search, or beside"
            )
        if self.schedule and self.search:
            raise UserError(f"schedule is {self.schedule} and search is true: give one of them")

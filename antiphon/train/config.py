"""What a training run is, as frozen data, from a TOML file.

    config = read_config(Path("train.toml"), ["optimizer.learning_rate=1e-3"])

Paths in the file are relative to it; `~` and environment variables are expanded, and `${PYTHON_LIBRARY}` is the folder
of the running interpreter's standard library. Unknown keys are refused with the nearest known one. Each table of the
file is a class; what ranks send, keep and reorder is off by default.
"""

import os
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field

from antiphon.base.errors import UserError
from antiphon.comm.float8 import Format
from antiphon.comm.launcher import CollectiveLauncher
from antiphon.comm.micro_ops import DEFAULT_CHUNK_BYTES, MicroOpScheduler
from antiphon.comm.replicas import LEVEL_CHUNKS
from antiphon.comm.tiles import check_tile_rows
from antiphon.kernels.ops.products import Kind
from antiphon.specs.checked import (
    Count,
    CountFromZero,
    Flag,
    NotNegative,
    Positive,
    Text,
    Whole,
    checked,
    read,
    read_mapping,
)
from antiphon.train.config_data import DataConfig
from antiphon.train.config_learning import LossConfig, OptimizerConfig, WatchConfig
from antiphon.train.config_paths import absolute_paths
from antiphon.train.device import DeviceName

Dtype = Literal["float32", "bfloat16", "float64"]


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
    make lies in memory that is used again (`kernels.ops.row_buffers`)."""

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


_WIDEST_BYTES = 8  # of a number: a chunk holds one at least


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

    def check_dispatch(self, parallel: "ParallelConfig") -> None:
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
class ModelConfig:
    """`path`: a Hugging Face folder or a `config.json`. `begin`: with random weights or with the folder's.
    `initializer_range`: deviation of random matrices."""

    path: Text
    begin: Literal["random", "checkpoint"] = "random"
    initializer_range: Positive = 0.02


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


@dataclass(frozen=True, kw_only=True)
class OutputConfig:
    """`folder`: of checkpoints, metrics and token ids. Every how many steps: `log_every`, `checkpoint_every`,
    `evaluate_every` (0: at the end only). `keep`: checkpoints that stay. `save_beside`: a checkpoint is written beside
    the steps that follow it, from a copy in host memory; not with `memory.offload`. `evaluate_sequences`: how many
    of the held-out text are looked at, evenly spread over it (0: all). `keep_best`: every evaluation is saved, and
    the checkpoint of the lowest held-out loss stays beside the newest. `wandb`: a project of Weights & Biases that
    gets the metrics too (empty: none)."""

    folder: Text
    log_every: Count = 10
    checkpoint_every: CountFromZero = 100
    keep: Count = 2
    save_beside: Flag = True
    evaluate_every: CountFromZero = 0
    evaluate_sequences: CountFromZero = 64
    keep_best: Flag = False
    wandb: str = ""


@checked("")
@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """A whole run. `batch`: sequences of one optimizer step; `micro_batch`: of one pass (0: all). `dtype`: of the
    arithmetic; parameters and optimizer are in float32 at least. `products`: of layers' weights, whose factors are
    rounded to E4M3 first ("float8"), gradients to E5M2 ("hybrid"). `device`: of each rank; "auto": a GPU where there
    are any (`train.device`)."""

    model: ModelConfig
    data: DataConfig
    output: OutputConfig
    steps: Count
    sequence_length: Annotated[Whole, Field(ge=2)]
    batch: Count
    micro_batch: CountFromZero = 0
    seed: CountFromZero = 0
    dtype: Dtype = "float32"
    products: Kind = "plain"
    device: DeviceName = "auto"
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    loss: LossConfig = field(default_factory=LossConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    communication: CommunicationConfig = field(default_factory=CommunicationConfig)
    memory: MemoryConfig = field(default_factory=MemoryConfig)
    overlap: OverlapConfig = field(default_factory=OverlapConfig)
    watch: WatchConfig = field(default_factory=WatchConfig)

    def __post_init__(self) -> None:
        if self.micro_batch and self.batch % self.micro_batch:
            raise UserError(
                f"batch is {self.batch}, micro_batch is {self.micro_batch}: batch must be a multiple of micro_batch"
            )
        self.communication.check_dispatch(self.parallel)
        self.communication.check_attention(self.parallel.tensor)
        self._check_offload()
        if self.overlap.pairs:
            self._check_pairs()
        if self.overlap.inside and self.parallel.dispatch == "two_level":
            raise UserError(
                "overlap.inside is true and parallel.dispatch is 'two_level': tiles go straight to the ranks of their "
                "experts: use dispatch all_to_all, or set overlap.inside to false"
            )
        if self.overlap.inside and self.products != "plain":
            raise UserError(
                f"overlap.inside is true and products is {self.products!r}: tiles are multiplied as they are, so set "
                "products to 'plain', or overlap.inside to false"
            )
        if self.overlap.inside and (self.communication.pipeline_experts or self.communication.packing):
            raise UserError(
                "overlap.inside cuts rows into tiles between fixed ranks: set communication.pipeline_experts and "
                "packing to false, or overlap.inside"
            )
        if self.communication.packing and (self.overlap.schedule or self.overlap.search):
            raise UserError(
                "communication.packing changes how many ranks share the experts, and so a layer's operators: leave out "
                "overlap.schedule and overlap.search, or set packing to false"
            )

    def _check_offload(self) -> None:
        if self.memory.offload == "none":
            return
        if self.optimizer.name != "adamw":
            raise UserError(
                f"memory.offload is {self.memory.offload!r} and optimizer.name is {self.optimizer.name!r}, which moves "
                "matrices of all layers together: use adamw, or offload 'none'"
            )
        if self.communication.packing:
            raise UserError(
                "memory.offload and communication.packing: packing moves experts between ranks while a run goes on, "
                "and the file is made once: leave one of them out"
            )
        if self.memory.offload == "experts" and self.parallel.zero:
            raise UserError(
                f"memory.offload is 'experts' and parallel.zero is {self.parallel.zero}, which keeps parameters in "
                "shards already: use offload 'moments', or zero 0"
            )

    @property
    def offload_folder(self) -> Path:
        """Where mapped files are made."""
        return Path(self.memory.offload_folder or self.output.folder)

    def _check_pairs(self) -> None:
        wrong = {
            f"micro_batch leaves {self.micro_batches} pass a step": self.micro_batches < 2,
            f"parallel.pipeline is {self.parallel.pipeline}": self.parallel.pipeline > 1,
            f"parallel.zero is {self.parallel.zero}": self.parallel.zero > 2,
            f"communication.sums is {self.communication.sums}": self.communication.sums != "behind",
            "overlap.inside is true": self.overlap.inside,
            "overlap.search is true": self.overlap.search,
        }
        if found := [what for what, is_so in wrong.items() if is_so]:
            raise UserError(
                f"overlap.pairs is true and {found[0]}: two micro-batches in turns need two of them, pipeline 1, zero "
                "below 3, sums 'behind', and neither inside nor search"
            )

    @property
    def micro_batches(self) -> int:
        """Passes of one optimizer step."""
        return self.batch // self.micro_batch if self.micro_batch else 1

    @property
    def tokens_per_step(self) -> int:
        return self.batch * self.sequence_length

    def as_table(self) -> dict[str, Any]:
        """As it would stand in a file; paths are absolute. What is empty is left out, as a file leaves it out."""
        return {
            key: {name: entry for name, entry in value.items() if entry != ""} if isinstance(value, dict) else value
            for key, value in asdict(self).items()
        }


def read_config(file: Path, changes: Sequence[str] = ()) -> TrainConfig:
    """The configuration in `file`, after `changes` such as ``optimizer.learning_rate=1e-3``; `UserError` if wrong."""
    mapping = read_mapping(file)
    for change in changes:
        apply_change(mapping, change)
    return config_of(absolute_paths(mapping, file.resolve().parent), str(file))


def config_of(mapping: Mapping[str, Any], where: str) -> TrainConfig:
    """The configuration that `as_table` gave, or that a file holds. Former names of values are read as the new ones."""
    for (table, key, former), name in _RENAMED.items():
        entries = mapping.get(table)
        if isinstance(entries, Mapping) and entries.get(key) == former:
            mapping = {**mapping, table: {**entries, key: name}}
    return read(TrainConfig, mapping, where)


_RENAMED = {("communication", "sums", "fixed"): "baseline"}  # Lina's own "fixed" is another schedule


def apply_change(mapping: dict[str, Any], change: str) -> None:
    """``a.b=value``; the value is TOML, or a text if it is not."""
    key, equals, value = change.partition("=")
    if not equals or not key:
        raise UserError(f"--set {change}: write key=value, for example optimizer.learning_rate=1e-3")
    *tables, last = key.split(".")
    for table in tables:
        mapping = mapping.setdefault(table, {})
        if not isinstance(mapping, dict):
            raise UserError(f"--set {change}: {table} is not a table")
    try:
        mapping[last] = tomllib.loads(f"value = {value}")["value"]
    except tomllib.TOMLDecodeError:
        mapping[last] = value

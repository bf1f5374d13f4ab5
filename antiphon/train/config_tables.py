"""The tables of a training file, as frozen data: the model, what a run is trained on and how it learns (files and
chats, optimizer, losses, what is watched); how ranks share its work, what they send each other, what they keep, what
runs beside what; what is written, and how often. Keys outside a table are in `train.config`, with the checks of
several tables together.

Without `sources`, the keys of `[data]` are one source. With them, each source has keys of its own, and says how often
it is seen: `weight`, its share of the tokens, or `epochs` in one pass over the data. What ranks send, keep and reorder
is off by default.
"""

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from pydantic import Field

from antiphon.base.errors import UserError
from antiphon.comm.float8 import Format
from antiphon.comm.launcher import CollectiveLauncher
from antiphon.comm.micro_ops import DEFAULT_CHUNK_BYTES, MicroOpScheduler
from antiphon.comm.replicas import LEVEL_CHUNKS
from antiphon.comm.tile_flight import check_tile_rows
from antiphon.specs.checked import MOST, Count, CountFromZero, Flag, NotNegative, Positive, Text, Whole, checked

BelowOne = Annotated[NotNegative, Field(lt=1)]
Kind = Literal["text", "chat", "answers"]


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """`path`: a Hugging Face folder or a `config.json`. `begin`: with random weights or with the folder's.
    `initializer_range`: deviation of random matrices."""

    path: Text
    begin: Literal["random", "checkpoint"] = "random"
    initializer_range: Positive = 0.02


@checked("")
@dataclass(frozen=True, kw_only=True)
class SourceConfig:
    """One source. `files`: patterns of text, `.jsonl`, `.json`, `.parquet` and `.arrow` files, or folders that
    `datasets` wrote, less those that `exclude` matches; text and JSON may end in `.gz` or `.zst`.

    `kind` "text": a text file is one document, a record's is under `text_key`. "chat": a record has `messages`, maybe
    `tools`, and goes through the model's chat template. "answers": it has `prompt` and `answer`. Of the last two, only
    what the assistant says is learned. `control_tokens`: whether "<|im_end|>" in a text is the token of that name
    (true) or ten characters (false)."""

    name: Text
    files: Annotated[tuple[Text, ...], Field(min_length=1)]
    exclude: tuple[str, ...] = ()
    kind: Kind = "text"
    text_key: Text = "text"
    control_tokens: Flag = False
    weight: Positive | None = None
    epochs: Positive | None = None

    @property
    def is_chat(self) -> bool:
        """Whether only answers are learned, and documents are packed whole."""
        return self.kind != "text"


@checked("")
@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """`files`, `exclude`, `kind`, `text_key`, `control_tokens`: as of `SourceConfig`; or `sources`, with keys of their
    own. `evaluation`: sets that are never trained on, with the keys of a source; each has a loss of its own beside that
    of what is held out. `made_by`: the command that makes files that are missing, for the message.

    `stream_tokens`: text is tokenized beside the steps, in blocks of about this many tokens; windows are shuffled
    within a block (0: all before the first step, and shuffled over all).

    `tokenizer`: a folder or a `tokenizer.json` (empty: the model's folder). `held_out`: part of the documents that is
    never trained on, chosen by their content. `cache`: folder of the token ids (empty: `tokens` in the output folder).
    `document_masks`: documents packed into one sequence do not see each other. `pieces`: training documents are encoded
    in pieces of this many characters on average (0: whole), so that the model has seen what follows when a prompt ends
    inside a token."""

    files: tuple[Text, ...] = ()
    exclude: tuple[str, ...] = ()
    kind: Kind = "text"
    text_key: Text = "text"
    control_tokens: Flag = False
    sources: tuple[SourceConfig, ...] = ()
    evaluation: tuple[SourceConfig, ...] = ()
    made_by: str = ""
    tokenizer: str = ""
    held_out: BelowOne = 0.01
    cache: str = ""
    document_masks: Flag = True
    pieces: CountFromZero = 0
    stream_tokens: CountFromZero = 0

    def __post_init__(self) -> None:
        if bool(self.files) == bool(self.sources):
            both = "files and sources are both given" if self.files else "neither files nor sources is given"
            raise UserError(f"{both}: name files, or a [[data.sources]] for each source")
        _check_sources(self.sources)
        _check_evaluation(self.evaluation, [each.name for each in self.all_sources()])
        if self.stream_tokens and (counted := [each.name for each in self.sources if each.epochs is not None]):
            raise UserError(
                f"stream_tokens is {self.stream_tokens} and source {counted[0]!r} has epochs: how long a source is "
                "shows only in the end, so give it a weight, or set stream_tokens to 0"
            )

    def tokenized(self) -> tuple[SourceConfig, ...]:
        """The sources, then the evaluation sets."""
        return (*self.all_sources(), *self.evaluation)

    def all_sources(self) -> tuple[SourceConfig, ...]:
        """What is trained on."""
        if self.sources:
            return self.sources
        keys: dict[str, Any] = {"kind": self.kind, "text_key": self.text_key, "control_tokens": self.control_tokens}
        return (SourceConfig(name="files", files=self.files, exclude=self.exclude, **keys),)


def _check_evaluation(sets: Sequence[SourceConfig], sources: Sequence[str]) -> None:
    names = [*sources, *(each.name for each in sets)]
    if twice := [name for name in names if names.count(name) > 1]:
        raise UserError(f"evaluation: {twice[0]!r} is the name of another source or set: give each its own")
    if weighed := [each.name for each in sets if each.weight is not None or each.epochs is not None]:
        raise UserError(f"evaluation: {weighed[0]!r} has a weight or epochs, but is not trained on: leave them out")


def _check_sources(sources: Sequence[SourceConfig]) -> None:
    names = [each.name for each in sources]
    if twice := [name for name in names if names.count(name) > 1]:
        raise UserError(f"sources: {twice[0]!r} is the name of {names.count(twice[0])}: give each its own")
    weighed = [each.name for each in sources if each.weight is not None]
    if weighed and len(weighed) < len(sources):
        without = next(each.name for each in sources if each.weight is None)
        raise UserError(f"sources: {weighed[0]!r} has a weight and {without!r} has none: give all one, or epochs")
    if both := [each.name for each in sources if each.weight is not None and each.epochs is not None]:
        raise UserError(f"sources: {both[0]!r} has weight and epochs: each decides how often it is seen, give one")


@checked("")
@dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """`name` "muon": Muon for matrices, at `muon_scale` times the rate, and AdamW for the rest. The rate rises over
    `warmup_steps`, then follows `schedule`: "cosine" down to `final_rate` of its peak, "wsd" stays and falls linearly
    over the last `decay_part` of the steps, "constant". `clip`: largest norm of the gradient (0: no limit). Norms,
    biases and the router's are not decayed.

    `schedule_steps`: the schedule's own length; behind it the rate stays (0: `steps` of the run's first start).
    `frozen`: patterns of parameters that keep their bits; one that begins with "!" takes out again what those before it
    took. `rates`: factors of the rate by pattern, the last that matches."""

    name: Literal["adamw", "muon"] = "adamw"
    learning_rate: Positive = 1e-3
    muon_scale: Positive = 1.0
    betas: tuple[BelowOne, BelowOne] = (0.9, 0.95)
    eps: Positive = 1e-8
    weight_decay: NotNegative = 0.1
    clip: NotNegative = 1.0
    warmup_steps: CountFromZero = 20
    schedule: Literal["cosine", "wsd", "constant"] = "cosine"
    final_rate: NotNegative = 0.1
    decay_part: NotNegative = 0.2
    schedule_steps: CountFromZero = 0
    frozen: tuple[Text, ...] = ()
    rates: dict[str, NotNegative] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class LossConfig:
    """Weights of what is added to the cross-entropy: `balance` of the experts' use, over each "layer" (Switch
    Transformer, eq. 4) or over the whole "model" (as transformers has it); `device_balance` of `device_groups` groups
    of experts (MegaScale-MoE, section 3.2); `z` of the router's squared log-sum-exp (ST-MoE, eq. 5). `bias_rate`: step
    of a score bias towards even use, for routers that have one (DeepSeek-V3, section 2.1.2).

    `capacity`: rows that an expert takes, over the mean; `device_capacity`: that a group takes, over the mean of groups
    (MegaScale-MoE, section 3.2). The choices of largest weight stay, the others are dropped; 0: none are.

    `mtp`: weight of the loss of the layer that predicts a token further (`train.further_token`; 0: it is not
    trained)."""

    balance: NotNegative = 0.01
    balance_over: Literal["layer", "model"] = "layer"
    device_balance: NotNegative = 0.0
    device_groups: Count = 1
    z: NotNegative = 0.0
    bias_rate: NotNegative = 1e-3
    capacity: NotNegative = 0.0
    device_capacity: NotNegative = 0.0
    mtp: NotNegative = 0.0

    def __post_init__(self) -> None:
        if self.device_capacity and self.device_groups == 1:
            raise UserError(
                f"device_capacity is {self.device_capacity}, device_groups is 1, so nothing would be dropped: say how "
                "many groups the experts make"
            )

    @property
    def drops(self) -> bool:
        """Whether there is a limit to the rows that experts take."""
        return self.capacity > 0 or self.device_capacity > 0


@dataclass(frozen=True, kw_only=True)
class WatchConfig:
    """Spikes (`train.watch`): a gradient norm of `norm_ratio` times the last steps', a loss `loss_rise` nats above
    theirs (0: not looked at). `on_spike`: "warn"; "skip" leaves the step's update out; "rollback" goes back to the
    newest checkpoint and leaves out all samples since."""

    on_spike: Literal["warn", "skip", "rollback"] = "warn"
    norm_ratio: NotNegative = 10.0
    loss_rise: NotNegative = 1.0


_WIDEST_BYTES = 8  # of a number: a chunk holds one at least
_LONGEST_WAIT_S = 1e6  # eleven days; the system counts milliseconds in 31 bits


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
    zero: Annotated[Whole, Field(ge=0, le=3)] = 0
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
    where these wait for rows (`train.measured_choices`). `timeout_s`: how long a rank waits for others before it names
    those that hang, and ends."""

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
    timeout_s: Annotated[Positive, Field(le=_LONGEST_WAIT_S)] = 600.0
    chunk_bytes: Annotated[Whole, Field(ge=_WIDEST_BYTES, le=MOST)] = DEFAULT_CHUNK_BYTES

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

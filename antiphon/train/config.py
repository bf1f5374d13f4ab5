"""What a training run is, as frozen data, from a TOML file.

    config = read_config(Path("train.toml"), ["optimizer.learning_rate=1e-3"])

Paths in the file are relative to it; `~` and environment variables are expanded, and `${PYTHON_LIBRARY}` is the folder
of the running interpreter's standard library. Unknown keys are refused with the nearest known one.
"""

import os
import sysconfig
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from string import Template
from typing import Any, Literal

from antiphon.base.errors import UserError
from antiphon.specs.strict_table import CountFromZero, NotNegative, Positive, Table, read_text
from antiphon.train.communication_config import CommunicationConfig
from antiphon.train.memory_config import MemoryConfig, OverlapConfig

Dtype = Literal["float32", "bfloat16", "float64"]


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """`path`: a Hugging Face folder or a `config.json`. `begin`: with random weights or with the folder's.
    `initializer_range`: deviation of random matrices."""

    path: str
    begin: Literal["random", "checkpoint"] = "random"
    initializer_range: Positive = 0.02


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """`files`: patterns of text, `.jsonl` or `.parquet` files, less those that `exclude` matches; a text file is one
    document, a record's is under `text_key`. `tokenizer`: a folder or a `tokenizer.json` (empty: the model's folder).
    `held_out`: part of the documents that is never trained on. `cache`: folder of the token ids (empty: `tokens` in
    the output folder). `document_masks`: documents packed into one sequence do not see each other. `pieces`: training
    documents are encoded in pieces of this many characters on average (0: whole), so that the model has seen what
    follows when a prompt ends inside a token."""

    files: tuple[str, ...]
    exclude: tuple[str, ...] = ()
    text_key: str = "text"
    tokenizer: str = ""
    held_out: NotNegative = 0.01
    cache: str = ""
    document_masks: bool = True
    pieces: CountFromZero = 0

    def __post_init__(self) -> None:
        if not self.files:
            raise UserError("files is empty: name at least one pattern")
        if self.held_out >= 1:
            raise UserError(f"held_out is {self.held_out}: it must be below 1")


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """`name` "muon": Muon for matrices, at `muon_scale` times the rate, and AdamW for the rest. The rate rises over
    `warmup_steps`, then follows `schedule`: "cosine" down to `final_rate` of its peak, "wsd" stays and falls linearly
    over the last `decay_part` of the steps, "constant". `clip`: largest norm of the gradient (0: no limit). Norms,
    biases and the router's are not decayed."""

    name: Literal["adamw", "muon"] = "adamw"
    learning_rate: Positive = 1e-3
    muon_scale: Positive = 1.0
    betas: tuple[float, ...] = (0.9, 0.95)
    eps: Positive = 1e-8
    weight_decay: NotNegative = 0.1
    clip: NotNegative = 1.0
    warmup_steps: CountFromZero = 20
    schedule: Literal["cosine", "wsd", "constant"] = "cosine"
    final_rate: NotNegative = 0.1
    decay_part: NotNegative = 0.2

    def __post_init__(self) -> None:
        if len(self.betas) != 2 or not all(0 <= beta < 1 for beta in self.betas):
            raise UserError(f"betas is {list(self.betas)}: two numbers from 0 to below 1 are needed")


@dataclass(frozen=True, kw_only=True)
class LossConfig:
    """Weights of what is added to the cross-entropy: `balance` of the experts' use, over each "layer" (Switch
    Transformer, eq. 4) or over the whole "model" (as transformers has it); `device_balance` of `device_groups` groups
    of experts (MegaScale-MoE, section 3.2); `z` of the router's squared log-sum-exp (ST-MoE, eq. 5). `bias_rate`: step
    of a score bias towards even use, for routers that have one (DeepSeek-V3, section 2.1.2).

    `capacity`: rows that an expert takes, over the mean; `device_capacity`: that a group takes, over the mean of groups
    (MegaScale-MoE, section 3.2). The choices of largest weight stay, the others are dropped; 0: none are."""

    balance: NotNegative = 0.01
    balance_over: Literal["layer", "model"] = "layer"
    device_balance: NotNegative = 0.0
    device_groups: int = 1
    z: NotNegative = 0.0
    bias_rate: NotNegative = 1e-3
    capacity: NotNegative = 0.0
    device_capacity: NotNegative = 0.0

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
class ParallelConfig:
    """How many ranks share what. `pipeline` ranks have different layers, `virtual_stages` runs of them each. Attention:
    `sequence` ranks share positions and heads (Ulysses), `tensor` ranks heads and weights. Experts: `expert` ranks have
    different experts, `expert_tensor` ranks slices of the same. The product of `pipeline` and either pair divides the
    number of ranks; what is left is data parallel. `zero`: what ranks that hold the same keep in shards: 1 the
    optimizer's state, 2 gradients too, 3 parameters too.

    `dispatch`: how rows reach experts; "auto" measures which way is faster here. `deduplicate`: an all-to-all sends a
    row once to a rank. `row_budget`: rows that a rank's experts may hold, over their share at even use; what is over it
    is worked on again in backward (0: no limit)."""

    pipeline: int = 1
    virtual_stages: int = 1
    sequence: int = 1
    tensor: int = 1
    expert: int = 1
    expert_tensor: int = 1
    zero: CountFromZero = 0
    dispatch: Literal["all_to_all", "gather_scatter", "auto"] = "all_to_all"
    deduplicate: bool = True
    row_budget: NotNegative = 1.1

    def __post_init__(self) -> None:
        if self.zero > 3:
            raise UserError(f"zero is {self.zero}: use 0, 1, 2 or 3")


@dataclass(frozen=True, kw_only=True)
class OutputConfig:
    """`folder`: of checkpoints, metrics and token ids. Every how many steps: `log_every`, `checkpoint_every`,
    `evaluate_every` (0: at the end only). `keep`: checkpoints that stay. `save_beside`: a checkpoint is
    written beside the steps that follow it, from a copy."""

    folder: str
    log_every: int = 10
    checkpoint_every: CountFromZero = 100
    keep: int = 2
    save_beside: bool = True
    evaluate_every: CountFromZero = 0
    evaluate_sequences: int = 64


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """A whole run. `batch`: sequences of one optimizer step; `micro_batch`: of one pass (0: all). `dtype`: of the
    arithmetic; parameters and optimizer are in float32 at least."""

    model: ModelConfig
    data: DataConfig
    output: OutputConfig
    steps: int
    sequence_length: int
    batch: int
    micro_batch: CountFromZero = 0
    seed: CountFromZero = 0
    dtype: Dtype = "float32"
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    loss: LossConfig = field(default_factory=LossConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    communication: CommunicationConfig = field(default_factory=CommunicationConfig)
    memory: MemoryConfig = field(default_factory=MemoryConfig)
    overlap: OverlapConfig = field(default_factory=OverlapConfig)

    def __post_init__(self) -> None:
        if self.sequence_length < 2:
            raise UserError(f"sequence_length is {self.sequence_length}: it must be at least 2")
        if self.micro_batch and self.batch % self.micro_batch:
            raise UserError(
                f"batch is {self.batch}, micro_batch is {self.micro_batch}: batch must be a multiple of micro_batch"
            )
        self.communication.check_dispatch(self.parallel.dispatch)
        if self.overlap.pairs:
            self._check_pairs()
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
    try:
        mapping = tomllib.loads(read_text(file))
    except tomllib.TOMLDecodeError as error:
        raise UserError(f"{file}: not valid TOML: {error}") from error
    for change in changes:
        apply_change(mapping, change)
    return config_of(_absolute(mapping, file.resolve().parent), str(file))


def config_of(mapping: Mapping[str, Any], where: str) -> TrainConfig:
    """The configuration that `as_table` gave, or that a file holds."""
    return Table(mapping, where).read(TrainConfig)


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


_PATHS = {
    "model": ("path",),
    "data": ("files", "exclude", "tokenizer", "cache"),
    "output": ("folder",),
    "overlap": ("schedule",),
}


def _absolute(mapping: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Paths made absolute, their variables replaced; what is not a path is left for `Table` to judge."""
    variables = {**os.environ, "PYTHON_LIBRARY": sysconfig.get_path("stdlib")}

    def whole(text: Any) -> Any:
        if not isinstance(text, str) or not text:
            return text
        try:
            text = Template(text).substitute(variables)
        except (KeyError, ValueError) as error:
            raise UserError(f"{text}: {error} is not set: set it, or write the path out") from error
        return str(folder / Path(text).expanduser())

    for table, keys in _PATHS.items():
        entries = mapping.get(table)
        if isinstance(entries, dict):
            for key in keys:
                value = entries.get(key)
                if value is not None:
                    entries[key] = [whole(each) for each in value] if isinstance(value, list) else whole(value)
    return mapping

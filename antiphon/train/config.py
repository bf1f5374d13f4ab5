"""What a training run is, as frozen data, from a TOML file.

    config = read_config(Path("train.toml"), ["optimizer.learning_rate=1e-3"])

Paths in the file are relative to it; `~` and environment variables are expanded, and `${PYTHON_LIBRARY}` is the folder
of the running interpreter's standard library. Unknown keys are refused with the nearest known one. Each table of the
file is a class of `train.config_tables`.
"""

import os
import sysconfig
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from string import Template
from typing import Annotated, Any, Literal

from pydantic import Field

from antiphon.base.errors import UserError
from antiphon.kernels.ops.products import Kind
from antiphon.specs.catalog import a_file_of
from antiphon.specs.checked import (
    MOST,
    Count,
    CountFromZero,
    Whole,
    checked,
    read,
    read_mapping,
)
from antiphon.train.config_tables import (
    CommunicationConfig,
    DataConfig,
    LossConfig,
    MemoryConfig,
    ModelConfig,
    OptimizerConfig,
    OutputConfig,
    OverlapConfig,
    ParallelConfig,
    WatchConfig,
)
from antiphon.train.device import DeviceName

MOST_SEQUENCES = 2**20  # of a step; more is a slip
Dtype = Literal["float32", "bfloat16", "float64"]


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
    sequence_length: Annotated[Whole, Field(ge=2, le=MOST)]
    batch: Annotated[Whole, Field(ge=1, le=MOST_SEQUENCES)]
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
        self._check_dispatch()
        self._check_attention()
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

    def _check_attention(self) -> None:
        """`communication.attention` would do nothing without tensor ranks."""
        if self.communication.attention != "plain" and self.parallel.tensor == 1:
            raise UserError(
                "communication.attention is 'float8' and parallel.tensor is 1, so no rank gathers rows before "
                "attention: raise tensor, or leave attention 'plain'"
            )

    def _check_dispatch(self) -> None:
        """Switches of communication that would do nothing, or not what they say, with this way of rows."""
        communication, parallel = self.communication, self.parallel
        dispatch = parallel.dispatch
        travels_twice = dispatch == "two_level" or (parallel.expert > 1 and parallel.expert_tensor > 1)
        if communication.sums == "between" and travels_twice:
            raise UserError(
                f"communication.sums is 'between', parallel.dispatch is {dispatch!r} and expert_tensor is "
                f"{parallel.expert_tensor}: rows travel twice each way then, and sums would begin between these: use "
                "another dispatch with expert_tensor 1, or sums 'priority'"
            )
        if dispatch not in ("all_to_all", "two_level") and communication.activations == "float8_permutation":
            raise UserError(
                "communication.activations is 'float8_permutation', which is about all-to-alls, and parallel.dispatch "
                f"is {dispatch}, which has none or may have none: use dispatch all_to_all, or another value"
            )
        if dispatch == "two_level" and (communication.packing or communication.pipeline_experts):
            raise UserError(
                "parallel.dispatch is 'two_level', whose rows travel twice between fixed ranks: set "
                "communication.packing and pipeline_experts to false, or use dispatch all_to_all"
            )
        if dispatch == "auto" and communication.packing:
            raise UserError(
                "communication.packing is true and parallel.dispatch is auto, which measures anew whenever other ranks "
                "share the experts: use dispatch all_to_all or gather_scatter"
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
    with a_file_of("run", file):
        mapping = read_mapping(file)
        for change in changes:
            apply_change(mapping, change)
        return config_of(_absolute_paths(mapping, file.resolve().parent), str(file))


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
        found = tomllib.loads(f"value = {value}")
    except (tomllib.TOMLDecodeError, RecursionError):
        found = {}
    mapping[last] = found["value"] if len(found) == 1 else value  # a second line of TOML would be another key


_PATHS = {
    "model": ("path",),
    "data": ("files", "exclude", "tokenizer", "cache"),
    "output": ("folder",),
    "overlap": ("schedule",),
    "memory": ("offload_folder",),
}
_PATHS_OF_SOURCE = ("files", "exclude")


def _absolute_paths(mapping: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Paths made absolute, their variables replaced; what is not a path is left for `read` to judge."""
    variables = {**os.environ, "PYTHON_LIBRARY": sysconfig.get_path("stdlib")}

    def whole(text: Any) -> Any:
        if not isinstance(text, str) or not text:
            return text
        if "\0" in text:
            raise UserError(f"{text!r} is no path: it holds a zero byte, take it out")
        try:
            text = Template(text).substitute(variables)
        except KeyError as error:
            raise UserError(f"{text}: {error} is not set: set it, or write the path out") from error
        except ValueError as error:
            raise UserError(f"{text}: a $ begins the name of a variable: write $$ for the character") from error
        text, base = os.path.expanduser(text), folder  # noqa: PTH111  (`Path.expanduser` raises for unknown users)
        while text.startswith("../"):  # `folder` is resolved, so its parent is what `..` means
            text, base = text[3:].lstrip("/"), base.parent
        return str(base / text)

    tables = [(mapping.get(table), keys) for table, keys in _PATHS.items()]
    data = mapping.get("data")
    for key in ("sources", "evaluation"):
        sources = data.get(key) if isinstance(data, dict) else None
        tables += [(each, _PATHS_OF_SOURCE) for each in (sources if isinstance(sources, list) else ())]
    for entries, keys in tables:
        if isinstance(entries, dict):
            for key in keys:
                value = entries.get(key)
                if value is not None:
                    entries[key] = [whole(each) for each in value] if isinstance(value, list) else whole(value)
    return mapping

"""Options that several commands share, declared once, and the configuration made from them; texts of options that are
read, and checks of their values."""

import json
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal, get_type_hints

import typer
from typer.models import OptionInfo

from antiphon.base.errors import UserError, shortened
from antiphon.base.units import parse_bytes
from antiphon.bench.harness.columns import PATIENCE, UpTo
from antiphon.cli.commands import given_options
from antiphon.models.checkpoint_folder import model_folder
from antiphon.models.config import load_model_spec
from antiphon.placement.sample_paths import read_path_profile
from antiphon.serve.config import MAX_TIMEOUT_S, OneRole, ServeConfig, Stepping, Switch, WeightFormatName
from antiphon.serve.layout_text import Layout, parse_layout
from antiphon.serve.micro_batch_choice import UNMEASURED, choose_micro_batches
from antiphon.serve.placement_control import Policy
from antiphon.specs.placement import read_placement
from antiphon.specs.plan import MAX_MICRO_BATCHES, Collectives
from antiphon.specs.sampling import SamplingParams

ModelFolder = Annotated[
    Path,
    typer.Argument(metavar="MODEL", help="Checkpoint folder, or a GGUF file.", callback=model_folder),
]
SIZES = ("layout", "instances", "attention", "experts", "tp", "expert_tp", "pp", "micro_batches")
_OF_ONE_POOL = (*SIZES, "placement")  # options that say nothing of two pools
_AS_WRITTEN = (  # options that are fields of a configuration
    *("exchange", "prefill_collectives", "decode_collectives", "device", "dtype", "kernels", "graphs"),
    *("streams", "max_model_len", "rope_scaling", "weights", "num_threads", "timeout_s", "balance"),
    *("expert_slots", "record_routing"),
)
DeviceOption = Annotated[str, typer.Option("--device", metavar="NAME", help="cpu or cuda.")]
DtypeOption = Annotated[str, typer.Option("--dtype", metavar="NAME", help="bfloat16, float16, float32.")]
KernelsOption = Annotated[str, typer.Option("--kernels", metavar="NAME", help="cpu (native), triton (GPU), reference.")]
ThreadsOption = Annotated[
    int | None, typer.Option("--threads", metavar="N", show_default="share the cores", help="Threads per worker.")
]
TimelineOption = Annotated[
    Path | None, typer.Option("--timeline", metavar="FILE", help="Write a Perfetto trace at the end.")
]
rare_option = partial(typer.Option, hidden=True)
"""An option that only `--help-all` and the docs show, because the help fills its screen."""


@dataclass(frozen=True, kw_only=True)
class CapacityOptions:
    """How much may run at once."""

    max_running: Annotated[int, typer.Option(metavar="N", help="Requests a step, per worker.")] = (
        ServeConfig.max_running
    )
    max_batch_tokens: Annotated[int, typer.Option(metavar="N", help="Tokens a step, per worker.")] = (
        ServeConfig.max_batch_tokens
    )
    max_waiting: Annotated[int, rare_option(metavar="N", help="Requests in line; more: 429.")] = 1024


@dataclass(frozen=True, kw_only=True)
class WorkerOptions:
    """Which workers run a model, and how. What is None (or "auto") was left out: the choice is ours."""

    layout: Annotated[
        Literal["auto", "colocated", "disaggregated", "hybrid"],
        typer.Option(metavar="NAME", help="colocated, disaggregated, hybrid."),
    ] = "auto"
    attention: Annotated[int, typer.Option(metavar="N", help="Attention workers, or replicas.")] = 1
    experts: Annotated[
        int | None, typer.Option(metavar="N", show_default="1", help="Expert workers, if disaggregated.")
    ] = None
    instances: Annotated[
        int | None, rare_option(metavar="N", show_default="1", help="Such groups, if disaggregated.")
    ] = None
    tp: Annotated[int, typer.Option(metavar="N", help="Ranks an attention worker has.")] = 1
    expert_tp: Annotated[
        int | None, typer.Option(metavar="N", show_default="1", help="Ranks an expert worker has.")
    ] = None
    pp: Annotated[int, rare_option(metavar="N", help="Stages of a replica.")] = 1
    micro_batches: Annotated[
        int | None, typer.Option(metavar="N", show_default="measured", help="Ping-pong, if apart.")
    ] = None
    prefill: Annotated[
        str | None, typer.Option(metavar="LAYOUT", show_default=False, help="Workers for prompts alone, e.g. 2.")
    ] = None
    decode: Annotated[
        str | None, typer.Option(metavar="LAYOUT", show_default=False, help="Workers beside those, e.g. 1+1/m2.")
    ] = None
    stepping: Annotated[
        Stepping | None,
        rare_option(metavar="HOW", show_default="measured", help="barrier: all together; free: each for itself."),
    ] = None
    exchange: Annotated[str, typer.Option("--transport", metavar="NAME", help="auto, shm, tcp or libfabric.")] = "auto"
    prefill_collectives: Annotated[
        Collectives, rare_option(metavar="FORM", help="fused, synchronous, auto; if hybrid, or --tp.")
    ] = "auto"
    decode_collectives: Annotated[
        Collectives, rare_option(metavar="FORM", help="fused, synchronous, auto; if hybrid.")
    ] = "auto"
    device: DeviceOption = "cpu"
    dtype: DtypeOption = "auto"
    kernels: KernelsOption = "auto"
    graphs: Annotated[Switch, rare_option(metavar="HOW", help="Decode steps as CUDA graphs: auto, on, off.")] = "auto"
    streams: Annotated[Switch, rare_option(metavar="HOW", help="Rows in stream order: auto, on, off.")] = "auto"
    max_model_len: Annotated[
        int | None, typer.Option(metavar="N", show_default="the model's", help="Longest sequence.")
    ] = None
    rope_scaling: Annotated[str, rare_option(metavar="JSON", help="Longer context, in place of the model's.")] = ""
    weights: Annotated[
        WeightFormatName, rare_option(metavar="NAME", help="Experts at load: as-stored, int8, int4, mxfp4.")
    ] = "as-stored"
    kv_bytes: Annotated[
        str | None, typer.Option(metavar="SIZE", show_default="30% of free", help="KV cache, e.g. 4GiB.")
    ] = None
    kv_dtype: Annotated[
        Literal["auto", "bf16", "int8", "fp8"],
        rare_option(metavar="NAME", help="Keys and values: auto (as --dtype), bf16, int8, fp8."),
    ] = "auto"
    num_threads: ThreadsOption = None
    timeout_s: Annotated[float, typer.Option("--timeout", metavar="S", help="Patience between workers.")] = 30.0
    balance: Annotated[Policy, typer.Option(metavar="HOW", help="static, window, predict, paths.")] = "off"
    path_profile: Annotated[Path | None, rare_option(metavar="FILE", help="Of --balance paths.")] = None
    expert_slots: Annotated[
        int | None, rare_option(metavar="N", show_default="no copies", help="Experts a layer a worker holds.")
    ] = None
    expert_memory: Annotated[
        str | None, rare_option(metavar="SIZE", help="Experts stay in the file; memory of those in use.")
    ] = None
    record_routing: Annotated[Path | None, rare_option(metavar="FILE", help="Write what experts rows chose.")] = None
    placement: Annotated[Path | None, rare_option(metavar="FILE", help="Which worker has which experts.")] = None
    plan: Annotated[Path | None, typer.Option(metavar="FILE", help="Obey this plan, one phase or both.")] = None
    attention_device: Annotated[str, rare_option(metavar="NAME", help="Of attention workers.")] = ""
    expert_device: Annotated[str, rare_option(metavar="NAME", help="Of expert workers.")] = ""
    attention_dtype: Annotated[str, rare_option(metavar="NAME", help="Of attention workers.")] = ""
    expert_dtype: Annotated[str, rare_option(metavar="NAME", help="Of expert workers.")] = ""
    attention_threads: Annotated[int | None, rare_option(metavar="N", help="Of one.")] = None
    expert_threads: Annotated[int | None, rare_option(metavar="N", help="Of one.")] = None

    def config(self, model: Path, capacity: CapacityOptions, *, trace: bool, written_in: str = "") -> ServeConfig:
        """A validated configuration; options that do not apply to the layout are refused, not ignored. `written_in`:
        the phase of a plan that the sizes are from."""
        if self.prefill is None and self.decode is None:
            return self._one_pool(self._layout_fields() | {"written_in": written_in}, capacity, model, trace=trace)
        layouts = self._pool_layouts().items()
        decode, prefill = (parse_layout(f"--{name}", text) | {"pool": name} for name, text in layouts)
        of_decode, of_prefill = self.for_pools(decode["layout"], prefill["layout"])
        return replace(
            of_decode._one_pool(decode, capacity, model, trace=trace),
            prefill=of_prefill._one_pool(prefill, capacity, model, trace=trace),
        )

    def for_pools(self, *layouts: Layout) -> "list[WorkerOptions]":
        """The options of each of two pools in these layouts: `--stepping` is about those with expert workers."""
        if self.stepping == "free" and "disaggregated" not in layouts:
            raise UserError(
                f"--stepping {self.stepping} needs a pool with expert workers, such as --decode 1+1/m2: others step "
                "freely anyway; leave it out"
            )
        return [self if layout == "disaggregated" else replace(self, stepping=None) for layout in layouts]

    def with_micro_batches(self, config: ServeConfig) -> ServeConfig:
        """`config` with as many micro-batches as a short measurement says, in pools for which no number was written and
        no plan has one; and with the stepping that it says, if none was written."""
        choose = partial(choose_micro_batches, any_stepping=self.stepping is None)
        if config.prefill is None:
            is_given = self.plan is not None or self.micro_batches is not None
            return config if is_given else choose(config)
        if self.plan is None and "m" not in (self.prefill or ""):
            chosen = choose(config.pools[1])  # the pool that knows what is beside it
            turns, stepping = chosen.num_micro_batches, chosen.stepping
            config = replace(config, prefill=replace(config.prefill, num_micro_batches=turns, stepping=stepping))
        return config if self.plan is not None or "m" in (self.decode or "") else choose(config)

    def _pool_layouts(self) -> dict[str, str]:
        """What was written for the pools; `UserError` if it does not go together with other options."""
        if self.decode is None or self.prefill is None:
            given, missing = ("prefill", "decode") if self.decode is None else ("decode", "prefill")
            raise UserError(f"--{given} without --{missing}: name the workers of both, or leave both out")
        for each in fields(self):
            if each.name in _OF_ONE_POOL and getattr(self, each.name) != each.default:
                option = f"--{each.name.replace('_', '-')}"
                raise UserError(
                    f"{option} does not apply with --prefill and --decode: write the layout there, or leave them out"
                )
        return {"decode": self.decode, "prefill": self.prefill}

    def _layout_fields(self) -> dict[str, Any]:
        layout = self._resolve_layout()
        return {
            "layout": layout,
            "num_attention": self.attention,
            "num_experts": 1 if self.experts is None else self.experts,
            "num_instances": 1 if self.instances is None else self.instances,
            "attention_tp": self.tp,
            "expert_tp": 1 if self.expert_tp is None else self.expert_tp,
            "num_stages": self.pp,
            "num_micro_batches": self._num_micro_batches(layout),
        }

    def _one_pool(self, layout: dict[str, Any], capacity: CapacityOptions, model: Path, *, trace: bool) -> ServeConfig:
        """The configuration of workers in that layout."""
        self._check_kv_dtype(model)
        given: dict[str, Any] = vars(self) | vars(capacity)
        return ServeConfig(
            **{name: given[name] for name in (*_AS_WRITTEN, *vars(capacity))},
            **layout,
            model=model,
            stepping=self.stepping or "barrier",
            trace=trace,
            kv_bytes=None if self.kv_bytes is None else parse_size("--kv-bytes", self.kv_bytes),
            kv_dtype="auto" if self.kv_dtype == "bf16" else self.kv_dtype,
            path_profile=self._checked_profile(model),
            expert_bytes=None if self.expert_memory is None else parse_size("--expert-memory", self.expert_memory),
            placement=None if self.placement is None else read_placement(self.placement),
            of_attention=OneRole(
                device=self.attention_device, dtype=self.attention_dtype, num_threads=self.attention_threads
            ),
            of_experts=OneRole(device=self.expert_device, dtype=self.expert_dtype, num_threads=self.expert_threads),
        )

    def _check_kv_dtype(self, model: Path) -> None:
        """Keys and values have the dtype of the rows, if they are not in 8 bits."""
        dtype = self.attention_dtype or self.dtype
        if self.kv_dtype == "bf16" and (dtype if dtype != "auto" else load_model_spec(model).dtype) != "bfloat16":
            raise UserError(f"--kv-dtype bf16: keys and values are kept as --dtype {dtype} says, or in int8 or fp8")

    def _checked_profile(self, model: Path) -> Path | None:
        """Read once before anything starts: each attention worker reads it, too."""
        if self.path_profile is not None:
            read_path_profile(self.path_profile).check_fits(load_model_spec(model))
        return self.path_profile

    def _num_micro_batches(self, layout: Layout) -> int:
        if self.micro_batches is not None:
            return self.micro_batches
        return UNMEASURED if layout == "disaggregated" else min(self.pp, MAX_MICRO_BATCHES)

    def _resolve_layout(self) -> Layout:
        if self.layout == "disaggregated":
            return "disaggregated"
        if self.layout == "hybrid":
            if self.experts is not None:
                raise UserError(
                    f"--experts {self.experts} does not apply to --layout hybrid: its replicas hold the experts, each "
                    f"on --expert-tp ranks"
                )
            return "hybrid"
        # On one machine the colocated layout is the faster one; asking for what only the other has asks for the other.
        several = self.pp == 1 and self.micro_batches is not None and self.micro_batches > 1
        apart = (
            any(value is not None for value in (self.experts, self.expert_tp, self.instances, self.placement))
            or self._roles_differ
        )
        if self.layout == "auto" and (apart or several or self.exchange != "auto"):
            return "disaggregated"
        leave = "leave it out or use disaggregated"
        ranks_are_apart = self.tp * self.pp > 1  # maybe on several machines
        for option, value, advice in (
            ("--experts", self.experts, leave),
            ("--instances", self.instances, "there an instance is a replica, use --attention"),
            ("--expert-tp", self.expert_tp, "a replica's experts are split as its attention is, by --tp"),
            ("--transport", None if self.exchange == "auto" or ranks_are_apart else self.exchange, leave),
            ("--placement", self.placement, leave),
        ):
            if value is not None:
                raise UserError(f"{option} {value} does not apply to --layout colocated: {advice}")
        return "colocated"

    @property
    def _roles_differ(self) -> bool:
        names = self.attention_device, self.expert_device, self.attention_dtype, self.expert_dtype
        return any(names) or self.attention_threads is not None or self.expert_threads is not None


def words_of(text: str) -> list[str]:
    """``"a, b,"`` -> ``["a", "b"]``."""
    return [word.strip() for word in text.split(",") if word.strip()]


def list_of(option: str, text: str, *, may_be_empty: bool = False, may_repeat: bool = False) -> list[str]:
    """What commas separate; `UserError` if that is nothing, and for what stands there twice, unless it may."""
    words = words_of(text)
    if not words and not may_be_empty:
        raise UserError(f"{option} is empty: name at least one")
    if not may_repeat:
        _check_unique(option, words)
    return words


def numbers_of(
    option: str, text: str, example: str, *, may_be_empty: bool = False, may_repeat: bool = False
) -> list[int]:
    """Whole numbers that commas separate; `UserError` for what is none, for no number unless there may be none, and
    for a number that stands there twice unless it may."""
    words = list_of(option, text, may_be_empty=may_be_empty, may_repeat=True)  # 1 and 01 are one number
    try:
        numbers = [int(word) for word in words]
    except ValueError as error:
        raise UserError(
            f"{option} {shortened(text)!r} is not a list of numbers: write for example {example}"
        ) from error
    if not may_repeat:
        _check_unique(option, numbers)
    return numbers


def _check_unique(option: str, values: Sequence[object]) -> None:
    """`UserError` for a value written twice: it would be measured twice, and the rows could not be told apart."""
    if twice := [str(value) for value in values if values.count(value) > 1]:
        raise UserError(f"{option} has {shortened(twice[0])} twice: write it once")


def parse_json_object(option: str, text: str | None) -> dict[str, Any]:
    """The object in ``'{"enable_thinking": false}'``; none for None."""
    try:
        value = json.loads(text or "{}")
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, dict):
        raise UserError(
            f"{option} {shortened(str(text))!r} is no JSON object: write for example '{{\"enable_thinking\": false}}'"
        )
    return value


def read_text_file(option: str, path: Path, max_bytes: int) -> str:
    """The text of a file that an option names; `UserError` when it is none, or longer than `max_bytes`."""
    try:
        if not path.is_file():
            raise UserError(f"{option} {path}: there is no such file")
        if (size := path.stat().st_size) > max_bytes:
            raise UserError(f"{option} {path} has {size} bytes: at most {max_bytes} are read")
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{option} {path} cannot be read: {error}") from error


def sampling_params(make: Callable[[], SamplingParams]) -> SamplingParams:
    """What `make` makes of options; its refusal, which begins with the name of a field, then begins with the option."""
    try:
        return make()
    except UserError as error:
        field, _, rest = str(error).partition(" ")
        raise UserError(f"--{field.replace('_', '-')} {rest}") from error


def check_count(option: str, value: int | None, most: int) -> None:
    """`UserError` unless `value` is 1 to `most`, or None: the option was left out."""
    if value is not None and not 1 <= value <= most:
        raise UserError(f"{option} is {value}: it must be 1 to {most}")


def check_timeout(option: str, value_s: float) -> None:
    """`UserError` unless somebody can wait so long."""
    if not 0 < value_s <= MAX_TIMEOUT_S:
        raise UserError(f"{option} is {value_s:g}: it must be above 0 s and at most {MAX_TIMEOUT_S:.0f}")


def check_one_of(option: str, value: str, known: Collection[str]) -> str:
    """`value`; `UserError` unless it is one of `known`."""
    if value not in known:
        shown = shortened(value) if value.strip() else repr(value)
        raise UserError(f"{option} {shown} does not exist: use {', '.join(known)}")
    return value


def check_limits(chosen: Any) -> None:
    """`UserError` for a field of a case that is beyond the limit in its annotation."""
    for name, hint in get_type_hints(type(chosen), include_extras=True).items():
        notes = getattr(hint, "__metadata__", ())
        named = [text for note in notes if isinstance(note, OptionInfo) for text in _names_of(note)]
        option, value = named[0] if named else f"--{name.replace('_', '-')}", getattr(chosen, name)
        for note in notes:
            if isinstance(note, UpTo):
                check_count(option, value, note.most)
            elif isinstance(note, tuple):
                check_one_of(option, value, note)
            elif note is PATIENCE:
                check_timeout(option, value)


def _names_of(option: OptionInfo) -> list[str]:
    """The names written in an annotation, where the first of them is in the place of the default."""
    return [name for name in (option.default, *(option.param_decls or ())) if isinstance(name, str)]


def refuse_alone(context: typer.Context, group: type[Any], needed: str, why: str) -> None:
    """`UserError` if an option of the group was written, and `needed` was not, without which none of them applies."""
    refuse_given(context, [field.name for field in fields(group) if field.name != needed], why)


def refuse_given(context: typer.Context, names: Collection[str], why: str) -> None:
    """`UserError` with `why` if options of these names were written: they would do nothing."""
    given = given_options(context, names)
    if named := [f"--{name.replace('_', '-')}" for name in names if name in given]:
        raise UserError(f"{', '.join(named)}: {why}")


def check_not_empty(option: str, value: str | None) -> None:
    """`UserError` for an empty text: an unset shell variable leaves one, and it would pass for no option at all."""
    if value is not None and not value.strip():
        raise UserError(f"{option} is empty: give a value, or leave the option out")


def parse_size(option: str, text: str) -> int:
    """Bytes from what was written behind `option`; `UserError` names it."""
    try:
        return parse_bytes(text)
    except UserError as error:
        raise UserError(f"{option} {error}") from error

"""From the options of `antiphon plan` to the specs a search takes.

Names and files are loaded and values checked once, before any search, in the terms of the option that was written.
"""

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

import typer

from antiphon.base.allowance import allowance
from antiphon.base.errors import CheckpointError, UserError
from antiphon.cli.commands import positive_option
from antiphon.models.checkpoint_folder import model_folder, model_name
from antiphon.models.planned import PlannedModel, load_planned_model, stored_precision
from antiphon.placement.routing_trace import with_recorded_popularity
from antiphon.planner.candidates import Pins, parse_pins
from antiphon.planner.setting import SearchLimits
from antiphon.specs.catalog import names, shipped_file
from antiphon.specs.checked import canonical, did_you_mean
from antiphon.specs.cluster import ClusterSpec, ComputeDtype, load_cluster
from antiphon.specs.model import BYTES_OF, WEIGHTS_ONLY, ModelSpec, PrecisionSpec, StorageDtype
from antiphon.specs.plan import LATENCIES, LAYOUTS, MAX_MICRO_BATCHES, Layout, Objective, PhaseName
from antiphon.specs.workload import UNKNOWN_LOADS, SloSpec, WorkloadSpec, load_workload

PHASES: dict[str, tuple[PhaseName, ...]] = {
    "decode": ("decode",),
    "prefill": ("prefill",),
    "both": ("prefill", "decode"),
    "serve": ("prefill", "decode", "serve"),  # servers that do both, beside pools
}
TRAIN = "train"
LINKED_FILE = "these-machines.json"  # of `antiphon profile --listen`
CLUSTER_FILE, PROFILE_FILE = "this-machine.json", "profile.json"  # of `antiphon profile`, in one folder
FORMAT_ALIASES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}
WEIGHT_PARTS = ("weights", "experts", "group")
PRECISION_PARTS = (*WEIGHT_PARTS, "kv", "wire", "dispatch", "combine", "compute")
MAX_GROUP = 65_536
_GPUS = Path("/proc/driver/nvidia/gpus")  # one folder for each
Values = list[str] | None  # an option that may be given several times
TokenTarget = Annotated[
    str | None, typer.Option(metavar="TIME", show_default=False, help="Target per token, e.g. 50ms.")
]
FirstTokenTarget = Annotated[
    str | None, typer.Option(metavar="TIME", show_default=False, help="Target for the first token.")
]
ProfileFile = Annotated[Path | None, typer.Option(metavar="FILE", help="Measurements instead of rooflines.")]


@dataclass(frozen=True, kw_only=True)
class SearchOptions:
    """What to plan, on what, and which answers count; numbers in place of those in the files."""

    cluster: Annotated[str, typer.Option(metavar="NAME|FILE", show_default=False, help="The machines; required.")] = ""
    workload: Annotated[str, typer.Option(metavar="NAME|FILE", help="Requests and targets.")] = "msi-production"
    routing: Annotated[Path | None, typer.Option(metavar="FILE", help="Popularity by serve.", hidden=True)] = None
    phase: Annotated[
        Literal["decode", "prefill", "both", "serve", "train"] | None,
        typer.Option(
            metavar="NAME",
            show_default=False,
            help="serve, decode, prefill, both or train.",
        ),
    ] = None
    prefer: Annotated[
        Literal["best", "simple"],
        typer.Option(metavar="NAME", help="best, or simple where that is a tie.", hidden=True),
    ] = "best"
    layout: Annotated[
        Values, typer.Option(metavar="LIST", show_default="auto", help="disaggregated,hybrid,tp_pp,dp_ep.")
    ] = None
    objective: Annotated[Objective, typer.Option(metavar="NAME", help="per-gpu/-cost/-power, ttft, tpot.")] = "per-gpu"
    precision: Annotated[
        Values, typer.Option(metavar="PART=F", show_default="stored", help="As fp8, or experts=mxfp4,kv=fp8.")
    ] = None
    model_set: Annotated[
        Values, typer.Option(metavar="KEY=X", show_default=False, help="Gives or replaces a key of config.json.")
    ] = None
    max_micro_batches: Annotated[
        int, typer.Option(metavar="N", min=1, max=MAX_MICRO_BATCHES, hidden=True, help="Most micro-batches tried.")
    ] = 4
    pin: Annotated[
        Values,
        typer.Option(metavar="NAME=N", show_default=False, help="Fix attention.tp, .dp, experts.tp, .ep, pp, ..."),
    ] = None
    profile: ProfileFile = None
    runnable_here: Annotated[bool, typer.Option("--runnable-here", help="Only what serve can run on this machine.")] = (
        False
    )
    nodes: Annotated[
        Path | None, typer.Option(metavar="FILE", show_default=False, help="… or on these; a cluster's file.")
    ] = None
    # numbers that take the place of those in the files
    slo_tpot: TokenTarget = None
    slo_ttft: FirstTokenTarget = None
    percentile: Annotated[
        float | None, typer.Option(metavar="P", show_default=False, help="Of requests that keep them, e.g. 0.99.")
    ] = None
    rate: Annotated[float | None, positive_option("R", "requests per second", "Requests per second.")] = None
    in_flight: Annotated[
        int | None,
        typer.Option(
            metavar="N", min=1, show_default=False, hidden=True, help="Requests at once, whatever their rate."
        ),
    ] = None
    price: Annotated[
        Values, typer.Option(metavar="DEVICE=X", show_default=False, help="A device's price; any unit.")
    ] = None

    def trains(self) -> bool:
        """Whether the plan is one to train."""
        return self.phase == TRAIN

    def phases(self, workload: WorkloadSpec) -> tuple[PhaseName, ...]:
        """The phases of a plan to serve: with requests that come at a rate, or wait for a first token, all of it."""
        assert not self.trains()
        phases = self._phases_of_latency(workload.is_online)
        phases = phases or PHASES[self.phase or ("serve" if workload.is_online else "decode")]
        if self.pins().batch is not None and len(phases) > 1:
            if self.phase in ("both", "prefill"):
                raise UserError(
                    "--pin batch=... means requests in decode and tokens in prefill: plan one phase at a time"
                )
            return ("serve",)
        return phases

    def _phases_of_latency(self, online: bool) -> tuple[PhaseName, ...]:
        """The phase of a plan for the least latency, which one kind of server has; empty for the other objectives."""
        if self.objective not in LATENCIES:
            return ()
        alone: PhaseName = "prefill" if self.objective == "ttft" else "decode"
        if self.phase not in (None, alone, "serve"):
            raise UserError(
                f"--objective {self.objective} is of --phase {alone} or serve, not of {self.phase}: change one of them"
            )
        return ("serve",) if self.phase == "serve" or (self.phase is None and online) else (alone,)

    def cluster_spec(self) -> ClusterSpec:
        if self.nodes is not None:
            if not self.runnable_here or self.cluster:
                raise UserError("--nodes takes the place of --cluster beside --runnable-here: give these two")
            return load_cluster(str(self.nodes))
        if not self.cluster:
            if self.runnable_here:
                return self._this_machine()
            raise UserError(f"--cluster is missing: give a file, or one of {', '.join(names('cluster'))}")
        cluster = load_cluster(self.cluster)
        if self.runnable_here:
            check_is_here(cluster)
        return cluster

    def _this_machine(self) -> ClusterSpec:
        """What `antiphon profile` wrote of it beside the profile."""
        file = None if self.profile is None else self.profile.parent / CLUSTER_FILE
        if file is None or not file.is_file():
            raise UserError(
                "--cluster is missing: antiphon profile MODEL --folder DIR measures this machine, then give --profile "
                f"DIR/{PROFILE_FILE}; or give --nodes FILE for others"
            )
        return load_cluster(str(file))

    def layouts(self) -> tuple[Layout, ...]:
        """Those asked for, in the order of `LAYOUTS`; all of them for auto."""
        asked = split_list(self.layout) or ["auto"]
        if unknown := [name for name in asked if name not in (*LAYOUTS, "auto")]:
            raise UserError(f"--layout {unknown[0]} does not exist: use auto or some of {', '.join(LAYOUTS)}")
        return tuple(layout for layout in LAYOUTS if "auto" in asked or layout in asked)

    def pins(self) -> Pins:
        """What was fixed of a layout."""
        return parse_pins(split_list(self.pin))

    def search_limits(self) -> SearchLimits:
        return SearchLimits(
            max_micro_batches=self.max_micro_batches,
            overlapped=not self.runnable_here,  # the engine computes a micro-batch whole
            prefer_simple=self.prefer == "simple",
            servable=self.runnable_here,
            pins=self.pins(),
        )

    def apply_to_workload(self, workload: WorkloadSpec) -> WorkloadSpec:
        """`workload` with the given targets and rate; "none" takes a target away."""
        slo = with_targets(workload.slo, tpot=self.slo_tpot, ttft=self.slo_ttft)
        if self.percentile is not None:
            if not 0 < self.percentile < 1:
                raise UserError(f"--percentile is {self.percentile}: it must lie between 0 and 1, for example 0.99")
            slo = replace(slo, percentile=self.percentile)
        if self.in_flight is not None:
            if self.rate is not None:
                raise UserError("--in-flight and --rate both say how many requests there are: give one of them")
            return replace(workload, slo=slo, requests_per_s=None, max_batch=self.in_flight)
        rate = workload.requests_per_s if self.rate is None else self.rate
        return replace(workload, slo=slo, requests_per_s=rate)

    def apply_to_cluster(self, cluster: ClusterSpec) -> ClusterSpec:
        """`cluster` with the given prices; a device that is not in it is refused."""
        prices = dict(parse_price(text) for text in split_list(self.price))
        known = [group.device.name for group in cluster.groups]
        by_canonical = {canonical(name): name for name in known}
        for name in prices:
            if canonical(name) not in by_canonical:
                raise UserError(
                    f"--price {name}: cluster {cluster.name} has no such device: {did_you_mean(name, known)}"
                )
        given = {by_canonical[canonical(name)]: price for name, price in prices.items()}
        groups = tuple(
            replace(group, device=replace(group.device, price=given.get(group.device.name, group.device.price)))
            for group in cluster.groups
        )
        return replace(cluster, groups=groups)


@dataclass(frozen=True, kw_only=True)
class PlanInputs:
    """Everything a search is given. `config`: the model's `config.json`; `notes`: on how it was read; `path`: where
    it was found."""

    model: ModelSpec
    model_name: str
    config: dict[str, Any]
    notes: tuple[str, ...]
    path: Path
    cluster: ClusterSpec
    workload: WorkloadSpec
    phases: tuple[PhaseName, ...]
    layouts: tuple[Layout, ...]
    objective: Objective
    precision: PrecisionSpec
    limits: SearchLimits
    profile: Path | None

    @property
    def promises_service(self) -> bool:
        """Whether the plan is of the whole service and promises something to requests that come at random."""
        promised = self.workload.slo.ttft_s is not None or self.workload.slo.tpot_s is not None
        return self.workload.is_online and promised and self.phases not in (("decode",), ("prefill",))


def read_inputs(model: str, search: SearchOptions) -> PlanInputs:
    """Load and check all of it; `UserError` names the option."""
    cluster = search.apply_to_cluster(search.cluster_spec())
    path = model_folder(shipped_file("model", model))
    planned = load_planned_model(path, search.model_set or ())
    workload = search.apply_to_workload(load_workload(search.workload))
    if search.routing is not None:
        workload = with_recorded_popularity(workload, search.routing)
    if not workload.says_loads and search.profile is None:  # a profile is of a machine whose loads were measured
        workload = replace(workload, expert_spread=UNKNOWN_LOADS)
    precision, notes = _precision(path, planned, search)
    return PlanInputs(
        model=planned.spec,
        model_name=model_name_of(path),
        config=planned.config,
        notes=(*planned.notes, *notes),
        path=path,
        cluster=cluster,
        workload=workload,
        phases=search.phases(workload),
        layouts=search.layouts(),
        objective=search.objective,
        precision=precision,
        limits=search.search_limits(),
        profile=search.profile,
    )


def _precision(path: Path, planned: PlannedModel, search: SearchOptions) -> tuple[PrecisionSpec, tuple[str, ...]]:
    """The formats that were asked for; where none of weights was, as the checkpoint's are kept. And notes on it."""
    asked = parse_precision(parts := split_list(search.precision))
    if any(text.partition("=")[0] in WEIGHT_PARTS or "=" not in text for text in parts):
        return asked, ()
    spec = planned.spec
    if search.model_set:  # the bytes are the file's own, and so are its sizes, if it says them
        try:
            spec = load_planned_model(path).spec
        except CheckpointError:
            return asked, ()
    try:
        stored = stored_precision(path, spec)
    except CheckpointError as error:
        return asked, (f"its weights cannot be read ({error}): they are planned in {asked.weights}",)
    if stored is None:
        return asked, ()
    return replace(asked, weights=stored.weights, experts=stored.experts, stored=stored.stored), ()


def model_name_of(path: Path) -> str:
    """A folder's name, or that of the file; of a file called config.json the folder it lies in."""
    resolved = path.resolve()
    return model_name(resolved) if resolved.is_dir() else resolved.parent.name if path.stem == "config" else path.stem


def check_is_here(cluster: ClusterSpec) -> None:
    """`UserError` unless this machine has the cluster's devices. Asks the system: planning needs no torch."""
    for group in cluster.groups:
        here = allowance().num_cores if group.device.kind == "cpu" else len(list(_GPUS.glob("*")))
        if group.num_devices > here:
            what = "core(s)" if group.device.kind == "cpu" else "GPU(s)"
            raise UserError(
                f"--cluster {cluster.name} has {group.num_devices} devices of {group.device.name}, this machine has "
                f"{here} {what}: give a smaller cluster, or its file as --nodes FILE if these machines are to run it"
            )


def with_targets(slo: SloSpec, *, tpot: str | None, ttft: str | None) -> SloSpec:
    """`slo` with what `--slo-tpot` and `--slo-ttft` say in place of its own targets."""
    if tpot is not None:
        slo = replace(slo, tpot_s=parse_target("--slo-tpot", tpot))
    return slo if ttft is None else replace(slo, ttft_s=parse_target("--slo-ttft", ttft))


def parse_target(option: str, text: str) -> float | None:
    """Seconds from ``"50ms"``, ``"0.05"``, ``"2 s"``; None from ``"none"``."""
    if text.strip().lower() == "none":
        return None
    match = re.fullmatch(r"\s*([0-9]*\.?[0-9]+(?:e-?[0-9]+)?)\s*(s|ms)?\s*", text.lower())
    if match is None:
        raise UserError(f"{option} is {text!r}: write seconds or milliseconds above 0, for example 0.05 or 50ms")
    seconds = float(match.group(1)) * (1e-3 if match.group(2) == "ms" else 1)
    if not (seconds > 0 and math.isfinite(seconds)):
        raise UserError(f"{option} is {text!r}: it must be above 0")
    return seconds


def parse_price(text: str) -> tuple[str, float]:
    """``"H20=1.85"`` -> ``("H20", 1.85)``."""
    name, equals, value = text.partition("=")
    try:
        price = float(value)
    except ValueError:
        price = math.nan
    if not (name.strip() and equals and price > 0 and math.isfinite(price)):
        raise UserError(f"--price {text!r}: write a device and a price above 0, for example H20=1.85")
    return name.strip(), price


def parse_precision(parts: Sequence[str]) -> PrecisionSpec:
    """``["fp8"]`` is fp8 for all; ``["weights=fp8", "kv=fp8"]`` changes these and leaves the rest in bfloat16.

    ``wire=`` is dispatch and combine. A format in `WEIGHTS_ONLY` alone is for weights: sending or caching in it
    takes a part's name. ``group=128``: columns of a scale in int8 and int4. Later entries win."""
    values: dict[str, Any] = {}
    for text in parts:
        part, _, name = text.rpartition("=")
        part = part or "all"
        if part not in (*PRECISION_PARTS, "all"):
            raise UserError(f"--precision {text!r}: {part!r} is none of {', '.join(PRECISION_PARTS)}")
        if part == "group":
            values["group"] = _checked_group(text, name)
            continue
        storage = FORMAT_ALIASES.get(name, name)
        everything = ("weights",) if storage in WEIGHTS_ONLY else ("weights", "kv", "dispatch", "combine", "compute")
        wanted = {"all": everything, "wire": ("dispatch", "combine")}
        for field in wanted.get(part, (part,)):
            values[field] = _checked_format(text, field, storage)
    if "group" in values and not {"int8", "int4"} & {values.get("weights"), values.get("experts")}:
        raise UserError(
            f"--precision group={values['group']}: only int8 and int4 have groups; name one, for example "
            "weights=int4, or leave it out"
        )
    return PrecisionSpec(**values)


def _checked_group(text: str, count: str) -> int:
    if not count.isdecimal() or not 1 <= int(count) <= MAX_GROUP:
        raise UserError(f"--precision {text!r}: group is a number of columns from 1 to {MAX_GROUP}, for example 128")
    return int(count)


def _checked_format(text: str, field: str, name: str) -> str:
    """Arithmetic knows fewer formats than storage: float16 is computed in bfloat16's rate, int4 in bfloat16."""
    if field == "compute" and "=" in text and name in get_args(ComputeDtype):
        return name
    if name not in BYTES_OF:
        known = ", ".join(get_args(StorageDtype))
        raise UserError(f"--precision {text!r}: format {name!r} is unknown: use one of {known}")
    if field != "compute" or name in get_args(ComputeDtype):
        return name
    if "=" in text:
        raise UserError(f"--precision {text!r}: compute must be one of {', '.join(get_args(ComputeDtype))}")
    return "bfloat16"


def split_list(values: Sequence[str] | None) -> list[str]:
    """An option given several times, or once with commas, as one list."""
    return [part.strip() for value in values or () for part in value.split(",") if part.strip()]

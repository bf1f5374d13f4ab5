"""`antiphon plan`: to serve, which layout, how many of what, at what cost; to train, which layout and how fast.

A plan is also put in the terms of what runs it (this engine, vLLM, SGLang, Kubernetes), for `--emit` and for the page.
"""

from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

import typer

from antiphon.base.errors import UserError
from antiphon.base.progress import progress
from antiphon.cli.commands import given_options, takes_groups
from antiphon.cli.output import JsonOption, check_output_file, emit_json, show, table, write_whole
from antiphon.cli.plan_inputs import TRAIN, PlanInputs, SearchOptions, read_inputs
from antiphon.cli.plan_training import TrainingOptions, find_training_plan
from antiphon.cli.plan_watch import WatchOptions, watch
from antiphon.cost.profile import read_serving_profile
from antiphon.models.config import refuse_other_model
from antiphon.planner.search import PlanResult, make_plan, settings_of
from antiphon.planner.setting import Setting
from antiphon.planner.what_if import smallest_cluster
from antiphon.report.colocated import Target
from antiphon.report.document import html, rendered
from antiphon.report.emit_engines import sglang_command, vllm_command
from antiphon.report.emit_k8s import kubernetes_manifest
from antiphon.report.gather import gather
from antiphon.report.serving import comparison_pieces, plan_page, plan_pieces
from antiphon.report.training_plan import training_page, training_pieces
from antiphon.sim.promise import checked
from antiphon.specs.catalog import FOLDERS, Kind, catalog, names
from antiphon.specs.cluster import DeviceSpec, load_device
from antiphon.specs.model import WEIGHT_GROUP, PrecisionSpec
from antiphon.specs.plan import LATENCIES, PhaseName, Plan, plan_to_json, read_plan
from antiphon.specs.training_plan import training_plan_to_json
from antiphon.specs.workload import WorkloadSpec, workload_to_json

SERVING_ONLY = (
    *("workload", "routing", "layout", "objective", "max_micro_batches", "prefer"),
    *("slo_tpot", "slo_ttft", "percentile", "rate", "in_flight", "price", "size", "emit", "no_check"),
)
TRAINING_ONLY = tuple(field.name for field in fields(TrainingOptions))
Emitter = Literal["vllm", "sglang", "k8s"]
TITLES: dict[Emitter, str] = {
    "vllm": "vLLM, the nearest settings",
    "sglang": "SGLang, the nearest settings",
    "k8s": "Kubernetes",
}


def emitted(name: Emitter, found: Plan, inputs: PlanInputs) -> str:
    """The plan in the terms of another engine, or as objects for Kubernetes."""
    if name == "k8s":
        kinds = {group.device.name: group.device.kind for group in inputs.cluster.groups}
        experts = inputs.model.router.num_experts
        return kubernetes_manifest(found, model=served_path(inputs), num_experts=experts, device_kinds=kinds)
    drafting = inputs.config.get("num_nextn_predict_layers") or 0
    target = Target(
        model=served_path(inputs),
        precision=inputs.precision,
        workload=inputs.workload,
        cluster=inputs.cluster,
        hidden_size=inputs.model.hidden_size,
        draft_layers=drafting if isinstance(drafting, int) else 0,
    )
    return vllm_command(found, target) if name == "vllm" else sglang_command(found, target)


def served_path(inputs: PlanInputs) -> str:
    """Where an engine finds the weights: the folder, where MODEL is one; else the usual place of a mount with the
    model's name, for the reader to change."""
    return str(inputs.path) if inputs.path.is_dir() else f"/models/{inputs.model_name}"


def launch(found: Plan, inputs: PlanInputs) -> list[tuple[str, str]]:
    """(what starts the plan, its commands), this engine first; those that cannot run it, and why, come last."""
    note = "# starts, or names what of the plan this engine does not run"
    own = f"{note}\nantiphon serve {served_path(inputs)} --plan plan.json{rounded_at_load(inputs.precision)}"
    ways = [("This engine", own), *((TITLES[name], _or_why_not(name, found, inputs)) for name in TITLES)]
    return sorted(ways, key=lambda way: all(line.startswith("#") for line in way[1].splitlines()))


def rounded_at_load(precision: PrecisionSpec) -> str:
    """The option of `serve` with which weights in floats become those that were planned, where it has one."""
    if precision.stored or precision.weights != "int8" or precision.group != WEIGHT_GROUP:
        return ""
    experts = precision.experts or precision.weights
    return f" --weights {experts}" if experts in ("int8", "int4", "mxfp4") else ""


def _or_why_not(name: Emitter, found: Plan, inputs: PlanInputs) -> str:
    try:
        return emitted(name, found, inputs)
    except UserError as error:
        return f"# {error}"


def _print_list(wanted: bool) -> None:
    if wanted:
        show_list()
        raise typer.Exit


def _print_comparison(files: tuple[Path, Path] | None) -> None:
    if files is None:
        return
    first, second = (read_plan(file) for file in files)
    names = (files[0].stem, files[1].stem) if files[0].stem != files[1].stem else (str(files[0]), str(files[1]))
    for item in rendered(comparison_pieces(first, second, names)):
        show(item)
    raise typer.Exit


@dataclass(frozen=True, kw_only=True)
class AnswerOptions:
    """What is made of the plan."""

    size: Annotated[bool, typer.Option("--size", help="Smallest cluster for the rate, not all of it.")] = False
    explain: Annotated[bool, typer.Option("--explain", help="Also say why, in detail.")] = False
    no_check: Annotated[bool, typer.Option("--no-check", help="Do not simulate whether targets are kept.")] = False
    html: Annotated[Path | None, typer.Option(metavar="FILE", help="Write the report as one page.")] = None
    emit: Annotated[
        Emitter | None, typer.Option(metavar="NAME", help="Print settings instead: vllm, sglang or k8s.")
    ] = None
    compare: Annotated[
        tuple[Path, Path] | None,
        typer.Option(
            metavar="A B", callback=_print_comparison, is_eager=True, show_default=False, help="Show two plans."
        ),
    ] = None
    list_: Annotated[
        bool,
        typer.Option("--list", callback=_print_list, is_eager=True, help="Show devices, clusters, workloads, models."),
    ] = False

    def check(self, json: str | None) -> None:
        """`UserError` now for what would fail after the search."""
        check_output_file("--html", self.html)
        if self.emit is not None and json == "-":
            raise UserError("--emit and --json - both write to standard output: write the JSON to a file")
        if self.explain and self.html is None and (self.emit is not None or json == "-"):
            instead = "--json -" if self.emit is None else f"--emit {self.emit}"
            raise UserError(f"--explain with {instead}: no text is printed, leave one of them out or add --html FILE")


@takes_groups
def plan(
    context: typer.Context,
    model: Annotated[str, typer.Argument(metavar="MODEL", help="Checkpoint folder, config.json, or a shipped name.")],
    search: SearchOptions,
    training: TrainingOptions,
    answer: AnswerOptions,
    watching: WatchOptions,
    json: JsonOption = None,
) -> None:
    """Plan how to serve or train MODEL on a cluster; all numbers are predicted."""
    if watching.watch is not None:
        refuse_beside_watch(context)
        watch(Path(model), watching, json)
        return
    if given := given_options(context, ("look_every", "looks", "move_time")):
        raise UserError(f"--{min(given).replace('_', '-')} is for --watch URL: add it, or leave it out")
    refuse_other_phase(context, search)
    answer.check(json)
    if search.trains():
        _training(model, search, training, answer, json)
    else:
        _serving(model, search, answer, json)


def refuse_other_phase(context: typer.Context, search: SearchOptions) -> None:
    """`UserError` for an option that does not apply to the phase and was written, be it with its default's value."""
    trains = search.trains()
    others = SERVING_ONLY if trains else TRAINING_ONLY
    given = given_options(context, others)
    if wrong := [f"--{name.replace('_', '-')}" for name in others if name in given]:
        where = "plans to serve" if trains else f"--phase {TRAIN}"
        raise UserError(
            f"{wrong[0]} is for {where}, not for --phase {search.phase or 'serve'}: leave it out or change --phase"
        )


def refuse_beside_watch(context: typer.Context) -> None:
    """`UserError` for an option of a search: the plan that is watched says all of that."""
    own = {"model", "json", *(field.name for field in fields(WatchOptions))}
    if others := sorted(given_options(context, set(context.params) - own)):
        raise UserError(f"--{others[0].replace('_', '-')} does not apply with --watch: the plan says it; leave it out")


def _training(
    model: str, search: SearchOptions, options: TrainingOptions, answer: AnswerOptions, json: str | None
) -> None:
    found = find_training_plan(model, search, options)
    emit_json(json, training_plan_to_json(found))
    for item in rendered(training_pieces(found, explain=answer.explain)):
        show(item, json=json)
    if answer.html is not None:
        write_whole("--html", answer.html, html(training_page(found)))


def _serving(model: str, search: SearchOptions, answer: AnswerOptions, json: str | None) -> None:
    inputs = read_inputs(model, search)
    if answer.no_check and not inputs.promises_service:
        raise UserError(
            "--no-check leaves out the simulation of a whole service with a rate and a target, and this plan is none: "
            "leave it out, or give --rate and --slo-tpot"
        )
    result = find_plan(inputs, smallest=answer.size, check=inputs.promises_service and not answer.no_check)
    emit_json(json, plan_to_json(result.plan))
    if answer.emit is not None:
        show(emitted(answer.emit, result.plan, inputs))
    if answer.html is None and (answer.emit is not None or json == "-"):
        return
    with progress("reporting") as step:
        report = gather(result, for_page=answer.html is not None, with_more_nodes=answer.explain, on_progress=step)
    if answer.emit is None:
        for item in rendered(plan_pieces(report, explain=answer.explain)):
            show(item, json=json)
    if answer.html is not None:
        write_whole("--html", answer.html, html(plan_page(report, launch(result.plan, inputs))))


def find_plan(inputs: PlanInputs, *, smallest: bool, check: bool = False) -> PlanResult:
    """Search, with progress where it lasts; the plan knows the `config.json` it was made for. `check`: its promise is
    simulated before it is believed."""
    profile = None if inputs.profile is None else read_serving_profile(inputs.profile)
    if profile is not None and profile.model_config:
        refuse_other_model(profile.model_config, inputs.model, f"--profile {inputs.profile}")
    if smallest:
        _check_smallest(inputs)
    with progress("planning") as report:

        def search(workload: WorkloadSpec) -> PlanResult:
            settings = settings_of(
                inputs.model,
                inputs.cluster,
                workload,
                phases=inputs.phases,
                objective=inputs.objective,
                precision=inputs.precision,
                profile=profile,
                limits=inputs.limits,
            )
            plan_of = _smallest if smallest else make_plan
            return plan_of(settings, model_name=inputs.model_name, layouts=inputs.layouts, on_progress=report)

        result = checked(search, inputs.workload) if check else search(inputs.workload)
    phases = {name: replace(phase, notes=(*phase.notes, *inputs.notes)) for name, phase in result.plan.phases.items()}
    asked = workload_to_json(inputs.workload)  # a check may have searched for tighter targets
    plan = replace(result.plan, model_config=inputs.config, phases=phases, workload_config=asked)
    settings = {name: replace(setting, workload=inputs.workload) for name, setting in result.settings.items()}
    return replace(result, plan=plan, settings=settings)


def _check_smallest(inputs: PlanInputs) -> None:
    if inputs.objective in LATENCIES:
        raise UserError(f"--size asks for the fewest nodes, --objective {inputs.objective} for all: leave one out")
    if inputs.workload.requests_per_s is None:
        raise UserError(f"--size needs a rate, workload {inputs.workload.name} has none: give --rate")


def _smallest(settings: dict[PhaseName, Setting], **options: Any) -> PlanResult:
    """The plan on the fewest nodes; a note of every phase says which nodes these are."""
    found = smallest_cluster(settings, **options)
    nodes = " and ".join(f"{group.num_nodes} of {group.device.name}" for group in found.cluster.groups)
    rate = next(iter(settings.values())).workload.requests_per_s
    note = f"smallest cluster for {rate:g} requests/s, in nodes: {nodes}"
    phases = {name: replace(phase, notes=(note, *phase.notes)) for name, phase in found.plan.phases.items()}
    return replace(found, plan=replace(found.plan, phases=phases))


def show_list() -> None:
    """Everything that has a name, by kind; a user's own files go by their paths."""
    for kind in get_args(Kind):
        if kind == "engine":  # of measured servers (`antiphon reproduce --deployments`); no plan takes one
            continue
        title = FOLDERS[kind].capitalize()
        if kind == "device":
            show(table(DEVICE_COLUMNS, [_device_row(load_device(name)) for name in names("device")], title=title))
        else:
            show(table((kind, "what it is"), [(entry.name, entry.summary) for entry in catalog(kind)], title=title))
        show("")
    show("A file of your own goes by its path; docs/planning.md shows what is in one.")


DEVICE_COLUMNS = ("device", "GB", "TB/s", "TFLOP/s bf16", "fp8", "GB/s scale-up", "scale-out", "W", "price")


def _device_row(device: DeviceSpec) -> tuple[object, ...]:
    """A device in the order of `DEVICE_COLUMNS`."""
    rates = (device.memory_bytes_per_s, device.flops_per_s.get("bfloat16"), device.flops_per_s.get("fp8"))
    links = (device.scale_up_bytes_per_s / 1e9, device.scale_out_bytes_per_s / 1e9)
    tera = (None if rate is None else rate / 1e12 for rate in rates)
    return device.name, device.memory_bytes / 1e9, *tera, *links, device.power_w, device.price

"""`antiphon plan --phase train`: its options, their checks, and the search they are handed to.

Rejected: a command of its own. Model, cluster, precision and outputs are the same, and so is the question.
"""

from dataclasses import dataclass, replace
from typing import Annotated, Any, cast

import typer

from antiphon.base.errors import UserError
from antiphon.base.progress import progress
from antiphon.cli.plan_inputs import FORMAT_ALIASES, TRAIN, SearchOptions, model_name_of, split_list
from antiphon.cost.profile import Profile, read_profile
from antiphon.cost.training.measured import machine_of_ranks
from antiphon.cost.training.setup import OverlapLevel, TrainingPrecision, trained_in
from antiphon.models.checkpoint_folder import model_folder
from antiphon.models.config import refuse_other_model
from antiphon.models.planned import load_planned_model
from antiphon.planner.candidates import pinned_numbers
from antiphon.planner.training import PIN_NAMES, plan_training
from antiphon.specs.catalog import shipped_file
from antiphon.specs.checked import canonical, did_you_mean
from antiphon.specs.cluster import ClusterSpec, NodeGroup
from antiphon.specs.model import ModelSpec
from antiphon.specs.training_plan import TrainingPlan

PRECISION_FORMATS: dict[str, tuple[str, ...]] = {
    "weights": ("float32", "bfloat16", "fp8"),
    "gradients": ("float32", "bfloat16"),
    "wire": ("float32", "bfloat16", "fp8"),
    "compute": ("float32", "bfloat16", "fp8"),
}
UNNAMED_PARTS = ("weights", "wire", "compute")  # of `--precision fp8`; sums of gradients keep theirs
LARGEST = 10**9  # of a length or batch: more is a slip of the finger, and would be divided for minutes


@dataclass(frozen=True, kw_only=True)
class TrainingOptions:
    """What `--phase train` is asked, and the choices that are not searched."""

    sequence_length: Annotated[
        int | None,
        typer.Option(metavar="N", min=1, show_default=False, help="train: tokens of a sequence; required."),
    ] = None
    global_batch: Annotated[
        int | None,
        typer.Option(metavar="N", min=1, show_default=False, help="train: sequences of a step; required."),
    ] = None
    devices: Annotated[
        int | None, typer.Option(metavar="N", min=1, show_default="all", help="train: at most N devices.")
    ] = None
    device: Annotated[
        str | None, typer.Option(metavar="NAME", show_default="fastest", help="train: on this kind only.")
    ] = None
    zero: Annotated[int, typer.Option(metavar="N", min=0, max=3, help="train: ZeRO stage, 0 to 3.")] = 1
    overlap: Annotated[OverlapLevel, typer.Option(metavar="NAME", help="train: none, inter or intra.")] = "intra"
    deduplicate: Annotated[bool, typer.Option("--deduplicate", help="train: a token goes to a rank once.")] = False
    no_compress: Annotated[
        bool, typer.Option("--no-compress", hidden=True, help="train: gradients are sent as kept.")
    ] = False


def find_training_plan(model: str, search: SearchOptions, options: TrainingOptions) -> TrainingPlan:
    """Load and check all of it (`UserError` names the option), then search, with progress where it lasts. With a
    profile the cluster is the measured machine. The plan knows the `config.json` it was made for."""
    sequence_length = _required("--sequence-length", options.sequence_length, 8192)
    global_batch = _required("--global-batch", options.global_batch, 720)
    profile = None if search.profile is None else _read_profile(search, options)
    cluster = search.cluster_spec() if profile is None else machine_of_ranks(profile, sequence_length)
    groups = _groups(cluster, options.device)
    _check_num_devices(cluster, groups, options.devices)
    path = model_folder(shipped_file("model", model))
    planned = load_planned_model(path, search.model_set or ())
    _check_attention(planned.spec)
    if profile is not None and profile.model_config:
        refuse_other_model(profile.model_config, planned.spec, f"--profile {search.profile}")
    measured = None if profile is None else profile.training_tables(sequence_length)
    with progress("planning") as report:
        found = plan_training(
            planned.spec,
            replace(cluster, groups=groups),
            sequence_length=sequence_length,
            global_batch=global_batch,
            num_devices=options.devices,
            model_name=model_name_of(path),
            precision=parse_training_precision(search.precision)
            if measured is None
            else trained_in(measured.dtype, options.zero),
            compress=not options.no_compress and profile is None,
            deduplicate=options.deduplicate or profile is not None,
            overlap=options.overlap if profile is None else "none",
            zero=options.zero,
            profile=profile,
            pins=pinned_numbers(split_list(search.pin), PIN_NAMES, {}),
            on_progress=report,
        )
    notes = (*found.notes, *planned.notes, *_congestion_note(cluster, found))
    return replace(found, notes=notes, model_config=planned.config)


def _read_profile(search: SearchOptions, options: TrainingOptions) -> Profile:
    """Measurements of this machine's trainer. They fix machine, formats and exchanges, so those options are refused."""
    said = {
        "--cluster": bool(search.cluster),
        "--precision": search.precision is not None,
        "--device": options.device is not None,
        "--overlap": options.overlap != TrainingOptions.overlap,
        "--no-compress": options.no_compress,
        "--deduplicate": options.deduplicate,
    }
    if given := [name for name, is_given in said.items() if is_given]:
        raise UserError(f"{given[0]} beside --profile: with --phase {TRAIN} the profile says it: leave it out")
    assert search.profile is not None
    return read_profile(search.profile)


def parse_training_precision(values: list[str] | None) -> TrainingPrecision:
    """``["fp8"]`` is fp8 for weights, rows on the wire and arithmetic; ``["wire=fp8"]`` for that part alone."""
    chosen: dict[str, str] = {}
    for text in split_list(values):
        part, _, name = text.rpartition("=")
        if part and part not in PRECISION_FORMATS:
            raise UserError(f"--precision {text!r}: {part!r} is none of {', '.join(PRECISION_FORMATS)}")
        storage = FORMAT_ALIASES.get(name, name)
        for each in (part,) if part else UNNAMED_PARTS:
            if storage not in PRECISION_FORMATS[each]:
                known = ", ".join(PRECISION_FORMATS[each])
                raise UserError(f"--precision {text!r}: training knows no {each} in {name!r}: use one of {known}")
            chosen[each] = storage
    gradients = chosen.pop("gradients", "float32")
    chosen["activation_wire"] = chosen.pop("wire", "bfloat16")
    return TrainingPrecision(**cast(dict[str, Any], {"gradients": gradients, "gradient_wire": gradients, **chosen}))


def _check_attention(model: ModelSpec) -> None:
    """`UserError` for attention whose backward the cost model does not have."""
    attention = model.attention
    unusual = {
        "layers with a state in place of keys and values": model.state is not None,
        "sparse attention": attention.sparse is not None,
        "layers that share keys and values": attention.layers_per_cache > 1,
        "gated or narrowed queries": attention.output_gate or attention.query_rank is not None,
    }
    if found := [name for name, there in unusual.items() if there]:
        raise UserError(
            f"{model.family} has {found[0]}: --phase {TRAIN} cannot price that, plan --phase decode, prefill or both"
        )


def _required(option: str, value: int | None, example: int) -> int:
    if value is None:
        raise UserError(f"{option} is missing: --phase {TRAIN} needs it, for example {option} {example}")
    if value > LARGEST:
        raise UserError(f"{option} is {value}: it must be at most {LARGEST}")
    return value


def _groups(cluster: ClusterSpec, device: str | None) -> tuple[NodeGroup, ...]:
    """The groups a plan may use; it takes one of them."""
    if device is None:
        return cluster.groups
    found = tuple(group for group in cluster.groups if canonical(group.device.name) == canonical(device))
    if not found:
        known = [group.device.name for group in cluster.groups]
        raise UserError(f"--device {device}: cluster {cluster.name} has no such device: {did_you_mean(device, known)}")
    return found


def _check_num_devices(cluster: ClusterSpec, groups: tuple[NodeGroup, ...], wanted: int | None) -> None:
    """A plan has devices of one kind, so more than the largest group can never be used."""
    if wanted is None:
        return
    largest = max(groups, key=lambda group: group.num_devices)
    if wanted > largest.num_devices:
        have = f"{largest.num_devices} {largest.device.name}"
        raise UserError(f"--devices is {wanted}: a plan uses one kind and {cluster.name} has {have}: ask for fewer")


def _congestion_note(cluster: ClusterSpec, plan: TrainingPlan) -> tuple[str, ...]:
    """What the cost model leaves out where a layer's group is wider than the fast links."""
    domain = max(group.scale_up_domain for group in cluster.groups if group.device.name == plan.device)
    degree = plan.layout.model_parallel
    if degree <= domain:
        return ()
    return (f"a layer's {degree} devices span nodes: exchanges between nodes are modelled without congestion",)

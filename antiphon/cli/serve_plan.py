"""`serve --plan`: from a plan file and the other options to the configuration that obeys both, or the line that says
why not."""

from dataclasses import replace
from pathlib import Path

import torch
import typer

from antiphon.base.allowance import allowance
from antiphon.base.units import format_seconds
from antiphon.bench.profile.this_machine import THIS_CORE
from antiphon.cli.commands import given_options
from antiphon.cli.engine_run import plural
from antiphon.cli.options import CapacityOptions, WorkerOptions
from antiphon.models.config import load_model_spec
from antiphon.serve.config import ServeConfig
from antiphon.serve.served_plan import ServedPlan, check_workers_fit, served_plan_of
from antiphon.specs.plan import read_plan

_PLANNED = (
    "layout",
    "instances",
    "attention",
    "experts",
    "tp",
    "expert_tp",
    "pp",
    "micro_batches",
    "max_running",
    "prefill_collectives",
    "decode_collectives",
)  # options a plan decides


def planned_config(
    context: typer.Context, model: Path, workers: WorkerOptions, capacity: CapacityOptions, *, trace: bool
) -> tuple[ServeConfig, ServedPlan | None]:
    """The configuration that was asked for, and the plan it obeys if one was given. An option that contradicts the
    plan is a `UserError`; `context` knows which options were written and which are defaults."""
    if workers.plan is None:
        return workers.config(model, capacity, trace=trace), None
    served = served_plan_of(read_plan(workers.plan), load_model_spec(model), workers.plan)
    values = {**vars(workers), **vars(capacity)}
    served.refuse_other({name.replace("_", "-"): values[name] for name in given_options(context, _PLANNED)})
    planned = replace(
        workers,
        layout=served.layout,
        instances=served.num_instances if served.layout != "colocated" else None,
        attention=served.num_attention,
        experts=served.num_experts if served.layout == "disaggregated" else None,
        tp=served.attention_tp,
        expert_tp=served.expert_tp if served.layout != "colocated" else None,
        pp=served.num_stages,
        micro_batches=served.num_micro_batches,
        prefill_collectives=_decided(served.prefill_collectives, workers.prefill_collectives),
        decode_collectives=_decided(served.decode_collectives, workers.decode_collectives),
    )
    room = capacity.max_batch_tokens
    if not given_options(context, ["max_batch_tokens"]):
        room = max(room, served.max_running)
    planned_capacity = replace(capacity, max_running=served.max_running, max_batch_tokens=room)
    config = planned.config(model, planned_capacity, trace=trace)
    return replace(config, placement=config.placement or served.placement), served


def _decided(planned: str, asked: str) -> str:
    """What the plan says, unless it leaves the choice open."""
    return asked if planned == "auto" else planned


def check_plan_fits(config: ServeConfig, served: ServedPlan) -> None:
    """`UserError` if this machine cannot carry the plan's workers, those that join from other machines not counted."""
    num_devices = allowance().num_cores if config.device == "cpu" else max(1, torch.cuda.device_count())
    check_workers_fit(config, num_devices, served.file)


def machine_name(device: str) -> str:
    """What a plan would call this machine's devices: a core, as `antiphon profile` does, or a GPU's own name."""
    return THIS_CORE if device == "cpu" else torch.cuda.get_device_name()


def join_lines(config: ServeConfig) -> str:
    """What to start on the other machines."""
    role, here = "attention" if config.layout == "disaggregated" else "replica", config.ranks_here
    attention = config.num_instances * config.joined_attention * config.attention_ranks
    experts = config.num_instances * config.joined_experts * config.expert_tp
    wanted = [(role, attention - here)] if attention else []
    if experts:
        wanted.append(("experts", experts - (0 if attention else here)))
    join = f"--join {config.join_address}"
    lines = [f"  elsewhere antiphon worker --role {role} {join}, {plural(count, 'time')}" for role, count in wanted]
    return "\n".join(lines)


def plan_lines(served: ServedPlan, machine: str) -> str:
    """What the banner says of a plan. A GPU's own name holds the plan's: ``NVIDIA H20`` is an ``H20``."""
    predicted = served.predicted
    promises = []
    if predicted.tpot_s is not None:
        promises.append(f"{format_seconds(predicted.tpot_s)} a token")
    if predicted.tokens_per_s:
        promises.append(f"{predicted.tokens_per_s:,.0f} tokens/s")
    said = f"predicts {' and '.join(promises)}" if promises else "predicts nothing"
    notes = list(served.notes)
    if others := [device for device in served.devices if device not in machine]:
        notes.append(f"planned for {', '.join(others)}: what it predicts is not of this machine")
    return "\n".join([f"  plan      {served.file}: {said}", *(f"            {note}" for note in notes)])

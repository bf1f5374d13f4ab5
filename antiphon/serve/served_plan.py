"""What this engine must be to follow a plan's decode phase, or both its phases, or the line that says why it cannot.

    served = served_plan_of(plan, spec, Path("plan.json"))
    config = ServeConfig(model=..., layout=served.layout, num_attention=served.num_attention, ...)

1. the plan has a decode phase, and its model is this model (the `config.json` keys it was made for); if it has a
   prefill phase as well, that becomes a pool of workers for prompts
2. its parallel sizes are ones the engine has: stages where attention and experts share devices, experts whole on one
   worker or on each of its ranks
3. its expert fractions become owners; its batch becomes the limit of running requests per attention worker, its
   `step_tokens` that of rows of a step

What the engine does differently without being wrong (rows are split by load, whatever the fractions) is a note, which
the caller shows. Rejected: running the nearest thing to a plan that cannot be run. The prediction beside it would then
be of something else.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from antiphon.base.errors import UserError
from antiphon.comm.two_level.levels import TwoLevel
from antiphon.models.planned import check_planned_for
from antiphon.models.shares import check_ranks
from antiphon.serve.config import MAX_BATCH_TOKENS, ServeConfig
from antiphon.serve.layout_text import Layout
from antiphon.serve.policy.handover import MAX_PROMPTS
from antiphon.specs.cluster import NodeGroup, cluster_from_json
from antiphon.specs.model import ModelSpec
from antiphon.specs.placement import ExpertPlacement
from antiphon.specs.plan import (
    MAX_ATTENTION_WORKERS,
    MAX_INSTANCES,
    MAX_MICRO_BATCHES,
    Collectives,
    Parallel,
    PhaseName,
    PhasePlan,
    Plan,
    Predicted,
)

# A plan for a cluster, opened on a laptop, must not start a hundred processes; a trial with some too many may.
MAX_WORKERS_PER_DEVICE = 4
MIN_BATCH_TOKENS = 256  # of a prefill worker's step: long prompts come in chunks
_DECODING: tuple[PhaseName, ...] = ("decode", "serve")  # phases that serving needs one of
_UNEVEN = 0.05  # a replica's fraction that differs more than this from an even share is worth a note


@dataclass(frozen=True, kw_only=True)
class ServedPlan:
    """A plan in this engine's own terms. `placement` None: colocated workers hold all experts.

    `written_in`: the file and the phase in it. The collectives are those of the plan's phases; `auto` where it leaves
    them open.
    `max_batch_tokens`: of a step of a worker, 0 where the plan does not say; `prefill`: the pool for prompts.
    `devices`: what the plan counts on; `node_devices`: those of a node, 0 if the plan is for one node;
    `experts_beside`: experts are on nodes of the same kind. `attention_device`, `expert_device`: names for
    `--attention-device` and `--expert-device` where one is on GPUs and the other on CPUs; else empty. `notes`: where
    engine and plan differ harmlessly, one line each.
    """

    file: Path
    written_in: str = ""
    layout: Layout
    num_instances: int
    num_attention: int
    num_experts: int
    attention_tp: int
    expert_tp: int
    num_stages: int = 1
    num_micro_batches: int
    max_running: int
    max_batch_tokens: int = 0
    prefill_collectives: Collectives = "auto"
    decode_collectives: Collectives = "auto"
    placement: ExpertPlacement | None
    predicted: Predicted
    devices: tuple[str, ...]
    node_devices: int = 0
    experts_beside: bool = True
    attention_device: str = ""
    expert_device: str = ""
    notes: tuple[str, ...]
    prefill: "ServedPlan | None" = None

    @property
    def join_workers(self) -> tuple[int, int, int]:
        """What is not on the first node, where the server is: attention workers (or replicas), expert workers, and how
        many ranks of the first of them are on it all the same, because it is wider than a node.

        Workers are placed in their order, each whole while the node has devices for it."""
        ranks, free = self.attention_tp * self.num_stages, self.node_devices
        attention = min(self.num_attention, free // ranks)
        free -= attention * ranks
        if attention == 0:
            return self.num_attention, self.num_experts if self.layout == "disaggregated" else 0, free
        if self.layout != "disaggregated":
            return self.num_attention - attention, 0, 0
        experts = min(self.num_experts, free // self.expert_tp) if self.experts_beside else 0
        return self.num_attention - attention, self.num_experts - experts, 0

    def refuse_other(self, given: Mapping[str, int | str]) -> None:
        """`UserError` if an option given beside the plan says something else; `given`: option name -> its value."""
        own: dict[str, int | str] = {
            "layout": self.layout,
            "instances": self.num_instances,
            "attention": self.num_attention,
            "experts": self.num_experts,
            "tp": self.attention_tp,
            "expert-tp": self.expert_tp,
            "pp": self.num_stages,
            "micro-batches": self.num_micro_batches,
            "max-running": self.max_running,
            "prefill-collectives": self.prefill_collectives,
            "decode-collectives": self.decode_collectives,
        }
        for name, value in given.items():
            if name in own and "auto" not in (own[name], value) and value != own[name]:
                raise UserError(
                    f"--{name} {value} contradicts {self.file}, which says {own[name]}: leave one of them out"
                )


def served_plan_of(plan: Plan, spec: ModelSpec, file: Path) -> ServedPlan:
    """`plan`, read from `file`, for the model `spec`. `UserError` says what keeps it from being run here."""
    name = next((each for each in _DECODING if each in plan.phases), None)
    if name is None:
        phases = " and ".join(plan.phases) or "no phase"
        raise UserError(
            f"{file} plans {phases} only: serving needs a phase that decodes, plan with --phase decode, both or serve"
        )
    check_planned_for(spec, plan.model_config, plan.model, file)
    phase = plan.phases[name]
    served = replace(_served_phase(plan, name, spec, file), max_batch_tokens=phase.step_tokens or 0)
    for what, rows in (("batch", served.max_running), ("step_tokens", served.max_batch_tokens)):
        if rows > MAX_BATCH_TOKENS:
            raise UserError(
                f"{served.written_in} has a {what} of {rows:,} on each attention worker: a step has at most "
                f"{MAX_BATCH_TOKENS:,} rows, plan with a smaller one (--pin batch=N)"
            )
    if "prefill" not in plan.phases:
        return served
    predicted = replace(served.predicted, ttft_s=plan.phases["prefill"].predicted.ttft_s)
    return replace(served, prefill=_prefill_pool(plan, spec, file), predicted=predicted)


def _served_phase(plan: Plan, name: PhaseName, spec: ModelSpec, file: Path) -> ServedPlan:
    """The workers of one phase; those of a hybrid layout exchange rows as it says in all their steps."""
    phase, where = plan.phases[name], f"{file}: phases.{name}"
    apart = phase.layout == "disaggregated"
    served = (_disaggregated if apart else _colocated)(phase, spec, file, where)
    names = [use.device for use in phase.devices]
    served = replace(served, node_devices=_node_devices(plan, names), experts_beside=len(set(names)) <= 1)
    of_role = _device_of_role(plan, phase)
    if len(set(of_role.values())) > 1:
        served = replace(served, attention_device=of_role["attention"], expert_device=of_role["experts"])
    if served.layout == "hybrid":
        forms = {name: each.collectives for name, each in plan.phases.items()}
        served = replace(
            served,
            prefill_collectives=forms.get("prefill", "auto"),
            decode_collectives=forms.get("decode", "auto"),
        )
    return served


def _prefill_pool(plan: Plan, spec: ModelSpec, file: Path) -> ServedPlan:
    """A prefill phase's batch counts tokens: rows of a step, not requests."""
    served = _served_phase(plan, "prefill", spec, file)
    running, rows = min(served.max_running, MAX_PROMPTS), max(served.max_running, MIN_BATCH_TOKENS)
    notes = served.notes
    if rows > MAX_BATCH_TOKENS:
        notes += (f"passes of {rows:,} tokens in the plan; here a step has at most {MAX_BATCH_TOKENS:,}",)
    return replace(served, max_running=running, max_batch_tokens=min(rows, MAX_BATCH_TOKENS), notes=notes)


def check_workers_fit(config: ServeConfig, num_devices: int, file: Path) -> None:
    """`UserError` if the plan asks for far more worker processes than this machine's `num_devices` can carry."""
    limit = MAX_WORKERS_PER_DEVICE * num_devices
    if config.num_workers > limit:
        what = "core(s)" if config.device == "cpu" else "GPU(s)"
        raise UserError(
            f"{file} needs {config.num_workers} workers, this machine has {num_devices} {what} for at most {limit}, so "
            f"{config.num_workers - limit} are missing: plan for this machine (--runnable-here), or let workers join "
            f"(--join-workers)"
        )


def _disaggregated(phase: PhasePlan, spec: ModelSpec, file: Path, where: str) -> ServedPlan:
    sizes = phase.parallel
    if sizes.pp != 1:
        raise UserError(
            f"{where} has pp {sizes.pp}: apart from experts, attention workers have all layers, so it must be 1; plan "
            f"again without it"
        )
    _check_instances(phase, where)
    check_ranks(spec, f"{where}: attention_tp", sizes.attention_tp, attention=True, experts=False)
    check_ranks(spec, f"{where}: expert_tp", sizes.expert_tp, attention=False, experts=True)
    if not 1 <= sizes.attention_dp <= MAX_ATTENTION_WORKERS:
        raise UserError(f"{where} has {sizes.attention_dp} attention workers: it must be 1 to {MAX_ATTENTION_WORKERS}")
    num_experts = spec.router.num_experts
    if sizes.expert_workers < 1:
        raise UserError(f"{where} has {sizes.expert_workers} expert workers: a disaggregated plan needs at least 1")
    if len(phase.placement) != num_experts:
        raise UserError(
            f"{where} places {len(phase.placement)} experts, this model has {num_experts}: plan for this one"
        )
    return ServedPlan(
        file=file,
        written_in=where,
        layout="disaggregated",
        num_instances=phase.num_instances,
        attention_tp=sizes.attention_tp,
        expert_tp=sizes.expert_tp,
        num_attention=sizes.attention_dp,
        num_experts=sizes.expert_workers,
        num_micro_batches=_micro_batches(phase, where),
        max_running=_per_worker(phase, sizes.attention_dp, where),
        placement=_placement(phase, spec, where),
        predicted=phase.predicted,
        devices=_devices(phase),
        notes=_uneven_replicas(phase),
    )


def _colocated(phase: PhasePlan, spec: ModelSpec, file: Path, where: str) -> ServedPlan:
    """Whatever its name in the plan: replicas that hold the whole model, each on its ranks, or, with data or expert
    parallelism inside an instance, hybrid ones, which share their experts."""
    sizes = phase.parallel
    is_hybrid = sizes.attention_dp > 1 or sizes.expert_ep > 1 or sizes.expert_tp != sizes.attention_tp
    if is_hybrid:
        _check_hybrid(sizes, where)
        _check_instances(phase, where)
    elif not 1 <= phase.num_instances <= MAX_ATTENTION_WORKERS:
        raise UserError(f"{where} has {phase.num_instances} instances: it must be 1 to {MAX_ATTENTION_WORKERS}")
    check_ranks(spec, f"{where}: attention_tp", sizes.attention_tp, attention=True, experts=not is_hybrid)
    check_ranks(spec, f"{where}: expert_tp", sizes.expert_tp, attention=False, experts=True)
    if not 1 <= sizes.pp <= spec.num_layers:
        raise UserError(f"{where} has pp {sizes.pp}: it must be 1 to {spec.num_layers}, which is the model's layers")
    return ServedPlan(
        file=file,
        written_in=where,
        layout="hybrid" if is_hybrid else "colocated",
        num_instances=phase.num_instances if is_hybrid else 1,
        attention_tp=sizes.attention_tp,
        expert_tp=sizes.expert_tp if is_hybrid else 1,
        num_stages=sizes.pp,
        num_attention=sizes.attention_dp if is_hybrid else phase.num_instances,
        num_experts=1,
        num_micro_batches=_micro_batches(phase, where),
        max_running=_per_worker(phase, sizes.attention_dp, where),
        placement=_placement(phase, spec, where) if is_hybrid else None,
        predicted=phase.predicted,
        devices=_devices(phase),
        notes=_uneven_replicas(phase) if is_hybrid else (),
    )


def _check_hybrid(sizes: Parallel, where: str) -> None:
    """Attention and experts are dealt out over the same ranks, in groups of which one kind divides the other."""
    num_ranks, of_experts = sizes.attention_dp * sizes.attention_tp, sizes.expert_ep * sizes.expert_tp
    if num_ranks != of_experts:
        raise UserError(
            f"{where} has attention on {num_ranks} ranks and experts on {of_experts}: colocated, they are the same "
            "ranks"
        )
    try:
        TwoLevel.of_ranks(num_ranks, sizes.attention_tp, sizes.expert_tp)
    except UserError as error:
        raise UserError(f"{where} has {error}") from error


def _check_instances(phase: PhasePlan, where: str) -> None:
    if not 1 <= phase.num_instances <= MAX_INSTANCES:
        raise UserError(f"{where} has {phase.num_instances} instances: it must be 1 to {MAX_INSTANCES}")


def _micro_batches(phase: PhasePlan, where: str) -> int:
    if not 1 <= phase.micro_batches <= MAX_MICRO_BATCHES:
        raise UserError(f"{where} has {phase.micro_batches} micro-batches: it must be 1 to {MAX_MICRO_BATCHES}")
    return phase.micro_batches


def _per_worker(phase: PhasePlan, num_workers: int, where: str) -> int:
    """Requests that one attention worker runs at once: an even share of the instance's, the odd ones on top."""
    if phase.batch < 1:
        raise UserError(f"{where} has a batch of {phase.batch}: it must be at least 1")
    return -(-phase.batch // num_workers)


def _placement(phase: PhasePlan, spec: ModelSpec, where: str) -> ExpertPlacement:
    """The workers with a share of each expert become its owners, in every layer."""
    owners = tuple(tuple(worker for worker, fraction in shares if fraction > 0) for shares in phase.placement)
    sizes = phase.parallel
    num_workers = sizes.expert_workers if phase.layout == "disaggregated" else sizes.expert_ep
    if idle := set(range(num_workers)) - {worker for workers in owners for worker in workers}:
        raise UserError(f"{where}: expert workers [{_first(idle)}] hold no expert: use at most {len(owners)} workers")
    try:
        return ExpertPlacement(num_workers, dict.fromkeys(spec.expert_layers, owners))
    except UserError as error:
        raise UserError(f"{where}: {error}") from error


def _node_devices(plan: Plan, names: list[str]) -> int:
    """Devices of a node of the kind that attention is on; 0 where the cluster has one node, or the plan has none. A
    group of CPUs with as many nodes as one of GPUs is the cores and the memory of the same nodes."""
    groups = _groups(plan)
    others = {group.num_nodes for group in groups if group.device.kind != "cpu"}
    if sum(group.num_nodes for group in groups if group.device.kind != "cpu" or group.num_nodes not in others) < 2:
        return 0
    return next((group.devices_per_node for group in groups if group.device.name in names[:1]), 0)


def _groups(plan: Plan) -> tuple[NodeGroup, ...]:
    return cluster_from_json(plan.cluster_config, plan.cluster).groups if plan.cluster_config else ()


def _device_of_role(plan: Plan, phase: PhasePlan) -> dict[str, str]:
    """cpu or cuda by role, of a phase whose roles have devices of their own."""
    kinds = {group.device.name: "cpu" if group.device.kind == "cpu" else "cuda" for group in _groups(plan)}
    return {use.role: kinds[use.device] for use in phase.devices if use.role != "both" and use.device in kinds}


def _devices(phase: PhasePlan) -> tuple[str, ...]:
    return tuple(sorted({use.device for use in phase.devices}))


def _uneven_replicas(phase: PhasePlan) -> tuple[str, ...]:
    uneven = [
        expert
        for expert, shares in enumerate(phase.placement)
        if any(fraction > 0 and abs(fraction - 1 / _num_owners(shares)) > _UNEVEN for _, fraction in shares)
    ]
    if not uneven:
        return ()
    return (
        f"experts {_first(uneven)} have uneven fractions in the plan; here rows are split by the load of each step",
    )


def _first(numbers: Collection[int]) -> str:
    """The first five of them; there may be thousands."""
    return ", ".join(map(str, sorted(numbers)[:5])) + (", …" if len(numbers) > 5 else "")


def _num_owners(shares: tuple[tuple[int, float], ...]) -> int:
    return sum(fraction > 0 for _, fraction in shares)

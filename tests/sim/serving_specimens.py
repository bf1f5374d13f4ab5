"""A small model on small clusters, and plans for it, for tests of the serving simulation."""

from dataclasses import replace

from antiphon.models.config import model_spec
from antiphon.planner.predict import candidate_of, predicted_of
from antiphon.planner.setting import Setting
from antiphon.sim.demand import Demand, draw_demand
from antiphon.sim.pools import Prefill, ServingOptions, pools_of
from antiphon.sim.serve_log import ServingRun
from antiphon.sim.serving_run import simulate_serving
from antiphon.specs.cluster import ClusterSpec, NodeGroup, load_device
from antiphon.specs.plan import DeviceUse, Layout, Parallel, PhaseName, PhasePlan, Plan, Predicted
from antiphon.specs.workload import LengthSpec, WorkloadSpec

CONFIG: dict[str, object] = {
    "model_type": "mixtral",
    "hidden_size": 1024,
    "intermediate_size": 3584,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "num_hidden_layers": 6,
    "num_local_experts": 5,
    "num_experts_per_tok": 2,
    "vocab_size": 32000,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
    "rope_theta": 1e6,
}
MODEL = model_spec(CONFIG)


def cluster() -> ClusterSpec:
    """3 nodes of 7 devices."""
    device = load_device("H20")
    group = NodeGroup(
        device=device,
        num_nodes=3,
        devices_per_node=7,
        scale_up_domain=7,
        scale_up_bytes_per_s=450e9,
        node_scale_out_bytes_per_s=175e9,
    )
    return ClusterSpec(name="odd", groups=(group,))


def workload(*, rate: float | None = None, sigma: float = 0.6, skew: float = 0.0, **changes: object) -> WorkloadSpec:
    made = WorkloadSpec(
        name="small",
        input_tokens=LengthSpec(median=60, sigma=sigma),
        output_tokens=LengthSpec(median=20, sigma=sigma),
        requests_per_s=rate,
        expert_skew=skew,
    )
    return replace(made, **changes)  # type: ignore[arg-type]


def setting(of: WorkloadSpec, phase: PhaseName = "decode") -> Setting:
    return Setting(model=MODEL, cluster=cluster(), workload=of, phase=phase)


def even_placement(num_workers: int) -> tuple[tuple[tuple[int, float], ...], ...]:
    return tuple(((expert % num_workers, 1.0),) for expert in range(MODEL.router.num_experts))


def apart(*, attention: int = 3, experts: int = 2, m: int = 2, batch: int = 48, instances: int = 1) -> PhasePlan:
    return PhasePlan(
        layout="disaggregated",
        parallel=Parallel(attention_dp=attention, expert_workers=experts),
        num_instances=instances,
        micro_batches=m,
        batch=batch,
        devices=(
            DeviceUse(role="attention", device="H20", num_devices=attention * instances),
            DeviceUse(role="experts", device="H20", num_devices=experts * instances),
        ),
        placement=even_placement(experts),
        predicted=Predicted(),
    )


def together(layout: Layout = "dp_ep", *, dp: int = 3, pp: int = 1, batch: int = 48, instances: int = 1) -> PhasePlan:
    return PhasePlan(
        layout=layout,
        parallel=Parallel(attention_dp=dp, expert_ep=dp, pp=pp),
        num_instances=instances,
        micro_batches=pp,
        batch=batch,
        devices=(DeviceUse(role="both", device="H20", num_devices=dp * pp * instances),),
        placement=even_placement(dp),
        predicted=Predicted(),
    )


def plan(of: WorkloadSpec, **phases: PhasePlan) -> Plan:
    """With what the planner predicts of each phase."""
    named: dict[PhaseName, PhasePlan] = {}
    for name in ("prefill", "decode"):
        if name in phases:
            one = replace(setting(of, name), transfers_kv=len(phases) > 1)
            predicted = predicted_of(one, candidate_of(one, phases[name]), phases[name].num_instances)
            named[name] = replace(phases[name], predicted=predicted)
    return Plan(model="small", cluster="odd", workload=of.name, objective="per-gpu", phases=named, model_config=CONFIG)


def serve(
    made: Plan,
    of: WorkloadSpec,
    *,
    num_requests: int | None = 60,
    demand: Demand | None = None,
    prefill: Prefill = "mixed",
    options: ServingOptions | None = None,
    record_steps: bool = False,
) -> ServingRun:
    """Simulate; 60 requests unless told otherwise."""
    seed = 0 if options is None else options.seed
    requests = demand or draw_demand(of, num_requests=num_requests, seed=seed)
    one = setting(of, "decode" if "decode" in made.phases else "prefill")
    pools = pools_of(made, one, requests, prefill=prefill)
    return simulate_serving(pools, requests, options or ServingOptions(), record_steps=record_steps)

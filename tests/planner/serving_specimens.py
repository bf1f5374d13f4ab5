"""Small models, devices and clusters for tests of the serving planner, of sizes at which everything matters a bit."""

from dataclasses import replace

from antiphon.planner.candidates import DISAGGREGATED, Candidates, candidates_of
from antiphon.planner.predict import candidate_of
from antiphon.planner.rate_match import pools_fit
from antiphon.planner.search import PlanResult, make_plan, settings_of
from antiphon.planner.setting import SearchLimits, Setting
from antiphon.specs.cluster import ClusterSpec, DeviceSpec, NodeGroup
from antiphon.specs.model import AttentionSpec, FeedForwardSpec, ModelSpec, RopeSpec, RouterSpec
from antiphon.specs.workload import LengthSpec, SloSpec, WorkloadSpec


def device(name: str = "one", **changes: object) -> DeviceSpec:
    """A tenth of an H100."""
    spec = DeviceSpec(
        name=name,
        kind="gpu",
        memory_bytes=8 * 10**9,
        memory_bytes_per_s=3e11,
        flops_per_s={"bfloat16": 1e14, "fp8": 2e14},
        scale_up_bytes_per_s=5e10,
        scale_up_domain=4,
        scale_out_bytes_per_s=1e10,
        power_w=100.0,
        price=1.0,
    )
    return replace(spec, **changes)  # type: ignore[arg-type]


def group(spec: DeviceSpec | None = None, num_nodes: int = 2, devices_per_node: int = 4) -> NodeGroup:
    spec = spec or device()
    return NodeGroup(
        device=spec,
        num_nodes=num_nodes,
        devices_per_node=devices_per_node,
        scale_up_domain=min(spec.scale_up_domain, devices_per_node),
        scale_up_bytes_per_s=spec.scale_up_bytes_per_s,
        node_scale_out_bytes_per_s=spec.scale_out_bytes_per_s * devices_per_node,
    )


def cluster(*groups: NodeGroup, name: str = "small") -> ClusterSpec:
    return ClusterSpec(name=name, groups=groups or (group(),))


def two_kinds() -> ClusterSpec:
    """Much memory and bandwidth beside cheap arithmetic, as H20 and L40S."""
    wide = device("wide", memory_bytes=12 * 10**9, memory_bytes_per_s=4e11, flops_per_s={"bfloat16": 1.5e13}, price=1.8)
    quick = device("quick", memory_bytes=5 * 10**9, memory_bytes_per_s=1e11, flops_per_s={"bfloat16": 4e13}, price=1.0)
    return cluster(group(wide), group(quick), name="two kinds")


def model(**changes: object) -> ModelSpec:
    """About 1.1 billion parameters: 8 layers, 8 experts, top 2."""
    spec = ModelSpec(
        family="mixtral",
        vocab_size=32000,
        hidden_size=1024,
        num_layers=8,
        moe_layers=(True,) * 8,
        attention=AttentionSpec(
            num_heads=16, num_kv_heads=4, head_dim=64, scale=0.125, rope=RopeSpec(dim=64, theta=1e4)
        ),
        router=RouterSpec(num_experts=8, top_k=2),
        feed_forward=FeedForwardSpec(intermediate=4096),
    )
    return replace(spec, **changes)  # type: ignore[arg-type]


def workload(**changes: object) -> WorkloadSpec:
    spec = WorkloadSpec(
        name="test",
        input_tokens=LengthSpec(median=500, sigma=0.5),
        output_tokens=LengthSpec(median=150, sigma=0.5),
        slo=SloSpec(tpot_s=0.02),
    )
    return replace(spec, **changes)  # type: ignore[arg-type]


def setting(**changes: object) -> Setting:
    values: dict[str, object] = {
        "model": model(),
        "cluster": cluster(),
        "workload": workload(),
        "phase": "decode",
        "limits": SearchLimits(max_micro_batches=3),
    }
    return Setting(**{**values, **changes})  # type: ignore[arg-type]


def planned(**changes: object) -> PlanResult:
    given = {name: changes.pop(name) for name in ("layouts", "on_progress") if name in changes}
    values: dict[str, object] = {"model": model(), "cluster": cluster(), "workload": workload()}
    return make_plan(settings_of(**values | changes), model_name="small", **given)  # type: ignore[arg-type]


def check_counts(result: PlanResult, machines: ClusterSpec, experts: int) -> None:
    """Devices, batch and placement add up, and everything fits on the cluster."""
    available = {nodes.device.name: nodes.num_devices for nodes in machines.groups}
    pools = []
    for name, phase in result.plan.phases.items():
        one = candidate_of(result.settings[name], phase)
        pools.append((one, 0, phase.num_instances))
        assert phase.batch == int(one.instance_batch[0])
        assert phase.batch % (phase.micro_batches * phase.parallel.attention_dp) == 0
        assert len(phase.placement) == experts
        for use in phase.devices:
            available[use.device] -= use.num_devices
        usable = min(nodes.device.memory_bytes for nodes in machines.groups) * 0.9
        assert all(used <= usable * 1.0001 for used in phase.predicted.memory_bytes.values())
    assert min(available.values()) >= 0
    assert pools_fit(machines, pools)


def candidates(**changes: object) -> Candidates:
    """One expert slot on one device beside one for attention, one request at a time, but for `changes`."""
    plain: dict[str, object] = {
        "layout": DISAGGREGATED,
        **dict.fromkeys(("attention_kind", "expert_kind", "piece_devices"), 0),
        **dict.fromkeys(("attention_tp", "attention_dp", "expert_tp", "expert_ep", "slots", "pp"), 1),
        **dict.fromkeys(("micro_batches", "batch"), 1),
    }
    return candidates_of(**(plain | changes))  # type: ignore[arg-type]

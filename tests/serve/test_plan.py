"""Which plans this engine obeys, what it makes of them, and the one line that refuses the others."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from antiphon.base.errors import UserError
from antiphon.models.config import model_spec
from antiphon.models.families.config_readers import FAMILIES
from antiphon.serve.config import ServeConfig
from antiphon.serve.served_plan import check_workers_fit, served_plan_of
from antiphon.specs.cluster import cluster_to_json
from antiphon.specs.model import ModelSpec
from antiphon.specs.placement import ExpertPlacement
from antiphon.specs.plan import DeviceUse, Parallel, PhasePlan, Plan, Predicted
from tests.planner.serving_specimens import cluster, device, group

FILE = Path("plan.json")
CONFIG: dict[str, Any] = {
    "model_type": "qwen3_moe",
    "vocab_size": 97,
    "hidden_size": 48,
    "intermediate_size": 40,
    "moe_intermediate_size": 24,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 12,
    "num_experts": 5,
    "num_experts_per_tok": 2,
    "norm_topk_prob": True,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "eos_token_id": 2,
}
SPEC: ModelSpec = model_spec(CONFIG)
PLACEMENT = (((0, 1.0),), ((0, 0.5), (1, 0.5)), ((1, 1.0),), ((1, 1.0),), ((0, 1.0),))
APART = PhasePlan(
    layout="disaggregated",
    parallel=Parallel(attention_dp=3, expert_workers=2),
    num_instances=1,
    micro_batches=2,
    batch=64,
    devices=(DeviceUse(role="attention", device="this-core", num_devices=3),),
    placement=PLACEMENT,
    predicted=Predicted(tpot_s=0.01, tokens_per_s=100.0),
)
TOGETHER = replace(
    APART, layout="dp_ep", parallel=Parallel(), num_instances=2, micro_batches=1, placement=(((0, 1.0),),) * 5
)


def plan(phase: PhasePlan, **changes: Any) -> Plan:
    made = Plan(
        model="tiny",
        cluster="this-machine",
        workload="chat",
        objective="per-gpu",
        phases={"decode": phase},
        model_config=CONFIG,
    )
    return replace(made, **changes)


def test_a_disaggregated_plan_says_everything_the_engine_asks() -> None:
    served = served_plan_of(plan(APART), SPEC, FILE)
    assert (served.layout, served.num_attention, served.num_experts) == ("disaggregated", 3, 2)
    assert served.num_micro_batches == 2
    assert served.max_running == 22  # 64 over 3 workers: 22, 21, 21
    owners = ((0,), (0, 1), (1,), (1,), (0,))
    assert served.placement == ExpertPlacement(2, dict.fromkeys(SPEC.expert_layers, owners))
    assert served.predicted.tpot_s == 0.01
    assert served.notes == ()


@pytest.mark.parametrize("layout", ["hybrid", "tp_pp", "dp_ep"])
def test_colocated_plans_without_parallel_sizes_are_replicas(layout: Any) -> None:
    served = served_plan_of(plan(replace(TOGETHER, layout=layout)), SPEC, FILE)
    assert (served.layout, served.num_attention, served.max_running) == ("colocated", 2, 64)
    assert served.placement is None


def test_ranks_and_instances_of_a_plan() -> None:
    apart = replace(APART, num_instances=3, parallel=replace(APART.parallel, attention_tp=2, expert_tp=3))
    served = served_plan_of(plan(apart), SPEC, FILE)
    assert (served.num_instances, served.attention_tp, served.expert_tp) == (3, 2, 3)
    assert served.max_running == 22  # the batch is one instance's
    together = replace(TOGETHER, layout="tp_pp", parallel=Parallel(attention_tp=2, expert_tp=2))
    served = served_plan_of(plan(together), SPEC, FILE)
    assert (served.num_attention, served.attention_tp, served.expert_tp, served.num_stages) == (2, 2, 1, 1)
    staged = replace(TOGETHER, layout="tp_pp", parallel=Parallel(pp=2), micro_batches=2)
    served = served_plan_of(plan(staged), SPEC, FILE)
    assert (served.layout, served.num_stages, served.num_micro_batches) == ("colocated", 2, 2)
    sizes = Parallel(attention_dp=4, attention_tp=2, expert_ep=2, expert_tp=4)
    served = served_plan_of(plan(replace(TOGETHER, layout="hybrid", parallel=sizes, placement=PLACEMENT)), SPEC, FILE)
    assert (served.layout, served.num_instances, served.num_attention) == ("hybrid", 2, 4)
    assert (served.attention_tp, served.expert_tp, served.max_running) == (2, 4, 16)
    assert served.placement == ExpertPlacement(2, dict.fromkeys(SPEC.expert_layers, ((0,), (0, 1), (1,), (1,), (0,))))


def test_the_form_of_a_plans_exchange_is_its_phases() -> None:
    sizes = Parallel(attention_dp=2, attention_tp=2, expert_ep=2, expert_tp=2)
    shared = replace(TOGETHER, layout="hybrid", parallel=sizes, placement=PLACEMENT, collectives="synchronous")
    served = served_plan_of(plan(shared), SPEC, FILE)
    assert (served.prefill_collectives, served.decode_collectives) == ("auto", "synchronous")
    served = served_plan_of(
        plan(shared, phases={"decode": shared, "prefill": replace(shared, collectives="fused")}), SPEC, FILE
    )
    assert (served.prefill_collectives, served.decode_collectives) == ("fused", "synchronous")
    served.refuse_other({"prefill-collectives": "fused", "decode-collectives": "auto"})
    with pytest.raises(UserError, match=r"--prefill-collectives synchronous contradicts plan\.json, which says fused"):
        served.refuse_other({"prefill-collectives": "synchronous"})
    served_plan_of(plan(shared), SPEC, FILE).refuse_other({"prefill-collectives": "fused"})
    replicas = replace(TOGETHER, collectives="fused")
    assert served_plan_of(plan(replicas), SPEC, FILE).decode_collectives == "auto"


def test_a_plan_with_both_phases_is_served_by_two_pools() -> None:
    prefill = replace(TOGETHER, num_instances=3, batch=4096, predicted=Predicted(ttft_s=0.5))
    served = served_plan_of(plan(APART, phases={"decode": APART, "prefill": prefill}), SPEC, FILE)
    assert (served.layout, served.predicted.ttft_s) == ("disaggregated", 0.5)
    assert served.prefill is not None
    assert (served.prefill.layout, served.prefill.num_attention) == ("colocated", 3)
    assert served.prefill.max_batch_tokens == 4096, "a prefill phase's batch counts tokens"
    assert served.prefill.max_running == 256


def test_the_rows_of_a_plans_steps_are_obeyed() -> None:
    served = served_plan_of(replace(plan(TOGETHER), phases={"serve": replace(TOGETHER, step_tokens=512)}), SPEC, FILE)
    assert served.max_batch_tokens == 512


def test_passes_longer_than_a_step_may_be_are_cut_and_said() -> None:
    phases = {"decode": APART, "prefill": replace(TOGETHER, num_instances=3, batch=3 << 20)}
    served = served_plan_of(replace(plan(APART), phases=phases), SPEC, FILE)
    assert served.prefill is not None
    assert served.prefill.max_batch_tokens == 1 << 20
    assert served.prefill.notes[-1] == "passes of 3,145,728 tokens in the plan; here a step has at most 1,048,576"


def over(num_nodes: int, devices_per_node: int, phase: PhasePlan) -> tuple[int, int, int]:
    """Who joins if this is served on such nodes."""
    core = device("this-core", kind="cpu", scale_up_domain=devices_per_node)
    nodes = cluster(group(core, num_nodes, devices_per_node))
    named = replace(phase, devices=(DeviceUse(role="both", device="this-core", num_devices=1),))
    return served_plan_of(plan(named, cluster_config=cluster_to_json(nodes)), SPEC, FILE).join_workers


def test_a_plan_for_several_nodes_says_who_joins() -> None:
    assert over(2, 3, APART) == (0, 2, 0)
    assert over(2, 4, APART) == (0, 1, 0)
    assert over(4, 2, replace(APART, parallel=replace(APART.parallel, attention_tp=2))) == (2, 2, 0)
    assert over(2, 1, TOGETHER) == (1, 0, 0)
    assert over(2, 1, replace(TOGETHER, num_instances=1, parallel=Parallel(attention_tp=2, expert_tp=2))) == (1, 0, 1)
    assert over(3, 2, replace(TOGETHER, num_instances=1, parallel=Parallel(pp=3), micro_batches=3)) == (1, 0, 2)
    shared = replace(TOGETHER, layout="hybrid", num_instances=1, placement=PLACEMENT)
    assert over(2, 2, replace(shared, parallel=Parallel(attention_dp=4, expert_ep=2, expert_tp=2))) == (2, 0, 0)
    served = served_plan_of(plan(APART), SPEC, FILE)
    assert served.node_devices == 0


def test_a_plan_with_experts_beside_the_gpu_names_the_devices() -> None:
    """One machine: a GPU for attention, its cores and memory for experts."""
    gpu, cores = device("one-gpu", num_processors=132), device("its-cores", kind="cpu")
    mixed = replace(
        APART,
        devices=(
            DeviceUse(role="attention", device="one-gpu", num_devices=1),
            DeviceUse(role="experts", device="its-cores", num_devices=2),
        ),
    )
    beside = cluster_to_json(cluster(group(gpu, 1, 1), group(cores, 1, 2)))
    served = served_plan_of(plan(mixed, cluster_config=beside), SPEC, FILE)
    assert (served.attention_device, served.expert_device) == ("cuda", "cpu")
    assert served.node_devices == 0  # no worker joins
    apart = cluster_to_json(cluster(group(gpu, 1, 4), group(cores, 3, 2)))
    assert served_plan_of(plan(mixed, cluster_config=apart), SPEC, FILE).join_workers == (0, 2, 0)
    alike = served_plan_of(plan(APART, cluster_config=beside), SPEC, FILE)
    assert (alike.attention_device, alike.expert_device) == ("", "")


def test_uneven_replicas_are_obeyed_as_even_ones_and_said() -> None:
    uneven = (((0, 0.8), (1, 0.2)), *PLACEMENT[1:])
    served = served_plan_of(plan(replace(APART, placement=uneven)), SPEC, FILE)
    assert served.placement is not None
    assert served.placement.owners[SPEC.expert_layers[0]][0] == (0, 1)
    assert served.notes == (
        "experts 0 have uneven fractions in the plan; here rows are split by the load of each step",
    )


def sizes(**changes: int) -> PhasePlan:
    return replace(APART, parallel=replace(APART.parallel, **changes))


def whole(**changes: int) -> PhasePlan:
    return replace(TOGETHER, parallel=replace(TOGETHER.parallel, **changes))


REFUSED: list[tuple[Plan, str]] = [
    (
        plan(APART, phases={"prefill": APART}),
        "plan.json plans prefill only: serving needs a phase that decodes, plan with --phase decode, both or serve",
    ),
    (
        plan(APART, model_config={}),
        "plan.json does not say which config.json it was made for: make it anew with antiphon plan",
    ),
    (
        plan(APART, model_config=CONFIG | {"hidden_size": 96}),
        "plan.json is for tiny with hidden_size 96, this model has 48: use that model, or plan for this one",
    ),
    (
        plan(APART, model_config=CONFIG | {"num_experts_per_tok": 3}),
        "plan.json is for tiny with router.top_k 3, this model has 2: use that model, or plan for this one",
    ),
    (
        plan(APART, model_config={"model_type": "llama"}),
        "plan.json holds a model_config that cannot be read: config.json: model_type = 'llama' is not supported: "
        f"use one of {', '.join(sorted(FAMILIES))}",
    ),
    (
        plan(sizes(attention_tp=7)),
        "plan.json: phases.decode: attention_tp is 7: the model has 6 attention heads, so it must be at most 6",
    ),
    (
        plan(sizes(expert_tp=25)),
        "plan.json: phases.decode: expert_tp is 25: the model has 24 columns in an expert, so it must be at most 24",
    ),
    (
        plan(whole(pp=9)),
        f"plan.json: phases.decode has pp 9: it must be 1 to {SPEC.num_layers}, which is the model's layers",
    ),
    (
        plan(whole(attention_dp=2, attention_tp=3, expert_tp=2, expert_ep=3)),
        "plan.json: phases.decode has attention_tp 3 and expert_tp 2 on 6 ranks: one must divide the "
        "other, and the larger the number "
        "of ranks",
    ),
    (
        plan(sizes(pp=2)),
        "plan.json: phases.decode has pp 2: apart from experts, attention workers have all layers, so "
        "it must be 1; plan again "
        "without it",
    ),
    (plan(replace(APART, num_instances=65)), "plan.json: phases.decode has 65 instances: it must be 1 to 64"),
    (plan(sizes(attention_dp=65)), "plan.json: phases.decode has 65 attention workers: it must be 1 to 64"),
    (
        plan(sizes(expert_workers=0)),
        "plan.json: phases.decode has 0 expert workers: a disaggregated plan needs at least 1",
    ),
    (
        plan(replace(APART, placement=PLACEMENT[:4])),
        "plan.json: phases.decode places 4 experts, this model has 5: plan for this one",
    ),
    (
        plan(sizes(expert_workers=3)),
        "plan.json: phases.decode: expert workers [2] hold no expert: use at most 5 workers",
    ),
    (plan(replace(APART, micro_batches=65)), "plan.json: phases.decode has 65 micro-batches: it must be 1 to 64"),
    (
        plan(replace(APART, batch=3 << 21)),
        "plan.json: phases.decode has a batch of 2,097,152 on each attention worker: a step has at most "
        "1,048,576 rows, plan with a "
        "smaller one (--pin batch=N)",
    ),
    (
        plan(replace(APART, step_tokens=1 << 21)),
        "plan.json: phases.decode has a step_tokens of 2,097,152 on each attention worker: a step has "
        "at most 1,048,576 rows, plan "
        "with a smaller one (--pin batch=N)",
    ),
    (plan(replace(APART, batch=0)), "plan.json: phases.decode has a batch of 0: it must be at least 1"),
    (
        plan(whole(expert_ep=2)),
        "plan.json: phases.decode has attention on 1 ranks and experts on 2: colocated, they are the same ranks",
    ),
    (plan(replace(TOGETHER, num_instances=65)), "plan.json: phases.decode has 65 instances: it must be 1 to 64"),
]


@pytest.mark.parametrize(("refused", "message"), REFUSED, ids=[message[:60] for _, message in REFUSED])
def test_what_cannot_be_obeyed_is_refused_in_one_line(refused: Plan, message: str) -> None:
    with pytest.raises(UserError) as caught:
        served_plan_of(refused, SPEC, FILE)
    assert str(caught.value) == message


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"experts": 3}, "--experts 3 contradicts plan.json, which says 2: leave one of them out"),
        ({"attention": 1}, "--attention 1 contradicts plan.json, which says 3: leave one of them out"),
        ({"micro-batches": 3}, "--micro-batches 3 contradicts plan.json, which says 2: leave one of them out"),
        ({"max-running": 64}, "--max-running 64 contradicts plan.json, which says 22: leave one of them out"),
        (
            {"layout": "colocated"},
            "--layout colocated contradicts plan.json, which says disaggregated: leave one of .*",
        ),
    ],
)
def test_options_that_contradict_the_plan_are_refused(given: dict[str, int | str], message: str) -> None:
    with pytest.raises(UserError, match=message):
        served_plan_of(plan(APART), SPEC, FILE).refuse_other(given)


def test_options_that_agree_with_the_plan_are_fine() -> None:
    served = served_plan_of(plan(APART), SPEC, FILE)
    served.refuse_other({"experts": 2, "attention": 3, "micro-batches": 2, "layout": "disaggregated"})
    served.refuse_other({"layout": "auto"})


def test_a_plan_for_a_cluster_does_not_start_a_hundred_processes_here() -> None:
    config = ServeConfig(model=Path("m"), layout="disaggregated", num_attention=6, num_experts=3)
    check_workers_fit(config, 3, FILE)
    with pytest.raises(
        UserError, match=r"needs 9 workers, this machine has 2 core\(s\) for at most 8, so 1 are missing"
    ):
        check_workers_fit(config, 2, FILE)
    joined = replace(config, join_address="127.0.0.1:7000", join_secret=b"s", joined_experts=3)
    check_workers_fit(joined, 2, FILE)

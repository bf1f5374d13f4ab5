"""Settings for engines that run attention and experts together: the right candidate, its sizes, what is lost."""

import itertools
import json
import re
import shlex
from dataclasses import replace
from pathlib import Path

import pytest

from antiphon.base.errors import ResourceError
from antiphon.report.colocated import Target, nearest_colocated
from antiphon.report.emit_engines import (
    low_latency_bytes,
    sglang_command,
    takes_ranks,
    vllm_command,
    why_no_low_latency,
)
from antiphon.report.gather import Report
from antiphon.specs.cluster import load_cluster
from antiphon.specs.model import PrecisionSpec
from antiphon.specs.plan import DeviceUse, Layout, Parallel, PhasePlan, Plan, Predicted, Rejected
from antiphon.specs.workload import LengthSpec, SloSpec, WorkloadSpec

EVEN = WorkloadSpec(
    name="even",
    input_tokens=LengthSpec(median=571),
    output_tokens=LengthSpec(median=159),
    slo=SloSpec(tpot_s=0.15),
)
TARGET = Target(
    model="mistralai/Mixtral-8x22B",
    precision=PrecisionSpec(),
    workload=EVEN,
    cluster=load_cluster("msi-hetero"),
)
RELEASES = {
    engine: json.loads((Path(__file__).parent / "data" / f"{engine}_flags.json").read_text())
    for engine in ("vllm", "sglang")
}
LINEAR = tuple(((expert // 2, 1.0),) for expert in range(16))
REPLICATED = (*LINEAR[:15], ((0, 0.5), (7, 0.5)))


def decode_only(report: Report) -> Plan:
    return replace(report.plan, phases={"decode": report.plan.phases["decode"]})


def colocated(report: Report, parallel: Parallel, batch: int = 640, layout: Layout = "hybrid", **more: object) -> Plan:
    """The report's plan with a decode phase alone, colocated in these sizes on H20."""
    devices = (DeviceUse(role="both", device="H20", num_devices=16),)
    changes = {"placement": (), "devices": devices, "micro_batches": 1, **more}
    decode = replace(report.plan.phases["decode"], layout=layout, parallel=parallel, batch=batch, **changes)  # type: ignore[arg-type]
    return replace(report.plan, phases={"decode": decode})


def commands(text: str) -> list[dict[str, str | None]]:
    """Every command of a script as option -> value, the program under its own name."""
    found = []
    for line in re.sub(r"\\\n\s*", "", text).splitlines():
        if line.startswith("#"):
            continue
        words = shlex.split(line)
        options: dict[str, str | None] = {}
        while words:
            word = words.pop(0)
            has_value = bool(words) and not words[0].startswith("--")
            options[word] = words.pop(0) if word.startswith("--") and has_value else None
        found.append(options)
    return found


def comments(text: str) -> str:
    return "\n".join(line for line in text.splitlines() if line.startswith("#"))


def test_the_best_colocated_loser_is_taken(report: Report) -> None:
    nearest = nearest_colocated(report.plan, "decode", TARGET.workload.slo)
    assert nearest.plan.layout == "hybrid"
    assert nearest.why_not == ""
    assert nearest.per_rank == 160
    assert nearest.devices_per_stage == 8


def test_one_that_keeps_the_target_comes_before_a_faster_one(report: Report) -> None:
    decode = report.plan.phases["decode"]
    fast = replace(decode.rejected[0], predicted=Predicted(tpot_s=0.4, per_gpu=95.0, per_cost=60.0))
    plan = replace(report.plan, phases={"decode": replace(decode, rejected=(fast, *decode.rejected[1:]))})
    assert nearest_colocated(plan, "decode", TARGET.workload.slo).plan.layout == "tp_pp"
    only_fast = replace(report.plan, phases={"decode": replace(decode, rejected=(fast,))})
    nearest = nearest_colocated(only_fast, "decode", TARGET.workload.slo)
    assert nearest.why_not == "a token takes 400 ms, the target is 150 ms"
    assert "#   - a promise: a token takes 400 ms, the target is 150 ms" in vllm_command(only_fast, TARGET)


def test_nothing_colocated_runs(report: Report) -> None:
    decode = replace(report.plan.phases["decode"], rejected=(Rejected(layout="dp_ep", reason="12 GB are missing"),))
    plan = replace(report.plan, phases={"decode": decode})
    with pytest.raises(ResourceError, match=r"no colocated layout of mixtral-8x22b runs .*DP \+ EP: 12 GB are missing"):
        nearest_colocated(plan, "decode", TARGET.workload.slo)


def test_vllm_on_one_node(report: Report) -> None:
    text = vllm_command(decode_only(report), TARGET)
    assert commands(text) == [
        {
            "vllm": None,
            "serve": None,
            "mistralai/Mixtral-8x22B": None,
            "--tensor-parallel-size": "2",
            "--data-parallel-size": "4",
            "--enable-expert-parallel": None,
            "--all2all-backend": "deepep_low_latency",
            "--max-num-seqs": "160",
            "--max-num-batched-tokens": "160",
            "--gpu-memory-utilization": "0.90",
            "--kv-cache-dtype": "auto",
            "--dtype": "bfloat16",
            "--kv-transfer-config": '{"kv_connector": "NixlConnector", "kv_role": "kv_both"}',
        }
    ]
    assert "a decode plan: this server is given prompts" in text
    assert "#   - attention and experts apart: 16 attention workers, 8 expert workers" in text
    assert "#   - a kind of device for each: 16 × H20 attention, 8 × L40S experts" in text
    assert "#   - 2 micro-batches in turn" in text
    assert "#   - the plan's placement: 1 expert with replicas" in text
    assert "-29% tokens/s per unit of price" in text


def test_sglang_on_one_node(report: Report) -> None:
    (options,) = commands(sglang_command(decode_only(report), TARGET))
    assert options == {
        "SGLANG_DEEPEP_NUM_MAX_DISPATCH_TOKENS_PER_RANK=160": None,
        "python": None,
        "-m": None,
        "sglang.launch_server": None,
        "--model-path": "mistralai/Mixtral-8x22B",
        "--tp-size": "8",
        "--attn-dp-size": "4",
        "--ep-size": "8",
        "--moe-a2a-backend": "deepep",
        "--deepep-mode": "low_latency",
        "--max-running-requests": "640",
        "--mem-fraction-static": "0.90",
        "--kv-cache-dtype": "auto",
        "--dtype": "bfloat16",
        "--disaggregation-mode": "decode",
    }


ON_H800 = replace(TARGET, cluster=load_cluster("msm-h800"), hidden_size=6144)


def on_h800(report: Report, batch: int, ranks: int = 16, **more: object) -> Plan:
    parallel = Parallel(attention_tp=1, attention_dp=ranks, expert_ep=ranks)
    devices = (DeviceUse(role="both", device="H800", num_devices=ranks),)
    return colocated(report, parallel, batch, "dp_ep", devices=devices, placement=LINEAR, **more)


def test_low_latency_kernels_are_asked_for_within_their_limits(report: Report) -> None:
    (options,) = commands(sglang_command(on_h800(report, 16 * 600), ON_H800))
    assert options["--deepep-mode"] == "low_latency"
    assert {name for name in options if "=" in name} == {
        "SGLANG_DEEPEP_NUM_MAX_DISPATCH_TOKENS_PER_RANK=600",
        "NVSHMEM_QP_DEPTH=1202",
    }
    text = sglang_command(on_h800(report, 16 * 1100), ON_H800)
    assert commands(text)[0]["--deepep-mode"] == "normal"
    assert "1,100 rows of a rank in a step: DeepEP's low-latency kernels take 1,024" in text
    text = vllm_command(on_h800(report, 16 * 1100), ON_H800)
    assert commands(text)[0]["--all2all-backend"] == "deepep_high_throughput"


def test_buffers_that_do_not_fit_are_not_asked_for(report: Report) -> None:
    assert low_latency_bytes(8192, 7168, 256) == pytest.approx(121e9, rel=0.02), "as one server allocated"
    many = replace(on_h800(report, 16 * 1000).phases["decode"], placement=tuple(((e % 16, 1.0),) for e in range(512)))
    text = vllm_command(replace(report.plan, phases={"decode": many}), ON_H800)
    assert commands(text)[0]["--all2all-backend"] == "deepep_high_throughput"
    assert re.search(r"low-latency buffers of [\d.]+ GB: a device has 8 GB beside the plan", text)


def test_ranks_that_deepep_does_not_take(report: Report) -> None:
    text = vllm_command(on_h800(report, 1200, ranks=12), ON_H800)
    assert not any("--all2all-backend" in command for command in commands(text))
    assert "exchange kernels: DeepEP's run on 2, 4 or 8 ranks" in text


def test_proposed_tokens_are_asked_for_or_said_to_be_lost(report: Report) -> None:
    drafting = replace(ON_H800, workload=replace(EVEN, draft_tokens=2, accept_rate=0.7))
    plan = on_h800(report, 16 * 64)
    assert "2 proposed tokens a step: vLLM needs a draft model" in vllm_command(plan, drafting)
    own = replace(drafting, draft_layers=1)
    options = commands(vllm_command(plan, own))[0]
    assert json.loads(options["--speculative-config"] or "") == {"method": "mtp", "num_speculative_tokens": 2}
    assert options["--max-num-batched-tokens"] == "192", "each sequence has three rows"
    (options,) = commands(sglang_command(plan, own))
    assert (options["--speculative-num-steps"], options["--speculative-num-draft-tokens"]) == ("2", "3")


def test_servers_that_compute_prompts_too(report: Report) -> None:
    decode = on_h800(report, 16 * 64).phases["decode"]
    plan = replace(report.plan, phases={"serve": replace(decode, step_tokens=2048)})
    text = vllm_command(plan, ON_H800)
    options = commands(text)[0]
    assert (options["--max-num-seqs"], options["--max-num-batched-tokens"]) == ("64", "2048")
    assert options["--all2all-backend"] == "deepep_high_throughput"
    assert "--kv-transfer-config" not in options
    assert "a decode plan" not in text
    (options,) = commands(sglang_command(plan, ON_H800))
    assert (options["--max-running-requests"], options["--chunked-prefill-size"]) == ("1024", "32768")


def test_formats(report: Report) -> None:
    fp8 = replace(TARGET, precision=PrecisionSpec(weights="fp8", kv="fp8", dispatch="fp8", compute="fp8"))
    (vllm,) = commands(vllm_command(decode_only(report), fp8))
    assert (vllm["--kv-cache-dtype"], vllm["--quantization"]) == ("fp8", "fp8")
    assert "--dtype" not in vllm
    text = sglang_command(decode_only(report), fp8)
    assert commands(text)[0]["--kv-cache-dtype"] == "fp8_e4m3"
    assert "#   - rows sent as fp8 and back as bfloat16: SGLang's exchange decides" in comments(text)
    int4 = replace(TARGET, precision=PrecisionSpec(weights="int4"))
    (vllm,) = commands(vllm_command(decode_only(report), int4))
    assert not {"--quantization", "--dtype"} & vllm.keys()
    assert "int4 weights: give vLLM a checkpoint that is quantised already" in vllm_command(decode_only(report), int4)


def test_a_pipeline_over_nodes_needs_ray(report: Report) -> None:
    plan = colocated(report, Parallel(attention_tp=8, expert_tp=8, pp=2), layout="tp_pp")
    text = vllm_command(plan, TARGET)
    (options,) = commands(text)
    assert options["--tensor-parallel-size"] == "8"
    assert options["--pipeline-parallel-size"] == "2"
    assert options["--distributed-executor-backend"] == "ray"
    assert not {"--data-parallel-size", "--enable-expert-parallel"} & options.keys()
    assert "lost" not in comments(text)
    (sglang,) = commands(sglang_command(plan, TARGET))
    assert (sglang["--tp-size"], sglang["--pp-size"], sglang["--nnodes"]) == ("8", "2", "2")
    assert "--ep-size" not in sglang


def test_data_parallel_ranks_over_odd_nodes(report: Report) -> None:
    """Five ranks of three devices on nodes of eight: two, two and one."""
    plan = colocated(report, Parallel(attention_tp=3, attention_dp=5, expert_ep=15), batch=77)
    text = vllm_command(plan, TARGET)
    first, others = commands(text)
    assert first["--data-parallel-size"] == "5"
    assert first["--data-parallel-size-local"] == "2"
    assert first["--max-num-seqs"] == "16"
    assert "--headless" not in first
    assert others["--data-parallel-start-rank"] == "$((NODE*2))"
    assert {"--headless", "--data-parallel-address"} <= others.keys()
    assert "# on the first of 3 nodes" in text
    assert "# the last one runs fewer ranks: --data-parallel-size-local 1 there" in text
    (sglang,) = commands(sglang_command(plan, TARGET))
    assert (sglang["--tp-size"], sglang["--attn-dp-size"], sglang["--nnodes"]) == ("15", "5", "3"), "five on each"


def test_sizes_vllm_cannot_express_are_said(report: Report) -> None:
    plan = colocated(report, Parallel(attention_tp=4, attention_dp=2, expert_ep=4, expert_tp=2))
    assert "#   - experts in EP 4 x TP 2: vLLM splits them over all 8 ranks as whole experts" in vllm_command(
        plan, TARGET
    )
    assert commands(sglang_command(plan, TARGET))[0]["--ep-size"] == "4"


def test_a_plan_of_prefill_alone(report: Report) -> None:
    """Tokens of a pass are a limit of tokens, not of requests."""
    prefill: PhasePlan = replace(report.plan.phases["prefill"], batch=10_001)
    plan = replace(report.plan, phases={"prefill": prefill})
    text = vllm_command(plan, TARGET)
    assert "prefill, workload msi-production" in text
    assert "400 ms to the first token" in text
    (vllm,) = commands(text)
    assert vllm["--max-num-batched-tokens"] == "2501"
    assert "--max-num-seqs" not in vllm
    assert vllm["--all2all-backend"] == "deepep_high_throughput"
    (sglang,) = commands(sglang_command(plan, TARGET))
    assert (sglang["--chunked-prefill-size"], sglang["--deepep-mode"]) == ("10001", "normal")
    assert "--max-running-requests" not in sglang


def test_two_phases_are_two_servers(report: Report) -> None:
    prefill, decode = commands(vllm_command(report.plan, TARGET))
    for server in (prefill, decode):
        assert json.loads(str(server["--kv-transfer-config"]))["kv_connector"] == "NixlConnector"
    assert ("--max-num-seqs" in prefill, "--max-num-seqs" in decode) == (False, True)
    modes = [server["--disaggregation-mode"] for server in commands(sglang_command(report.plan, TARGET))]
    assert modes == ["prefill", "decode"]
    assert sglang_command(report.plan, TARGET).startswith("# two kinds of server: SGLang's router")


EP8 = Parallel(attention_tp=2, attention_dp=4, expert_ep=8)


def test_overlap_and_balance_are_asked_for(report: Report) -> None:
    plan = colocated(report, EP8, micro_batches=2, placement=REPLICATED)
    (vllm,) = commands(vllm_command(plan, TARGET))
    assert "--enable-dbo" in vllm
    assert "--enable-eplb" in vllm
    assert json.loads(str(vllm["--eplb-config"])) == {"num_redundant_experts": 8}, "17 copies fill 24 places of 8 ranks"
    (sglang,) = commands(sglang_command(plan, TARGET))
    assert {"--enable-two-batch-overlap", "--enable-eplb"} <= sglang.keys()
    assert sglang["--ep-num-redundant-experts"] == "8"
    assert "which experts have replicas: the engine chooses" in comments(vllm_command(plan, TARGET))
    more = colocated(report, EP8, micro_batches=3)
    assert "3 micro-batches at once: the engine overlaps two" in comments(vllm_command(more, TARGET))


def test_nothing_is_asked_for_that_the_plan_does_not_have(report: Report) -> None:
    plan = colocated(report, EP8, placement=LINEAR)
    asked = commands(vllm_command(plan, TARGET))[0].keys() | commands(sglang_command(plan, TARGET))[0].keys()
    assert not {"--enable-dbo", "--enable-eplb", "--enable-two-batch-overlap"} & asked
    skewed = replace(TARGET, workload=replace(EVEN, expert_loads=(0.3, *[0.7 / 15] * 15)))
    (vllm,) = commands(vllm_command(plan, skewed))
    assert json.loads(str(vllm["--eplb-config"])) == {"num_redundant_experts": 0}
    (sglang,) = commands(sglang_command(plan, skewed))
    assert "--enable-eplb" in sglang
    assert "--ep-num-redundant-experts" not in sglang
    uneven = colocated(report, replace(EP8, attention_dp=3, expert_ep=6), placement=LINEAR)
    (vllm,) = commands(vllm_command(uneven, TARGET))
    assert json.loads(str(vllm["--eplb-config"])) == {"num_redundant_experts": 2}, "16 experts on 6 ranks, 3 each"
    staged = colocated(report, replace(EP8, pp=2), micro_batches=2)
    assert "--enable-dbo" not in commands(vllm_command(staged, TARGET))[0]


def test_who_sends_rows_depends_on_the_device(report: Report) -> None:
    for cluster, device, vllm_name, sglang_name in (
        ("mix-ascend", "910B", None, None),
        ("msi-hetero", "H20", "deepep_low_latency", "deepep"),
    ):
        target = replace(TARGET, cluster=load_cluster(cluster))
        use = next(group.device.name for group in target.cluster.groups if device in group.device.name)
        plan = colocated(report, EP8, devices=(DeviceUse(role="both", device=use, num_devices=8),))
        assert commands(vllm_command(plan, target))[0].get("--all2all-backend") == vllm_name
        assert commands(sglang_command(plan, target))[0].get("--moe-a2a-backend") == sglang_name


def test_the_order_of_ranks_is_told_where_it_costs(report: Report) -> None:
    """Two stages of eight devices on two nodes: SGLang keeps a stage on a node, vLLM a copy."""
    plan = colocated(report, replace(EP8, pp=2))
    assert "its experts exchange rows between nodes" in comments(vllm_command(plan, TARGET))
    assert "between nodes" not in comments(sglang_command(plan, TARGET))
    small = colocated(report, Parallel(attention_dp=4, expert_ep=4, pp=2))
    assert "between nodes" not in comments(vllm_command(small, TARGET))


def test_copies_wider_than_a_node_span_nodes(report: Report) -> None:
    plan = colocated(report, Parallel(attention_tp=8, attention_dp=2, expert_ep=16, pp=2))
    text = vllm_command(plan, TARGET)
    assert "VLLM_RAY_DP_PACK_STRATEGY=span vllm serve" in text
    assert commands(text)[0]["--data-parallel-backend"] == "ray"


@pytest.mark.parametrize("phase", ["prefill", "decode"])
def test_every_flag_is_one_the_release_takes(report: Report, phase: str) -> None:
    """Switches without a value, values that are among the choices."""
    sizes = [(1, 1, 1), (2, 4, 1), (8, 2, 1), (2, 4, 2), (3, 5, 1), (8, 1, 2), (1, 32, 1)]
    formats = [PrecisionSpec(), PrecisionSpec(weights="fp8", kv="fp8", compute="fp8"), PrecisionSpec(weights="int4")]
    for (tp, dp, pp), micro_batches, precision in itertools.product(sizes, (1, 2), formats):
        parallel = Parallel(attention_tp=tp, attention_dp=dp, expert_ep=tp * dp, pp=pp)
        placement = tuple((((expert + 1) % (tp * dp), 1.0),) for expert in range(16))
        made = colocated(report, parallel, micro_batches=micro_batches, placement=placement).phases["decode"]
        other = "decode" if phase == "prefill" else "prefill"
        for phases in ({phase: made}, {phase: made, other: report.plan.phases[other]}):
            plan = replace(report.plan, phases=phases)  # type: ignore[arg-type]
            target = replace(TARGET, precision=precision, workload=replace(EVEN, expert_loads=(0.5, 0.25, 0.25)))
            for engine, text in (("vllm", vllm_command(plan, target)), ("sglang", sglang_command(plan, target))):
                for command in commands(text):
                    check_flags(engine, command)


def test_the_command_says_for_which_release_it_is(report: Report) -> None:
    plan = decode_only(report)
    for engine, text in (("vllm", vllm_command(plan, TARGET)), ("sglang", sglang_command(plan, TARGET))):
        said = text.split(":")[0].split()[-1]
        assert RELEASES[engine]["version"].startswith(said)


def check_flags(engine: str, command: dict[str, str | None]) -> None:
    for name, value in command.items():
        if not name.startswith("--"):
            continue
        takes = RELEASES[engine]["flags"][name]
        if takes == "switch":
            assert value is None, name
        elif takes == "value":
            assert value, name
        else:
            assert value in takes, name


@pytest.mark.parametrize(
    ("num_ranks", "normal", "low_latency"),
    [(2, True, True), (3, False, True), (8, True, True), (12, False, False), (16, True, True), (24, False, True)],
)
def test_deepep_is_built_for_some_numbers_of_ranks(num_ranks: int, normal: bool, low_latency: bool) -> None:
    assert takes_ranks(num_ranks, is_low_latency=False) is normal
    assert takes_ranks(num_ranks, is_low_latency=True) is low_latency


def test_low_latency_kernels_are_built_for_some_hidden_sizes() -> None:
    sizes = {"num_experts": 128, "room_bytes": 8e9}
    assert why_no_low_latency(64, hidden_size=4096, **sizes) == ""
    assert "none for rows of 2,880 elements" in why_no_low_latency(64, hidden_size=2880, **sizes)

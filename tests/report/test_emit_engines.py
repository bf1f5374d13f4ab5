"""Settings for engines that run attention and experts together: the right candidate, its sizes, what is lost."""

import re
import shlex
from dataclasses import replace

import pytest

from antiphon.base.errors import ResourceError
from antiphon.report.colocated import Target, nearest_colocated
from antiphon.report.contents import Report
from antiphon.report.emit_engines import sglang_command, vllm_command
from antiphon.specs.plan import Layout, Parallel, PhasePlan, Plan, Predicted, Rejected
from antiphon.specs.precision import PrecisionSpec
from antiphon.specs.workload import SloSpec

TARGET = Target(
    model="mistralai/Mixtral-8x22B",
    precision=PrecisionSpec(),
    slo=SloSpec(tpot_s=0.15),
    memory_reserve=0.1,
    devices_per_node=8,
)


def colocated(report: Report, parallel: Parallel, batch: int = 640, layout: Layout = "hybrid") -> Plan:
    """The report's plan with a decode phase that is colocated in these sizes."""
    decode = replace(report.plan.phases["decode"], layout=layout, parallel=parallel, batch=batch, placement=())
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
    nearest = nearest_colocated(report.plan, TARGET.slo)
    assert nearest.layout == "hybrid"
    assert nearest.why_not == ""
    assert nearest.requests_per_rank == 160
    assert nearest.devices_per_stage == 8


def test_one_that_keeps_the_target_comes_before_a_faster_one(report: Report) -> None:
    decode = report.plan.phases["decode"]
    fast = replace(decode.rejected[0], predicted=Predicted(tpot_s=0.4, per_gpu=95.0, per_cost=60.0))
    plan = replace(report.plan, phases={"decode": replace(decode, rejected=(fast, *decode.rejected[1:]))})
    assert nearest_colocated(plan, TARGET.slo).layout == "tp_pp"
    only_fast = replace(report.plan, phases={"decode": replace(decode, rejected=(fast,))})
    nearest = nearest_colocated(only_fast, TARGET.slo)
    assert nearest.why_not == "a token takes 400 ms, the target is 150 ms"
    assert "#   - a promise: a token takes 400 ms, the target is 150 ms" in vllm_command(only_fast, TARGET)


def test_nothing_colocated_runs(report: Report) -> None:
    decode = replace(report.plan.phases["decode"], rejected=(Rejected(layout="dp_ep", reason="12 GB are missing"),))
    plan = replace(report.plan, phases={"decode": decode})
    with pytest.raises(ResourceError, match=r"no colocated layout of mixtral-8x22b runs .*DP \+ EP: 12 GB are missing"):
        nearest_colocated(plan, TARGET.slo)


def test_vllm_on_one_node(report: Report) -> None:
    text = vllm_command(report.plan, TARGET)
    assert commands(text) == [
        {
            "vllm": None,
            "serve": None,
            "mistralai/Mixtral-8x22B": None,
            "--tensor-parallel-size": "2",
            "--data-parallel-size": "4",
            "--enable-expert-parallel": None,
            "--max-num-seqs": "160",
            "--gpu-memory-utilization": "0.90",
            "--kv-cache-dtype": "auto",
            "--dtype": "bfloat16",
        }
    ]
    assert "#   - attention and experts apart: 16 attention workers, 8 expert workers" in text
    assert "#   - a kind of device for each: 16 × H20 attention, 8 × L40S experts" in text
    assert "#   - 2 micro-batches in turn" in text
    assert "#   - the plan's placement: 1 expert with replicas" in text
    assert "-29% tokens/s per unit of price" in text


def test_sglang_on_one_node(report: Report) -> None:
    (options,) = commands(sglang_command(report.plan, TARGET))
    assert options == {
        "python": None,
        "-m": None,
        "sglang.launch_server": None,
        "--model-path": "mistralai/Mixtral-8x22B",
        "--tp-size": "8",
        "--dp-size": "4",
        "--enable-dp-attention": None,
        "--ep-size": "8",
        "--max-running-requests": "640",
        "--mem-fraction-static": "0.90",
        "--kv-cache-dtype": "auto",
        "--dtype": "bfloat16",
    }


def test_formats(report: Report) -> None:
    fp8 = replace(TARGET, precision=PrecisionSpec(weights="fp8", kv="fp8", dispatch="fp8", compute="fp8"))
    (vllm,) = commands(vllm_command(report.plan, fp8))
    assert (vllm["--kv-cache-dtype"], vllm["--quantization"]) == ("fp8", "fp8")
    assert "--dtype" not in vllm
    text = sglang_command(report.plan, fp8)
    assert commands(text)[0]["--kv-cache-dtype"] == "fp8_e4m3"
    assert "#   - rows sent as fp8 and back as bfloat16: SGLang's exchange decides" in comments(text)
    int4 = replace(TARGET, precision=PrecisionSpec(weights="int4"))
    (vllm,) = commands(vllm_command(report.plan, int4))
    assert not {"--quantization", "--dtype"} & vllm.keys()
    assert "int4 weights: give vLLM a checkpoint that is quantised already" in vllm_command(report.plan, int4)


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
    assert (sglang["--tp-size"], sglang["--dp-size"], sglang["--nnodes"]) == ("15", "5", "2")


def test_sizes_vllm_cannot_express_are_said(report: Report) -> None:
    plan = colocated(report, Parallel(attention_tp=4, attention_dp=2, expert_ep=4, expert_tp=2))
    assert "#   - experts in EP 4 x TP 2: vLLM splits them over all 8 ranks as whole experts" in vllm_command(
        plan, TARGET
    )
    assert commands(sglang_command(plan, TARGET))[0]["--ep-size"] == "4"


def test_a_plan_of_prefill_alone(report: Report) -> None:
    prefill: PhasePlan = report.plan.phases["prefill"]
    text = vllm_command(replace(report.plan, phases={"prefill": prefill}), TARGET)
    assert "prefill, workload msi-production" in text
    assert "400 ms to the first token" in text

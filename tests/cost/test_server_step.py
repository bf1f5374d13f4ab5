"""One function prices a step of a server, for the planner's search and for the servers that others measured."""

from dataclasses import replace

import numpy as np
import pytest

from antiphon.cost.engine_step import load_engine, num_small_kernels, server_load
from antiphon.cost.exchange import Degrees
from antiphon.models.planned import load_planned_model
from antiphon.planner.candidates import candidates_of
from antiphon.planner.search import SearchLimits, settings_of
from antiphon.planner.step_times import step_times
from antiphon.specs.catalog import shipped_file
from antiphon.specs.cluster import load_cluster
from antiphon.specs.model import PrecisionSpec
from antiphon.specs.plan import LAYOUTS
from antiphon.specs.workload import LengthSpec, WorkloadSpec

IN_FLIGHT, PROMPT, OUTPUT = 24, 1000, 200


@pytest.mark.parametrize("model_name", ["mixtral-8x22b", "deepseek-v3", "qwen3.5-397b-a17b"])
@pytest.mark.parametrize("expert_ep", [1, 8])
def test_search_and_measured_servers_have_one_price(model_name: str, expert_ep: int) -> None:
    """The search's decode step of a TP 8 server is that of an engine whose constants are the cluster's efficiencies."""
    model, precision = load_planned_model(shipped_file("model", model_name), ()).spec, PrecisionSpec()
    cluster = load_cluster("one-h100-server")
    efficiency = replace(cluster.efficiency, layer_overhead_s=0.0)
    cluster = replace(cluster, efficiency=efficiency)
    workload = WorkloadSpec(
        name="equal",
        input_tokens=LengthSpec(median=PROMPT, sigma=0.0),
        output_tokens=LengthSpec(median=OUTPUT, sigma=0.0),
    )
    setting = settings_of(
        model, cluster, workload, phases=("decode",), precision=precision, limits=SearchLimits(overlapped=False)
    )["decode"]
    one = candidates_of(
        layout=LAYOUTS.index("dp_ep" if expert_ep > 1 else "tp_pp"),
        attention_tp=8,
        attention_dp=1,
        expert_tp=8 // expert_ep,
        expert_ep=expert_ep,
        slots=-(-model.router.num_experts // expert_ep),
        pp=1,
        micro_batches=1,
        piece_devices=8,
        batch=IN_FLIGHT,
    )
    factors = dict.fromkeys(("dense", "experts", "wire", "prompt"), 1.0)
    engine = replace(
        load_engine("vllm"),
        step_s=0.0,
        sequence_s=0.0,
        kernel_s=efficiency.kernel_s,
        collective_s=efficiency.collective_s,
        **factors,
    )
    load = server_load(
        model,
        cluster,
        Degrees(attention_tp=8, attention_dp=1, expert_tp=8 // expert_ep, expert_ep=expert_ep),
        precision,
        in_flight=np.array([float(IN_FLIGHT)]),
        prompt=np.array([float(PROMPT)]),
        output=np.array([float(OUTPUT)]),
        decodes_only=True,
    )
    beside = num_small_kernels(model, precision) * efficiency.kernel_s
    beside += efficiency.collective_s * (model.attention.qk_norm == "full")  # sums that engines alone count
    expected_s = float(load.tpot_s(engine)[0]) - model.num_layers * beside
    assert float(step_times(setting, one).step_s[0]) == pytest.approx(expected_s, rel=1e-6)

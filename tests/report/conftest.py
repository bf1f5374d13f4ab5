"""One report with every kind of content, small enough to check by eye: two phases, four layouts, two devices."""

from dataclasses import replace

import pytest

from antiphon.cost.roofline import Parts
from antiphon.models.config import load_model_spec
from antiphon.report.gather import (
    MemoryUse,
    PhaseContents,
    Points,
    Report,
    Sensitivity,
)
from antiphon.sim.gantt import Bar
from antiphon.specs.catalog import shipped_file
from antiphon.specs.cluster import load_cluster
from antiphon.specs.model import PrecisionSpec
from antiphon.specs.plan import LAYOUTS, DeviceUse, Parallel, PhasePlan, Plan, Predicted, Rejected
from antiphon.specs.workload import load_workload

SEPARATE = (
    DeviceUse(role="attention", device="H20", num_devices=16),
    DeviceUse(role="experts", device="L40S", num_devices=8),
)
TOGETHER = (DeviceUse(role="both", device="H20", num_devices=16),)


def predicted(tpot_s: float | None, ttft_s: float | None, per_gpu: float) -> Predicted:
    return Predicted(
        tpot_s=tpot_s,
        ttft_s=ttft_s,
        tokens_per_s=per_gpu * 24,
        per_gpu=per_gpu,
        per_cost=per_gpu / 1.6,
        per_power=per_gpu / 380,
        t_a_s=210e-6,
        t_e_s=190e-6,
        t_c_s=60e-6,
        memory_bytes={"attention": 81e9, "experts": 40e9},
        bound_by={"attention": "memory bandwidth", "experts": "compute"},
    )


def losers(tpot_s: float | None, ttft_s: float | None) -> tuple[Rejected, ...]:
    sizes = Parallel(attention_tp=2, attention_dp=4, expert_tp=1, expert_ep=8)
    return (
        Rejected(
            layout="hybrid",
            reason="0.71 of the tokens/s per unit of price: expert weights leave room for 40 requests a device",
            parallel=sizes,
            micro_batches=1,
            batch=640,
            devices=TOGETHER,
            predicted=predicted(tpot_s, ttft_s, 71.0),
        ),
        Rejected(
            layout="tp_pp",
            reason="0.42 of the tokens/s per unit of price: each stage reads all its experts for every micro-batch",
            parallel=Parallel(attention_tp=8, expert_tp=8, pp=2),
            micro_batches=2,
            batch=256,
            devices=TOGETHER,
            predicted=predicted(tpot_s, ttft_s, 42.0),
        ),
        Rejected(layout="dp_ep", reason="the weights of attention need 12.3 GB more than a device of 48.0 GB has"),
    )


def bars() -> tuple[Bar, ...]:
    """Two micro-batches, two layers, four tracks."""
    result = []
    for layer in range(2):
        for batch in range(2):
            start_s = (2 * layer + batch) * 200e-6
            for offset, track in enumerate(("attention", "to experts", "experts", "to attention")):
                result.append(
                    Bar(
                        track=track,
                        label=f"layer {layer + 1}, micro-batch {batch + 1}",
                        start_s=start_s + offset * 100e-6,
                        end_s=start_s + offset * 100e-6 + (190e-6 if offset % 2 == 0 else 60e-6),
                        layer=layer,
                        micro_batch=batch,
                    )
                )
    return tuple(result)


def points(scale: float) -> tuple[Points, ...]:
    return tuple(
        Points(
            layout=layout,
            latency_s=tuple(scale * (0.03 + 0.02 * step) for step in range(4)),
            scores=tuple((40 - 6 * index) * (1 + step) / 2 for step in range(4)),
            labels=tuple(f"{layout} {step}" for step in range(4)),
        )
        for index, layout in enumerate(LAYOUTS)
    )


def phase_contents(name: str, phase: PhasePlan, scale: float) -> PhaseContents:
    return PhaseContents(
        name="decode" if name == "decode" else "prefill",
        phase=phase,
        tokens_per_request=219.0 if name == "decode" else 941.0,
        fronts=points(scale),
        bars=bars(),
        bars_title="Two layers of the pipeline",
        memory=(
            MemoryUse(
                role="attention",
                device="H20",
                capacity_bytes=96e9,
                weight_bytes=12e9,
                kv_bytes=69e9,
                reserve_bytes=9.6e9,
            ),
            MemoryUse(
                role="experts", device="L40S", capacity_bytes=48e9, weight_bytes=40e9, kv_bytes=0, reserve_bytes=4.8e9
            ),
        ),
        parts={
            "attention": Parts(30e-6, 150e-6, 20e-6, 0.0, 10e-6),
            "experts": Parts(160e-6, 20e-6, 0.0, 0.0, 10e-6),
            "exchange": Parts(0.0, 0.0, 0.0, 50e-6, 10e-6),
        },
        measured_like={"vllm": (0.08, 0.07, 0.1)},
        accounts={phase.layout: {"attention": 1e-3, "waiting": 2e-4}, "tp_pp": {"attention": 2e-3, "waiting": 0.0}},
        conditions=(
            ("eq. 1", "T_a ≈ T_e", "210 µs and 190 µs", "yes"),
            ("eq. 2", "T_c < T_f", "60 µs < 210 µs", "yes"),
            ("eq. 3", "m T_f ≥ 2 (T_f + T_c)", "420 µs ≥ 540 µs", "no"),
        ),
        num_candidates=5000,
        num_feasible=1200,
    )


@pytest.fixture(scope="session")
def report() -> Report:
    decode = PhasePlan(
        layout="disaggregated",
        parallel=Parallel(attention_tp=1, attention_dp=16, expert_tp=1, expert_workers=8),
        num_instances=1,
        micro_batches=2,
        batch=1536,
        devices=SEPARATE,
        placement=(*(((worker, 1.0),) for worker in range(7)), ((0, 0.5), (7, 0.5))),
        predicted=predicted(0.09, None, 100.0),
        rejected=losers(0.11, None),
        notes=("expert 7 is popular: it has two replicas",),
    )
    prefill = replace(
        decode,
        layout="hybrid",
        parallel=Parallel(attention_tp=2, attention_dp=4, expert_tp=1, expert_ep=8),
        devices=TOGETHER,
        predicted=predicted(None, 0.4, 90.0),
        rejected=(
            Rejected(layout="disaggregated", reason="attention computes as long as experts do: nothing is gained"),
            *losers(None, 0.5)[1:],
        ),
        notes=(),
    )
    cluster, workload = load_cluster("msi-hetero"), load_workload("msi-production")
    plan = Plan(
        model="mixtral-8x22b",
        cluster=cluster.name,
        workload=workload.name,
        objective="per-cost",
        phases={"prefill": prefill, "decode": decode},
        model_config={"model_type": "mixtral", "note": "</script><b>not markup</b>"},
        num_candidates=10_000,
        search_s=1.25,
    )
    return Report(
        plan=plan,
        model=load_model_spec(shipped_file("model", "mixtral-8x22b")),
        cluster=cluster,
        workload=workload,
        precision=PrecisionSpec(),
        phases=(phase_contents("prefill", prefill, 10.0), phase_contents("decode", decode, 1.0)),
        sensitivity=(
            Sensitivity(
                title="A tighter or looser target",
                axis="TPOT target (ms)",
                values=(50.0, 100.0, 150.0, 300.0),
                scores={"disaggregated": (20.0, 45.0, 62.5, 80.0), "hybrid": (None, 30.0, 44.0, 60.0)},
                current=150.0,
            ),
        ),
        more_nodes={"decode": [("H20", 2600.0, 1.08)]},
    )

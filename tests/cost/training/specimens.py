"""Training cases for tests: a model of round sizes, and MegaScale-MoE's cluster with its calibration."""

from dataclasses import replace

from antiphon.cost.training.megascale_models import TABLE_2
from antiphon.cost.training.setup import Training
from antiphon.specs.cluster import ClusterSpec, EfficiencySpec, load_cluster
from antiphon.specs.model import ModelSpec
from tests.cost.specimens import ROUND, round_cluster, round_group

# Seven numbers, fitted together to eleven results: Table 3 (MegaScale-MoE's five rows), Table 5, Figure 14's ends and
# Figure 7.
MEGASCALE_EFFICIENCY = EfficiencySpec(
    gemm=0.42,
    attention=0.5,
    memory=0.8,
    scale_up=0.75,
    scale_up_half_bytes=1.5e6,
    layer_overhead_s=400e-6,
    overlap=0.7,
    source="test: fitted to MegaScale-MoE Tables 3 and 5, Figures 7 and 14 together",
)


def megascale_cluster(name: str = "msm-h800") -> ClusterSpec:
    return replace(load_cluster(name), efficiency=MEGASCALE_EFFICIENCY)


def small_model(num_layers: int = 4, **changes: object) -> ModelSpec:
    """8 heads of 16, 2 key/value heads, hidden 128, 8 experts of width 256, top 2."""
    row = replace(
        TABLE_2["Mixtral-8x7B"],
        hidden_size=128,
        num_heads=8,
        heads_per_kv_head=4,
        expert_width=256,
        num_layers=num_layers,
    )
    return replace(row, **changes).model()


def round_training(model: ModelSpec | None = None, *, batch: int = 8, nodes: int = 3, **cluster: object) -> Training:
    """`model` on nodes of 4 devices of 1 TFLOP/s, 1 GB/s and 1 GB each."""
    group = round_group(device=replace(ROUND, memory_bytes=10**9), num_nodes=nodes)
    return Training(
        model=small_model() if model is None else model,
        cluster=round_cluster(groups=(group,), **cluster),
        group=group,
        sequence_length=64,
        batch=batch,
    )

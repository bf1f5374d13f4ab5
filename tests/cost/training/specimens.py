"""Training cases for tests: a model of round sizes, and MegaScale-MoE's cluster with its calibration."""

from dataclasses import replace

from antiphon.cost.curves import Curve, Surface
from antiphon.cost.profile import MachineFacts, Profile, SumName, TrainingLayer, TrainingSum, TrainingTables
from antiphon.cost.training.setup import Training
from antiphon.reproduce.msm_models import TABLE_2
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
    exchange_s=10e-6,
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


WAYS: tuple[tuple[str, str, str], ...] = (
    ("sequence", "expert", "all_to_all"),
    ("sequence", "expert", "all_gather"),
    ("sequence", "tensor", "all_gather"),
    ("tensor", "expert", "all_to_all"),
    ("tensor", "expert", "all_gather"),
    ("tensor", "tensor", "all_gather"),
)


def training_tables(sequence_length: int = 64, cores: int = 2) -> TrainingTables:
    """Of a machine with `cores` cores: a token takes a layer 1 ms forward and 2 backward, the head 0.5 ms, a parameter
    1 ns, a byte of a sum 1 ns; ranks beyond the cores share them."""
    tokens, sizes = (float(sequence_length), 8.0 * sequence_length), (1e3, 1e9)

    def over(ranks: tuple[int, ...], per_unit_s: float, units: tuple[float, ...] = tokens) -> Surface:
        shares = (max(1.0, count / cores) for count in ranks)
        seconds = tuple(tuple(share * per_unit_s * unit for unit in units) for share in shares)
        return Surface(tuple(map(float, ranks)), units, seconds)

    def layer(way: tuple[str, str, str], degree: int, kind: str) -> TrainingLayer:
        ranks = tuple(count for count in (1, 2, 4) if count % degree == 0)
        return TrainingLayer(
            attention=way[0],  # type: ignore[arg-type]
            experts=way[1],  # type: ignore[arg-type]
            dispatch=way[2],  # type: ignore[arg-type]
            layer=kind,  # type: ignore[arg-type]
            model_parallel=degree,
            forward=over(ranks, 1e-3 / degree),
            backward=over(ranks, 2e-3 / degree),
            waiting=over(ranks, 0.1e-3 if degree > 1 else 0.0),
        )

    ways = [(WAYS[0], 1), *((way, degree) for degree in (2, 4) for way in WAYS)]
    alone = (1.0, 2.0, 4.0)
    names: tuple[SumName, ...] = ("all_reduce", "reduce_scatter", "all_gather")
    return TrainingTables(
        dtype="float32",
        flops_per_s=1e11,
        sequence_length=sequence_length,
        ranks=(1, 2, 4),
        layers=tuple(layer(way, degree, kind) for way, degree in ways for kind in ("moe", "dense")),
        head=over((1, 2, 4), 0.5e-3),
        update={name: Curve(alone, (1e-9, 1e-9, 2e-9)) for name in ("adamw", "muon")},
        step=Curve(alone, (1e-3, 1e-3, 2e-3)),
        sums=tuple(
            TrainingSum(name=name, degree=degree, times=over(tuple(range(degree, 5, degree)), 1e-9, sizes))
            for degree in (2, 4)
            for name in names
        ),
        message=Curve(sizes, tuple(1e-9 * size for size in sizes)),
    )


def training_profile(sequence_length: int = 64, cores: int = 2) -> Profile:
    return Profile(
        command="antiphon profile --phase train model",
        created="2026-11-24",
        machine=MachineFacts(name="box", num_cores=cores, memory_bytes=10**10),
        model="model",
        dtype="float32",
        attention=(),
        experts=(),
        training=training_tables(sequence_length, cores),
    )

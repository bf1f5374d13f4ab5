"""MegaScale-MoE's training speed by the cost model: Table 3, the ladder of Table 5, Figures 7, 12 and 13.

Table 3's MegaScale-MoE times, Table 5 and Figure 7 chose the calibration of the H800 cluster; the rest are checks of
it.
"""

from functools import partial

from antiphon.cost.network import network
from antiphon.cost.training.dispatch import crossover_top_k
from antiphon.cost.training.megascale_models import NODE_DEVICES, SEQUENCE_LENGTH, TABLE_2, TABLE_3, TABLE_5
from antiphon.reproduce import shipped
from antiphon.reproduce.claim import Claim, ClaimMaker
from antiphon.reproduce.msm_cases import (
    H800,
    Variant,
    number,
    step_352b,
    step_one_node,
)

MODELLED, GAIN, LEVEL = 0.2, 0.1, 0.15
SPEEDUPS = {240: 1.81, 480: 1.65, 720: 1.72, 960: 1.77, 1440: 1.88}
MEGATRON_REASON = (
    "Our 'Megatron-LM' is tensor parallelism without overlap, with the same kernels as MegaScale-MoE's: the baseline "
    "of Table 5, where MegaScale-MoE gains 1.28, not 1.81. The factor of about 1.4 between that baseline and "
    "Megatron-LM (27.7 s against 39.9 s at 240 GPUs) is its implementation (section 3.2: scatter_add and gather, "
    "section 4: autograd's order of operators), which a cost model of layouts does not contain."
)
_claim = ClaimMaker(paper="MSM", kind="modelled", cluster=H800)
FIGURE_13 = {"H800": H800, "A100": "msm-a100", "H20": "msm-h20"}


def claims() -> tuple[Claim, ...]:
    return (
        *_figure_7(),
        *_table_3(),
        *_table_5(),
        *_scaling(),
    )


def _figure_7() -> tuple[Claim, ...]:
    return (
        _claim(
            "fig7-crossover",
            "Figure 7, section 3.2",
            "Mixtral-8x7B, n = 8: largest top-k for which all-to-all is faster than all-gather",
            6.0,
            _crossover,
            unit="top-k",
            note="chose the calibration",
        ),
    )


def _crossover() -> float:
    cluster, hidden = shipped.cluster(H800), TABLE_2["Mixtral-8x7B"].hidden_size
    return float(crossover_top_k(network(cluster, cluster.groups[0]), SEQUENCE_LENGTH, 2.0 * hidden, NODE_DEVICES))


def _table_3() -> tuple[Claim, ...]:
    found = []
    variants: tuple[tuple[str, Variant], ...] = (("megascale", "megascale"), ("megatron", "tp_tp"))
    for system, variant in variants:
        lines = TABLE_3["megascale"] if system == "megascale" else TABLE_3["megatron"]
        for line in lines:
            found.append(
                _claim(
                    f"table3-{system}-{line.num_devices}-model",
                    "Table 3",
                    f"{system}, {line.num_devices} GPUs: throughput",
                    line.printed_tokens_per_s,
                    partial(_rate, variant, line.num_devices),
                    LEVEL,
                    unit="tokens/s",
                    reason=MEGATRON_REASON if system == "megatron" else "",
                    note="chose the calibration" if system == "megascale" else "",
                )
            )
    found += [
        _claim(
            f"table3-speedup-{num_devices}",
            "Table 3",
            f"MegaScale-MoE over Megatron-LM, {num_devices} GPUs",
            theirs,
            partial(_over, "megascale", "tp_tp", num_devices),
            LEVEL,
            reason=MEGATRON_REASON,
        )
        for num_devices, theirs in SPEEDUPS.items()
    ]
    found += [
        _claim(
            f"mfu-{num_devices}-model",
            "section 6.1",
            f"MegaScale-MoE's MFU, {num_devices} GPUs",
            theirs,
            partial(_mfu, num_devices),
            LEVEL,
        )
        for num_devices, theirs in ((240, 0.3248), (1440, 0.2789))
    ]
    return tuple(found)


def _over(better: Variant, worse: Variant, num_devices: int) -> float:
    return number(step_352b(better, num_devices).tokens_per_s) / number(step_352b(worse, num_devices).tokens_per_s)


def _rate(variant: Variant, num_devices: int) -> float:
    return number(step_352b(variant, num_devices).tokens_per_s)


def _mfu(num_devices: int) -> float:
    return number(step_352b("megascale", num_devices).mfu)


def _table_5() -> tuple[Claim, ...]:
    steps: tuple[tuple[Variant, str], ...] = (
        ("sp_ep", "SP for attention, EP for experts"),
        ("inter", "that and inter-operator overlap"),
        ("intra", "that and intra-operator overlap"),
    )
    ladder = tuple(
        _claim(
            f"table5-{variant.replace('_', '-')}",
            "Table 5",
            f"352B, 240 GPUs, over TP + TP: {what}",
            theirs,
            partial(_over, variant, "tp_tp", 240),
            GAIN,
            note="chose the calibration",
        )
        for (variant, what), theirs in zip(steps, TABLE_5[1:], strict=True)
    )
    return (
        *ladder,
        _claim(
            "table5-order",
            "Table 5",
            "each step gains",
            "TP+TP < SP+EP < inter < intra",
            _ladder_order,
        ),
    )


def _ladder_order() -> str:
    names: dict[Variant, str] = {"tp_tp": "TP+TP", "sp_ep": "SP+EP", "inter": "inter", "intra": "intra"}
    return " < ".join(names[one] for one in sorted(names, key=lambda one: number(step_352b(one, 240).tokens_per_s)))


def _scaling() -> tuple[Claim, ...]:
    return (
        _claim(
            "fig12-weak-megascale",
            "Figure 12, section 6.1",
            "MegaScale-MoE, 480 to 1440 GPUs with batch 360 to 1080: throughput per GPU kept",
            1 - 0.002,
            lambda: _kept("megascale"),
            0.02,
        ),
        _claim(
            "fig12-weak-megatron",
            "Figure 12, section 6.1",
            "Megatron-LM, the same",
            1 - 0.0274,
            lambda: _kept("tp_tp"),
            0.02,
        ),
        _claim(
            "communication-share",
            "section 1",
            "share of communication in training an internal model",
            0.32,
            lambda: number(step_352b("tp_tp", 240).communication_s) / number(step_352b("tp_tp", 240).iteration_s),
            0.25,
            reason="Which model, which layout and how many GPUs is not stated. Ours is the 352B model under TP + TP, "
            "where Table 5 leaves at most 22% for communication (1 - 1/1.28, all of it hidden); 32% must be of "
            "another setup.",
        ),
        _claim(
            "fig13-mfu-order",
            "Figure 13, section 6.1",
            "Mixtral-8x7B on 32 GPUs: MFU falls as compute grows",
            "H20 > A100 > H800",
            _figure_13_order,
            cluster="msm-h800, msm-a100, msm-h20",
        ),
        _claim(
            "fig13-speedup",
            "Figure 13, section 6.1",
            "largest gain in MFU over Megatron-LM of H800, A100, H20",
            1.58,
            lambda: max(_figure_13(name, "megascale") / _figure_13(name, "tp_tp") for name in FIGURE_13),
            LEVEL,
            cluster="msm-h800, msm-a100, msm-h20",
        ),
    )


def _figure_13(device: str, variant: Variant) -> float:
    return number(step_one_node("Mixtral-8x7B", variant, FIGURE_13[device], 4, 128).mfu)


def _figure_13_order() -> str:
    return " > ".join(sorted(FIGURE_13, key=lambda name: -_figure_13(name, "megascale")))


def _kept(variant: Variant) -> float:
    first, last = (number(step_352b(variant, n, batch).tokens_per_s) / n for n, batch in ((480, 360), (1440, 1080)))
    return last / first

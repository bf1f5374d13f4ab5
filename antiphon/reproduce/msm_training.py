"""MegaScale-MoE's training speed by the cost model: Table 3, the ladder of Table 5, Figures 7, 12 and 13.

Table 3's MegaScale-MoE times, Table 5 and Figure 7 chose the calibration of the H800 cluster; the rest are checks of
it.
"""

from antiphon.cost.network import network
from antiphon.cost.training.dispatch import crossover_top_k
from antiphon.cost.training.megascale_models import NODE_DEVICES, SEQUENCE_LENGTH, TABLE_2
from antiphon.reproduce import shipped
from antiphon.reproduce.msm_cases import (
    H800,
    Variant,
    number,
    step_352b,
    step_one_node,
)

FIGURE_13 = {"H800": H800, "A100": "msm-a100", "H20": "msm-h20"}


def _crossover() -> float:
    cluster, hidden = shipped.cluster(H800), TABLE_2["Mixtral-8x7B"].hidden_size
    return float(crossover_top_k(network(cluster, cluster.groups[0]), SEQUENCE_LENGTH, 2.0 * hidden, NODE_DEVICES))


def _over(better: Variant, worse: Variant, num_devices: int) -> float:
    return number(step_352b(better, num_devices).tokens_per_s) / number(step_352b(worse, num_devices).tokens_per_s)


def _rate(variant: Variant, num_devices: int) -> float:
    return number(step_352b(variant, num_devices).tokens_per_s)


def _mfu(num_devices: int) -> float:
    return number(step_352b("megascale", num_devices).mfu)


def _ladder_order() -> str:
    names: dict[Variant, str] = {"tp_tp": "TP+TP", "sp_ep": "SP+EP", "inter": "inter", "intra": "intra"}
    return " < ".join(names[one] for one in sorted(names, key=lambda one: number(step_352b(one, 240).tokens_per_s)))


def _figure_13(device: str, variant: Variant) -> float:
    return number(step_one_node("Mixtral-8x7B", variant, FIGURE_13[device], 4, 128).mfu)


def _figure_13_order() -> str:
    return " > ".join(sorted(FIGURE_13, key=lambda name: -_figure_13(name, "megascale")))


def _kept(variant: Variant) -> float:
    first, last = (number(step_352b(variant, n, batch).tokens_per_s) / n for n, batch in ((480, 360), (1440, 1080)))
    return last / first


OURS = {
    "crossover": _crossover,
    "throughput": _rate,
    "over": _over,
    "MFU": _mfu,
    "ladder": _ladder_order,
    "kept": _kept,
    "communication": lambda *case: number(step_352b(*case).communication_s) / number(step_352b(*case).iteration_s),
    "order of MFU": _figure_13_order,
    "largest gain in MFU": lambda: max(_figure_13(name, "megascale") / _figure_13(name, "tp_tp") for name in FIGURE_13),
}

"""MegaScale-MoE's Figure 16: what fusing each of a layer's four exchanges with its product gains in the forward
pass."""

from functools import cache

from antiphon.cost.network import network
from antiphon.cost.roofline import roofs
from antiphon.cost.training.layer_case import LayerCase
from antiphon.cost.training.megascale_models import SEQUENCE_LENGTH, TABLE_2
from antiphon.cost.training.operators import layer_operators
from antiphon.cost.training.overlap import fused_speedup
from antiphon.reproduce import shipped
from antiphon.reproduce.msm_cases import H800, SETUPS, number, setup_of_one_node


@cache
def pair_speedups() -> tuple[float, ...]:
    """All pairs of all models: time one after the other over time fused."""
    cluster = shipped.cluster(H800)
    group, efficiency = cluster.groups[0], cluster.efficiency
    found = []
    for row in TABLE_2.values():
        case = LayerCase(
            model=row.model(),
            setup=setup_of_one_node(SETUPS["intra"], data_parallel=1),
            roofs=roofs(group.device, efficiency),
            network=network(cluster, group),
            sequence_length=SEQUENCE_LENGTH,
        )
        operators = layer_operators(case)
        for item in operators.communications.values():
            product = operators.products[item.fuses_with].forward
            speedup = fused_speedup(number(item.time.total_s), number(product.total_s), efficiency.overlap)
            found.append(number(speedup))
    return tuple(found)

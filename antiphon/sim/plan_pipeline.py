"""A planned disaggregated phase as a ping-pong pipeline, with or without chance in its times.

A plan predicts T_a, T_e and T_c for one micro-batch and layer; here they become times of workers and links. T_c
occupies a link, as in `antiphon.cost.ping_pong`, so that without chance the simulated iteration equals the planned one.
`variation` multiplies every worker's and cell's computation by a log-normal factor of mean 1: what barriers then cost
is not in the plan's formula. Rejected: normal factors, which can be negative.
"""

import numpy as np

from antiphon.base.errors import UserError
from antiphon.sim.destinations import Floats
from antiphon.sim.ping_pong import PingPong
from antiphon.specs.plan import PhasePlan


def plan_pipeline(phase: PhasePlan, num_layers: int, *, variation: float = 0.0, seed: int = 0) -> PingPong:
    """One iteration of one instance. `variation`: coefficient of variation of computation; same seed, same times."""
    times = (phase.predicted.t_a_s, phase.predicted.t_e_s, phase.predicted.t_c_s)
    if phase.layout != "disaggregated" or None in times:
        raise UserError(
            f"a {phase.layout} phase with times {times} has no ping-pong pipeline: "
            "give a disaggregated phase with t_a_s, t_e_s and t_c_s predicted"
        )
    t_a_s, t_e_s, t_c_s = (float(time) for time in times if time is not None)
    num_attention, num_experts = phase.parallel.attention_dp, phase.parallel.expert_workers
    random = np.random.default_rng(seed)
    shape = (num_layers, phase.micro_batches)
    return PingPong(
        num_layers=num_layers,
        num_micro_batches=phase.micro_batches,
        num_attention_workers=num_attention,
        num_expert_workers=num_experts,
        attention_s=t_a_s * chance_factors((*shape, num_attention), variation, random),
        experts_s=t_e_s * chance_factors((*shape, num_experts), variation, random),
        attention_send_s=t_c_s,
        experts_receive_s=t_c_s,
        experts_send_s=t_c_s,
        attention_receive_s=t_c_s,
    )


def chance_factors(shape: tuple[int, ...], variation: float, random: np.random.Generator) -> Floats:
    """Independent log-normal factors of mean 1 and the given coefficient of variation; ones if that is 0."""
    if not 0 <= variation < float("inf"):
        raise UserError(f"a coefficient of variation of {variation}: give a number, zero or more")
    if variation == 0:
        return np.ones(shape)
    variance = np.log1p(variation**2)
    factors: Floats = random.lognormal(-variance / 2, np.sqrt(variance), shape)
    return factors

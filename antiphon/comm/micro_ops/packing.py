"""How many experts to pack on a device so that expert computation fills the time of all-to-all (Lina section 4.2).

Start with one expert per device and double, as long as the FFN micro-op is shorter than the all-to-all micro-op: more
experts on a device means fewer devices per all-to-all, so less is sent and more is computed between two sends. Stop
when computation is no longer shorter, when a device would hold all experts (no all-to-all is left), or at the memory
limit. Rejected: searching all divisors; each step costs a re-distribution of expert weights and a few measured steps.
"""

from collections.abc import Callable
from dataclasses import dataclass

from antiphon.base.errors import UserError


@dataclass(frozen=True, kw_only=True, slots=True)
class PackingStep:
    """One packing that was tried, with the times of one micro-op of each kind."""

    experts_per_device: int
    ffn_s: float
    all_to_all_s: float


def choose_experts_per_device(
    measure: Callable[[int], tuple[float, float]], num_experts: int, max_experts_per_device: int | None = None
) -> list[PackingStep]:
    """Try 1, 2, 4, ... experts per device; the last step is the choice.

    `measure(experts_per_device)` -> (seconds of an FFN micro-op, seconds of an all-to-all micro-op). Only numbers that
    divide `num_experts` are tried: a device group must hold each expert equally often.
    """
    limit = num_experts if max_experts_per_device is None else min(num_experts, max_experts_per_device)
    if limit < 1:
        raise UserError(
            f"{num_experts} experts, at most {max_experts_per_device} per device: both must be at least one"
        )
    steps: list[PackingStep] = []
    packed = 1
    while packed <= limit and num_experts % packed == 0:
        ffn_s, all_to_all_s = measure(packed)
        steps.append(PackingStep(experts_per_device=packed, ffn_s=ffn_s, all_to_all_s=all_to_all_s))
        if ffn_s >= all_to_all_s:
            break
        packed *= 2
    return steps

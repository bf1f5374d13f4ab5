"""Steps whose loss or gradient stands out: whether one does, from the steps before it.

A step is a spike if its gradient norm is `norm_ratio` times the median of the last good steps, its loss `loss_rise`
nats above theirs, or one of them is not finite. Medians, because a mean would follow the spike. The first
`LEAST_STEPS` steps of a run have nothing to be compared with.

What was compared with is part of a checkpoint, so that a run that goes on decides as an undisturbed one. Rejected:
standard deviations. Norms of gradients have long tails, and three of them were seen every few hundred steps.
"""

import math
import statistics
from collections.abc import Sequence

from antiphon.base.errors import UserError
from antiphon.train.config_learning import WatchConfig

WINDOW_STEPS, LEAST_STEPS = 50, 20
MOST_IN_A_ROW = 10  # steps left out
MOST_ROLLBACKS = 5  # to one checkpoint
Recent = tuple[tuple[float, float], ...]  # loss and norm of the last good steps


def with_step(recent: Recent, loss: float, norm: float) -> Recent:
    """`recent` and one more good step."""
    return (*recent, (loss, norm))[-WINDOW_STEPS:]


def spike(config: WatchConfig, recent: Sequence[Sequence[float]], loss: float, norm: float) -> str:
    """What stands out of this step, for a message; empty if nothing does."""
    if not math.isfinite(loss) or not math.isfinite(norm):
        return f"loss {loss:g} and gradient norm {norm:g} are not both finite"
    if len(recent) < LEAST_STEPS:
        return ""
    usual_loss, usual_norm = (statistics.median(each) for each in zip(*recent, strict=True))
    found = []
    if config.loss_rise and loss > usual_loss + config.loss_rise:
        found.append(f"loss {loss:.4f} is {loss - usual_loss:.2f} nats above the last steps' {usual_loss:.4f}")
    if config.norm_ratio and norm > usual_norm * config.norm_ratio:
        times = f"{norm / usual_norm:.1f} times" if usual_norm else "above"
        found.append(f"gradient norm {norm:.3g} is {times} the last steps' {usual_norm:.3g}")
    return " and ".join(found)


class SpikeLimit:
    """Counts what was left out, so that a run that only does that ends."""

    def __init__(self) -> None:
        self._in_a_row = 0
        self._rollbacks: dict[int, int] = {}

    def good(self) -> None:
        self._in_a_row = 0

    def skipped(self, step: int, words: str) -> None:
        """`UserError` if too many steps in a row were."""
        self._in_a_row += 1
        if self._in_a_row > MOST_IN_A_ROW:
            raise UserError(
                f"step {step}: {words}; {MOST_IN_A_ROW} steps before it were left out for the same reason: lower "
                "optimizer.learning_rate or optimizer.clip, look at the data, or raise watch.norm_ratio and loss_rise"
            )

    def rolled_back(self, to_step: int, words: str) -> None:
        """`UserError` if the run went back to that step too often."""
        self._rollbacks[to_step] = self._rollbacks.get(to_step, 0) + 1
        if self._rollbacks[to_step] > MOST_ROLLBACKS:
            raise UserError(
                f"{words}; the run went back to step {to_step} {MOST_ROLLBACKS} times: lower optimizer.learning_rate, "
                "look at the data, or go on from an older checkpoint"
            )

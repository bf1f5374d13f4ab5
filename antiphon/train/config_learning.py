"""How a run learns, as frozen data: the optimizer, what is added to the loss, and what is watched."""

from dataclasses import dataclass, field
from typing import Literal

from antiphon.base.errors import UserError
from antiphon.specs.checked import Count, CountFromZero, NotNegative, Positive, Text, checked
from antiphon.train.config_data import BelowOne


@checked("")
@dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """`name` "muon": Muon for matrices, at `muon_scale` times the rate, and AdamW for the rest. The rate rises over
    `warmup_steps`, then follows `schedule`: "cosine" down to `final_rate` of its peak, "wsd" stays and falls linearly
    over the last `decay_part` of the steps, "constant". `clip`: largest norm of the gradient (0: no limit). Norms,
    biases and the router's are not decayed.

    `schedule_steps`: the schedule's own length; behind it the rate stays (0: `steps` of the run's first start).
    `frozen`: patterns of parameters that keep their bits; one that begins with "!" takes out again what those before it
    took. `rates`: factors of the rate by pattern, the last that matches."""

    name: Literal["adamw", "muon"] = "adamw"
    learning_rate: Positive = 1e-3
    muon_scale: Positive = 1.0
    betas: tuple[BelowOne, BelowOne] = (0.9, 0.95)
    eps: Positive = 1e-8
    weight_decay: NotNegative = 0.1
    clip: NotNegative = 1.0
    warmup_steps: CountFromZero = 20
    schedule: Literal["cosine", "wsd", "constant"] = "cosine"
    final_rate: NotNegative = 0.1
    decay_part: NotNegative = 0.2
    schedule_steps: CountFromZero = 0
    frozen: tuple[Text, ...] = ()
    rates: dict[str, NotNegative] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class LossConfig:
    """Weights of what is added to the cross-entropy: `balance` of the experts' use, over each "layer" (Switch
    Transformer, eq. 4) or over the whole "model" (as transformers has it); `device_balance` of `device_groups` groups
    of experts (MegaScale-MoE, section 3.2); `z` of the router's squared log-sum-exp (ST-MoE, eq. 5). `bias_rate`: step
    of a score bias towards even use, for routers that have one (DeepSeek-V3, section 2.1.2).

    `capacity`: rows that an expert takes, over the mean; `device_capacity`: that a group takes, over the mean of groups
    (MegaScale-MoE, section 3.2). The choices of largest weight stay, the others are dropped; 0: none are.

    `mtp`: weight of the loss of the layer that predicts a token further (`train.further_token`; 0: it is not
    trained)."""

    balance: NotNegative = 0.01
    balance_over: Literal["layer", "model"] = "layer"
    device_balance: NotNegative = 0.0
    device_groups: Count = 1
    z: NotNegative = 0.0
    bias_rate: NotNegative = 1e-3
    capacity: NotNegative = 0.0
    device_capacity: NotNegative = 0.0
    mtp: NotNegative = 0.0

    def __post_init__(self) -> None:
        if self.device_capacity and self.device_groups == 1:
            raise UserError(
                f"device_capacity is {self.device_capacity}, device_groups is 1, so nothing would be dropped: say how "
                "many groups the experts make"
            )

    @property
    def drops(self) -> bool:
        """Whether there is a limit to the rows that experts take."""
        return self.capacity > 0 or self.device_capacity > 0


@dataclass(frozen=True, kw_only=True)
class WatchConfig:
    """Spikes (`train.spikes`): a gradient norm of `norm_ratio` times the last steps', a loss `loss_rise` nats above
    theirs (0: not looked at). `on_spike`: "warn"; "skip" leaves the step's update out; "rollback" goes back to the
    newest checkpoint and leaves out all samples since."""

    on_spike: Literal["warn", "skip", "rollback"] = "warn"
    norm_ratio: NotNegative = 10.0
    loss_rise: NotNegative = 1.0

"""What a serving simulation is asked beside plan and requests: chance, failures, re-placement. Validated once."""

from dataclasses import dataclass

from antiphon.base.errors import UserError
from antiphon.sim.worker_names import Kill


@dataclass(frozen=True, kw_only=True)
class ServingOptions:
    """`shared_prefix_tokens`: equal first tokens of all prompts, which the prefix cache can find (0: nothing is
    shared). `restart_s`: how long a killed worker is away. `rebalance_every_s`, `shift_every_s`: None: never."""

    seed: int = 0
    shared_prefix_tokens: int = 0
    kills: tuple[Kill, ...] = ()
    restart_s: float = 20.0
    rebalance_every_s: float | None = None
    shift_every_s: float | None = None

    def __post_init__(self) -> None:
        if self.shared_prefix_tokens < 0:
            raise UserError(f"a shared prefix of {self.shared_prefix_tokens} tokens: give at least 0")
        for name, value in (("rebalance", self.rebalance_every_s), ("shift", self.shift_every_s)):
            if value is not None and not 0 < value < float("inf"):
                raise UserError(f"{name} every {value} s: give a time above 0")
        if not 0 <= self.restart_s < float("inf"):
            raise UserError(f"a restart takes {self.restart_s} s: give a time of at least 0")

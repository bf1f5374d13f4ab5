"""What a serving simulation is asked beside the plan and the requests (`demand`): failures, re-placement, the host."""

from dataclasses import dataclass
from typing import Literal

from antiphon.base.errors import UserError
from antiphon.serve.policy.handover import HandOver
from antiphon.sim.host import CoreWaits

Role = Literal["attention", "experts"]


@dataclass(frozen=True, kw_only=True)
class Kill:
    """A worker dies at `time_s`. `pool`: its number among those it was parsed with."""

    pool: int
    role: Role
    worker: int
    time_s: float


@dataclass(frozen=True, kw_only=True)
class ServingOptions:
    """`shared_prefix_tokens`: equal first tokens of all prompts, which the prefix cache can find (0: nothing is
    shared). `restart_s`: how long a killed worker is away. `rebalance_every_s`, `shift_every_s`: None: never.
    `hand_over`: when keys and values leave a prefill worker: layer by layer, or all at the end of its step.
    `client_here`: clients are a process on the serving machine (`sim.host`). `core_waits`: what steps, and threads that
    are woken, wait for cores of a machine all of whose cores compute; not with times of HTTP."""

    seed: int = 0
    shared_prefix_tokens: int = 0
    kills: tuple[Kill, ...] = ()
    restart_s: float = 20.0
    rebalance_every_s: float | None = None
    shift_every_s: float | None = None
    hand_over: HandOver = "layers"
    client_here: bool = False
    core_waits: CoreWaits | None = None

    def __post_init__(self) -> None:
        if self.shared_prefix_tokens < 0:
            raise UserError(f"a shared prefix of {self.shared_prefix_tokens} tokens: give at least 0")
        for name, value in (("rebalance", self.rebalance_every_s), ("shift", self.shift_every_s)):
            if value is not None and not 0 < value < float("inf"):
                raise UserError(f"{name} every {value} s: give a time above 0")
        if not 0 <= self.restart_s < float("inf"):
            raise UserError(f"a restart takes {self.restart_s} s: give a time of at least 0")

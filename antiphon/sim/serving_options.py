"""What a serving simulation is asked beside plan and requests: chance, failures, re-placement. Validated once.

Failures are asked for by a worker's name. A plan of one phase has `attention[0]`, `attention[1]`, ... and `experts[0]`,
..., numbered through all instances; where prefill and decode have a pool each, names begin with it:
`decode.attention[0]`. Colocated ranks are `attention[...]`: they hold keys, values and experts, and what happens when
one dies is what happens when both kinds die.
"""

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from antiphon.base.errors import UserError
from antiphon.serve.policy.handover import HandOver

Role = Literal["attention", "experts"]


@dataclass(frozen=True, kw_only=True)
class WorkerCounts:
    """Workers of one pool, over all its instances; `num_experts` 0: colocated. `prefix`: the pool's name, empty if it
    is the only one."""

    prefix: str
    num_attention: int
    num_experts: int

    def name(self, role: Role, worker: int) -> str:
        return f"{self.prefix}{'.' if self.prefix else ''}{role}[{worker}]"

    def known(self) -> str:
        """For errors."""
        counts: tuple[tuple[Role, int], ...] = (("attention", self.num_attention), ("experts", self.num_experts))
        return ", ".join(
            self.name(role, 0) + (f" to {self.name(role, count - 1)}" if count > 1 else "")
            for role, count in counts
            if count
        )


@dataclass(frozen=True, kw_only=True)
class Kill:
    """A worker dies at `time_s`. `pool`: index into the counts it was parsed with."""

    pool: int
    role: Role
    worker: int
    time_s: float


def parse_kill(text: str, pools: Sequence[WorkerCounts]) -> Kill:
    """``"attention[0]@12.5"``; `UserError` names what is wrong and the workers there are."""
    match = re.fullmatch(r"\s*(?:(\w+)\.)?(attention|experts)\[(\d+)\]\s*@\s*(\S+?)\s*", text)
    if match is None:
        raise UserError(f"{text!r} is no failure: write a worker and a time in seconds, for example attention[0]@12.5")
    prefix, role, number, moment = match.groups()
    try:
        time_s = float(moment)
    except ValueError:
        time_s = math.nan
    if not 0 <= time_s < math.inf:
        raise UserError(f"{text!r}: {moment!r} is no time: give seconds, at least 0")
    for index, pool in enumerate(pools):
        if pool.prefix == (prefix or ""):
            count = pool.num_attention if role == "attention" else pool.num_experts
            if int(number) < count:
                found: Role = "attention" if role == "attention" else "experts"
                return Kill(pool=index, role=found, worker=int(number), time_s=time_s)
    name = text.rpartition("@")[0].strip()
    raise UserError(f"there is no worker {name}: the plan has {', '.join(pool.known() for pool in pools)}")


@dataclass(frozen=True, kw_only=True)
class ServingOptions:
    """`shared_prefix_tokens`: equal first tokens of all prompts, which the prefix cache can find (0: nothing is
    shared). `restart_s`: how long a killed worker is away. `rebalance_every_s`, `shift_every_s`: None: never.
    `hand_over`: when keys and values leave a prefill worker: layer by layer, or all at the end of its step.
    `client_here`: clients are a process on the serving machine (`sim.host`)."""

    seed: int = 0
    shared_prefix_tokens: int = 0
    kills: tuple[Kill, ...] = ()
    restart_s: float = 20.0
    rebalance_every_s: float | None = None
    shift_every_s: float | None = None
    hand_over: HandOver = "layers"
    client_here: bool = False

    def __post_init__(self) -> None:
        if self.shared_prefix_tokens < 0:
            raise UserError(f"a shared prefix of {self.shared_prefix_tokens} tokens: give at least 0")
        for name, value in (("rebalance", self.rebalance_every_s), ("shift", self.shift_every_s)):
            if value is not None and not 0 < value < float("inf"):
                raise UserError(f"{name} every {value} s: give a time above 0")
        if not 0 <= self.restart_s < float("inf"):
            raise UserError(f"a restart takes {self.restart_s} s: give a time of at least 0")

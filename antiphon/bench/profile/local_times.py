"""What `antiphon profile` measured of the engine on one machine: tables of seconds, as JSON.

Rows are the tokens of one micro-batch at one worker. Everything is per layer that has the part, or said to be per step.
Times are kept by number of threads, because a worker's share of the cores decides it; beside a worker on other cores
the shared memory slows both, which is kept as a ratio by rows.

Rejected: a roofline with fitted efficiencies for the local machine. On two cores half of a decode step is Python,
caches and waiting, which a roofline has no term for.
"""

from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import msgspec

from antiphon.base.errors import UserError

KIND = "antiphon-local-times"
VERSION = 1


@dataclass(frozen=True, kw_only=True)
class Samples:
    """Values at ascending x, straight between them; beyond the last as between the last two, but never falling below
    the last; before the first the first.

    Not `cost.curves.Curve`: that one holds times of growing work and raises a point that falls. Ratios may fall."""

    x: tuple[float, ...]
    y: tuple[float, ...]

    def __post_init__(self) -> None:
        if not self.x or len(self.x) != len(self.y) or any(low >= high for low, high in pairwise(self.x)):
            raise UserError(f"samples need ascending x and as many y: they have x {list(self.x)}, y {list(self.y)}")

    def at(self, x: float) -> float:
        if x <= self.x[0] or len(self.x) == 1:
            return self.y[0]
        upper = next((index for index, known in enumerate(self.x) if known >= x), len(self.x) - 1)
        low, high = upper - 1, upper
        slope = (self.y[high] - self.y[low]) / (self.x[high] - self.x[low])
        value = self.y[low] + slope * (x - self.x[low])
        return max(value, self.y[-1]) if x > self.x[-1] else value


def flat(value: float) -> Samples:
    """The same for every x."""
    return Samples(x=(1.0,), y=(value,))


@dataclass(frozen=True, kw_only=True)
class ThreadTimes:
    """Of one worker with `num_threads` threads, nobody beside it.

    Attention of a layer: `attention_s(rows)` at a context of `base_context`, plus `per_context_s(rows)` for every
    cached token beyond, of each row. `experts_s[h]`: a layer's experts when the worker holds h of them, by all rows
    that go to any expert. `head_s`, `step_s`: per step; logits and sampling, and the rest of a step that is sent again
    and again, which finds everything in the caches.
    `prompt_attention_s`: one layer of a prompt's first x tokens.
    """

    num_threads: int
    base_context: int
    attention_s: Samples
    per_context_s: Samples
    experts_s: dict[int, Samples]
    head_s: Samples
    step_s: Samples
    prompt_attention_s: Samples

    def attention_layer_s(self, rows: float, context: float) -> float:
        beyond = max(0.0, context - self.base_context)
        return self.attention_s.at(rows) + rows * beyond * max(0.0, self.per_context_s.at(rows))


@dataclass(frozen=True, kw_only=True)
class Slowdowns:
    """How many times longer a one-worker time takes while the other cores are at work, by rows of both."""

    attention_beside_experts: Samples
    experts_beside_attention: Samples
    attention_beside_attention: Samples
    experts_beside_experts: Samples
    replica_beside_replica: Samples


@dataclass(frozen=True, kw_only=True)
class ExchangeTimes:
    """One micro-batch between one attention and one expert worker, by rows: what each call takes of its caller's core,
    and one way beside the calls (waking up included)."""

    dispatch_s: Samples
    receive_s: Samples
    reply_s: Samples
    combine_s: Samples
    one_way_s: Samples
    message_bytes: Samples


@dataclass(frozen=True, kw_only=True)
class EngineTimes:
    """Between a worker's end of one step and its begin of the next: messages, commit, the next plan; by running
    requests of one attention worker (`alone_s`), and what every further attention worker adds. `bookkeeping_s`: of a
    worker's step beside kernels, head and sampling, as it is within the engine. With attention and experts apart, each
    on cores of its own, the engine has none to itself: all of it, and the head, takes longer then."""

    alone_s: Samples
    bookkeeping_s: Samples
    apart_s: Samples
    apart_bookkeeping_s: Samples
    apart_head_ratio: Samples
    per_further_worker_s: Samples


@dataclass(frozen=True, kw_only=True)
class LocalTimes:
    """All of it, with where it is from. `foreign_share`: CPU of other processes while it was measured; `spread`: the
    median over all measurements of (upper quartile - lower quartile) / median."""

    kind: str = KIND
    version: int = VERSION
    model: str
    model_config: dict[str, Any]
    dtype: str
    kernels: str
    cpu: str
    num_cores: int
    threads: tuple[ThreadTimes, ...]
    slowdowns: Slowdowns
    exchange: ExchangeTimes
    engine: EngineTimes
    read_bytes_per_s: dict[int, float] = field(default_factory=dict)
    gemm_flops_per_s: dict[int, float] = field(default_factory=dict)
    foreign_share: float = 0.0
    spread: float = 0.0
    notes: tuple[str, ...] = ()


def local_times_to_json(times: LocalTimes) -> dict[str, Any]:
    """Plain JSON values."""
    written: dict[str, Any] = msgspec.to_builtins(times, str_keys=True)
    return written

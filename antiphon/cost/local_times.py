"""What `antiphon profile` measured of the engine on one machine: tables of seconds, as JSON.

Rows are the tokens of one micro-batch at one worker. Everything is per layer that has the part, or said to be per step.
Times are kept by number of threads, because a worker's share of the cores decides it; beside a worker on other cores
the shared memory slows both, which is kept as a ratio by rows.

Rejected: a roofline with fitted efficiencies for the local machine. On two cores half of a decode step is Python,
caches and waiting, which a roofline has no term for.
"""

from dataclasses import dataclass, field
from typing import Any

from antiphon.cost.curves import Curve


def flat(value: float) -> Curve:
    """The same for every x."""
    return Curve((1.0,), (value,))


@dataclass(frozen=True, kw_only=True)
class ThreadTimes:
    """Times of one worker with `num_threads` threads and no other worker beside it.

    Attention of a layer: `attention_s(rows)` at a context of `base_context`, plus `per_context_s(rows)` for every
    cached token beyond, of each row. `experts_s[h]`: a layer's experts when the worker holds h of them, by all rows
    that go to any expert. `head_s`, `step_s`: per step; logits and sampling, and the rest of a step that is sent again
    and again, which finds everything in the caches.
    `prompt_attention_s`: one layer of a prompt's first x tokens.
    """

    num_threads: int
    base_context: int
    attention_s: Curve
    per_context_s: Curve
    experts_s: dict[int, Curve]
    head_s: Curve
    step_s: Curve
    prompt_attention_s: Curve

    def attention_layer_s(self, rows: float, context: float) -> float:
        beyond = max(0.0, context - self.base_context)
        return self.attention_s.value(rows) + rows * beyond * max(0.0, self.per_context_s.value(rows))


@dataclass(frozen=True, kw_only=True)
class Slowdowns:
    """How many times longer a one-worker time takes while the other cores are at work, by rows of both."""

    attention_beside_experts: Curve
    experts_beside_attention: Curve
    attention_beside_attention: Curve
    experts_beside_experts: Curve
    replica_beside_replica: Curve


@dataclass(frozen=True, kw_only=True)
class ExchangeTimes:
    """One micro-batch between one attention and one expert worker, by rows: what each call takes of its caller's core,
    and one way beside the calls (waking up included)."""

    dispatch_s: Curve
    receive_s: Curve
    reply_s: Curve
    combine_s: Curve
    one_way_s: Curve
    message_bytes: Curve


@dataclass(frozen=True, kw_only=True)
class RowCalls:
    """What a rank of a hybrid layout computes itself, in one layer, for rows to reach their experts and come back, by
    its rows. `across_s`: experts are dealt out over nodes (of `comm/two_level`); `gathered_s`: the ranks of an expert
    have rows of their own; `completed_s`: ranks with the same rows have different experts."""

    across_s: Curve
    gathered_s: Curve
    completed_s: Curve

    def layer_s(self, rows: float, *, attention_tp: int, expert_tp: int, num_ranks: int) -> float:
        """The largest of what applies: much of it is the same in all."""
        found = [0.0]
        if num_ranks > max(attention_tp, expert_tp):
            found.append(self.across_s.value(rows))
        if expert_tp > attention_tp:
            found.append(self.gathered_s.value(rows))
        if attention_tp > expert_tp:
            found.append(self.completed_s.value(rows))
        return max(found)


@dataclass(frozen=True, kw_only=True)
class EngineTimes:
    """Between a worker's end of one step and its begin of the next: messages, commit, the next plan; by running
    requests of one attention worker (`alone_s`), and what every further attention worker adds. `bookkeeping_s`: of a
    worker's step beside kernels, head and sampling, as it is within the engine. With attention and experts apart, each
    on cores of its own, the engine has none to itself: all of it, and the head, takes longer then."""

    alone_s: Curve
    bookkeeping_s: Curve
    apart_s: Curve
    apart_bookkeeping_s: Curve
    apart_head_ratio: Curve
    per_further_worker_s: Curve


@dataclass(frozen=True, kw_only=True)
class LocalTimes:
    """All of it, with where it is from. `foreign_share`: CPU of other processes while it was measured; `spread`: the
    median over all measurements of (upper quartile - lower quartile) / median. `row_calls` None: not measured, as in
    older files, and taken as nothing."""

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
    row_calls: RowCalls | None = None
    foreign_share: float = 0.0
    spread: float = 0.0
    notes: tuple[str, ...] = ()

"""Random routing: which rows every worker sends, receives and computes when tokens choose experts by chance.

1. Each token draws top_k different experts, popular ones more often: those whose clock rings first, the clocks being
   exponential with the shares as rates, which is exact sampling without replacement.
2. An expert belongs to one worker, or to several with fractions; a token's copy goes to one of them by chance.
3. A row is sent once to each worker that serves any of the token's experts, and computed once for each expert.

The maximum over workers then comes from the draw itself: skew and the barrier are simulated, not estimated. Rejected:
independent counts per expert, which ignore that a token's experts differ.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from antiphon.base.errors import UserError
from antiphon.sim.destinations import Destinations, Floats, Indices
from antiphon.sim.ping_pong import PingPong


@dataclass(frozen=True, kw_only=True, eq=False)
class Routing:
    """`shares[e]`: popularity, adding up to 1. `placement[e]`: (worker, fraction of expert e's rows) as in a plan."""

    shares: Floats
    placement: Sequence[Sequence[tuple[int, float]]]
    num_expert_workers: int
    top_k: int

    def __post_init__(self) -> None:
        shares = np.asarray(self.shares, dtype=np.float64)
        if shares.ndim != 1 or not (shares > 0).all() or abs(shares.sum() - 1) > 1e-9:
            raise UserError("routing: shares must be positive, one per expert, adding up to 1")
        if not 1 <= self.top_k <= len(shares):
            raise UserError(f"routing: top_k is {self.top_k}: give 1 to {len(shares)}, the number of experts")
        if len(self.placement) != len(shares):
            raise UserError(f"routing: {len(self.placement)} placed experts for {len(shares)} shares: give one each")
        for expert, owners in enumerate(self.placement):
            workers = [worker for worker, _ in owners]
            fits = all(0 <= worker < self.num_expert_workers for worker in workers)
            if not (fits and abs(sum(fraction for _, fraction in owners) - 1) < 1e-6):
                raise UserError(
                    f"routing: expert {expert} is placed as {list(owners)}: use workers 0 to "
                    f"{self.num_expert_workers - 1} with fractions that add up to 1"
                )


@dataclass(frozen=True, eq=False)
class Routed:
    """One micro-batch of one layer. `sent_rows` [attention workers]; the other two [expert workers]."""

    destinations: Destinations
    sent_rows: Indices
    received_rows: Indices
    computed_rows: Indices


def route(routing: Routing, num_tokens: Sequence[int], random: np.random.Generator) -> Routed:
    """Draw for every attention worker a micro-batch of `num_tokens[a]` tokens."""
    pairs, computed = [], np.zeros(routing.num_expert_workers, dtype=np.int64)
    sent = np.zeros(len(num_tokens), dtype=np.int64)
    received = np.zeros(routing.num_expert_workers, dtype=np.int64)
    owner_of = _owner_table(routing)
    for worker, count in enumerate(num_tokens):
        serving = _serving_workers(routing, owner_of, count, random)
        computed += np.bincount(serving.ravel(), minlength=routing.num_expert_workers)
        serving.sort(axis=1)
        first = np.ones(serving.shape, dtype=bool)
        first[:, 1:] = serving[:, 1:] != serving[:, :-1]
        by_target = np.bincount(serving[first], minlength=routing.num_expert_workers)
        received += by_target
        sent[worker] = first.sum()
        pairs.append(np.flatnonzero(by_target))
    attention = np.repeat(np.arange(len(num_tokens)), [len(targets) for targets in pairs])
    destinations = Destinations.from_pairs(
        attention, np.concatenate([np.empty(0, np.int64), *pairs]), len(num_tokens), routing.num_expert_workers
    )
    return Routed(destinations, sent, received, computed)


def _owner_table(routing: Routing) -> tuple[Floats, Indices]:
    """[experts, most owners]: fractions added up, and the workers they lead to."""
    most = max(len(owners) for owners in routing.placement)
    bounds = np.ones((len(routing.placement), most))
    workers = np.zeros((len(routing.placement), most), dtype=np.int64)
    for expert, owners in enumerate(routing.placement):
        workers[expert] = owners[-1][0]
        workers[expert, : len(owners)] = [worker for worker, _ in owners]
        bounds[expert, : len(owners) - 1] = np.cumsum([fraction for _, fraction in owners])[:-1]
    return bounds, workers


def _serving_workers(
    routing: Routing, owner_of: tuple[Floats, Indices], num_tokens: int, random: np.random.Generator
) -> Indices:
    """[tokens, top_k]: the worker that serves each of a token's experts."""
    rings = random.standard_exponential((num_tokens, len(routing.shares)), dtype=np.float32) / routing.shares
    experts = np.argpartition(rings, routing.top_k - 1, axis=1)[:, : routing.top_k]
    bounds, workers = owner_of
    chosen = (random.random(experts.shape)[..., None] >= bounds[experts]).sum(axis=-1)
    serving: Indices = workers[experts, np.minimum(chosen, bounds.shape[1] - 1)]
    return serving


@dataclass(frozen=True, kw_only=True)
class WorkerTimes:
    """What rows cost: an expert worker computes n rows in `expert_fixed_s + n * expert_row_s`; links carry
    `link_rows_per_s`; attention of a micro-batch takes `attention_s` on every worker."""

    attention_s: float
    expert_fixed_s: float
    expert_row_s: float
    link_rows_per_s: float
    latency_s: float = 0.0


def routed_pipeline(
    routing: Routing,
    times: WorkerTimes,
    *,
    num_layers: int,
    num_micro_batches: int,
    num_tokens: Sequence[int],
    seed: int = 0,
) -> PingPong:
    """A ping-pong pipeline with a new draw for every layer and micro-batch; `num_tokens[a]` per micro-batch."""
    random = np.random.default_rng(seed)
    shape = (num_layers, num_micro_batches)
    cells = {cell: route(routing, num_tokens, random) for cell in np.ndindex(shape)}

    def stack(name: str) -> Floats:
        values: Floats = np.stack([getattr(routed, name) for routed in cells.values()]).astype(np.float64)
        return values.reshape(*shape, -1)

    computed = stack("computed_rows")
    sent_s, received_s = stack("sent_rows") / times.link_rows_per_s, stack("received_rows") / times.link_rows_per_s
    return PingPong(
        num_layers=num_layers,
        num_micro_batches=num_micro_batches,
        num_attention_workers=len(num_tokens),
        num_expert_workers=routing.num_expert_workers,
        attention_s=times.attention_s,
        experts_s=np.where(computed > 0, times.expert_fixed_s + computed * times.expert_row_s, 0.0),
        latency_s=times.latency_s,
        attention_send_s=sent_s,
        experts_receive_s=received_s,
        experts_send_s=received_s,
        attention_receive_s=sent_s,
        destinations=lambda layer, micro_batch: cells[layer, micro_batch].destinations,
    )

"""Where rows go, and what it costs to send them from the ranks of a stage to the ranks of their experts, or back.

Expected numbers of workers, or nodes, that hold at least one of a row's experts:

1. All choices of experts are equally likely; experts are spread over workers in their order, as evenly as they divide.
2. With `num_groups` the gate first takes `top_k_groups` groups of neighbouring experts, all choices equally likely, and
   then the experts among them: fewer workers, and far fewer nodes.
3. The same formula counts nodes: a node is a worker that holds the experts of all its devices.

Rejected: top_k as the count. It is the limit for many workers; for a few it is too many by half.

Two ways to send rows, the better one counts:

1. Direct: a row goes to each rank that holds one of its experts, over the wire that joins the two. Both wires work at
   once; the longer one counts.
2. Once per node: a row goes once to every other domain in which it is wanted, to the device of equal place, which
   forwards it inside. The wire between domains carries fewer rows, the inner wire carries all of them, a device's own
   included (they pass the same buffers), and a second hop costs its own fixed time.
3. Only messages that exist are charged: to other domains at most one for each row that goes there, and at most one for
   each peer. Inside a domain rows are stored directly; there is no message.

Rejected: an all-to-all of equal blocks. It charges every peer in every layer, also those that no row goes to: with one
token and 144 ranks that is 20 times the time of the messages that exist.
"""

import math
from dataclasses import dataclass

import numpy as np

from antiphon.cost.network import Network
from antiphon.cost.parts import FloatArray, Number, Parts, longest, select


def probability_of_none(num_experts: Number, top_k: Number, num_held: Number) -> Number:
    """C(E - held, k) / C(E, k): that none of a row's k experts is among `num_held` of E, all choices equally likely.

    `num_held` need not be whole: an expert with two equal replicas counts half on each."""
    experts, chosen, held = np.broadcast_arrays(
        *(np.asarray(value, dtype=np.float64) for value in (num_experts, top_k, num_held))
    )
    missed = np.ones(experts.shape)
    for draw in range(int(np.max(chosen, initial=0))):
        left = np.maximum(experts - draw, 1.0)
        missed = np.where(draw < chosen, missed * np.clip((left - held) / left, 0.0, 1.0), missed)
    result: Number = missed if missed.ndim else float(missed)
    return result


def expected_distinct(
    num_experts: Number, top_k: Number, num_workers: Number, *, num_groups: int = 1, top_k_groups: int = 1
) -> Number:
    """Expected number of expert workers that a row must be sent to, experts spread as evenly as they divide.

    N (1 - C(E - E/N, k) / C(E, k)) where N divides E; else E mod N workers hold one expert more. With replicas, E is
    still the number of experts: each worker serves E / N of them."""
    workers = np.asarray(num_workers, dtype=np.float64)
    held = np.floor(num_experts / workers)
    num_larger = num_experts - held * workers

    def touched(num_held: FloatArray) -> FloatArray:
        if top_k_groups >= num_groups:
            return 1 - np.asarray(probability_of_none(num_experts, top_k, num_held))
        return 1 - _none_of_groups(num_experts, top_k, num_held, num_groups, top_k_groups)

    result: Number = num_larger * touched(held + 1) + (workers - num_larger) * touched(held)
    return result


def _none_of_groups(
    num_experts: Number, top_k: Number, num_held: FloatArray, num_groups: int, top_k_groups: int
) -> FloatArray:
    """As `probability_of_none`, by how many of the groups that the held experts lie in are taken."""
    group_size = np.asarray(num_experts, dtype=np.float64) / num_groups
    spanned = np.clip(np.ceil(num_held / group_size), 1, num_groups).astype(np.int64)
    choices = math.comb(num_groups, top_k_groups)
    total = np.zeros(np.broadcast_shapes(spanned.shape, group_size.shape))
    for taken in range(top_k_groups + 1):
        ways = [
            math.comb(span, taken) * math.comb(num_groups - span, top_k_groups - taken) / choices
            for span in range(num_groups + 1)
        ]
        held = np.minimum(taken * num_held / spanned, top_k_groups * group_size)
        total = total + np.asarray(ways)[spanned] * probability_of_none(top_k_groups * group_size, top_k, held)
    return total


@dataclass(frozen=True, kw_only=True)
class Spread:
    """`num_ranks` ranks, of which `ranks_per_domain` share a domain, and the expected numbers of ranks and of domains
    that one row goes to (`expected_distinct`)."""

    num_ranks: Number
    ranks_per_domain: Number
    ranks_per_row: Number
    domains_per_row: Number

    @property
    def num_domains(self) -> Number:
        count: Number = np.ceil(np.asarray(self.num_ranks) / self.ranks_per_domain)
        return count


def dispatch(network: Network, spread: Spread, rows: Number, row_bytes: Number, *, per_node: bool = True) -> Parts:
    """One way of `rows` rows of the busiest rank. `per_node` False: rows always go direct."""
    straight = direct(network, spread, rows, row_bytes)
    if not per_node:
        return straight
    forwarded = once_per_node(network, spread, rows, row_bytes)
    return select(np.asarray(forwarded.total_s < straight.total_s), forwarded, straight)


def direct(network: Network, spread: Spread, rows: Number, row_bytes: Number) -> Parts:
    """A copy for each rank. The slowest rank is of the emptiest domain for messages out, of a full one inside."""
    ranks = np.asarray(spread.num_ranks, dtype=np.float64)
    together = np.minimum(spread.ranks_per_domain, ranks)
    fewest = ranks - together * (np.ceil(ranks / together) - 1)
    copies = rows * spread.ranks_per_row
    inside, across = copies * (together - 1) / ranks, copies * (ranks - fewest) / ranks
    return _side_by_side(network, spread, inside * row_bytes, across, ranks - fewest, row_bytes, num_hops=1)


def once_per_node(network: Network, spread: Spread, rows: Number, row_bytes: Number) -> Parts:
    """A copy for each domain, forwarded inside while the next ones arrive."""
    domains = np.asarray(spread.num_domains, dtype=np.float64)
    across = rows * spread.domains_per_row * (domains - 1) / domains
    inside = np.where(np.asarray(spread.ranks_per_domain) > 1, rows * spread.ranks_per_row, 0.0)
    return _side_by_side(network, spread, inside * row_bytes, across, domains - 1, row_bytes, num_hops=2)


def _side_by_side(
    network: Network,
    spread: Spread,
    inside_bytes: Number,
    rows_across: Number,
    peers: Number,
    row_bytes: Number,
    *,
    num_hops: int,
) -> Parts:
    inner, outer = network.scale_up, network.scale_out
    up_s = inner.stream_s(inside_bytes, np.minimum(spread.ranks_per_domain, spread.num_ranks) - 1)
    num_messages = np.minimum(peers, rows_across)
    message_bytes = rows_across * row_bytes / np.maximum(num_messages, 1e-12)
    wires = longest(inner.parts(up_s), outer.parts(outer.send_s(message_bytes, num_messages)))
    happens = np.asarray(wires.total_s) > 0
    return wires + Parts(fixed_s=np.where(happens, num_hops * network.exchange_s, 0.0))

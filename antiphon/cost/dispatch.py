"""Rows from the ranks of a stage to the ranks of their experts (or back): two ways to send them, the better one counts.

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

from dataclasses import dataclass

import numpy as np

from antiphon.cost.network import Network
from antiphon.cost.parts import Number, Parts, longest, select


@dataclass(frozen=True, kw_only=True)
class Spread:
    """`num_ranks` ranks, of which `ranks_per_domain` share a domain, and the expected numbers of ranks and of domains
    that one row goes to (`cost.destinations`)."""

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

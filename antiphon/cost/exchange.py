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

All that one layer exchanges where attention and experts share devices, TP x DP and TP x EP (MixServe section III), on
the real two-level network, every byte counted (`layer_exchange`):

1. Attention: reduce-scatter over its TP group; each device then owns 1/tp of its group's rows.
2. Dispatch: each device sends its rows to the EP ranks their experts are on (a device per rank), then
   all-gather within the expert TP group. Combine mirrors it: reduce-scatter, all-to-all. At last the all-gather that
   completes step 1. d_DP =, > or < d_EP only change how rows are shared out, not the formula.
3. Fused (section III-D): the all-to-all goes round by round, and the all-gather or reduce-scatter of the rows of one
   round overlaps with the next round's messages, because they use different wires. One kernel that runs all rounds
   leaves those together that are too small to gain. Where each round is a call of its own (`Network.round_s`), few rows
   hide less than the calls take, and the synchronous form is faster: it has one for the rows of all nodes.

Rejected as costs: the paper's eq. 2, which divides by the degree twice, and eq. 13, which leaves out the reduce-scatter
of the k weighted copies.
"""

import math
from dataclasses import dataclass

import numpy as np

from antiphon.cost.network import Network
from antiphon.cost.roofline import FloatArray, Number, Parts, longest, select


def probability_of_none(num_experts: Number, top_k: Number, num_held: Number) -> Number:
    """C(E - held, k) / C(E, k): that none of a row's k experts is among `num_held` of E, all choices equally likely.

    `num_held` need not be whole: an expert with two equal replicas counts half on each."""
    experts, chosen, held = np.broadcast_arrays(
        *(np.asarray(value, dtype=np.float64) for value in (num_experts, top_k, num_held))
    )
    missed = np.ones(experts.shape)
    for draw in range(int(min(np.max(chosen, initial=0), np.max(experts, initial=0)))):
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


@dataclass(frozen=True, kw_only=True)
class Degrees:
    """attention_tp * attention_dp = expert_tp * expert_ep = devices of one pipeline stage; TP groups are neighbours."""

    attention_tp: Number = 1
    attention_dp: Number = 1
    expert_tp: Number = 1
    expert_ep: Number = 1


def layer_exchange(
    network: Network,
    degrees: Degrees,
    spread: Spread,
    *,
    rows: Number,
    row_bytes: Number,
    dispatch_row_bytes: Number | None = None,
    combine_row_bytes: Number | None = None,
    fused: bool | None = True,
    sliced: bool = True,
    per_node: bool = True,
    busiest: Number = 1.0,
) -> Parts:
    """All communication of one MoE layer, as seen by the busiest device.

    `rows`: new tokens of one DP rank. `row_bytes`: hidden size * bytes, of rows between devices of a TP group; the
    other two of rows between EP ranks (None: the same). `spread`: where a row goes. `fused`: the form, of both ways;
    either may be the faster one; None: the faster one of each. `sliced` False: every device of an attention TP group
    sends all its rows (no reduce-scatter; expert TP groups then need no all-gather). `per_node`: rows may travel once
    per node. `busiest`: rows of the busiest EP rank over the mean."""
    sync = network.all_reduce(rows * row_bytes, degrees.attention_tp)
    there = row_bytes if dispatch_row_bytes is None else dispatch_row_bytes
    back = row_bytes if combine_row_bytes is None else combine_row_bytes
    sent = rows * busiest / (degrees.attention_tp if sliced else 1)
    arrived = rows * degrees.attention_dp * spread.ranks_per_row * busiest / degrees.expert_ep
    to_experts = dispatch(network, spread, sent, there, per_node=per_node)
    alike = np.array_equal(there, back)
    from_experts = to_experts if alike else dispatch(network, spread, sent, back, per_node=per_node)
    if not sliced:
        return sync + to_experts + from_experts + network.all_reduce(arrived * row_bytes, degrees.expert_tp)

    def of_form(fused: bool) -> Parts:
        return (
            sync
            + _overlapped(network, degrees, spread, to_experts, arrived * there, combine=False, fused=fused)
            + _overlapped(network, degrees, spread, from_experts, arrived * row_bytes, combine=True, fused=fused)
        )

    if fused is not None or not np.any(np.asarray(degrees.expert_tp) > 1):
        return of_form(bool(fused))
    in_rounds, in_turn = of_form(True), of_form(False)
    return select(np.asarray(in_rounds.total_s <= in_turn.total_s), in_rounds, in_turn)


def summed_exchange(network: Network, degrees: Degrees, size_bytes: Number) -> Parts:
    """All communication of one MoE layer of engines that send no rows, whatever its experts' layout is. `size_bytes`:
    of one data-parallel rank's rows.

    With one attention group all devices have all rows: two all-reduces. With several, rows are gathered from all before
    the experts, and reduced and scattered behind them."""
    sums = network.all_reduce(size_bytes, degrees.attention_tp)
    if not np.any(np.asarray(degrees.attention_dp) > 1):
        return 2 * sums
    ranks = degrees.attention_tp * degrees.attention_dp
    return sums + 2 * network.all_gather(size_bytes * degrees.attention_dp, ranks)


def _overlapped(
    network: Network,
    degrees: Degrees,
    spread: Spread,
    exchange: Parts,
    arrived_bytes: Number,
    *,
    combine: bool,
    fused: bool,
) -> Parts:
    """The exchange and the TP group's all-gather (reduce-scatter): one after the other, or fused in rounds, each with
    its own latency, messages and fixed time."""
    gather = network.all_gather(arrived_bytes, degrees.expert_tp)
    together = exchange + gather
    if not fused or not np.any(np.asarray(degrees.expert_tp) > 1):
        return together
    num_nodes = spread.num_domains
    num_sends = np.maximum(num_nodes - 1, 1)
    num_gathers = num_nodes if combine else num_sends
    inter_s = exchange.scale_out_s / num_sends
    intra_s = network.all_gather(arrived_bytes / num_gathers, degrees.expert_tp).scale_up_s
    fused_s = (fused_combine_s if combine else fused_dispatch_s)(num_nodes, inter_s, intra_s)
    has_rounds = np.asarray(num_nodes > 1) & (np.asarray(gather.total_s) > 0)
    hidden = np.maximum(exchange.scale_out_s + gather.scale_up_s - fused_s, 0.0)
    hidden = network.overlap * np.where(np.asarray(num_nodes) > 1, hidden, 0.0)
    from_up = np.asarray(gather.scale_up_s <= exchange.scale_out_s)
    # one call in place of two, and what each of its rounds takes
    fixed_s = np.maximum(exchange.fixed_s, gather.fixed_s) + num_gathers * network.round_s
    return Parts(
        scale_up_s=together.scale_up_s - np.where(from_up, hidden, 0.0),
        scale_out_s=together.scale_out_s - np.where(from_up, 0.0, hidden),
        fixed_s=np.where(has_rounds, fixed_s, together.fixed_s),
    )


# MixServe section III-D, Figure 9. n nodes; each inter-node round and each intra-node round takes the same time.


def fused_dispatch_s(num_nodes: Number, inter_s: Number, intra_s: Number) -> Number:
    """Algorithm 2: the all-gather of round i's rows runs beside round i + 1's messages. Only the first round's messages
    and the last round's all-gather stand alone."""
    rounds = num_nodes - 1
    busy = np.maximum(rounds * inter_s + intra_s, inter_s + rounds * intra_s)
    result: Number = np.where(np.asarray(rounds) > 0, busy, 0.0)
    return result


def fused_combine_s(num_nodes: Number, inter_s: Number, intra_s: Number, gather_s: Number = 0.0) -> Number:
    """Algorithm 1: the node's own reduce-scatter runs beside the first round's messages, and so on; the all-gather
    follows."""
    result: Number = np.maximum(num_nodes * intra_s, (num_nodes - 1) * inter_s + intra_s) + gather_s
    return result

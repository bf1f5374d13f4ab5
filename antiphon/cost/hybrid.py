"""Colocated layouts: what one layer exchanges under TP x DP attention and TP x EP experts (MixServe section III).

`layer_exchange` is the cost used by the planner, on the real two-level network, every byte counted:
1. Attention: reduce-scatter over its TP group; each device then owns 1/tp of its group's rows.
2. Dispatch: each device sends its rows to the EP ranks their experts are on (`cost.dispatch`, a device per rank), then
   all-gather within the expert TP group. Combine mirrors it: reduce-scatter, all-to-all. At last the all-gather that
   completes step 1. d_DP =, > or < d_EP only change how rows are shared out, not the formula.
3. Fused (section III-D): the all-to-all goes round by round, and the all-gather or reduce-scatter of the rows of one
   round overlaps with the next round's messages, because they use different wires. One kernel that runs all rounds
   leaves those together that are too small to gain. Where each round is a call of its own (`Network.round_s`), few rows
   hide less than the calls take, and the synchronous form is faster: it has one for the rows of all nodes.

The paper's own equations stand below, named by number. Rejected as costs: eq. 2 divides by the degree twice, and
eq. 13 leaves out the reduce-scatter of the k weighted copies.
"""

from dataclasses import dataclass

import numpy as np

from antiphon.cost.dispatch import Spread, dispatch
from antiphon.cost.network import Network
from antiphon.cost.parts import Number, Parts


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
    fused: bool = True,
    sliced: bool = True,
    per_node: bool = True,
    busiest: Number = 1.0,
) -> Parts:
    """All communication of one MoE layer, as seen by the busiest device.

    `rows`: new tokens of one DP rank. `row_bytes`: hidden size * bytes, of rows between devices of a TP group; the
    other two of rows between EP ranks (None: the same). `spread`: where a row goes. `fused`: the form, of both ways;
    either may be the faster one. `sliced` False: every device of an attention TP group sends all its rows (no
    reduce-scatter; expert TP groups then need no all-gather). `per_node`: rows may travel once per node. `busiest`:
    rows of the busiest EP rank over the mean."""
    sync = network.all_reduce(rows * row_bytes, degrees.attention_tp)
    there = row_bytes if dispatch_row_bytes is None else dispatch_row_bytes
    back = row_bytes if combine_row_bytes is None else combine_row_bytes
    sent = rows * busiest / (degrees.attention_tp if sliced else 1)
    arrived = rows * degrees.attention_dp * spread.ranks_per_row * busiest / degrees.expert_ep
    to_experts = dispatch(network, spread, sent, there, per_node=per_node)
    from_experts = dispatch(network, spread, sent, back, per_node=per_node)
    if not sliced:
        return sync + to_experts + from_experts + network.all_reduce(arrived * row_bytes, degrees.expert_tp)
    return (
        sync
        + _overlapped(network, degrees, spread, to_experts, arrived * there, combine=False, fused=fused)
        + _overlapped(network, degrees, spread, from_experts, arrived * row_bytes, combine=True, fused=fused)
    )


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
    if not fused:
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


# MixServe section III-B and III-C: the equations as printed, in units of the sizes they are given.


def eq1_reduce_scatter(size: Number, degree: Number) -> Number:
    """Eq. 1, also all-gather: proportional to size / degree (bytes of one round to one peer)."""
    return size / degree


def eq2_all_reduce(size: Number, degree: Number) -> Number:
    """Eq. 2 as printed: RS(size / d, d) + AG(size / d, d). It divides by d twice, where the counted bytes of one
    round are 2 size / d."""
    return 2 * eq1_reduce_scatter(size / degree, degree)


def eq3_all_to_all(size: Number, degree: Number) -> Number:
    """Eq. 3: proportional to (size / degree) (degree - 1), which is what a rank sends."""
    return size / degree * (degree - 1)


def eq4_compute(parameters: Number, tp: Number, ep: Number, dp: Number, batch: Number, width: Number) -> Number:
    """Eq. 4: proportional to Psi / (d_TP d_EP) * b / d_DP * s h; `width` is s h."""
    return parameters / (tp * ep) * batch / dp * width


def eq5_communicated(batch: Number, width: Number, top_k: Number, tp: Number, ep: Number, dp: Number) -> Number:
    """Eq. 5, with eq. 1-3 for the collectives: 2 AR + 2 A2A; of d_DP and d_EP the larger shares out the batch and the
    smaller is the degree."""
    exchanged = eq3_all_to_all(batch / np.maximum(dp, ep) * width * top_k, np.minimum(dp, ep))
    return 2 * eq2_all_reduce(batch / dp * width, tp) + 2 * exchanged


def eq6_service_s(
    num_layers: Number, compute_s: Number, communication_s: Number, pp: Number = 1, hop_s: Number = 0.0
) -> Number:
    """Eq. 6: l (tau + lambda) + (d_PP - 1) P2P."""
    return num_layers * (compute_s + communication_s) + (pp - 1) * hop_s

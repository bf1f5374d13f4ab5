"""M2N: attention workers send rows to expert workers, and results come back. Time one way, and what is sent.

1. A row goes to each expert worker that holds at least one of its top-k experts, once: the expected number of distinct
   destinations is less than k as soon as a worker holds several experts.
2. Every device of a worker of `tp` devices sends (or receives) its share of a row; between workers of unequal tp the
   row is cut into max(tp_a, tp_e) pieces, so that the wider side sends one piece per device.
3. One way takes as long as the slower side: the busiest sender's messages one after another on its link, or the
   busiest receiver's on its own (MegaScale-Infer eq. 6 in bytes; Util is of one message, not of the sum).

Rejected: eq. 6 to the letter. It counts elements, and applies Util to all of a device's bytes as if they were one
message.
"""

from dataclasses import dataclass

import numpy as np

from antiphon.cost.network import Link
from antiphon.cost.parts import Number, Parts, longest


@dataclass(frozen=True, kw_only=True)
class Side:
    """One side of the exchange: workers, devices per worker, and one device's link to the other side."""

    num_workers: Number
    tp: Number
    link: Link


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


def expected_distinct(num_experts: Number, top_k: Number, num_workers: Number) -> Number:
    """Expected number of expert workers that a row must be sent to, experts spread as evenly as they divide.

    N (1 - C(E - E/N, k) / C(E, k)) where N divides E; else E mod N workers hold one expert more. With replicas, E is
    still the number of experts: each worker serves E / N of them."""
    workers = np.asarray(num_workers, dtype=np.float64)
    held = np.floor(num_experts / workers)
    num_larger = num_experts - held * workers
    larger = num_larger * (1 - np.asarray(probability_of_none(num_experts, top_k, held + 1)))
    smaller = (workers - num_larger) * (1 - np.asarray(probability_of_none(num_experts, top_k, held)))
    result: Number = larger + smaller
    return result


def message_bytes(rows_per_pair: Number, row_bytes: Number, sending_tp: Number, receiving_tp: Number) -> Number:
    """Bytes of one message between two devices: rows from one worker to another, cut into max(tp) pieces."""
    result: Number = rows_per_pair * row_bytes / np.maximum(sending_tp, receiving_tp)
    return result


def m2n(
    sending: Side,
    receiving: Side,
    *,
    rows_sent: Number,
    rows_received: Number,
    row_bytes: Number,
    fixed_s: Number = 0.0,
) -> Parts:
    """One way of one micro-batch: dispatch (attention sends) or, with the sides exchanged, combine.

    `rows_sent`: rows the busiest sending worker sends to all receivers together; `rows_received`: what the busiest
    receiving worker gets from all senders. `row_bytes`: hidden size * bytes per element of a whole row."""
    pieces = np.maximum(sending.tp, receiving.tp)
    send_s = _side_s(sending, receiving.num_workers, rows_sent, row_bytes, pieces)
    receive_s = _side_s(receiving, sending.num_workers, rows_received, row_bytes, pieces)
    slower = longest(sending.link.parts(send_s), receiving.link.parts(receive_s))
    return slower + Parts(fixed_s=fixed_s)


def _side_s(side: Side, num_peers: Number, rows: Number, row_bytes: Number, pieces: Number) -> Number:
    """One device's messages with all workers of the other side: ceil(pieces / tp) for each of them."""
    num_messages = num_peers * np.ceil(pieces / np.asarray(side.tp))
    return side.link.send_s(rows * row_bytes / side.tp / num_messages, num_messages)

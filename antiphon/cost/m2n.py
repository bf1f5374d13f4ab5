"""M2N: attention workers send rows to expert workers, and results come back. Time one way, and what is sent.

1. A row goes to each expert worker that holds at least one of its top-k experts, once (`cost.dispatch`).
2. Every device of a worker of `tp` devices sends (or receives) its share of a row; between workers of unequal tp the
   row is cut into max(tp_a, tp_e) pieces, so that the wider side sends one piece per device.
3. One way takes as long as the slower side: the busiest sender's messages one after another on its link, or the
   busiest receiver's on its own (MegaScale-Infer eq. 6 in bytes; Util is of one message, not of the sum).
4. No worker is sent an empty message: there are at most as many as rows.

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
    """One device's messages with the workers of the other side: ceil(pieces / tp) for each that has a row."""
    num_messages = np.minimum(num_peers, rows) * np.ceil(pieces / np.asarray(side.tp))
    return side.link.send_s(rows * row_bytes / side.tp / np.maximum(num_messages, 1e-12), num_messages)

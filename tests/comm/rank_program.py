"""A rank of a group, made to be killed (test_rank_kills.py).

    python rank_program.py RANK SIZE TRANSPORT

Says its ticket. An order begins an epoch: from then on it sums and gathers without end, and checks each result. What
ends that is said, and the next order awaited. All of it as JSON lines; at the end of its input it exits.
"""

import json
import os
import sys
import threading
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch

from antiphon import _m2n
from antiphon.base.errors import PeerLost, PeerTimeout
from antiphon.comm.m2n.api import StepAborted
from antiphon.comm.rank_group import NativeRankGroup

COUNTS = (1, 1000, 200_000)


def say(**words: Any) -> None:
    print(json.dumps(words), flush=True)


def work(group: NativeRankGroup) -> None:
    """One round of each collective, checked."""
    for count in COUNTS:
        tensor = torch.full((count,), float(group.rank + 1))
        group.all_reduce(tensor)
        assert bool((tensor == group.size * (group.size + 1) / 2).all()), "a wrong sum"
    rows = [rank + 1 for rank in range(group.size)]
    gathered = group.all_gather(torch.full((rows[group.rank], 50), float(group.rank)), rows)
    assert gathered[:, 0].tolist() == [float(rank) for rank, count in enumerate(rows) for _ in range(count)]


def main() -> None:
    rank, size, transport = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
    torch.set_num_threads(1)
    endpoint = _m2n.Endpoint(f"rank[{rank}]", transport, secret=b"kills", local_processes=size)
    group = NativeRankGroup(endpoint, rank, size, timeout_s=float(sys.argv[4]))
    say(ticket=group.ticket.hex())
    orders = iter(sys.stdin)
    for line in orders:
        order = json.loads(line)
        reader = threading.Thread(target=abort_on, args=(orders, group), daemon=True)
        try:
            group.reset(order["epoch"], [bytes.fromhex(ticket) for ticket in order["tickets"]])
            say(began=order["epoch"])
            reader.start()
            while True:
                work(group)
        except PeerLost as error:
            say(lost=error.peer)
        except PeerTimeout as error:
            say(late=error.peers)
        except StepAborted:
            say(aborted=order["epoch"])
        if reader.ident is not None:
            reader.join()  # the order to abort comes in any case
    os._exit(0)


def abort_on(orders: Any, group: NativeRankGroup) -> None:
    """The next line is the number of the epoch to come."""
    line = next(orders, None)
    if line is None:
        os._exit(0)
    group.abort(json.loads(line)["abort"])


if __name__ == "__main__":
    main()

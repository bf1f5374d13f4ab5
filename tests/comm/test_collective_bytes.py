"""What the ledger counts is what leaves the machine."""

import subprocess
import sys

import pytest

from antiphon.bench.box import box_unavailable
from antiphon.bench.box.topology import plan_ranks
from tests.serve.forking_box import ForkingBox

IN_A_BOX = """
import os, torch
from antiphon.comm.collectives import AllGather, AllReduce, AllToAll, ReduceScatter, run
from antiphon.comm.mesh import Sizes, connect
torch.distributed.init_process_group("gloo")
group = connect(Sizes(world_size=2, expert=2), int(os.environ["RANK"]), 60).group("expert")
x = torch.ones(1024, 1024)
got = run(ReduceScatter(group, "sums", (512, 512)), x)
assert got.eq(2).all() and got.shape == (512, 1024)
run(AllGather(group, "sums", (512, 512)), got)
run(AllToAll(group, "rows", (512, 512), (512, 512)), x)
run(AllReduce(group, "sums"), x)
print(sum(group.ledger.sent_bytes.values()), flush=True)
torch.distributed.destroy_process_group()
"""


def test_collectives_send_what_is_counted() -> None:
    """But for headers, which are less than a tenth; 2 MiB of each collective, 4 of the all-reduce."""
    if reason := box_unavailable():
        pytest.skip(reason)
    with ForkingBox(num_nodes=2, mbit=1000) as box:
        ranks = [
            box.fork(plan.node, plan.args, plan.env, stdout=subprocess.PIPE)
            for plan in plan_ranks(num_nodes=2, num_local_ranks=1, command=[sys.executable, "-c", IN_A_BOX])
        ]
        for node, each in enumerate(ranks):
            assert each.wait(120) == 0
            assert each.stdout is not None
            counted = int(each.stdout.read())
            assert counted == 5 << 21
            sent = box.counters(node)
            assert counted < sent.up_bulk_bytes + sent.up_control_bytes < 1.1 * counted

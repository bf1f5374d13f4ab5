"""`antiphon worker` on other machines: nodes of a cluster in a box, which reach each other over the network only."""

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from antiphon.bench.box import box_unavailable
from tests.serve.box_engine import SECRET
from tests.serve.engine_harness import Prompts, TinyModel, Tokens
from tests.serve.fork_server import BOX_ENGINE
from tests.serve.forking_box import ForkingBox, Program

PORT = 7700
PATIENCE_S = 90.0
ENVIRONMENT = {"ANTIPHON_JOIN_SECRET": SECRET.decode(), "OMP_NUM_THREADS": "1"}


@pytest.fixture(scope="module")
def possible() -> None:
    """Skip where no box can be made."""
    if reason := box_unavailable():
        pytest.skip(reason)


def start_worker(box: ForkingBox, node: int, role: str = "experts") -> Program:
    """The one plain command of that node."""
    command = ["-m", "antiphon.cli.main", "worker", "--role", role, "--threads", "1"]
    where = ["--join", f"{box.address(0)}:{PORT}", "--host", box.address(node), "--patience", str(PATIENCE_S)]
    return box.fork(node, [sys.executable, *command, *where], ENVIRONMENT, stdout=subprocess.PIPE)


def start_engine(
    box: ForkingBox, model: TinyModel, layout: str, joined: tuple[int, int], prompts: Prompts, ranks_here: int = 0
) -> Program:
    asked = {"model": str(model.folder), "join": f"{box.address(0)}:{PORT}", "layout": layout, "joined": joined}
    asked["ranks_here"] = ranks_here
    command = [sys.executable, "-m", BOX_ENGINE, json.dumps(asked | {"prompts": prompts})]
    return box.fork(0, command, ENVIRONMENT, stdin=subprocess.PIPE, stdout=subprocess.PIPE)


def first_line_of(process: Program) -> bytes:
    assert process.stdout is not None
    return process.stdout.readline()


def lines_of(engine: Program) -> Iterator[str]:
    assert engine.stdout is not None
    for line in engine.stdout:
        yield line.decode()


def both_rounds(
    engine: Program, between: Callable[[], None], in_second: Callable[[], None]
) -> tuple[dict[str, Any], bool]:
    """What the engine says at the end, and whether `in_second` was called, in the middle of the second round."""
    result, was_called = dict[str, Any](), False
    assert engine.stdin is not None
    for line in lines_of(engine):
        word, _, rest = line.strip().partition(" ")
        if word == "done":
            result = json.loads(rest)
            continue
        if word == "ready":
            between()
        else:
            assert word == "paused", line
            was_called = True
            in_second()
        engine.stdin.write(b"go\n")
        engine.stdin.flush()
    return result, was_called


@pytest.mark.usefixtures("possible")
@pytest.mark.parametrize(("num_nodes", "spare"), [(2, False), (3, True)])
def test_workers_of_other_nodes_serve_the_same_text(
    num_nodes: int, spare: bool, tiny_model: TinyModel, prompts: Prompts, reference: Tokens
) -> None:
    """In the second round node 1 loses its expert worker; another one on that node, or a waiting spare, takes over."""
    prompts, reference = prompts[:16], reference[:16]
    with ForkingBox(num_nodes=num_nodes, mbit=400) as box:
        workers = [start_worker(box, node) for node in range(1, num_nodes)]
        engine = start_engine(box, tiny_model, f"1+{num_nodes - 1}/m2", (0, num_nodes - 1), prompts)

        def before_second_round() -> None:
            if spare:
                workers.append(start_worker(box, 1))
                assert b"joined" in first_line_of(workers[-1])

        def replace_first() -> None:
            workers[0].kill()
            if not spare:
                workers.append(start_worker(box, 1))

        result, killed = both_rounds(engine, before_second_round, replace_first)
        assert engine.wait(PATIENCE_S) == 0
        assert killed, "the second round ended before a worker could be killed"
        assert result["first"] == reference
        assert result["errors"] == [None] * len(prompts)
        assert result["second"] == reference
        assert result["restarts"] == 1
        assert [worker.wait(PATIENCE_S) for worker in workers] == [-9, *[0] * (num_nodes - 1)]
        bytes_sent = [
            box.counters(node).up_bulk_bytes + box.counters(node).up_control_bytes for node in range(num_nodes)
        ]
    # Rows of 64 prompts' tokens travelled: far more than the openings, and from every node.
    assert min(bytes_sent) > 100_000, "dispatch and combine went over the wire of every node"


@pytest.mark.usefixtures("possible")
@pytest.mark.parametrize(
    "layout", ["2t2*2/m2", *(pytest.param(each, marks=pytest.mark.slow) for each in ("2t2*1", "2p2*2/m2"))]
)
def test_replicas_of_other_nodes_share_experts(
    layout: str, tiny_model: TinyModel, prompts: Prompts, reference: Tokens
) -> None:
    """The second replica's ranks are on node 1. One dies: the other one leaves too, and two new ones of that node take
    their places. The one on node 2 has waited longer, and cannot: ranks of a replica are on one machine."""
    prompts, reference = prompts[:16], reference[:16]
    with ForkingBox(num_nodes=3, mbit=400) as box:
        workers = [start_worker(box, 1, "replica") for _ in range(2)]
        engine = start_engine(box, tiny_model, layout, (1, 0), prompts)
        waiting: list[Program] = []

        def one_alone() -> None:
            waiting.append(start_worker(box, 2, "replica"))
            assert b"joined" in first_line_of(waiting[0])

        def replace_both() -> None:
            workers[0].kill()
            workers.extend(start_worker(box, 1, "replica") for _ in range(2))

        result, killed = both_rounds(engine, one_alone, replace_both)
        assert engine.wait(PATIENCE_S) == 0
        assert killed, "the second round ended before a worker could be killed"
        assert result["first"] == reference
        assert result["errors"] == [None] * len(prompts)
        assert result["second"] == reference
        assert [worker.wait(PATIENCE_S) for worker in (*workers, *waiting)] == [-9, *[0] * 4]
        sent = [box.counters(node).up_bulk_bytes + box.counters(node).up_control_bytes for node in range(2)]
    assert min(sent) > 100_000, "rows went over the wire of both nodes"


@pytest.mark.usefixtures("possible")
@pytest.mark.parametrize("layout", ["1t2", *(pytest.param(each, marks=pytest.mark.slow) for each in ("1p2", "1t2*1"))])
def test_a_worker_spread_over_nodes(layout: str, tiny_model: TinyModel, prompts: Prompts, reference: Tokens) -> None:
    """One replica, rank 1 of it on node 1. It dies in the second round, and another one of that node takes over."""
    prompts, reference = prompts[:16], reference[:16]
    with ForkingBox(num_nodes=2, mbit=400) as box:
        workers = [start_worker(box, 1, "replica")]
        engine = start_engine(box, tiny_model, layout, (1, 0), prompts, ranks_here=1)

        def replace() -> None:
            workers[0].kill()
            workers.append(start_worker(box, 1, "replica"))

        result, killed = both_rounds(engine, lambda: None, replace)
        assert engine.wait(PATIENCE_S) == 0
        assert killed, "the second round ended before a rank could be killed"
        assert (result["first"], result["second"]) == (reference, reference)
        assert result["errors"] == [None] * len(prompts)
        assert [worker.wait(PATIENCE_S) for worker in workers] == [-9, 0]
        sent = [box.counters(node).up_bulk_bytes + box.counters(node).up_control_bytes for node in range(2)]
    assert min(sent) > 100_000, "sums, or rows between stages, went over the wire of both nodes"


@pytest.mark.usefixtures("possible")
def test_a_replica_of_another_node_takes_requests(tiny_model: TinyModel, prompts: Prompts, reference: Tokens) -> None:
    """Nothing travels between replicas: the other node's wire carries orders and tokens only."""
    prompts, reference = prompts[:16], reference[:16]
    with ForkingBox(num_nodes=2, mbit=400) as box:
        worker = start_worker(box, 1, "replica")
        engine = start_engine(box, tiny_model, "2", (1, 0), prompts)
        result, _ = both_rounds(engine, lambda: None, lambda: None)
        assert engine.wait(PATIENCE_S) == 0
        assert worker.wait(PATIENCE_S) == 0
        assert (result["first"], result["second"]) == (reference, reference)
        assert box.counters(1).up_bulk_bytes + box.counters(1).up_control_bytes > 10_000, "it answered requests"

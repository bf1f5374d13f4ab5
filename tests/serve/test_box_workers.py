"""`antiphon worker` on other machines: nodes of a cluster in a box, which reach each other over the network only."""

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from antiphon.bench.box import Box, NodeProcess, box_unavailable
from tests.serve.box_engine import SECRET
from tests.serve.engine_harness import Prompts, TinyModel, Tokens

ROOT = Path(__file__).parents[2]
PORT = 7700
PATIENCE_S = 90.0
ENVIRONMENT = {"PYTHONPATH": str(ROOT), "ANTIPHON_JOIN_SECRET": SECRET.decode(), "OMP_NUM_THREADS": "1"}


@pytest.fixture(scope="module")
def possible() -> None:
    """Skip where no box can be made."""
    if reason := box_unavailable():
        pytest.skip(reason)


def start_worker(box: Box, node: int) -> NodeProcess:
    """The one plain command of that node."""
    command = ["-m", "antiphon.cli.main", "worker", "--role", "experts", "--threads", "1"]
    where = ["--join", f"{box.address(0)}:{PORT}", "--host", box.address(node), "--patience", str(PATIENCE_S)]
    return box.start(node, [sys.executable, *command, *where], env=ENVIRONMENT, cwd=ROOT, stdout=subprocess.PIPE)


def first_line_of(process: NodeProcess) -> bytes:
    assert process.stdout is not None
    return process.stdout.readline()


def lines_of(engine: NodeProcess) -> Iterator[str]:
    assert engine.stdout is not None
    for line in engine.stdout:
        yield line.decode()


@pytest.mark.usefixtures("possible")
@pytest.mark.parametrize(("num_nodes", "spare"), [(2, False), (3, True)])
def test_workers_of_other_nodes_serve_the_same_text(
    num_nodes: int, spare: bool, tiny_model: TinyModel, prompts: Prompts, reference: Tokens
) -> None:
    """In the second round node 1 loses its expert worker; another one on that node, or a waiting spare, takes over."""
    prompts, reference = prompts[:16], reference[:16]
    asked = {"model": str(tiny_model.folder), "experts": num_nodes - 1, "prompts": prompts}
    with Box(num_nodes=num_nodes, mbit=400) as box:
        workers = [start_worker(box, node) for node in range(1, num_nodes)]
        script = json.dumps(asked | {"join": f"{box.address(0)}:{PORT}"})
        command = [sys.executable, "-m", "tests.serve.box_engine", script]
        engine = box.start(0, command, env=ENVIRONMENT, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        killed = False
        for line in lines_of(engine):
            word, _, rest = line.partition(" ")
            if word == "ready\n":
                if spare:
                    workers.append(start_worker(box, 1))
                    assert b"joined" in first_line_of(workers[-1])
                assert engine.stdin is not None
                engine.stdin.write(b"go\n")
            elif word == "done":
                result = json.loads(rest)
            elif word == "tokens" and not killed and int(rest) > 200:
                killed = True
                workers[0].kill()
                if not spare:
                    workers.append(start_worker(box, 1))
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

"""`--ray` on a local cluster of two Ray nodes: the same text, on both nodes, and on one when the other is killed."""

import signal
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest

from antiphon.base.errors import ResourceError
from antiphon.serve.engine import Engine
from antiphon.serve.launch import start_engine
from antiphon.serve.ray_cluster import RayCluster
from antiphon.serve.ray_placement import RayPlacement
from tests.serve.engine_harness import GREEDY, Prompts, Run, TinyModel, Tokens, complete, config
from tests.serve.server_harness import ServerProcess, serve

pytest.importorskip("ray", reason="Ray is not installed: pip install 'antiphon[ray]'")
from ray.cluster_utils import Cluster

from tests.waiting import wait_until

ROOT = Path(__file__).parents[2]
NODE = {"num_cpus": 3, "object_store_memory": 80 << 20, "include_dashboard": False}
# The loss of a node is noticed in seconds.
HEALTH = {
    "health_check_initial_delay_ms": 1000,
    "health_check_period_ms": 500,
    "health_check_timeout_ms": 2000,
    "health_check_failure_threshold": 3,
    "prestart_worker_first_driver": False,
}


@dataclass
class TwoNodes:
    """A Ray cluster of two nodes on this machine."""

    cluster: Any
    second: Any

    @property
    def address(self) -> str:
        return str(self.cluster.address)


@pytest.fixture(scope="module")
def two_nodes() -> Iterator[TwoNodes]:
    with pytest.MonkeyPatch.context() as patch, tempfile.TemporaryDirectory(prefix="ray", dir="/tmp") as folder:
        patch.setenv("PYTHONPATH", str(ROOT))
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        patch.setenv("RAY_TMPDIR", folder)
        cluster = Cluster(initialize_head=True, head_node_args={**NODE, "_system_config": HEALTH})
        try:
            yield TwoNodes(cluster, cluster.add_node(**NODE))
        finally:
            cluster.shutdown()


@pytest.fixture
def placement(two_nodes: TwoNodes, tiny_model: TinyModel) -> Iterator[RayPlacement]:
    with RayPlacement(config(tiny_model, "1+2/m2"), RayCluster(two_nodes.address)) as placed:
        yield placed


@pytest.fixture
def engine(placement: RayPlacement) -> Iterator[Engine]:
    started = start_engine(placement.config, lambda done, total: placement.check())
    try:
        yield started
    finally:
        placement.expect_end()
        started.stop()


def test_serve_ray(two_nodes: TwoNodes, checkpoint: Path, live_server: ServerProcess, tmp_path: Path) -> None:
    """The command: same text as the engine's own workers, no secret to be seen, everything ends with the server."""
    options = ("--layout", "disaggregated", "--threads", "1", "--ray", "--ray-address", two_nodes.address)
    with serve(checkpoint, tmp_path, *options) as server:
        assert server.text(max_tokens=48) == live_server.text(max_tokens=48)
        assert {worker["name"] for worker in server.facts["workers"]} == {"attention[0]", "experts[0]"}
        workers = [psutil.Process(worker["pid"]) for worker in server.facts["workers"]]
        assert {" ".join(worker.cmdline()[1:]) for worker in workers} == {"-m antiphon.serve.worker.joined"}
        assert not any("JOIN_SECRET" in name for worker in workers for name in worker.environ())
        assert server.end(signal.SIGTERM) == 0
        assert "Traceback" not in server.log
        wait_until(lambda: not any(worker.is_running() for worker in workers), "the workers end", 10.0)


def test_ranks_of_workers_sit_together(
    two_nodes: TwoNodes, tiny_model: TinyModel, prompts: Prompts, reference: Tokens
) -> None:
    """Attention on two ranks, experts on two: four actors, a worker's on one node."""
    with RayPlacement(config(tiny_model, "1t2+1t2/m2"), RayCluster(two_nodes.address)) as placed:
        started = start_engine(placed.config, lambda done, total: placed.check())
        try:
            assert complete(started, prompts[:8]) == reference[:8]
            assert len(started.worker_pids()) == 4
        finally:
            placed.expect_end()
            started.stop()


def test_workers_of_a_killed_node_are_placed_on_the_other(
    two_nodes: TwoNodes, placement: RayPlacement, engine: Engine, prompts: Prompts, reference: Tokens
) -> None:
    nodes = placement.nodes()
    assert nodes["experts[0]"] == nodes["experts[1]"] != nodes["attention[0]"]
    assert complete(engine, prompts) == reference
    run = Run(engine, prompts, GREEDY)
    lost = two_nodes.second.node_id
    killed: list[int] = []

    def kill_once(num_tokens: int) -> None:
        if num_tokens > 300 and not killed:
            killed.append(num_tokens)
            two_nodes.cluster.remove_node(two_nodes.second, allow_graceful=False)

    finished = run.finish(kill_once)
    assert [request.error for request in finished] == [None] * len(prompts)
    assert [request.token_ids for request in finished] == reference
    assert killed
    survivor = set(nodes.values()) - {lost}
    assert len(survivor) == 1, "the lost node had workers"
    wait_until(lambda: len(placement.nodes()) == 3 and set(placement.nodes().values()) == survivor, "all on one node")
    wait_until(lambda: engine.complete, "all workers are back")
    assert complete(engine, prompts[:8]) == reference[:8]


def test_no_cluster_is_one_line() -> None:
    with pytest.raises(ResourceError, match=r"--ray-address 127\.0\.0\.1:1: no Ray cluster there .*ray start --head"):
        RayCluster("127.0.0.1:1").connect()

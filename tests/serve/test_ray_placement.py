"""Placing workers with Ray, without Ray: a cluster that only pretends, then a real worker in a real seat."""

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import msgspec
import psutil
import pytest

from antiphon.base.errors import ResourceError, UserError
from antiphon.serve import ray_cluster, ray_placement
from antiphon.serve.config import ServeConfig
from antiphon.serve.joining import JoinedPeer, JoinListener
from antiphon.serve.launch import start_engine
from antiphon.serve.ray_cluster import ClusterNode, RayCluster, RunningActor, WorkerActor, WorkerEnd, WorkerNeeds
from antiphon.serve.ray_placement import RayPlacement
from antiphon.serve.worker.joined import JoinOrder, TetheredJob
from tests.serve.engine_harness import Prompts, TinyModel, Tokens, complete, config, is_alive
from tests.serve.fork_server import PROGRAMS
from tests.waiting import wait_until


@pytest.fixture(autouse=True)
def forked_workers_of_seats(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray_cluster, "subprocess", PROGRAMS)


SECRET = b"correct horse battery staple"
ROOT = Path(__file__).parents[2]


@dataclass
class Placed:
    """One worker that the pretended cluster runs."""

    node: str
    needs: WorkerNeeds
    order: JoinOrder
    secret: bytes
    seat: RunningActor

    def end(self, code: int, *last_lines: str) -> None:
        self.seat.ended.set_result(msgspec.json.encode((code, list(last_lines))))


@dataclass
class PretendedCluster(RayCluster):
    """Nodes that start every worker at once, and run none."""

    cpus: dict[str, float]
    free: float | None = None
    starts: bool = True
    placed: list[Placed] = field(default_factory=list)
    killed: list[RunningActor] = field(default_factory=list)
    connected: bool = False

    def connect(self) -> str:
        self.connected = True
        return "127.0.0.1"

    def disconnect(self) -> None:
        self.connected = False

    def nodes(self) -> list[ClusterNode]:
        return [ClusterNode(node=node, num_cpus=cpus) for node, cpus in self.cpus.items()]

    def addresses(self) -> dict[str, str]:
        return {node: f"10.0.0.{index}" for index, node in enumerate(self.cpus)}

    def num_free_cpus(self) -> float:
        return sum(self.cpus.values()) if self.free is None else self.free

    def start_worker(self, node: str, needs: WorkerNeeds, job: bytes) -> RunningActor:
        seat = RunningActor(actor=None, started=Future(), ended=Future())
        if self.starts:
            seat.started.set_result(("host", 1))
        self.placed.append(Placed(node, needs, *msgspec.json.decode(job, type=TetheredJob), seat))
        return seat

    def kill(self, seat: RunningActor) -> None:
        self.killed.append(seat)
        seat.ended.cancel()

    def finished(self, references: list[Any], timeout_s: float) -> list[Any]:
        return list(wait(references, timeout_s, FIRST_COMPLETED).done) if references else []

    def answer(self, reference: Any) -> Any:
        return reference.result()


def asked(**changes: Any) -> ServeConfig:
    settings: dict[str, Any] = {"layout": "disaggregated", "num_threads": 1} | changes
    return ServeConfig(model=Path("model"), **settings)


def place(cluster: PretendedCluster, **changes: Any) -> RayPlacement:
    return RayPlacement(asked(**changes), cluster)


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray_placement, "_LOOK_S", 0.02)
    monkeypatch.setattr(ray_placement, "_NO_ROOM_S", 0.02)
    monkeypatch.setattr(ray_placement, "_END_S", 0.1)
    monkeypatch.setattr(ray_placement, "_MAX_PAUSE_S", 0.05)


def test_every_worker_gets_an_order_and_the_engine_a_door(caplog: pytest.LogCaptureFixture) -> None:
    cluster = PretendedCluster({"a": 4, "b": 4})
    with caplog.at_level("DEBUG"), place(cluster, num_attention=1, num_experts=2) as placement:
        config = placement.config
        assert (config.joined_attention, config.joined_experts, config.num_workers) == (1, 2, 0)
        orders = [placed.order for placed in cluster.placed]
        assert [order.role for order in orders] == ["attention", "experts", "experts"]
        assert {order.address for order in orders} == {config.join_address}
        assert {order.model for order in orders} == {str(Path("model").resolve())}
        assert {placed.secret for placed in cluster.placed} == {config.join_secret}
        assert orders[0].host != orders[1].host == orders[2].host
        assert placement.nodes()["attention[0]"] != placement.nodes()["experts[1]"] == placement.nodes()["experts[0]"]
        placement.check()
        with_listener = JoinListener(config.join_address, config.join_secret, lambda peer: None)
        assert with_listener.start() == config.join_address, "the address is kept for the engine"
        with_listener.close()
    assert len(cluster.killed) == 3
    assert not cluster.connected
    assert config.join_secret.decode() not in caplog.text + repr(config)


def test_both_pools_are_placed() -> None:
    cluster = PretendedCluster({"a": 4, "b": 4})
    prefill = asked(layout="colocated", num_attention=2, pool="prefill")
    with place(cluster, num_attention=1, num_experts=1, pool="decode", prefill=prefill) as placement:
        config = placement.config
        assert config.prefill is not None
        assert (config.joined_attention, config.joined_experts, config.prefill.joined_attention) == (1, 1, 2)
        assert config.num_workers == 0
        roles = [placed.order.role for placed in cluster.placed]
        assert sorted(roles) == ["attention", "experts", "replica", "replica"]
    with pytest.raises(UserError, match="same numbers of ranks"):
        place(cluster, pool="decode", prefill=asked(layout="colocated", attention_tp=2, pool="prefill"))


def test_threads_are_as_many_as_fit() -> None:
    cluster = PretendedCluster({"a": 8, "b": 6})
    with place(cluster, num_attention=1, num_experts=2, num_threads=None):
        assert {placed.needs.num_cpus for placed in cluster.placed} == {4}
        assert {placed.order.num_threads for placed in cluster.placed} == {4}


def test_who_ends_is_placed_again_and_on_another_node_if_its_own_is_gone() -> None:
    cluster = PretendedCluster({"a": 1, "b": 1, "c": 1})
    with place(cluster) as placement:
        attention, experts = cluster.placed
        experts.end(-signal.SIGKILL)
        wait_until(lambda: len(cluster.placed) == 3, "placed again")
        assert cluster.placed[2].order.role == "experts"
        assert cluster.placed[2].node != attention.node
        del cluster.cpus[cluster.placed[2].node]
        cluster.placed[2].seat.ended.set_exception(ResourceError("The actor died because its node has died."))
        wait_until(lambda: len(cluster.placed) == 4, "placed on another node")
        assert cluster.placed[3].node in cluster.cpus.keys() - {attention.node}
        assert len(set(placement.nodes().values())) == 2
        placement.expect_end()
        attention.end(0)
        time.sleep(0.1)
        assert len(cluster.placed) == 4, "nobody is placed again at the end"


def test_ranks_of_a_worker_sit_on_one_node_and_are_placed_again_together() -> None:
    cluster = PretendedCluster({"a": 2, "b": 3, "c": 2})
    with place(cluster, attention_tp=2, expert_tp=3, num_attention=1) as placement:
        assert [placed.order.role for placed in cluster.placed] == ["attention"] * 2 + ["experts"] * 3
        assert {placed.needs.num_cpus for placed in cluster.placed} == {1}
        node = placement.nodes()["attention[0]"]
        assert placement.nodes()["experts[0]"] == "b" != node
        assert [placed.node for placed in cluster.placed] == [node] * 2 + ["b"] * 3
        del cluster.cpus[node]
        cluster.placed[1].seat.ended.set_exception(ResourceError("The actor died because its node has died."))
        wait_until(lambda: len(cluster.placed) == 7, "both ranks placed again")
        (other,) = cluster.cpus.keys() - {"b"}
        assert [placed.node for placed in cluster.placed[5:]] == [other] * 2
        assert cluster.placed[0].seat in cluster.killed, "a rank alone is of no use"


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"layout": "colocated", "num_attention": 3}, {"a": ["replica"] * 2, "b": ["replica"]}),
        ({"layout": "colocated", "num_attention": 2, "num_stages": 2}, {"a": ["replica"] * 2, "b": ["replica"] * 2}),
        (
            {"layout": "hybrid", "num_attention": 2, "attention_tp": 3, "expert_tp": 3},
            {"a": ["replica"] * 3, "b": ["replica"] * 3},
        ),
        (
            {"layout": "hybrid", "num_attention": 2, "num_instances": 2},
            {"a": ["replica"] * 2, "b": ["replica"] * 2},
        ),
        ({"num_instances": 2}, {"a": ["attention"] * 2, "b": ["experts"] * 2}),
    ],
)
def test_replicas_and_instances_spread_over_the_nodes(changes: dict[str, Any], expected: dict[str, list[str]]) -> None:
    cluster = PretendedCluster({"a": 3, "b": 3})
    with place(cluster, **changes) as placement:
        config = placement.config
        roles: dict[str, list[str]] = {node: [] for node in cluster.cpus}
        for placed in cluster.placed:
            roles[placed.node].append(placed.order.role)
        assert roles == expected
        assert len(placement.nodes()) == len(placement._places)
        assert config.joined_attention == config.num_attention
        assert config.num_workers == 0, "none is the engine's own"


def test_a_lost_replica_is_placed_again_whole() -> None:
    cluster = PretendedCluster({"a": 2, "b": 2, "c": 2})
    with place(cluster, layout="colocated", num_attention=2, attention_tp=2) as placement:
        lost = cluster.placed[0].node
        del cluster.cpus[lost]
        cluster.placed[1].seat.ended.set_exception(ResourceError("The actor died because its node has died."))
        wait_until(lambda: len(cluster.placed) == 6, "both ranks placed again")
        (other,) = cluster.cpus.keys() - {placement.nodes()["replica[1]"]}
        assert [placed.node for placed in cluster.placed[4:]] == [other] * 2


def test_a_worker_waits_until_a_node_has_room() -> None:
    cluster = PretendedCluster({"a": 1, "b": 1})
    with place(cluster):
        lost = cluster.placed[1]
        cpus = cluster.cpus.pop(lost.node)
        lost.end(1)
        time.sleep(0.2)
        assert len(cluster.placed) == 2
        cluster.cpus["back"] = cpus
        wait_until(lambda: len(cluster.placed) == 3, "placed on the node that came back")
        assert cluster.placed[2].node == "back"


def test_a_worker_that_never_starts_ends_the_start_with_its_last_words() -> None:
    cluster = PretendedCluster({"a": 1, "b": 1})
    with place(cluster) as placement:
        for attempt in range(ray_placement._MAX_FAILED_STARTS):
            placement.check()
            wait_until(lambda due=attempt: len(cluster.placed) == 2 + due, "tried again")
            cluster.placed[-1].end(1, "earlier", "no such model")
        with pytest.raises(ResourceError, match="experts worker 0 on Ray does not start: exit code 1: no such model"):
            wait_until(lambda: placement.check() is not None, "the failure is told", 10.0)


def test_a_node_that_is_busy_is_named_and_another_one_tried() -> None:
    cluster = PretendedCluster({"a": 2, "b": 2, "c": 2}, starts=False)
    with RayPlacement(asked(), cluster, start_timeout_s=0.05) as placement:
        first = {placed.node for placed in cluster.placed}
        with pytest.raises(ResourceError, match=r"has not started it within 0\.05 s: it needs 1 CPUs, 6 are free"):
            wait_until(lambda: placement.check() is not None, "the failure is told", 10.0)
        wait_until(lambda: {placed.node for placed in cluster.placed} > first, "another node is tried")


@pytest.mark.parametrize(
    ("cpus", "changes", "message"),
    [
        (
            {"a": 1},
            {},
            r"2 workers need 1 CPUs each; the Ray cluster's nodes have 1 CPUs and 0 GPUs, and 1 CPUs are free",
        ),
        ({}, {"num_threads": None}, "nodes have nothing, and 0 CPUs are free in all: add nodes"),
        ({"a": 8, "b": 2}, {"num_threads": 5}, "2 workers need 5 CPUs each; .* 8 CPUs and 0 GPUs, 2 CPUs and 0 GPUs"),
        ({"a": 8}, {"device": "cuda"}, "2 workers need 1 CPUs and 1 GPU each"),
        (
            {"a": 2, "b": 2},
            {"attention_tp": 3},
            "1 attention workers of 3 ranks and 1 expert workers of 1 ranks need 1 CPUs for each rank, a worker's on",
        ),
        (
            {"a": 4, "b": 2},
            {"layout": "colocated", "num_attention": 2, "attention_tp": 3},
            "2 replicas of 3 ranks need 1 CPUs for each rank, a worker's on one node; .* lower --threads, --attention$",
        ),
        (
            {"a": 3},
            {"num_instances": 2},
            "4 workers need 1 CPUs each; .* lower --threads, --attention, --instances or --experts$",
        ),
    ],
)
def test_too_small_a_cluster_is_one_line(cpus: dict[str, float], changes: dict[str, Any], message: str) -> None:
    cluster = PretendedCluster(cpus)
    with pytest.raises(ResourceError, match=message), place(cluster, **changes):
        pass
    assert not cluster.connected
    assert cluster.placed == []


def test_cpus_that_others_have_reserved_do_not_count() -> None:
    with pytest.raises(ResourceError, match="and 1 CPUs are free in all"), place(PretendedCluster({"a": 4}, free=1)):
        pass


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"device": "cuda:1"}, "Ray chooses the GPUs"),
        (
            {"joined_experts": 1, "join_address": "10.0.0.1:7700", "join_secret": SECRET},
            "leave --join-workers and --join-address out",
        ),
    ],
)
def test_what_ray_cannot_place_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        place(PretendedCluster({"a": 4}), **changes)


def test_without_the_package_the_line_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(UserError, match=r"--ray needs the package ray .*pip install 'antiphon\[ray\]'"):
        RayCluster("auto").connect()
    with pytest.raises(UserError, match="the server must itself run on a node"):
        RayCluster("ray://10.0.0.1:10001")


# --- a real worker in its seat ---


@dataclass
class Door:
    """A listener that takes workers in and keeps them waiting for a configuration."""

    came: list[JoinedPeer] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.listener = JoinListener("127.0.0.1:0", SECRET, self.came.append)
        self.address = self.listener.start()

    def job(self, **changes: Any) -> bytes:
        order = replace_struct(JoinOrder(address=self.address, role="experts", num_threads=1, patience_s=5.0), changes)
        return msgspec.json.encode((order, SECRET))


def replace_struct(order: JoinOrder, changes: dict[str, Any]) -> JoinOrder:
    return msgspec.structs.replace(order, **changes)


@pytest.fixture
def door() -> Iterator[Door]:
    made = Door()
    yield made
    made.listener.close()
    for peer in made.came:
        peer.channel.close()


def run_seat(job: bytes) -> tuple[threading.Thread, list[WorkerEnd]]:
    ends: list[WorkerEnd] = []
    thread = threading.Thread(target=lambda: ends.append(msgspec.json.decode(WorkerActor().run(job), type=WorkerEnd)))
    thread.start()
    return thread, ends


def test_a_seat_runs_a_worker_and_tells_how_it_ended(door: Door) -> None:
    thread, ends = run_seat(door.job())
    wait_until(lambda: len(door.came) == 1, "the worker has joined")
    worker = psutil.Process(door.came[0].pid)
    assert SECRET.decode() not in " ".join(worker.cmdline()) + str(worker.environ())
    worker.send_signal(signal.SIGTERM)  # for the engine to decide
    worker.send_signal(signal.SIGINT)
    assert worker.is_running()
    worker.kill()
    thread.join(20.0)
    assert ends == [(-signal.SIGKILL, [])]


def test_a_worker_ends_in_order_when_the_engine_hangs_up(door: Door) -> None:
    thread, ends = run_seat(door.job())
    wait_until(lambda: len(door.came) == 1, "the worker has joined")
    door.came[0].channel.hang_up()
    thread.join(20.0)
    assert ends == [(0, [])]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"address": "127.0.0.1:1", "patience_s": 0.1}, "join 127.0.0.1:1: no engine within 0.1 s"),
        ({"host": "0.0.0.0"}, "--host is 0.0.0.0: it cannot be dialled"),
    ],
)
def test_why_a_worker_cannot_join_is_its_last_word(door: Door, changes: dict[str, Any], message: str) -> None:
    thread, ends = run_seat(door.job(**changes))
    thread.join(30.0)
    assert ends[0][0] > 0
    assert message in ends[0][1][-1]


ACTOR = (
    "import sys; from antiphon.serve.ray_cluster import WorkerActor; "
    "WorkerActor().run(sys.stdin.buffer.readline().strip())"
)


def test_a_worker_does_not_outlive_its_actor(door: Door) -> None:
    actor = PROGRAMS.Popen([sys.executable, "-c", ACTOR], stdin=subprocess.PIPE, cwd=ROOT)
    try:
        assert actor.stdin is not None
        actor.stdin.write(door.job() + b"\n")
        actor.stdin.flush()
        wait_until(lambda: len(door.came) == 1, "the worker has joined")
        pid = door.came[0].pid
        assert is_alive(pid)
        os.kill(actor.pid, signal.SIGKILL)
        wait_until(lambda: not is_alive(pid), "the worker ends with its actor", 10.0)
    finally:
        actor.kill()
        actor.wait()
        with contextlib.suppress(OSError):
            actor.stdin.close()


def test_the_placement_s_own_configuration_is_valid() -> None:
    """`--transport shm` does not reach other machines, with Ray as without."""
    with (
        pytest.raises(UserError, match="does not reach other machines"),
        place(PretendedCluster({"a": 4}), exchange="shm"),
    ):
        pass
    assert replace(asked(), exchange="tcp").transport == "tcp"


@dataclass
class SeatsHere(PretendedCluster):
    """Nodes that are all this machine, whose actors are threads with real workers."""

    def addresses(self) -> dict[str, str]:
        return dict.fromkeys(self.cpus, "127.0.0.1")

    def start_worker(self, node: str, needs: WorkerNeeds, job: bytes) -> RunningActor:
        seat = super().start_worker(node, needs, job)

        def run() -> None:
            seat.ended.set_result(WorkerActor().run(job))

        threading.Thread(target=run, daemon=True).start()
        return seat


@pytest.mark.parametrize(
    ("layout", "num_instances"), [("2t2", 1), ("2t2*2", 1), ("1+1", 2)], ids=["replicas", "hybrid", "instances"]
)
def test_what_is_placed_serves(
    layout: str,
    num_instances: int,
    tiny_model: TinyModel,
    prompts: Prompts,
    reference: Tokens,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(ray_placement, "_END_S", 30.0)  # the workers end because the engine has
    asked = config(tiny_model, layout, num_instances=num_instances)
    with RayPlacement(asked, SeatsHere({"a": 2, "b": 2})) as placed:
        engine = start_engine(placed.config, lambda done, total: placed.check())
        try:
            assert complete(engine, prompts[:8]) == reference[:8]
            assert len(engine.worker_pids()) == 4
        finally:
            placed.expect_end()
            engine.stop()

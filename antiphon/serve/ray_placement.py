"""All workers of a server on the nodes of a Ray cluster: placed at the start, placed again when one is lost.

The engine listens for workers (`worker_handle`) at this machine's address in the cluster, under a secret of this run.
Ray starts an actor for each rank of a worker on the node that `choose_nodes` names; the actor starts the rank,
which joins. A thread waits for ranks that end. The worker of one is placed again, all its ranks on one node, which is
another one if its node is gone, until `expect_end`. The secret travels as an argument between Ray's processes.
Rejected: Ray's own actor restarts and placement groups, which know no roles; and tensors through Ray, whose object
store copies what the M2N library writes in place.

Attention and experts go to different nodes where both sides fit. A worker's ranks share memory, so they are on one
node; all ranks need the same. Replicas have no other side: they spread evenly over all nodes. At first the nodes are
split in two, for attention and for experts, so that both sides fit and the fuller of the two is as empty as can be;
within a side workers spread evenly. Where no split fits, they mix. Without a number of threads the largest is taken
that keeps the sides apart, or else the largest that fits. A worker that is lost goes to a node of its own side if it
fits on one, else to any. Rejected: a cluster scheduler's own spreading, which knows no roles and so puts attention and
experts together when there are more workers than nodes.
"""

import secrets
import signal
import socket
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from types import TracebackType
from typing import Self

import msgspec

from antiphon.base.errors import ResourceError, UserError
from antiphon.base.logging import get_logger
from antiphon.serve.config import ServeConfig
from antiphon.serve.joining import JoinRole
from antiphon.serve.ray_cluster import (
    ClusterNode,
    RayCluster,
    RunningActor,
    Side,
    WorkerEnd,
    WorkerNeeds,
)
from antiphon.serve.worker.joined import JoinOrder

SIDES: tuple[Side, Side] = ("attention", "experts")
Placed = tuple[Side, str]  # a worker that has a node: its side and the node
_log = get_logger("ray")
_LOOK_S = 0.5
_MAX_FAILED_STARTS = 3  # in a row, of one worker while the server starts
_STEADY_S = 10.0  # a worker that lived longer has not failed to start
_MAX_PAUSE_S = 30.0
_NO_ROOM_S = 5.0  # between two looks for a node with free CPUs
_END_S = 5.0  # for workers to end once the engine has


@dataclass(kw_only=True)
class _Place:
    """One worker's place: where its ranks run, and how that goes. `index`: counted over all instances; `actors`: none
    while it is not placed."""

    side: JoinRole
    index: int
    num_ranks: int = 1
    node: str = ""
    actors: list[RunningActor] = field(default_factory=list)
    started: bool = False
    placed_s: float = 0.0
    next_try_s: float = 0.0
    num_failures: int = 0
    avoid: frozenset[str] = field(default_factory=frozenset)

    def __str__(self) -> str:
        return f"{self.side} {self.index}" if self.side == "replica" else f"{self.side} worker {self.index}"


class RayPlacement:
    """Enter it, start an engine with `config`, call `check` while that loads; `expect_end` before the engine stops."""

    def __init__(self, config: ServeConfig, cluster: RayCluster, *, start_timeout_s: float = 60.0) -> None:
        if config.joined_attention or config.joined_experts:
            raise UserError("--ray places all workers itself: leave --join-workers and --join-address out")
        prefill = config.prefill
        if prefill is not None and (prefill.attention_ranks, prefill.expert_tp) != (
            config.attention_ranks,
            config.expert_tp,
        ):
            raise UserError("--ray places workers of equal size: give --prefill and --decode the same numbers of ranks")
        if ":" in config.device:
            raise UserError(f"--device {config.device}: with --ray, Ray chooses the GPUs; use cuda")
        self._asked = config
        self._cluster = cluster
        self._needs = WorkerNeeds(
            num_cpus=config.num_threads or 1,
            num_gpus=0 if config.device == "cpu" else 1,
            attention_ranks=config.attention_ranks,
            expert_ranks=config.expert_tp,
        )
        self._start_timeout_s = start_timeout_s
        self._secret = secrets.token_hex(32).encode()
        counts: Counter[JoinRole] = Counter()
        for pool in config.pools:
            role: JoinRole = "attention" if pool.num_expert_workers else "replica"
            counts[role] += pool.num_instances * pool.num_attention
            counts["experts"] += pool.num_instances * pool.num_expert_workers
        self._num_experts = counts.pop("experts")
        self._num_attention = counts.total()
        sides: list[tuple[JoinRole, int]] = [*counts.items(), ("experts", self._num_experts)]
        self._places = [
            _Place(side=side, index=index, num_ranks=self._needs.ranks(side))
            for side, count in sides
            for index in range(count)
        ]
        self._reserved: socket.socket | None = None
        self._ending = threading.Event()
        self._lock = threading.Lock()
        self._failure: ResourceError | None = None
        self._keeper = threading.Thread(target=self._keep, name="ray", daemon=True)
        self.config = config

    def __enter__(self) -> Self:
        host = self._cluster.connect()
        try:
            self._choose()
            address = self._reserve(host)
            prefill = self._asked.prefill
            prefill = None if prefill is None else self._joined(prefill, address)
            self.config = replace(self._joined(self._asked, address), prefill=prefill)
            for place in self._places:
                self._start(place)
            self._keeper.start()
        except BaseException:  # an interrupt too must leave no worker behind
            self._close(0.0)
            raise
        return self

    def _joined(self, config: ServeConfig, address: str) -> ServeConfig:
        """The configuration with all workers from outside."""
        return replace(
            config,
            join_address=address,
            join_secret=self._secret,
            joined_attention=config.num_attention,
            joined_experts=config.num_expert_workers,
        )

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.expect_end()
        self._close(_END_S if kind is None else 0.0)

    def check(self) -> None:
        """`ResourceError` if a worker cannot be placed or cannot join; to be called until all have joined."""
        with self._lock:
            if self._failure is not None:
                raise self._failure

    def expect_end(self) -> None:
        """From now on no worker that ends is placed again."""
        self._ending.set()
        if self._keeper.is_alive():
            self._keeper.join()

    def nodes(self) -> dict[str, str]:
        """The Ray node of each worker that has one now, by the worker's side and index, as in ``experts[1]``."""
        return {f"{place.side}[{place.index}]": place.node for place in self._places if place.actors}

    # --- start and end -----------------------------------------------------------------------------------------------

    def _choose(self) -> None:
        """What each rank reserves (the threads that were asked for, or as many as fit), and its first node."""
        config = self._asked
        nodes, free = self._cluster.nodes(), self._cluster.num_free_cpus()
        num_cpus = config.num_threads or most_cpus(nodes, self._num_attention, self._num_experts, self._needs)
        self._needs = replace(self._needs, num_cpus=max(1, num_cpus))
        num_ranks = sum(place.num_ranks for place in self._places)
        chosen = choose_nodes(nodes, self._num_attention, self._num_experts, self._needs)
        if chosen is None or free < num_ranks * self._needs.num_cpus:
            each = f"{self._needs.num_cpus} CPUs" + (" and 1 GPU" if self._needs.num_gpus else "")
            whom = f"{len(self._places)} workers need {each} each"
            if num_ranks > len(self._places):
                attention = "attention workers" if self._num_experts else "replicas"
                whom = f"{self._num_attention} {attention} of {config.attention_ranks} ranks"
                if self._num_experts:
                    whom += f" and {self._num_experts} expert workers of {config.expert_tp} ranks"
                whom += f" need {each} for each rank, a worker's on one node"
            others = " or --experts" if self._num_experts else ""
            others = f", --instances{others}" if config.num_instances > 1 else others
            sizes = f"the workers of {config.written_in}" if config.written_in else f"--attention{others}"
            have = ", ".join(f"{node.num_cpus:g} CPUs and {node.num_gpus:g} GPUs" for node in nodes) or "nothing"
            raise ResourceError(
                f"{whom}; the Ray cluster's nodes have {have}, and {free:g} CPUs "
                f"are free in all: add nodes, end other jobs, or lower --threads, {sizes}"
            )
        for place, (_, node) in zip(self._places, chosen, strict=True):
            place.node = node

    def _reserve(self, host: str) -> str:
        """An address for workers to join at, taken until the engine listens there."""
        self._reserved = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
        self._reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self._reserved.bind((host, 0))
        return f"{host}:{self._reserved.getsockname()[1]}"

    def _start(self, place: _Place) -> None:
        """Have Ray start the actors, and each actor its rank."""
        host = self._cluster.addresses().get(place.node, "")
        order = JoinOrder(
            address=self.config.join_address,
            role=place.side,
            host=host,
            model=str(self._asked.model.resolve()),
            num_threads=self._needs.num_cpus,
            patience_s=self._start_timeout_s / _MAX_FAILED_STARTS,
        )
        job = msgspec.json.encode((order, self._secret))
        place.actors = [self._cluster.start_worker(place.node, self._needs, job) for _ in range(place.num_ranks)]
        place.started = False
        place.placed_s = time.monotonic()
        _log.info("%s: on Ray node %s at %s, %d threads", place, place.node[:8], host, self._needs.num_cpus)

    def _close(self, patience_s: float) -> None:
        """End what still runs after `patience_s`; if all went well the workers end because the engine has."""
        deadline = time.monotonic() + patience_s
        waiting = [actor.ended for place in self._places for actor in place.actors]
        while waiting and (left := deadline - time.monotonic()) > 0:
            ended = self._cluster.finished(waiting, left)
            waiting = [reference for reference in waiting if reference not in ended]
        for place in self._places:
            self._leave(place)
        self._cluster.disconnect()
        if self._reserved is not None:
            self._reserved.close()

    def _leave(self, place: _Place) -> None:
        for actor in place.actors:
            self._cluster.kill(actor)
        place.actors = []

    # --- the keeper's thread -----------------------------------------------------------------------------------------

    def _keep(self) -> None:
        while not self._ending.is_set():
            try:
                self._look_after_places()
            except ResourceError as error:
                _log.error("the Ray cluster does not answer: %s", error)
                self._ending.wait(_NO_ROOM_S)

    def _look_after_places(self) -> None:
        """Wait until a worker ends, at most `_LOOK_S`, and do what there is to do."""
        watched = [actor.ended for place in self._places for actor in place.actors]
        if not watched:
            self._ending.wait(_LOOK_S)
        ended = self._cluster.finished(watched, _LOOK_S)
        if self._ending.is_set():
            return
        for place in self._places:
            lost = next((actor for actor in place.actors if actor.ended in ended), None)
            if lost is not None:
                self._on_end(place, lost)
            elif place.actors and not place.started:
                self._look_whether_started(place)
        for place in self._places:
            if not place.actors and time.monotonic() >= place.next_try_s:
                self._place_again(place)

    def _look_whether_started(self, place: _Place) -> None:
        """Give up a node that does not start the actors in time."""
        if all(self._cluster.finished([actor.started], 0.0) for actor in place.actors):
            place.started = True
            place.avoid = frozenset()
        elif time.monotonic() - place.placed_s > self._start_timeout_s:
            place.avoid |= {place.node}
            free, wanted = self._cluster.num_free_cpus(), place.num_ranks * self._needs.num_cpus
            self._give_up(
                place,
                f"Ray node {place.node[:8]} has not started it within {self._start_timeout_s:g} s: it needs "
                f"{wanted} CPUs, {free:g} are free in the cluster; end other jobs or lower --threads",
                fatal=True,
            )

    def _on_end(self, place: _Place, actor: RunningActor) -> None:
        try:
            code, last_lines = msgspec.json.decode(self._cluster.answer(actor.ended), type=WorkerEnd)
        except ResourceError as error:
            self._give_up(place, str(error))
            return
        if code < 0:
            self._give_up(place, f"killed by {signal.Signals(-code).name}")
        else:
            self._give_up(place, ": ".join([f"exit code {code}", *(last_lines[-1:] if code else [])]))

    def _give_up(self, place: _Place, reason: str, *, fatal: bool = False) -> None:
        """End the actors; place the worker again at once, or after a pause if it has failed before."""
        assert place.actors, "only a placed worker can be given up"
        self._leave(place)
        steady = time.monotonic() - place.placed_s > _STEADY_S
        place.num_failures = 1 if steady and not fatal else place.num_failures + 1
        pause_s = 0.0 if place.num_failures == 1 else min(_MAX_PAUSE_S, 0.5 * 2.0**place.num_failures)
        place.next_try_s = time.monotonic() + pause_s
        _log.warning("%s ended: %s", place, reason)
        if fatal or place.num_failures >= _MAX_FAILED_STARTS:
            with self._lock:
                self._failure = ResourceError(f"{place} on Ray does not start: {reason}")

    def _place_again(self, place: _Place) -> None:
        taken = [(other.side, other.node) for other in self._places if other.actors]
        node = choose_node(self._cluster.nodes(), taken, place.side, self._needs, place.avoid)
        if node is None:
            num_cpus = place.num_ranks * self._needs.num_cpus
            _log.warning("%s: no node has %d CPUs to spare; waiting for one", place, num_cpus)
            place.next_try_s = time.monotonic() + _NO_ROOM_S
            return
        place.node = node
        self._start(place)


def choose_nodes(
    nodes: Sequence[ClusterNode], num_attention: int, num_experts: int, needs: WorkerNeeds
) -> list[Placed] | None:
    """Nodes for the attention workers, then for the expert workers; None if they do not fit."""
    return _apart(nodes, num_attention, num_experts, needs) or _mixed(nodes, num_attention, num_experts, needs)


def most_cpus(nodes: Sequence[ClusterNode], num_attention: int, num_experts: int, needs: WorkerNeeds) -> int:
    """The largest number of CPUs each rank can have, in place of that of `needs`, with the sides apart, or else at all;
    0 if not even one."""
    for fit in (_apart, _mixed):
        for num_cpus in range(int(max((each.num_cpus for each in nodes), default=0.0)), 0, -1):
            if fit(nodes, num_attention, num_experts, replace(needs, num_cpus=num_cpus)) is not None:
                return num_cpus
    return 0


def choose_node(
    nodes: Sequence[ClusterNode],
    taken: Sequence[Placed],
    side: Side,
    needs: WorkerNeeds,
    avoid: frozenset[str] = frozenset(),
) -> str | None:
    """The node for one more worker beside those that are `taken`; None if it fits on none.

    First choice are nodes without the other side, then the emptiest; nodes of `avoid` only come last."""
    other = {where for placed, where in taken if placed != side}
    num_taken = {each.node: sum(needs.ranks(placed) for placed, where in taken if where == each.node) for each in nodes}
    num_free = {each.node: each.num_workers(needs, side, num_taken[each.node]) for each in nodes}
    open_nodes = [each.node for each in nodes if num_free[each.node] > 0]
    return min(open_nodes, key=lambda node: (node in avoid, node in other, -num_free[node], node), default=None)


def _apart(
    nodes: Sequence[ClusterNode], num_attention: int, num_experts: int, needs: WorkerNeeds
) -> list[Placed] | None:
    """Attention and experts on different nodes; None if no split of the nodes fits both."""
    best: tuple[float, frozenset[int]] | None = None
    capacity = [(each.num_workers(needs, "attention"), each.num_workers(needs, "experts")) for each in nodes]
    for num_places, (lost, chosen) in _subsets_by_capacity(capacity):
        others = sum(places for _, places in capacity) - lost
        if num_places >= num_attention and others >= num_experts:
            fullness = max(num_attention / num_places, num_experts / others if num_experts else 0.0)
            if best is None or fullness < best[0]:
                best = (fullness, chosen)
    if best is None:
        return None
    sides: tuple[list[ClusterNode], list[ClusterNode]] = ([], [])
    for index, each in enumerate(nodes):
        sides[index not in best[1]].append(each)
    attention = _spread(sides[0], "attention", num_attention, needs)
    return attention + _spread(sides[1], "experts", num_experts, needs)


def _subsets_by_capacity(capacity: Sequence[tuple[int, int]]) -> Iterator[tuple[int, tuple[int, frozenset[int]]]]:
    """For every number of attention workers that exactly fill some nodes: how many expert workers would fit on those
    nodes instead, and which nodes they are. The choice that costs the fewest. The usual subset-sum table."""
    known: dict[int, tuple[int, frozenset[int]]] = {0: (0, frozenset())}
    for index, (places, lost) in enumerate(capacity):
        if not places:
            continue
        for total, (already, chosen) in list(known.items()):
            entry = already + lost, chosen | {index}
            if total + places not in known or entry[0] < known[total + places][0]:
                known[total + places] = entry
    yield from sorted(known.items(), key=lambda entry: entry[0])


def _spread(nodes: Sequence[ClusterNode], side: Side, count: int, needs: WorkerNeeds) -> list[Placed]:
    placed: list[Placed] = []
    for _ in range(count):
        node = choose_node(nodes, placed, side, needs)
        assert node is not None, "the nodes of a side hold all its workers"
        placed.append((side, node))
    return placed


def _mixed(
    nodes: Sequence[ClusterNode], num_attention: int, num_experts: int, needs: WorkerNeeds
) -> list[Placed] | None:
    """Any nodes, the sides in turn so that each finds nodes without the other while there are some."""
    placed: dict[Side, list[Placed]] = {side: [] for side in SIDES}
    wanted = {"attention": num_attention, "experts": num_experts}
    for _ in range(num_attention + num_experts):
        side = min(SIDES, key=lambda side: len(placed[side]) / wanted[side] if wanted[side] else 1.0)
        node = choose_node(nodes, [*placed["attention"], *placed["experts"]], side, needs)
        if node is None:
            return None
        placed[side].append((side, node))
    return placed["attention"] + placed["experts"]

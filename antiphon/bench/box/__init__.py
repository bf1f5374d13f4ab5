"""A cluster in a box: nodes with addresses, slow links between them, and processes in them. See docs/box.md.

    with Box(num_nodes=3, mbit=400) as box:
        server = box.start(0, ["python", "server.py"])
        print(box.run(1, ["python", "client.py", box.address(0)], timeout_s=30).stdout)

Everything ends with the `with` block, with an exception, and with the death of this process, whatever caused it: see
`namespaces.py`. Nodes share files, memory, cores and clocks with the host; each has its own network, host name,
/etc/hosts, process numbers and /dev/shm. Hosts and nodes cannot reach each other over the network.

`topology.py` says what a box consists of (addresses, shaping) and why, and who runs what in it; `namespaces.py` is the
process that holds it, without names on disk, and says why nothing survives its owner; `keeper.py` talks to that
process, and to those that it starts. `benchmarks/box.py` is the command.
"""

import json
import os
import subprocess
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self

from antiphon.base.errors import ResourceError, UserError

from . import topology
from .keeper import BoxError, Keeper, NodeProcess, Stream, box_unavailable, close_all, open_stream
from .topology import LinkShape

__all__ = ["Box", "BoxError", "LinkCounters", "NodeProcess", "box_unavailable"]


@dataclass(frozen=True, kw_only=True)
class LinkCounters:
    """What passed one node's link since the start; frames with their headers. `up`: what the node sent."""

    up_control_bytes: int = 0
    up_bulk_bytes: int = 0
    down_control_bytes: int = 0
    down_bulk_bytes: int = 0


class Box:
    """`num_nodes` nodes, each behind a link of `mbit` (10^6 bits/s) each way.

    `priority`: packets marked IP_TOS 0x10 go ahead of others. `delay_us`, `loss`: of what each node sends; they need
    the kernel's sch_netem. `near_mbit`: rate of a second link of each node, to the others of its `num_near` neighbours
    (nodes 0 to `num_near` - 1, and so on), as devices of one server have. Nothing is made before the `with` statement;
    that raises ResourceError where this machine cannot, and BoxError when the kernel refuses. Methods may be called
    from any thread.
    """

    def __init__(
        self,
        *,
        num_nodes: int,
        mbit: float,
        priority: bool = True,
        delay_us: float = 0.0,
        loss: float = 0.0,
        near_mbit: float | None = None,
        num_near: int = 1,
    ) -> None:
        topology.check_num_nodes(num_nodes)
        self._num_near = num_near
        self._near_shape = None if near_mbit is None else LinkShape(mbit=near_mbit)
        shape = LinkShape(mbit=mbit, priority=priority, delay_us=delay_us, loss=loss)
        self.num_nodes = num_nodes
        self._shapes = [shape] * num_nodes
        self._keeper = Keeper()
        self._init_pids: list[int] = []
        self._open = ExitStack()

    def __enter__(self) -> Self:
        if reason := box_unavailable(netem=self._shapes[0].needs_netem):
            raise ResourceError(reason)
        with ExitStack() as stack:
            stack.enter_context(self._keeper)
            self._build()
            self._open = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        """Kill everything in the nodes, remove them; returns when it is done."""
        self._open.close()

    def _build(self) -> None:
        names = [topology.hostname(node) for node in range(self.num_nodes)]
        self._init_pids = self._keeper.ask("create", names=names, hosts=topology.hosts_file(self.num_nodes))["pids"]
        self._keeper.configure(None, "ip", topology.switch_links(self._init_pids))
        down: list[str] = []
        forwarding: list[str] = []
        for node, shape in enumerate(self._shapes):
            forwarding += topology.forwarding(node)
            first = node - node % self._num_near
            near = [other for other in range(first, min(first + self._num_near, self.num_nodes)) if other != node]
            beside: dict[str, Any] = {"near": near, "near_shape": self._near_shape}
            down += topology.shaping(topology.SWITCH_PORT.format(node), shape, sends=False, **beside)
            self._keeper.configure(node, "ip", topology.node_links(node, self.num_nodes))
            self._keeper.configure(node, "tc", topology.shaping(topology.NODE_DEVICE, shape, sends=True, **beside))
        self._keeper.configure(None, "bridge", forwarding)
        self._keeper.configure(None, "tc", down)

    def address(self, node: int) -> str:
        """The node's IPv4 address."""
        return topology.address(self._checked(node))

    def network(self, node: int) -> str:
        """The file of a node's network namespace, for setns(2); there until the node is killed, or the box ends."""
        return f"/proc/{self._init_pids[self._checked(node)]}/ns/net"

    def start(
        self,
        node: int,
        args: Sequence[str],
        *,
        env: Mapping[str, str] | None = None,
        cwd: Path | str | None = None,
        stdin: Stream = subprocess.DEVNULL,
        stdout: Stream = None,
        stderr: Stream = None,
    ) -> NodeProcess:
        """Start a command in a node; returns when it executes. BoxError if it cannot.

        `env` is added to this process's environment. `stderr` may be subprocess.STDOUT. The command gets a session and
        process group of its own.
        """
        if not args:
            raise UserError("no command to start; give at least the name of a program")
        directory = str(Path(cwd) if cwd is not None else Path.cwd())
        with ExitStack() as stack:
            streams: list[int] = []
            pipes: list[int] = []
            for stream, output in ((stdin, False), (stdout, True), (stderr, True)):
                if stream == subprocess.STDOUT and len(streams) == 2:
                    streams.append(streams[1])
                    pipes.append(-1)
                    continue
                theirs, ours = open_stream(stream, len(streams), output=output, stack=stack)
                streams.append(theirs)
                pipes.append(ours)
            status, said = os.pipe()
            stack.callback(os.close, said)
            try:
                pid = self._keeper.ask(
                    "start",
                    [*streams, said],
                    node=self._checked(node),
                    args=list(args),
                    env={**os.environ, **(env or {})},
                    cwd=directory,
                )["pid"]
            except BaseException:
                close_all([status, *(pipe for pipe in pipes if pipe >= 0)])
                raise
        process = NodeProcess(self._keeper, node, args, pid, status)
        process.stdin = os.fdopen(pipes[0], "wb", buffering=0) if pipes[0] >= 0 else None
        process.stdout = os.fdopen(pipes[1], "rb") if pipes[1] >= 0 else None
        process.stderr = os.fdopen(pipes[2], "rb") if pipes[2] >= 0 else None
        return process

    def run(
        self, node: int, args: Sequence[str], *, timeout_s: float, env: Mapping[str, str] | None = None
    ) -> subprocess.CompletedProcess[str]:
        """Run a command to its end and return what it printed. TimeoutError kills it and names it."""
        with ExitStack() as stack:
            # Files, not pipes: they never fill up, so no thread has to read while it runs.
            outputs = [stack.enter_context(os.fdopen(os.memfd_create("output"), "r+b")) for _ in range(2)]
            process = self.start(node, args, env=env, stdout=outputs[0], stderr=outputs[1])
            try:
                code = process.wait(timeout_s)
            except BaseException:
                process.kill()
                raise
            texts = [os.pread(f.fileno(), os.fstat(f.fileno()).st_size, 0).decode(errors="replace") for f in outputs]
        return subprocess.CompletedProcess(list(args), code, *texts)

    def set_rate(self, node: int, mbit: float) -> None:
        """From now on the node's link carries `mbit` each way."""
        self._reshape(node, replace(self._shapes[self._checked(node)], mbit=mbit))

    def set_delay(self, node: int, delay_us: float, loss: float = 0.0) -> None:
        """From now on the node's packets take `delay_us` more, one way, and are dropped with probability `loss`."""
        self._reshape(node, replace(self._shapes[self._checked(node)], delay_us=delay_us, loss=loss))

    def _reshape(self, node: int, shape: LinkShape) -> None:
        if shape.needs_netem and (reason := box_unavailable(netem=True)):
            raise ResourceError(reason)
        port = topology.SWITCH_PORT.format(node)
        self._keeper.configure(node, "tc", topology.reshaping(topology.NODE_DEVICE, shape, sends=True))
        self._keeper.configure(None, "tc", topology.reshaping(port, shape, sends=False))
        self._shapes[node] = shape

    def partition(self, node: int) -> None:
        """Cut the node off: the switch passes nothing to it or from it, silently. Sockets stay open.

        Frames that queue for the node on the switch's side at this moment still arrive.
        """
        self._keeper.configure(None, "ip", topology.leave_switch(self._checked(node)))

    def heal(self, node: int) -> None:
        """Undo `partition`. What was sent meanwhile is lost; TCP sends it again, after a pause as long as the cut."""
        self._keeper.configure(None, "ip", topology.join_switch(self._checked(node)))
        self._keeper.configure(None, "bridge", topology.forwarding(node))

    def kill(self, node: int) -> None:
        """Kill every process of the node at once; returns when they are gone. `start` brings the node back.

        Peers see closed connections, as after a crash of the program. For a loss of power call `partition` first.
        """
        self._keeper.ask("kill", node=self._checked(node))

    def counters(self, node: int) -> LinkCounters:
        """What passed the node's link so far."""
        up = self._link_counters(self._checked(node), topology.NODE_DEVICE)
        down = self._link_counters(None, topology.SWITCH_PORT.format(node))
        control, bulk = topology.CONTROL_CLASS, topology.BULK_CLASS
        return LinkCounters(
            up_control_bytes=up.get(control, 0),
            up_bulk_bytes=up[bulk],
            down_control_bytes=down.get(control, 0),
            down_bulk_bytes=down[bulk],
        )

    def _link_counters(self, node: int | None, device: str) -> dict[int, int]:
        """Bytes sent by each class's queue."""
        printed = self._keeper.configure(node, "tc", [f"qdisc show dev {device}"], ["-s", "-j"])
        queues = {entry["handle"]: entry for entry in json.loads(printed)}
        classes = (topology.CONTROL_CLASS, topology.BULK_CLASS)
        found = {number: queues[f"{number}:"] for number in classes if f"{number}:" in queues}
        return {number: entry["bytes"] for number, entry in found.items()}

    def _checked(self, node: int) -> int:
        if not 0 <= node < self.num_nodes:
            raise UserError(f"node {node}; this box has nodes 0 to {self.num_nodes - 1}")
        return node

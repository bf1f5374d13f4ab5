"""Plans as a user runs them, measured: `antiphon plan --runnable-here` with a pinned layout, `antiphon serve --plan`,
and load over HTTP; on this machine, or on the nodes of a cluster in a box, where the workers of other nodes join.

A device of a plan is a core: layouts use all cores, a process on each. Nodes of a box share them out. What is measured
is a decode step while all requests decode, which is what a plan of the decode phase predicts. A plan of both phases is
for requests that come at a rate; what it promises is what the simulation of it shows.

Rejected: the engine without a server (`serve.AntiphonEngine`). It would leave out what makes a plan hard to serve: who
joins, and where each rank goes.
"""

import json
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from antiphon.base.errors import UserError
from antiphon.bench.box import Box
from antiphon.bench.harness.processes import (
    ANTIPHON,
    PATIENCE_S,
    Process,
    end_of,
    end_process,
    ready_facts,
    run_beside,
    start_here,
    start_on,
    worker_command,
)
from antiphon.bench.openai_peer import OpenAIPeer
from antiphon.bench.serve import WorkloadSize, make_workload
from antiphon.bench.serving_peers import PeerError
from antiphon.models.config import load_model_spec
from antiphon.serve.joining import roles_of
from antiphon.serve.served_plan import ServedPlan, served_plan_of
from antiphon.specs.plan import read_plan

_JOIN_PORT = 7700
_LOOSE = "--slo-ttft", "2s", "--slo-tpot", "100ms"  # without targets a pass is as long as memory allows
HEADERS = 0.984  # of a frame, what is not headers (docs/box.md)
_NUM_PINGS = 200
_PING = """
import socket, statistics, sys, time
if len(sys.argv) == 2:
    server = socket.create_server((sys.argv[1], 7900))
    peer = server.accept()[0]
    while peer.recv(1):
        peer.send(b"x")
else:
    for attempt in range(50):
        try:
            peer = socket.create_connection((sys.argv[1], 7900))
            break
        except OSError:
            time.sleep(0.1)
    peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    took = []
    for number in range(int(sys.argv[2])):
        begin = time.perf_counter()
        peer.send(b"x")
        peer.recv(1)
        took.append(time.perf_counter() - begin)
    print(statistics.median(took) / 2)
"""


@dataclass(frozen=True, kw_only=True)
class PinnedLayout:
    """A layout of `--layout`, what `--pin` fixes of it, and how many instances of it there are."""

    name: str
    layout: str
    pins: str
    num_instances: int = 1


def layouts_of(num_devices: int) -> list[PinnedLayout]:
    """Nine layouts that use this many devices, at least two, all of them."""
    d, half = num_devices, num_devices // 2
    apart = f"attention.tp=1,attention.dp={d - half},experts.tp=1,experts.ep={half}"
    return [
        PinnedLayout(name=f"{d} replicas", layout="tp_pp", pins="attention.tp=1,pp=1", num_instances=d),
        PinnedLayout(name=f"TP {d}", layout="tp_pp", pins=f"attention.tp={d},experts.tp={d},pp=1"),
        PinnedLayout(name=f"PP {d}", layout="tp_pp", pins=f"attention.tp=1,pp={d}"),
        *(
            PinnedLayout(name=f"{d - half}+{half}, m {m}", layout="disaggregated", pins=f"{apart},micro_batches={m}")
            for m in (1, 2, 4)
        ),
        PinnedLayout(name=f"DP {d} + EP {d}", layout="dp_ep", pins=f"attention.dp={d},experts.ep={d},pp=1"),
        PinnedLayout(name=f"TP {d} + EP {d}", layout="dp_ep", pins=f"attention.tp={d},experts.ep={d},pp=1"),
        PinnedLayout(name=f"DP {d}, experts TP {d}", layout="hybrid", pins=f"attention.dp={d},experts.tp={d},pp=1"),
    ]


@dataclass(frozen=True, kw_only=True)
class Machines:
    """Where plans are served. `cluster`: the options of `antiphon plan` that name it; `box` None: this machine."""

    box: Box | None
    cluster: tuple[str, ...]
    num_devices: int
    devices_per_node: int

    def start(self, node: int, arguments: Sequence[str], log: Path) -> Process:
        return start_here(arguments, log) if self.box is None else start_on(self.box, node, arguments, log)


def this_machine(cluster: dict[str, Any]) -> Machines:
    """All cores of the machine that `cluster`, a file of `antiphon profile`, describes."""
    cores = int(cluster["groups"][0]["devices_per_node"])
    return Machines(box=None, cluster=(), num_devices=cores, devices_per_node=cores)


@contextmanager
def nodes_in_a_box(cluster: dict[str, Any], num_nodes: int, mbit: float, folder: Path) -> Iterator[Machines]:
    """Nodes that share out those cores, behind links of `mbit`; their cluster's file is written to `folder`."""
    (group,) = cluster["groups"]
    cores = int(group["devices_per_node"])
    if num_nodes < 2 or cores % num_nodes:
        raise UserError(f"--nodes is {num_nodes}: share the {cores} cores of this machine out evenly over 2 or more")
    each = cores // num_nodes
    with Box(num_nodes=num_nodes, mbit=mbit) as box:
        group = group | {"num_nodes": num_nodes, "devices_per_node": each, "scale_up_domain": each}
        group["node_scale_out_bytes_per_s"] = HEADERS * mbit * 1e6 / 8
        nodes = cluster | {"name": f"box-{mbit:g}", "scale_out_latency_s": _latency_s(box), "groups": [group]}
        file = folder / "nodes.json"
        file.write_text(json.dumps(nodes))
        yield Machines(box=box, cluster=("--nodes", str(file)), num_devices=cores, devices_per_node=each)


def _latency_s(box: Box) -> float:
    """One way of a small message between two nodes."""
    server = box.start(1, [sys.executable, "-c", _PING, box.address(1)])
    try:
        found = box.run(0, [sys.executable, "-c", _PING, box.address(1), str(_NUM_PINGS)], timeout_s=30.0)
    finally:
        server.kill()
    return float(found.stdout)


def profile_here(model: Path, folder: Path, *, quick: bool) -> Path:
    """`antiphon profile` into `folder`; its profile."""
    _run(*ANTIPHON, "profile", str(model), "--folder", str(folder), *(["--quick"] if quick else []))
    return folder / "profile.json"


def make_plan(
    machines: Machines, model: Path, profile: Path, layout: PinnedLayout, size: WorkloadSize, folder: Path
) -> ServedPlan:
    """`antiphon plan` for this many requests at once; its file goes to `folder`."""
    workload, file = write_workload(size, folder), folder / f"{profile.parent.name}, {layout.name}.json"
    if size.concurrency % layout.num_instances:
        raise UserError(f"{size.concurrency} requests: give a multiple of the {layout.num_instances} replicas")
    pins = f"{layout.pins},batch={size.concurrency // layout.num_instances}"
    options = ["--profile", str(profile), "--workload", str(workload), "--layout", layout.layout, "--pin", pins]
    _run(*ANTIPHON, "plan", str(model), "--runnable-here", *machines.cluster, *options, "--json", str(file))
    return served_plan_of(read_plan(file), load_model_spec(model), file)


def _run(*command: str) -> None:
    """`UserError` with its last line if it fails."""
    found = subprocess.run(command, capture_output=True, encoding="utf-8", errors="replace", check=False)
    if found.returncode:
        raise UserError(f"{' '.join(command)}: {found.stderr.strip().splitlines()[-1]}")


def make_two_phase_plan(model: Path, profile: Path, rate: float, size: WorkloadSize, folder: Path) -> ServedPlan:
    """`antiphon plan --phase both` for requests of this size that come at `rate` a second."""
    workload, file = write_workload(size, folder), folder / f"{rate:g} a second.json"
    options = ["--profile", str(profile), "--workload", str(workload), "--phase", "both", "--rate", str(rate), *_LOOSE]
    _run(*ANTIPHON, "plan", str(model), "--runnable-here", *options, "--json", str(file))
    return served_plan_of(read_plan(file), load_model_spec(model), file)


def promise_of(served: ServedPlan, profile: Path, rate: float, num_requests: int, folder: Path) -> dict[str, Any]:
    """What `antiphon simulate` says of that plan by a profile of this machine, for that many requests, which come when
    those of `bench.load` do."""
    file = folder / "promised.json"
    options = ["--rate", str(rate), "--requests", str(num_requests), "--seed", "0"]
    options += ["--profile", str(profile), "--client-here"]
    _run(*ANTIPHON, "simulate", str(served.file), *options, "--json", str(file))
    promise: dict[str, Any] = json.loads(file.read_text())
    return promise


def write_workload(size: WorkloadSize, folder: Path) -> Path:
    """A file of requests that are all of this size."""
    file = folder / "workload.toml"
    lengths = f"[input_tokens]\ntrace = [{size.input_tokens}]\n[output_tokens]\ntrace = [{size.output_tokens}]\n"
    file.write_text(f'name = "benchmark"\n{lengths}[slo]\n')
    return file


@contextmanager
def serving(machines: Machines, model: Path, served: ServedPlan, size: WorkloadSize, folder: Path) -> Iterator[str]:
    """A server of this plan that is ready: its URL. It is ended afterwards. Logs are in `folder`."""
    ready = folder / "ready.json"
    ready.unlink(missing_ok=True)
    serve = [*ANTIPHON, "serve", str(model), "--plan", str(served.file), "--threads", "1", "--kv-bytes", "1GiB"]
    serve += ["--max-model-len", str(size.input_tokens + size.output_tokens + 1), "--port", "0", "--json", str(ready)]
    with ExitStack() as stack:

        def start(node: int, arguments: Sequence[str], name: str) -> Process:
            process = machines.start(node, arguments, folder / f"{name}.log")
            stack.callback(end_process, process)
            return process

        if machines.box is not None:
            join = f"{machines.box.address(0)}:{_JOIN_PORT}"
            serve += ["--join-address", join, "--timeout", str(PATIENCE_S)]
            for index, role in enumerate(_roles_elsewhere(served)):
                start(1 + index // machines.devices_per_node, worker_command(role, join), f"worker-{index}")
        server = start(0, serve, "server")
        yield str(ready_facts(ready, server, folder / "server.log")["url"])


def serve_and_measure(machines: Machines, model: Path, served: ServedPlan, size: WorkloadSize, folder: Path) -> float:
    """Tokens per second while all requests decode. Logs are in `folder`. `UserError` with the end of the server's log
    if the load fails, or takes more than 900 s."""
    workload = make_workload(size, load_model_spec(model).vocab_size)
    with serving(machines, model, served, size, folder) as url:
        peer = OpenAIPeer(url)

        def measure() -> float:
            peer.start()
            return peer.steady_decode_tokens_per_s(workload)

        try:
            return run_beside(machines.box, measure)
        except PeerError as error:
            log = end_of(folder / "server.log")
            raise UserError(f"the load failed: {error}; the end of the server's log: {log}") from None


def _roles_elsewhere(served: ServedPlan) -> list[str]:
    """The role of each process that is not on the first node, in order."""
    attention, experts, ranks_here = served.join_workers
    width = served.attention_tp * served.num_stages
    return roles_of(served.layout, attention * width, experts * served.expert_tp)[ranks_here:]

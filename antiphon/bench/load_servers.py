"""Servers of ours for a load: one for each layout, on this machine, or spread over the nodes of a cluster in a box.

In a box every node has as many processes of a layout, a thread each, so all layouts have equal hardware (MixServe's
Figure 10, MegaScale-Infer's Figures 8 and 9, whose baselines are layouts too). Processes lie on the nodes in order:
those of attention workers or replicas, rank by rank, then those of expert workers. The server is on node 0 with the
first ones; the others join, as on machines of their own. The client sits on node 0.

Rejected: nodes for each contestant in turn. A start costs more than a load; a server that waits costs nothing.
"""

import json
import os
import subprocess
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TypeVar

from antiphon.base.errors import ResourceError, UserError
from antiphon.bench.box import Box, box_unavailable
from antiphon.bench.box.namespaces import CLONE_NEWNET, enter
from antiphon.bench.load import LoadCase, LoadOptions
from antiphon.bench.openai_peer import OpenAIPeer
from antiphon.bench.serve import parse_contestant
from antiphon.bench.served_plans import ANTIPHON, SECRET, START_S, Process, end_process, start_here, wait_for
from antiphon.planner.local_prediction import LocalChoice

_Result = TypeVar("_Result")
_FIRST_PORT = 7700  # where workers join the first contestant; the next port is the next one's
_PATIENCE_S = "120"


@contextmanager
def own_servers(
    model: Path, contestants: Sequence[str], case: LoadCase, folder: Path, options: Sequence[str], box: Box | None
) -> Iterator[list[OpenAIPeer]]:
    """`antiphon serve` for each contestant, one after the other, with `options` besides; all are ended at the end.

    A contestant is a layout, behind which `:fused` or `:synchronous` may say the form of its prompts' collectives.

    `UserError` with the end of a server's log if it does not start within 300 s, or if a layout's processes cannot be
    shared out evenly over the nodes."""
    choices = [parse_contestant(name.partition(":")[0]) for name in contestants]
    spreads = [None if box is None else spread_over_nodes(choice, box.num_nodes) for choice in choices]
    with ExitStack() as stack:
        peers = []
        for index, (name, choice, spread_over) in enumerate(zip(contestants, choices, spreads, strict=True)):
            ready, log = folder / f"{index}.json", folder / f"{index}.log"
            command = [*ANTIPHON, "serve", str(model), *serve_options(choice), "--port", "0", "--json", str(ready)]
            command += ["--max-streams", str(2 * case.num_requests), *options]
            if form := name.partition(":")[2]:
                command += ["--prefill-collectives", form]
            if case.workload.max_batch is not None:
                command += ["--max-running", str(case.workload.max_batch)]
            if box is None or spread_over is None:
                server = start_here(command, log)
                stack.callback(end_process, server)
            else:
                address = f"{box.address(0)}:{_FIRST_PORT + index}"
                server = _run_on_nodes(box, command, spread_over, address, log, stack)
            wait_for(partial(_is_written, ready), server, log, START_S)
            url = str(json.loads(ready.read_text(encoding="utf-8"))["url"])
            peers.append(OpenAIPeer(url, name=f"antiphon {name}"))
        yield peers


def _is_written(file: Path) -> bool:
    return file.exists() and file.stat().st_size > 0


@dataclass(frozen=True, kw_only=True)
class OverNodes:
    """How a layout lies on nodes: `options` of its server, and for each further node the roles of its processes."""

    options: tuple[str, ...]
    joined: tuple[tuple[str, ...], ...]


def spread_over_nodes(choice: LocalChoice, num_nodes: int) -> OverNodes:
    """Equally many processes of this layout on each node. `UserError` if they cannot be: expert workers are whole on a
    node, and of attention workers only the first may lie on several."""
    width = choice.tp * choice.num_stages
    is_apart = choice.layout == "disaggregated"
    attention, experts = choice.num_attention * width, choice.num_experts * choice.expert_tp if is_apart else 0
    here, rest = divmod(attention + experts, num_nodes)
    if rest:
        raise UserError(f"--nodes {num_nodes}: {choice} has {attention + experts} processes, not equally many a node")
    roles = ["attention" if is_apart else "replica"] * attention + ["experts"] * experts
    elsewhere = roles[here:]
    in_one = here < width
    if (here > width and here < attention and here % width) or elsewhere.count("experts") % choice.expert_tp:
        raise UserError(f"--nodes {num_nodes}: the {here} processes of a node cut a worker of {choice} in two")
    joined_attention = choice.num_attention - (0 if in_one else min(here, attention) // width)
    options = ["--join-workers", f"{joined_attention}+{elsewhere.count('experts') // choice.expert_tp}"]
    if in_one:
        options += ["--ranks-here", str(here)]
    joined = [tuple(elsewhere[first : first + here]) for first in range(0, len(elsewhere), here)]
    return OverNodes(options=tuple(options), joined=tuple(joined))


def _run_on_nodes(
    box: Box, command: Sequence[str], spread_over: OverNodes, address: str, log: Path, stack: ExitStack
) -> Process:
    """The server on node 0, and what joins it on the others."""

    def start(node: int, command: Sequence[str], log: Path) -> Process:
        with log.open("wb") as output:
            environment = {"ANTIPHON_JOIN_SECRET": SECRET}
            process = box.start(node, command, env=environment, stdout=output, stderr=subprocess.STDOUT)
        stack.callback(end_process, process)
        return process

    for node, roles in enumerate(spread_over.joined, start=1):
        for number, role in enumerate(roles):
            worker = [*ANTIPHON, "worker", "--role", role, "--join", address, "--threads", "1"]
            start(node, [*worker, "--patience", _PATIENCE_S], log.with_suffix(f".{node}.{number}.log"))
    here = ["--threads", "1", "--timeout", _PATIENCE_S, "--join-address", address, *spread_over.options]
    return start(0, [*command, *here], log)


def serve_options(choice: LocalChoice) -> list[str]:
    """How `antiphon serve` is asked for that layout."""
    numbers = {"--attention": choice.num_attention, "--tp": choice.tp}
    if choice.layout == "colocated":
        numbers["--pp"] = choice.num_stages
    else:
        numbers["--expert-tp"] = choice.expert_tp
    if choice.layout == "disaggregated":
        numbers |= {"--experts": choice.num_experts, "--micro-batches": choice.num_micro_batches}
    return ["--layout", choice.layout, *(str(word) for pair in numbers.items() for word in pair)]


@contextmanager
def nodes_for(options: LoadOptions) -> Iterator[Box | None]:
    """The nodes that the options ask for; None: this machine as it is. `ResourceError` if there can be no box."""
    if options.nodes is None:
        if options.mbit is not None:
            raise UserError(f"--mbit {options.mbit:g} is of the nodes' links: give --nodes too, or leave it out")
        yield None
        return
    if options.nodes < 2:
        raise UserError(f"--nodes is {options.nodes}: it must be 2 at least")
    mbit = 100.0 if options.mbit is None else options.mbit
    if not 0.1 <= mbit <= 40_000:
        raise UserError(f"--mbit is {mbit:g}: it must be 0.1 to 40000")
    if reason := box_unavailable():
        raise ResourceError(f"--nodes makes a cluster in a box (docs/box.md): {reason}")
    with Box(num_nodes=options.nodes, mbit=mbit) as box:
        yield box


def run_beside(box: Box | None, work: Callable[[], _Result]) -> _Result:
    """`work`, which talks to the servers: here, or in a thread that lives in the network of node 0."""
    if box is None:
        return work()
    holder = box.start(0, ["sleep", "infinity"])  # ends with the box

    def move() -> None:
        descriptor = os.open(f"/proc/{holder.pid}/ns/net", os.O_RDONLY)
        enter(descriptor, CLONE_NEWNET)
        os.close(descriptor)

    with ThreadPoolExecutor(1, initializer=move) as inside:
        return inside.submit(work).result()

"""Run a command on every node of a cluster in a box, print what it says, end it as a whole.

    python benchmarks/box.py --nodes 3 --mbit 400 -- python train.py --rank {rank} --master {address0}
    python benchmarks/box.py --nodes 2 --mbit 400 --node-command 0:'python server.py' --until 1 -- COMMAND {address0}

Exit code: 0; else that of the rank that failed first (128 + signal), 124 after --timeout, 130 after Ctrl-C, 143 after
SIGTERM, 1 where no box can be made, 2 for a mistake in the arguments. When one rank fails the others get SIGTERM, and
SIGKILL after 5 s.

Needs Linux, root and iproute2. The guide is docs/box.md. From Python: `from antiphon.bench.box import Box`.
"""

import argparse
import math
import multiprocessing.connection
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from functools import partial
from threading import Thread
from types import FrameType
from typing import BinaryIO

from antiphon.base.errors import UserError
from antiphon.base.system import signal_name
from antiphon.bench.box import Box, BoxError, NodeProcess, box_unavailable
from antiphon.bench.box.topology import RankPlan, plan_ranks

GRACE_S = 5.0
TIMED_OUT = 124
MAX_LINE_BYTES = 1 << 16
INTERRUPTIONS = (signal.SIGINT, signal.SIGTERM)


def parse_node_command(text: str, num_nodes: int) -> dict[int, list[str]]:
    """The command of each node, from `NODES:COMMAND`: nodes as 0 or 0,2 or 1-3, the command with a shell's quotes but
    without a shell."""
    where, colon, command = text.partition(":")
    if not colon or not re.fullmatch(r"\d+(-\d+)?(,\d+(-\d+)?)*", where):
        raise UserError(f"--node-command {text!r}; write NODES:COMMAND, as in 0:'python server.py' or 1,3-5:...")
    nodes: set[int] = set()
    for part in where.split(","):
        first, _, last = part.partition("-")
        nodes.update(range(int(first), int(last or first) + 1))
    if not nodes or max(nodes) >= num_nodes:
        raise UserError(f"--node-command {text!r} names nodes {where}; this box has nodes 0 to {num_nodes - 1}")
    try:
        args = shlex.split(command)
    except ValueError as error:
        raise UserError(f"--node-command {text!r}: {error}; close what is open") from None
    if not args:
        raise UserError(f"--node-command {text!r} has no command after the colon")
    return dict.fromkeys(nodes, args)


class RunInterrupted(BaseException):
    """SIGINT or SIGTERM came."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.exit_code = 128 + number


class Supervision:
    """Decides when all ranks end, and with which code."""

    def __init__(self, running: dict[NodeProcess, RankPlan], *, until: int | None, timeout_s: float | None) -> None:
        self.exit_code = 0
        self._running = running
        self._until = until
        self._timeout_s = timeout_s
        self._deadline = math.inf if timeout_s is None else time.monotonic() + timeout_s
        self._is_ending = False

    def wait(self) -> int:
        """Until every rank has ended; the exit code of the run."""
        while self._running:
            try:
                signal.pthread_sigmask(signal.SIG_UNBLOCK, INTERRUPTIONS)
                self._step()
            except RunInterrupted as interruption:
                if self._is_ending:
                    raise  # a second time: no more patience
                self._end(interruption.exit_code, "interrupted")
        return self.exit_code

    def _step(self) -> None:
        left_s = self._deadline - time.monotonic()
        if left_s <= 0 and self._is_ending:
            for process in self._running:
                process.kill()
            self._deadline = time.monotonic() + GRACE_S
        elif left_s <= 0:
            names = ", ".join(str(plan.rank) for plan in self._running.values())
            self._end(TIMED_OUT, f"ranks {names} had not ended within {self._timeout_s:g} s")
        else:
            # Not without end: a signal that comes just before it sleeps does not wake it.
            for process in multiprocessing.connection.wait(list(self._running), min(left_s, 0.5)):
                assert isinstance(process, NodeProcess)
                self._ended(process)

    def _ended(self, process: NodeProcess) -> None:
        code, plan = process.wait(0.0), self._running.pop(process)
        if self._is_ending:
            return
        if code != 0:
            words = f"exit code {code}" if code > 0 else signal_name(-code)
            where = f"rank {plan.rank} (node {plan.node})"
            self._end(code if code > 0 else 128 - code, f"{where} ended with {words}")
        elif self._until is not None and all(other.node != self._until for other in self._running.values()):
            self._end(0, "")

    def _end(self, exit_code: int, why: str) -> None:
        """Ask the others to end; `_step` insists after a while."""
        self.exit_code, self._is_ending = exit_code, True
        self._deadline = time.monotonic() + GRACE_S
        if why:
            say(f"{why}; ending {len(self._running)} other ranks" if self._running else why)
        for process in self._running:
            process.terminate()


def relay(rank: int, stream: BinaryIO, target: BinaryIO) -> None:
    """Print the stream's lines behind the number of the rank, until it ends. A very long line comes in parts."""
    for line in iter(partial(stream.readline, MAX_LINE_BYTES), b""):
        target.write(b"[%d] %s\n" % (rank, line.removesuffix(b"\n")))
        target.flush()


def say(text: str) -> None:
    print(f"box: {text}", file=sys.stderr, flush=True)


def parser() -> argparse.ArgumentParser:
    usage = "box.py --nodes N --mbit RATE [options] -- COMMAND ARG ..."
    description = "Runs COMMAND on every node of a cluster in a box. Replaced in its arguments: {node} {rank} "
    description += "{local_rank} {num_nodes} {world_size} {address} {addresses} and {address0} {address1} ... of nodes."
    made = argparse.ArgumentParser(prog="box.py", usage=usage, description=description)
    made.add_argument("--nodes", type=int, required=True, help="number of nodes")
    made.add_argument("--mbit", type=float, required=True, help="bandwidth of each node's link each way, 10^6 bits/s")
    made.add_argument("--procs-per-node", type=int, default=1, metavar="R", help="processes on each node (1)")
    made.add_argument("--no-priority", action="store_true", help="control (IP_TOS 0x10) queues with everything else")
    made.add_argument("--delay-us", type=float, default=0.0, help="added one-way delay of each node's packets (0)")
    made.add_argument("--loss", type=float, default=0.0, help="probability that a packet is dropped (0)")
    made.add_argument("--timeout", type=float, metavar="SECONDS", help="end the run after so long, with exit code 124")
    made.add_argument(
        "--node-command",
        action="append",
        default=[],
        metavar="NODES:COMMAND",
        help="another command for some nodes, as in 0:'python server.py' or 1,3-5:...; may be given several times",
    )
    made.add_argument("--until", type=int, metavar="NODE", help="end the others when all ranks of this node have ended")
    return made


def run_ranks(arguments: argparse.Namespace, plans: Sequence[RankPlan]) -> int:
    link = {"delay_us": arguments.delay_us, "loss": arguments.loss}
    box = Box(num_nodes=arguments.nodes, mbit=arguments.mbit, priority=not arguments.no_priority, **link)
    running, relays = {}, []
    with box:
        for plan in plans:
            pipe = subprocess.PIPE
            process = box.start(plan.node, plan.args, env=plan.env, stdout=pipe, stderr=pipe)
            running[process] = plan
        signal.pthread_sigmask(signal.SIG_BLOCK, INTERRUPTIONS)  # until all is watched; relays take none
        for process, plan in running.items():
            for stream, target in ((process.stdout, sys.stdout.buffer), (process.stderr, sys.stderr.buffer)):
                relays.append(Thread(target=relay, args=(plan.rank, stream, target), daemon=True))
                relays[-1].start()
        exit_code = Supervision(running, until=arguments.until, timeout_s=arguments.timeout).wait()
    for each in relays:
        each.join(GRACE_S)  # their streams end with the box
    return exit_code


def on_signal(number: int, frame: FrameType | None) -> None:
    raise RunInterrupted(number)


def main(argv: Sequence[str] | None = None) -> int:
    given = list(sys.argv[1:] if argv is None else argv)
    split = given.index("--") if "--" in given else len(given)
    arguments = parser().parse_args(given[:split])
    try:
        own = [parse_node_command(text, arguments.nodes) for text in arguments.node_command]
        command, node_commands = given[split + 1 :], {node: args for each in own for node, args in each.items()}
        without = [node for node in range(arguments.nodes) if node not in node_commands]
        if without and not command:
            raise UserError(f"no command for node {without[0]}; give one after -- or with --node-command")
        sizes = {"num_nodes": arguments.nodes, "num_local_ranks": arguments.procs_per_node}
        plans = plan_ranks(**sizes, command=command, node_commands=node_commands)
        if arguments.until is not None and not 0 <= arguments.until < arguments.nodes:
            raise UserError(f"--until {arguments.until}: this box has nodes 0 to {arguments.nodes - 1}")
        if reason := box_unavailable(netem=arguments.delay_us > 0 or arguments.loss > 0):
            say(reason)
            return 1
        for number in INTERRUPTIONS:
            signal.signal(number, on_signal)
        return run_ranks(arguments, plans)
    except UserError as error:
        say(str(error))
        return error.exit_code
    except BoxError as error:
        say(str(error))
        return 1
    except RunInterrupted as interruption:
        return interruption.exit_code


if __name__ == "__main__":
    sys.exit(main())

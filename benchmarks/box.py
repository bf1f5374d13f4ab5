"""Run a command on every node of a cluster in a box, print what it says, end it as a whole.

    python benchmarks/box.py --nodes 3 --mbit 400 -- python train.py --rank {rank} --master {address0}
    python benchmarks/box.py --nodes 2 --mbit 400 --node-command 0:'python server.py' --until 1 -- COMMAND {address0}

Exit code: 0; else that of the rank that failed first (128 + signal), 124 after --timeout, 130 after Ctrl-C, 143 after
SIGTERM, 1 where no box can be made, 2 for a mistake in the arguments. When one rank fails the others get SIGTERM, and
SIGKILL after 5 s.

Needs Linux, root and iproute2. The guide is docs/box.md. From Python: `from antiphon.bench.box import Box`.
"""

import argparse
import os
import re
import selectors
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from types import FrameType
from typing import BinaryIO

from antiphon.base.errors import UserError
from antiphon.bench.box import Box, BoxError, NodeProcess, box_unavailable
from antiphon.bench.box.topology import RankPlan, plan_ranks

GRACE_S = 5.0
TIMED_OUT = 124
MAX_LINE_BYTES = 1 << 16


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


@dataclass(kw_only=True)
class Rank:
    """A running rank, and what it has printed of its current line on either stream."""

    plan: RankPlan
    process: NodeProcess
    partial: dict[BinaryIO, bytearray] = field(default_factory=dict)


class Supervision:
    """Relays what ranks print and decides when all end, and with which code."""

    def __init__(self, ranks: Sequence[Rank], *, until: int | None, timeout_s: float | None) -> None:
        self.exit_code = 0
        self._running = {rank.plan.rank: rank for rank in ranks}
        self._until = until
        self._deadline = None if timeout_s is None else time.monotonic() + timeout_s
        self._timeout_s = timeout_s
        self._kill_at: float | None = None
        self._selector = selectors.DefaultSelector()
        for rank in ranks:
            self._selector.register(rank.process.fileno(), selectors.EVENT_READ, (rank, None))
            for stream in (rank.process.stdout, rank.process.stderr):
                assert stream is not None
                rank.partial[stream] = bytearray()
                os.set_blocking(stream.fileno(), False)
                self._selector.register(stream, selectors.EVENT_READ, (rank, stream))

    def wait(self) -> int:
        """Until every rank has ended; the exit code of the run."""
        while self._running:
            try:
                self._step()
            except RunInterrupted as interruption:
                if self._kill_at is not None:
                    raise  # a second time: no more patience
                self._end(interruption.exit_code, "interrupted")
        return self.exit_code

    def _step(self) -> None:
        now = time.monotonic()
        if self._kill_at is not None and now >= self._kill_at:
            for rank in self._running.values():
                rank.process.kill()
            self._kill_at = now + GRACE_S
        elif self._kill_at is None and self._deadline is not None and now >= self._deadline:
            names = ", ".join(str(rank) for rank in self._running)
            self._end(TIMED_OUT, f"ranks {names} had not ended within {self._timeout_s:g} s")
        wake_at = self._kill_at if self._kill_at is not None else self._deadline
        for key, _ in self._selector.select(None if wake_at is None else max(0.0, wake_at - time.monotonic())):
            rank, stream = key.data
            if key.fileobj not in self._selector.get_map():
                continue  # the end of its process came in the same batch
            if stream is not None:
                self._relay(rank, stream)
            else:
                self._selector.unregister(key.fileobj)
                self._ended(rank)

    def _relay(self, rank: Rank, stream: BinaryIO) -> bool:
        """Print the whole lines that have come, and at the end of the stream the rest. False: nothing is there now."""
        try:
            data = os.read(stream.fileno(), 1 << 16)
        except BlockingIOError:
            return False
        if not data:
            self._selector.unregister(stream)
            self._flush(rank, stream)
            return False
        partial = rank.partial[stream]
        *lines, rest = (partial + data).split(b"\n")
        partial[:] = rest
        self._print(rank, stream, lines)
        if len(partial) > MAX_LINE_BYTES:
            self._flush(rank, stream)
        return True

    def _flush(self, rank: Rank, stream: BinaryIO) -> None:
        if rank.partial[stream]:
            self._print(rank, stream, [bytes(rank.partial[stream])])
            rank.partial[stream].clear()

    @staticmethod
    def _print(rank: Rank, stream: BinaryIO, lines: Sequence[bytes | bytearray]) -> None:
        target = sys.stdout.buffer if stream is rank.process.stdout else sys.stderr.buffer
        target.writelines(b"[%d] %s\n" % (rank.plan.rank, line) for line in lines)
        target.flush()

    def _ended(self, rank: Rank) -> None:
        code = rank.process.wait(0.0)
        for stream in rank.partial:
            if stream in self._selector.get_map():
                # Children that it left may hold the stream open and go on: its end need not come. A pipe holds 64 KiB.
                for _ in range(2):
                    if not self._relay(rank, stream):
                        break
                self._flush(rank, stream)
        del self._running[rank.plan.rank]
        if self._kill_at is not None:
            return
        if code != 0:
            words = f"exit code {code}" if code > 0 else signal_name(-code)
            where = f"rank {rank.plan.rank} (node {rank.plan.node})"
            self._end(code if code > 0 else 128 - code, f"{where} ended with {words}")
        elif self._until is not None and all(other.plan.node != self._until for other in self._running.values()):
            self._end(0, "")

    def _end(self, exit_code: int, why: str) -> None:
        """Ask the others to end; `_step` insists after a while."""
        self.exit_code = exit_code
        self._kill_at = time.monotonic() + GRACE_S
        if why:
            say(f"{why}; ending {len(self._running)} other ranks" if self._running else why)
        for rank in self._running.values():
            rank.process.terminate()


def signal_name(number: int) -> str:
    with suppress(ValueError):
        return signal.Signals(number).name
    return f"signal {number}"


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
    box = Box(
        num_nodes=arguments.nodes,
        mbit=arguments.mbit,
        priority=not arguments.no_priority,
        delay_us=arguments.delay_us,
        loss=arguments.loss,
    )
    with box:
        ranks = []
        for plan in plans:
            pipe = subprocess.PIPE
            process = box.start(plan.node, plan.args, env=plan.env, stdout=pipe, stderr=pipe)
            ranks.append(Rank(plan=plan, process=process))
        return Supervision(ranks, until=arguments.until, timeout_s=arguments.timeout).wait()


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
        plans = plan_ranks(
            num_nodes=arguments.nodes,
            num_local_ranks=arguments.procs_per_node,
            command=command,
            node_commands=node_commands,
        )
        if arguments.until is not None and not 0 <= arguments.until < arguments.nodes:
            raise UserError(f"--until {arguments.until}: this box has nodes 0 to {arguments.nodes - 1}")
        if reason := box_unavailable(netem=arguments.delay_us > 0 or arguments.loss > 0):
            say(reason)
            return 1
        for number in (signal.SIGINT, signal.SIGTERM):
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

"""Two processes that exchange micro-batches in stream order, on a CPU or on one GPU; the second one is this program.

`python -m tests.comm.m2n.stream_peer DEVICE TICKET MODE` is the attention side. It prints its ticket, then, by mode:
`exchange`: all steps are put on its stream at once, and what comes back is checked; `hold`: it only stays connected.
"""

import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch

from antiphon import _m2n
from antiphon.comm.m2n.streams.core import StreamCore
from antiphon.comm.m2n.streams.cuda import CudaStream
from antiphon.comm.m2n.streams.stream import HostStream
from tests.comm.m2n.backends import PATIENCE_S, SECRET

NUM_STEPS, NUM_MICRO_BATCHES = 60, 3
SHAPE = (64, 256)
SLOT_BYTES = SHAPE[0] * SHAPE[1] * 4


class Side:
    """One process's end: an inbox for one source and, once connected, a core, a stream and a lane each way."""

    def __init__(self, pool: ExitStack, name: str, device: str) -> None:
        self.pool = pool
        self.device = device
        self.endpoint = _m2n.Endpoint(name, "shm", secret=SECRET)
        pool.callback(self.endpoint.close)
        self.inbox = self.endpoint.inbox(1, NUM_MICRO_BATCHES + 1, SLOT_BYTES)
        self.ticket = self.endpoint.ticket(self.inbox)
        kind = CudaStream if device == "cuda" else HostStream
        self.stream: Any = pool.enter_context(kind(name))
        self.matrix = torch.eye(1024 if device == "cuda" else 64, device=device)

    def connect(self, ticket: bytes) -> None:
        outbox = self.endpoint.connect(ticket, 0, PATIENCE_S)
        self.inbox.wait_connected(1, PATIENCE_S)
        self.core = self.pool.enter_context(StreamCore(self.endpoint))
        self.sender = self.core.sender(outbox, self.stream, num_stages=2, timeout_s=PATIENCE_S)
        self.receiver = self.core.receiver(self.inbox, self.stream, num_stages=2, timeout_s=PATIENCE_S)

    def put(self, work: Callable[[], object]) -> None:
        """Work of the device's, in stream order, that takes a while."""
        if self.device == "cuda":
            with torch.cuda.stream(self.stream.stream):
                for _ in range(4):
                    self.matrix.copy_(self.matrix @ self.matrix)
                work()
        else:
            self.stream.enqueue(lambda: self.matrix.copy_(self.matrix @ self.matrix))
            self.stream.enqueue(work)

    def settle(self) -> None:
        """Nothing failed, and all is done."""
        self.core.wait_idle(PATIENCE_S)
        if self.device == "cuda":
            self.stream.synchronize()
        else:
            self.stream.synchronize(PATIENCE_S)


def attention(side: Side) -> None:
    """Send, spoil what was sent, receive the answer, keep it; then look at all answers."""
    rows = [torch.zeros(SHAPE, device=side.device) for _ in range(NUM_MICRO_BATCHES)]
    answers = torch.zeros(NUM_STEPS, *SHAPE, device=side.device)
    if side.device == "cuda":
        torch.cuda.synchronize()  # the tensors were made on another stream
    for step in range(NUM_STEPS + NUM_MICRO_BATCHES):
        if (answered := step - NUM_MICRO_BATCHES) >= 0:
            side.receiver.receive(answered, [0], answers[answered : answered + 1])
        if step < NUM_STEPS:
            own = rows[step % NUM_MICRO_BATCHES]
            side.put(lambda own=own, step=step: own.fill_(step))
            side.sender.send(step, own)
            side.put(lambda own=own: own.fill_(-1))
    side.settle()
    expected = 2 * torch.arange(NUM_STEPS, dtype=torch.float32)[:, None, None] + 1
    assert torch.equal(answers.cpu(), expected.expand(NUM_STEPS, *SHAPE))


def experts(side: Side) -> None:
    """Answer every step with twice the rows and one."""
    work = torch.zeros(1, *SHAPE, device=side.device)
    if side.device == "cuda":
        torch.cuda.synchronize()
    for step in range(NUM_STEPS):
        side.receiver.receive(step, [0], work)
        side.put(lambda: work.mul_(2).add_(1))
        side.sender.send(step, work)
    side.settle()


@contextmanager
def peer(side: Side, mode: str) -> Iterator[subprocess.Popen[str]]:
    """The attention side in a process of its own, connected to `side`; killed when the block ends."""
    command = [sys.executable, "-m", "tests.comm.m2n.stream_peer", side.device, side.ticket.hex(), mode]
    with subprocess.Popen(
        command, cwd=Path(__file__).parents[3], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        try:
            assert process.stdout is not None
            side.connect(bytes.fromhex(process.stdout.readline()))
            yield process
        finally:
            process.kill()


def main() -> None:
    device, ticket, mode = sys.argv[1:]
    with ExitStack() as pool:
        side = Side(pool, "attention", device)
        print(side.ticket.hex(), flush=True)
        side.connect(bytes.fromhex(ticket))
        if mode == "exchange":
            attention(side)
        else:
            sys.stdin.read()


if __name__ == "__main__":
    main()

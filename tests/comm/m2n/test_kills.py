"""Any peer may be killed at any point: survivors hear of it at once, no data is wrong, whoever comes back carries on.

Real processes under load (kill_worker.py) and a seeded driver. Times are taken from the monotonic clock, which all
processes of a machine share.
"""

import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from antiphon import _m2n
from antiphon.base.errors import PeerLost
from tests.comm.m2n.backends import by_name, need
from tests.comm.m2n.kill_worker import NUM_RECEIVERS, NUM_SENDERS, SLOT_BYTES, SLOTS, Checker

KILLS = {"shm": 60, "tcp": 40, "libfabric": 20}
NOTICE_LIMIT_S = 1.0  # quiet machines need a hundredth of it
JOIN_LIMIT_S = 20.0
_PROGRAM = Path(__file__).with_name("kill_worker.py")
_ENVIRONMENT = {
    **os.environ,
    "PYTHONPATH": str(Path(__file__).resolve().parents[3]),
    "OPENBLAS_NUM_THREADS": "1",  # numpy starts its threads on import, and they are of no use here
}


@dataclass
class Worker:
    """One incarnation of a sender or receiver, and what it has said."""

    role: str
    index: int
    incarnation: int
    transport: str
    changed: threading.Condition
    events: list[dict[str, Any]] = field(default_factory=list)

    def __post_init__(self) -> None:
        arguments = [self.role, str(self.index), str(self.incarnation), self.transport]
        self.process = subprocess.Popen(
            [sys.executable, str(_PROGRAM), *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=_ENVIRONMENT,
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    @property
    def name(self) -> str:
        return f"{self.role}[{self.index}]#{self.incarnation}"

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if not line.endswith("\n"):
                return  # it was killed while it wrote
            with self.changed:
                self.events.append(json.loads(line))
                self.changed.notify_all()

    def order(self, **order: Any) -> None:
        assert self.process.stdin is not None
        with suppress(BrokenPipeError):  # killed meanwhile
            self.process.stdin.write(json.dumps(order) + "\n")
            self.process.stdin.flush()

    def said(self, event: str, peer: str | None = None) -> dict[str, Any] | None:
        """The first such event."""
        return next((e for e in self.events if e["event"] == event and peer in {None, e.get("peer")}), None)

    def end(self) -> None:
        self.process.kill()
        self.process.wait()
        self._reader.join()
        for pipe in (self.process.stdin, self.process.stdout):
            assert pipe is not None
            with suppress(BrokenPipeError):
                pipe.close()


class Crowd:
    """All workers of one run."""

    def __init__(self, transport: str) -> None:
        self._transport = transport
        self._changed = threading.Condition()
        self._incarnations: dict[tuple[str, int], int] = {}
        self.workers: dict[tuple[str, int], Worker] = {}
        self.notices_s: list[float] = []
        for index in range(NUM_SENDERS):
            self.start("sender", index)
        for index in range(NUM_RECEIVERS):
            self.start("receiver", index)

    def role(self, role: str) -> list[Worker]:
        return [worker for (kind, _), worker in self.workers.items() if kind == role]

    def start(self, role: str, index: int) -> Worker:
        incarnation = self._incarnations.get((role, index), -1) + 1
        self._incarnations[role, index] = incarnation
        worker = Worker(role, index, incarnation, self._transport, self._changed)
        self.workers[role, index] = worker
        return worker

    def introduce(self, worker: Worker) -> None:
        """Hand tickets around for a worker that has just been started, as far as the others are ready."""
        self.wait_for(lambda: worker.said("ready") is not None, f"{worker.name} is ready")
        pairs = [(worker, r) for r in self.role("receiver")] if worker.role == "sender" else []
        pairs += [(s, worker) for s in self.role("sender")] if worker.role == "receiver" else []
        for sender, receiver in pairs:
            ready = receiver.said("ready")
            if ready is not None and sender.said("ready") is not None:
                sender.order(order="connect", receiver=receiver.index, name=receiver.name, ticket=ready["ticket"])

    def wait_for(self, condition: Callable[[], bool], what: str, limit_s: float = JOIN_LIMIT_S) -> None:
        with self._changed:
            assert self._changed.wait_for(lambda: self.check_nothing_wrong() or condition(), limit_s), (
                f"not within {limit_s} s: {what}\n{self.story()}"
            )

    def check_nothing_wrong(self) -> bool:
        """False, or an assertion."""
        for worker in self.workers.values():
            wrong = worker.said("wrong")
            assert wrong is None, f"{worker.name}: {wrong}"
        return False

    def story(self) -> str:
        return "\n".join(f"{worker.name}: {worker.events[-6:]}" for worker in self.workers.values())

    def wait_until_all_carry(self) -> None:
        """Every sender is heard by every receiver, in their present incarnations."""

        def all_joined() -> bool:
            pairs = [(sender, receiver) for sender in self.role("sender") for receiver in self.role("receiver")]
            return all(r.said("joined", s.name) and s.said("joined", r.name) for s, r in pairs)

        self.wait_for(all_joined, "all peers carry on")

    def kill(self, victim: Worker) -> None:
        """SIGKILL; everybody who had heard of this incarnation says within the limit that it is lost."""
        others = [w for w in self.workers.values() if w.role != victim.role]
        with self._changed:
            victim.process.send_signal(signal.SIGKILL)
            killed_ns = time.monotonic_ns()
            concerned = [w for w in others if w.said("joined", victim.name)]
        victim.end()
        for worker in concerned:
            self.wait_for(
                lambda w=worker: w.said("lost", victim.name) is not None,  # type: ignore[misc]
                f"{worker.name} notices the loss of {victim.name}",
            )
            lost = worker.said("lost", victim.name)
            assert lost is not None
            # Negative: the event is stamped by a thread that ran before we read the clock.
            self.notices_s.append((lost["at_ns"] - killed_ns) * 1e-9)
            assert self.notices_s[-1] < NOTICE_LIMIT_S, f"{worker.name} noticed {victim.name} late: {lost}"

    def stop(self) -> int:
        """All finish in order; returns how many messages the present receivers have checked."""
        for worker in self.role("sender"):
            worker.order(order="stop")
        for worker in self.role("sender"):
            self.wait_for(lambda w=worker: w.said("done") is not None, f"{worker.name} is done")  # type: ignore[misc]
        num_messages = 0
        for worker in self.role("receiver"):
            worker.order(order="stop")
            self.wait_for(lambda w=worker: w.said("done") is not None, f"{worker.name} is done")  # type: ignore[misc]
            done = worker.said("done")
            assert done is not None
            num_messages += done["messages"]
        return num_messages

    def end(self) -> None:
        for worker in self.workers.values():
            worker.end()


@pytest.fixture(params=list(KILLS))
def crowd(request: pytest.FixtureRequest) -> Iterator[Crowd]:
    """Three senders and two receivers that are at work."""
    (backend,) = by_name(request.param)
    made = Crowd(need(backend).transport)
    try:
        for worker in list(made.workers.values()):
            made.introduce(worker)
        made.wait_until_all_carry()
        yield made
    finally:
        made.end()


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_random_kills_under_load(crowd: Crowd, request: pytest.FixtureRequest) -> None:
    """Most kills hit a crowd at work; every third hits one that is still putting itself together again."""
    transport = request.node.callspec.params["crowd"]
    chance = random.Random(f"kills over {transport}")
    kills_left = KILLS[transport]
    while kills_left > 0:
        time.sleep(chance.uniform(0.0, 0.12))
        fallen: list[Worker] = []
        for _ in range(min(kills_left, chance.choice([1, 1, 2]))):
            victim = chance.choice(list(crowd.workers.values()))
            crowd.kill(victim)
            fallen.append(crowd.start(victim.role, victim.index))
            kills_left -= 1
            if chance.random() < 0.5:
                # The next one may fall while this one opens its connections.
                crowd.introduce(fallen[-1])
                time.sleep(chance.uniform(0.0, 0.004))
        for worker in fallen:
            if worker in crowd.workers.values():  # it has not fallen again
                crowd.introduce(worker)
        crowd.wait_until_all_carry()
    assert crowd.stop() > 0
    notices = sorted(notice * 1e3 for notice in crowd.notices_s)
    assert len(notices) >= KILLS[transport]
    median, late = notices[len(notices) // 2], notices[int(len(notices) * 0.9)]
    print(
        f"{transport}: {KILLS[transport]} kills, {len(notices)} notices,"
        f" median {median:.2f} ms, 90% {late:.2f} ms, latest {notices[-1]:.2f} ms"
    )


@pytest.mark.parametrize("transport", list(KILLS))
def test_a_stopped_sender_that_was_replaced_writes_to_nobody(transport: str) -> None:
    """Stopped anywhere, often in the middle of a message; continued when its successor has been at work for a while."""
    (backend,) = by_name(transport)
    endpoint = _m2n.Endpoint("receiver[0]#0", need(backend).transport, secret=b"kills")
    inbox = endpoint.inbox(NUM_SENDERS, SLOTS, SLOT_BYTES)
    ticket = endpoint.ticket(inbox).hex()
    checker = Checker(0)
    changed = threading.Condition()
    chance = random.Random(f"stops over {transport}")
    workers: list[Worker] = []

    def receive(condition: Callable[[], bool]) -> None:
        """Take messages, each checked, until the condition holds."""
        deadline = time.monotonic() + JOIN_LIMIT_S
        while not condition():
            assert time.monotonic() < deadline, [worker.events[-5:] for worker in workers]
            try:
                step = inbox.wait_complete(0.01)
            except PeerLost:
                continue
            if step is not None:
                for message in inbox.messages(step):
                    checker.check(message)
                inbox.release(step)

    def is_current(worker: Worker) -> bool:
        return inbox.counters()[0]["name"] == worker.name

    def join() -> None:
        worker = Worker("sender", 0, len(workers), transport, changed)
        workers.append(worker)
        worker.order(order="connect", receiver=0, name="receiver[0]#0", ticket=ticket)
        receive(lambda: is_current(worker))
        some = checker.num_messages + 20
        receive(lambda: checker.num_messages >= some)

    try:
        join()
        for _ in range(8):
            moment = time.monotonic() + chance.uniform(0.0, 0.02)
            receive(lambda at=moment: time.monotonic() >= at)  # type: ignore[misc]
            stopped = workers[-1]
            stopped.process.send_signal(signal.SIGSTOP)
            receive_some = time.monotonic() + 0.01
            receive(lambda at=receive_some: time.monotonic() >= at)  # type: ignore[misc]
            join()
            stopped.process.send_signal(signal.SIGCONT)
            # It goes on where it was stopped, until it hears that it has been replaced.
            receive(lambda w=stopped: w.said("lost") is not None)  # type: ignore[misc]
            assert is_current(workers[-1])
            some = checker.num_messages + 20
            receive(lambda n=some: checker.num_messages >= n)  # type: ignore[misc]
        assert inbox.counters()[0]["rejected"] == 0
        assert not any(worker.said("wrong") for worker in workers)
    finally:
        for worker in workers:
            worker.end()
        endpoint.close()

"""Workers that do not read, seen from the thread that serves all of them: it never waits for one of them."""

import errno
import os
import select
import selectors
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import psutil
import pytest

from antiphon.serve.fleet import Event, Fleet
from antiphon.serve.worker.channel import Channel
from antiphon.serve.worker.messages import Configure, Reset, ResetDone, RunStep
from antiphon.serve.worker_handle import WorkerName, WorkerProcess
from antiphon.specs.placement import ExpertPlacement
from tests.waiting import wait_until

# Answers every Reset; whatever else it is sent, it only reads.
ECHO = f"""#!{sys.executable}
import socket, sys
from antiphon.base.errors import PeerLost
from antiphon.serve.worker.channel import Channel
from antiphon.serve.worker.messages import Reset, ResetDone, Shutdown, ToWorker

channel = Channel(socket.socket(fileno=int(sys.argv[sys.argv.index("--fd") + 1])), "engine", ToWorker)
try:
    while not isinstance(message := channel.receive(1e6), Shutdown):
        if isinstance(message, Reset):
            channel.send(ResetDone(message.epoch))
except PeerLost:
    pass
"""
CONFIGURE = Configure(
    role="experts", index=0, model="", device="cpu", device_index=0, dtype="", kernels="", num_threads=1, cores=[],
    block_size=16, num_blocks=1, max_model_len=1, max_running=1, placement=ExpertPlacement(1, {}), expert_slots=1,
    count_rows=False, exchange=None, timeout_s=1.0, trace=False,
)  # fmt: skip
LARGE = RunStep(step=0, released=["x" * (1 << 23)], starts=[], micro_batches=[], participants=[])
NAMES = [WorkerName("experts", 0), WorkerName("experts", 1)]


@pytest.fixture
def fleet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Fleet]:
    """Two workers that only echo."""
    script = tmp_path / "echo"
    script.write_text(ECHO)
    script.chmod(0o700)
    monkeypatch.setenv(
        "PYTHONPATH", os.pathsep.join([str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH", "")])
    )
    fleet = Fleet()
    with monkeypatch.context() as patched:
        patched.setattr("sys.executable", str(script))
        for name in NAMES:
            fleet.launch(name, CONFIGURE)
    yield fleet
    for worker in fleet.workers.values():
        if worker.channel is not None:
            os.kill(worker.pid, signal.SIGCONT)
    fleet.stop()


def poll_until(fleet: Fleet, done: Callable[[list[Event]], bool]) -> list[Event]:
    """Events until `done`; no single poll may wait for one worker, which would be for ever."""
    events: list[Event] = []

    def poll() -> bool:
        started = time.monotonic()
        events.extend(fleet.poll(0.05))
        assert time.monotonic() - started < 5.0
        return done(events)

    wait_until(poll, "the events", 30.0)
    return events


def is_readable(worker: WorkerProcess) -> bool:
    assert worker.channel is not None
    return bool(select.select([worker.channel], [], [], 0)[0])


def answers(events: list[Event]) -> list[tuple[str, int]]:
    return [(str(e.worker.name), e.message.epoch) for e in events if isinstance(e.message, ResetDone)]


def test_a_worker_that_does_not_read_holds_up_nobody(fleet: Fleet) -> None:
    stopped, other = (fleet.workers[name] for name in NAMES)
    os.kill(stopped.pid, signal.SIGSTOP)
    started = time.monotonic()
    for epoch in range(5):
        assert fleet.send(stopped, LARGE)
        assert fleet.send(stopped, Reset(epoch))
        assert fleet.send(other, Reset(epoch))
    assert time.monotonic() - started < 5.0
    events = poll_until(fleet, lambda events: len(answers(events)) == 5)
    assert answers(events) == [("experts[1]", epoch) for epoch in range(5)]
    os.kill(stopped.pid, signal.SIGCONT)
    events = poll_until(fleet, lambda events: len(answers(events)) == 5)
    assert answers(events) == [("experts[0]", epoch) for epoch in range(5)]
    assert stopped.channel is not None
    assert not stopped.channel.has_unsent


def test_a_worker_that_reads_nothing_for_long_is_killed(fleet: Fleet) -> None:
    fleet.send_timeout_s = 0.4
    stopped, other = (fleet.workers[name] for name in NAMES)
    poll_until(fleet, lambda _: not (stopped.channel and stopped.channel.has_unsent))
    os.kill(stopped.pid, signal.SIGSTOP)
    started = time.monotonic()
    fleet.send(stopped, LARGE)
    (death,) = poll_until(fleet, bool)
    assert time.monotonic() - started > 0.4
    assert death.worker is stopped
    assert death.reason == "killed by SIGKILL (it has read nothing for 0.4 s)"
    assert not fleet.send(stopped, Reset(1))
    assert fleet.send(other, Reset(7))
    assert answers(poll_until(fleet, bool)) == [("experts[1]", 7)]


def test_too_much_unread_means_that_the_worker_is_lost(fleet: Fleet, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("antiphon.serve.worker.channel.MAX_UNSENT_BYTES", 1 << 20)
    worker = fleet.workers[NAMES[0]]
    os.kill(worker.pid, signal.SIGSTOP)
    assert fleet.send(worker, LARGE), "one message may be of any size"
    assert not fleet.send(worker, Reset(1))
    (death,) = poll_until(fleet, bool)
    assert "does not read: " in death.reason


def test_a_death_is_described(fleet: Fleet) -> None:
    os.kill(fleet.workers[NAMES[1]].pid, signal.SIGABRT)
    (death,) = poll_until(fleet, bool)
    assert death.message is None
    assert death.reason.startswith("killed by SIGABRT (connection closed")


def test_deaths_come_before_what_others_say(fleet: Fleet) -> None:
    talker, victim = (fleet.workers[name] for name in NAMES)
    poll_until(fleet, lambda _: not any(w.channel and w.channel.has_unsent for w in (talker, victim)))
    for worker in (talker, victim):
        fleet.send(worker, Reset(7))
    wait_until(lambda: is_readable(talker) and is_readable(victim), "answers")
    os.kill(victim.pid, signal.SIGKILL)
    os.waitid(os.P_PID, victim.pid, os.WEXITED | os.WNOWAIT)
    events = fleet.poll(0.0)
    assert [event.worker is victim for event in events] == [True, True, False]
    assert [event.message is None for event in events] == [False, True, False]


def refuse(patch: pytest.MonkeyPatch, name: str, num_refusals: int) -> None:
    """The selector's `name` fails so many times."""
    real, refusals = getattr(selectors.DefaultSelector, name), [errno.ENOMEM] * num_refusals

    def refusing(self: selectors.BaseSelector, *arguments: object) -> object:
        if refusals:
            number = refusals.pop()
            if name == "modify":  # as the real one does
                self.unregister(arguments[0])  # type: ignore[arg-type]
            raise OSError(number, os.strerror(number))
        return real(self, *arguments)

    patch.setattr(selectors.DefaultSelector, name, refusing)


def test_a_worker_that_cannot_be_watched_any_more_is_lost_alone(fleet: Fleet, monkeypatch: pytest.MonkeyPatch) -> None:
    lost, other = (fleet.workers[name] for name in NAMES)
    poll_until(fleet, lambda _: not any(w.channel and w.channel.has_unsent for w in (lost, other)))
    os.kill(lost.pid, signal.SIGSTOP)
    with monkeypatch.context() as patch:
        refuse(patch, "modify", 1)
        fleet.send(lost, LARGE)
    (death,) = poll_until(fleet, bool)
    assert death.worker is lost
    assert death.reason == "killed by SIGKILL (it cannot be watched ([Errno 12] Cannot allocate memory))"
    assert fleet.send(other, Reset(7))
    assert answers(poll_until(fleet, bool)) == [("experts[1]", 7)]


def test_a_worker_that_cannot_be_watched_at_all_is_not_started(
    fleet: Fleet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = psutil.Process().children()
    with monkeypatch.context() as patch:
        patch.setattr("sys.executable", str(tmp_path / "echo"))
        refuse(patch, "register", 1)
        with pytest.raises(OSError, match="Cannot allocate memory"):
            fleet.launch(WorkerName("experts", 2), CONFIGURE)
    assert list(fleet.workers) == NAMES
    assert psutil.Process().children() == before, "its process has ended"


def test_what_was_heard_before_a_refusal_is_not_lost(fleet: Fleet, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in NAMES:
        fleet.send(fleet.workers[name], Reset(3))
    wait_until(lambda: all(is_readable(fleet.workers[name]) for name in NAMES), "both have answered")
    real, num_calls = Channel.poll, 0

    def refusing(self: Channel) -> object:
        nonlocal num_calls
        num_calls += 1
        if num_calls == 3:  # the second worker's answer
            raise MemoryError
        return real(self)

    with monkeypatch.context() as patch:
        patch.setattr(Channel, "poll", refusing)
        with pytest.raises(MemoryError):
            fleet.poll(0.0)
    assert len(answers(poll_until(fleet, lambda events: len(answers(events)) == 2))) == 2


def test_a_worker_that_dies_of_a_signal_without_a_name_is_described(fleet: Fleet) -> None:
    os.kill(fleet.workers[NAMES[1]].pid, 40)
    (death,) = poll_until(fleet, bool)
    assert death.reason.startswith("killed by signal 40 (")


def test_a_worker_starts_beside_a_thousand_connections(fleet: Fleet, tmp_path: Path) -> None:
    """Its descriptor has a number that `select` does not know, in both processes."""
    with ExitStack() as stack:
        while (connection := stack.enter_context(socket.socket())).fileno() < 1100:
            pass
        script, name = str(tmp_path / "echo"), WorkerName("experts", 2)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("sys.executable", script)
            fleet.launch(name, CONFIGURE)
        worker = fleet.workers[name]
        assert worker.channel is not None
        assert worker.channel.fileno() > 1023
        assert connection.fileno() > 1023
        fleet.send(worker, Reset(4))
        assert answers(poll_until(fleet, bool)) == [("experts[2]", 4)]

"""Stream-ordered sends and receives over the CPU's form of a stream: order, blocking, failures.

The CUDA form goes through the same lanes and the same core; tests/gpu/test_m2n_streams.py runs it where there is a GPU.
"""

import importlib.util
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack

import psutil
import pytest
import torch
from torch import Tensor

from antiphon import _m2n
from antiphon.base.errors import Interrupted, NoCredit, PeerLost, PeerTimeout, UserError
from antiphon.comm.m2n.streams.core import StreamCore
from antiphon.comm.m2n.streams.cuda import load_driver
from antiphon.comm.m2n.streams.lanes import Lane
from antiphon.comm.m2n.streams.stream import FlagPage, HostStream
from tests.comm.m2n.backends import PATIENCE_S, Backend, by_name, need
from tests.comm.m2n.stream_peer import SHAPE, Side, experts, peer
from tests.waiting import wait_until

SHORT_S = 0.15  # a deadline that is meant to pass


class End:
    """An endpoint with a core that owns it and one stream."""

    def __init__(self, pool: ExitStack, endpoint: _m2n.Endpoint, stream_timeout_s: float = 60.0) -> None:
        self.endpoint = endpoint
        self.stream = pool.enter_context(HostStream(endpoint.name))
        self.core = pool.enter_context(StreamCore(endpoint, stream_timeout_s=stream_timeout_s))

    def settle(self) -> None:
        """Everything put on the stream is done, and nothing has failed."""
        self.core.wait_idle(PATIENCE_S)
        self.stream.synchronize(PATIENCE_S)


class Net:
    """Ends of one test. Connections are made before the cores own the endpoints."""

    def __init__(self, backend: Backend, pool: ExitStack) -> None:
        self.backend = backend
        self.pool = pool
        self.outboxes: list[_m2n.Outbox] = []

    def endpoint(self, name: str) -> _m2n.Endpoint:
        endpoint = self.backend.endpoint(name)
        self.pool.callback(endpoint.close)
        return endpoint

    def star(self, num_sources: int, slots: int = 2, slot_bytes: int = 64) -> tuple[_m2n.Inbox, list[End], End]:
        """Senders, each with `self.outboxes[i]`, and one receiver."""
        target = self.endpoint("receiver")
        inbox = target.inbox(num_sources, slots, slot_bytes)
        sources = [self.endpoint(f"sender[{index}]") for index in range(num_sources)]
        ticket = target.ticket(inbox)
        self.outboxes = [each.connect(ticket, index, PATIENCE_S) for index, each in enumerate(sources)]
        inbox.wait_connected(num_sources, PATIENCE_S)
        return inbox, [End(self.pool, each) for each in sources], End(self.pool, target)


@pytest.fixture(params=by_name("shm", "tcp", "loopback-shuffled", "libfabric"), ids=lambda backend: backend.name)
def net(request: pytest.FixtureRequest) -> Iterator[Net]:
    with ExitStack() as pool:
        yield Net(need(request.param), pool)


@pytest.fixture
def shm() -> Iterator[Net]:
    """For what does not depend on the back-end."""
    with ExitStack() as pool:
        yield Net(by_name("shm")[0], pool)


stages = pytest.mark.parametrize("num_stages", [0, 1, 3])


# --- order


@stages
def test_later_work_sees_the_data_and_may_overwrite_the_source(net: Net, num_stages: int) -> None:
    inbox, sources, target = net.star(2)
    senders = [
        each.core.sender(outbox, each.stream, num_stages=num_stages, timeout_s=PATIENCE_S)
        for each, outbox in zip(sources, net.outboxes, strict=True)
    ]
    receiver = target.core.receiver(inbox, target.stream, num_stages=num_stages, timeout_s=PATIENCE_S)
    tensors = [torch.zeros(16, dtype=torch.int32) for _ in sources]
    out = torch.zeros(2, 16, dtype=torch.int32)
    seen: list[Tensor] = []
    for step in range(20):
        for index, each in enumerate(sources):
            if step % 5 == index:
                each.stream.enqueue(lambda: time.sleep(0.002))
            each.stream.enqueue(lambda index=index, step=step: tensors[index].fill_(100 * step + index))
            senders[index].send(step, tensors[index])
            each.stream.enqueue(lambda index=index: tensors[index].fill_(-1))
        receiver.receive(step, [0, 1], out)
        target.stream.enqueue(lambda: seen.append(out.clone()))
        target.stream.enqueue(lambda: out.fill_(-2))
    for end in (*sources, target):
        end.settle()
    expected = [[[100 * step + index] * 16 for index in range(2)] for step in range(20)]
    assert torch.stack(seen).tolist() == expected


@stages
def test_work_behind_a_receive_waits_for_the_message(shm: Net, num_stages: int) -> None:
    inbox, (source,), target = shm.star(1)
    receiver = target.core.receiver(inbox, target.stream, num_stages=num_stages, timeout_s=PATIENCE_S)
    out = torch.zeros(1, 8)
    ran = threading.Event()
    transfer = receiver.receive(0, [0], out)
    target.stream.enqueue(ran.set)
    assert not ran.wait(SHORT_S)
    assert not transfer.over
    sender = source.core.sender(shm.outboxes[0], source.stream, num_stages=num_stages, timeout_s=PATIENCE_S)
    sender.send(0, torch.ones(5))
    assert ran.wait(PATIENCE_S)
    assert transfer.lengths == [20]
    assert out[0, :5].tolist() == [1.0] * 5


def test_a_source_without_stages_is_not_overwritten_before_it_is_sent(shm: Net) -> None:
    inbox, (source,), target = shm.star(1, slots=1)
    sender = source.core.sender(shm.outboxes[0], source.stream, num_stages=0, timeout_s=PATIENCE_S)
    tensor = torch.full((8,), 7, dtype=torch.uint8)
    sender.send(0, tensor).wait(PATIENCE_S)
    sender.send(1, tensor)  # finds no credit
    overwritten = threading.Event()
    source.stream.enqueue(lambda: tensor.fill_(9))
    source.stream.enqueue(overwritten.set)
    assert not overwritten.wait(SHORT_S)
    receiver = target.core.receiver(inbox, target.stream, num_stages=0, timeout_s=PATIENCE_S)
    outs = [torch.zeros(1, 8, dtype=torch.uint8) for _ in range(2)]
    for step, out in enumerate(outs):
        receiver.receive(step, [0], out)
    target.settle()
    assert overwritten.wait(PATIENCE_S)
    assert torch.cat(outs).tolist() == [[7] * 8] * 2


def test_with_stages_the_stream_goes_on_until_they_are_used_up(shm: Net) -> None:
    inbox, (source,), target = shm.star(1, slots=1)
    sender = source.core.sender(shm.outboxes[0], source.stream, num_stages=2, timeout_s=PATIENCE_S)
    tensor = torch.zeros(8, dtype=torch.uint8)
    passed = [threading.Event() for _ in range(4)]
    for step, event in enumerate(passed):  # one is in the slot, two in stages, the last has no stage
        source.stream.enqueue(lambda step=step: tensor.fill_(step))
        sender.send(step, tensor)
        source.stream.enqueue(event.set)
    assert passed[2].wait(PATIENCE_S)
    assert not passed[3].wait(SHORT_S)
    receiver = target.core.receiver(inbox, target.stream, num_stages=2, timeout_s=PATIENCE_S)
    outs = [torch.zeros(1, 8, dtype=torch.uint8) for _ in passed]
    for step, out in enumerate(outs):
        receiver.receive(step, [0], out)
    target.settle()
    source.settle()
    assert torch.cat(outs)[:, 0].tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize("one_stream", [True, False], ids=["one stream", "a stream each"])
@pytest.mark.parametrize("m", [2, 3])
def test_micro_batches_overlap(net: Net, m: int, one_stream: bool) -> None:
    """Ping-pong of two sides, all layers put on the streams at once: the result is that of a plain loop."""
    num_layers, width = 6, 8
    ends = [net.endpoint("attention"), net.endpoint("experts")]
    inboxes = [each.inbox(1, m + 1, 4 * width) for each in ends]
    outboxes = [ends[side].connect(ends[1 - side].ticket(inboxes[1 - side]), 0, PATIENCE_S) for side in (0, 1)]
    for inbox in inboxes:
        inbox.wait_connected(1, PATIENCE_S)
    cores = [net.pool.enter_context(StreamCore(each)) for each in ends]
    streams = [
        [net.pool.enter_context(HostStream(f"{each.name} {index}")) for index in range(1 if one_stream else m)]
        for each in ends
    ]
    senders, receivers = (
        [
            [make(core, box, stream) for stream in of_side]
            for core, box, of_side in zip(cores, boxes, streams, strict=True)
        ]
        for make, boxes in (
            (lambda core, box, stream: core.sender(box, stream, num_stages=2, timeout_s=PATIENCE_S), outboxes),
            (lambda core, box, stream: core.receiver(box, stream, num_stages=2, timeout_s=PATIENCE_S), inboxes),
        )
    )
    rows = [torch.full((1, width), float(index)) for index in range(m)]
    work = [torch.zeros(1, width) for _ in range(m)]
    for layer in range(num_layers):
        for index in range(m):
            lane = 0 if one_stream else index
            step = layer * m + index
            if layer > 0:
                receivers[0][lane].receive(step - m, [0], rows[index])
            streams[0][lane].enqueue(lambda index=index: rows[index].add_(1))
            senders[0][lane].send(step, rows[index])
            receivers[1][lane].receive(step, [0], work[index])
            streams[1][lane].enqueue(lambda index=index: work[index].mul_(2))
            senders[1][lane].send(step, work[index])
    for index in range(m):
        receivers[0][0 if one_stream else index].receive((num_layers - 1) * m + index, [0], rows[index])
    for core, of_side in zip(cores, streams, strict=True):
        core.wait_idle(PATIENCE_S)
        for stream in of_side:
            stream.synchronize(PATIENCE_S)
    for index in range(m):
        expected = float(index)
        for _ in range(num_layers):
            expected = (expected + 1) * 2
        assert rows[index].tolist() == [[expected] * width]


def test_empty_and_full_messages(net: Net) -> None:
    inbox, (source,), target = net.star(1, slot_bytes=48)
    sender = source.core.sender(net.outboxes[0], source.stream, num_stages=1, timeout_s=PATIENCE_S)
    receiver = target.core.receiver(inbox, target.stream, num_stages=1, timeout_s=PATIENCE_S)
    sender.send(0, torch.empty(0, 12))
    sender.send(1, torch.ones(12))
    empty, full = receiver.receive(0, [0], torch.zeros(1, 0)), receiver.receive(1, [0], torch.zeros(1, 12))
    target.settle()
    assert (empty.lengths, full.lengths) == ([0], [48])


def test_two_processes_exchange_in_stream_order() -> None:
    with ExitStack() as pool:
        side = Side(pool, "experts", "cpu")
        with peer(side, "exchange") as process:
            experts(side)
            assert process.wait(PATIENCE_S) == 0


# --- failures


def test_a_killed_peer_lets_the_stream_go() -> None:
    with ExitStack() as pool:
        side = Side(pool, "experts", "cpu")
        with peer(side, "hold") as process:
            transfer = side.receiver.receive(0, [0], torch.zeros(1, *SHAPE))
            ready = side.stream.record()
            assert not ready.done()
            process.kill()
            wait_until(ready.done, "the stream goes on", 2.0)
            with pytest.raises(PeerLost, match="lost attention"):
                transfer.wait(PATIENCE_S)


def test_a_lost_peer_lets_the_stream_go(net: Net) -> None:
    inbox, sources, target = net.star(2)
    receiver = target.core.receiver(inbox, target.stream, num_stages=1, timeout_s=PATIENCE_S)
    out = torch.zeros(2, 4)
    going = threading.Event()
    receiver.receive(0, [0, 1], out)
    target.stream.enqueue(going.set)
    assert not going.wait(SHORT_S)
    sources[1].core.close()
    sources[1].endpoint.close()
    assert going.wait(PATIENCE_S)
    with pytest.raises(PeerLost, match=r"lost sender\[1\]"):
        receiver.receive(1, [0], out[:1])
    sender = sources[0].core.sender(net.outboxes[0], sources[0].stream, num_stages=1, timeout_s=PATIENCE_S)
    sender.send(1, torch.ones(4))  # the other pair never noticed
    receiver.receive(1, [0], out[:1])
    target.settle()
    assert out[0].tolist() == [1.0] * 4


@stages
def test_a_lost_receiver_lets_senders_go(shm: Net, num_stages: int) -> None:
    _, (source,), target = shm.star(1, slots=1)
    sender = source.core.sender(shm.outboxes[0], source.stream, num_stages=num_stages, timeout_s=PATIENCE_S)
    for step in range(num_stages + 2):
        sender.send(step, torch.ones(4))
    target.core.close()
    target.endpoint.close()
    source.stream.synchronize(PATIENCE_S)
    with pytest.raises(PeerLost, match="lost receiver"):
        sender.wait_idle(PATIENCE_S)


def test_a_peer_that_returns_gets_a_new_lane(shm: Net) -> None:
    inbox, (source,), target = shm.star(1)
    sender = source.core.sender(shm.outboxes[0], source.stream, num_stages=1, timeout_s=PATIENCE_S)
    target.core.run(lambda: inbox.drop(0), PATIENCE_S)
    ticket = target.core.run(lambda: target.endpoint.ticket(inbox), PATIENCE_S)
    sender.close()
    outbox = source.core.run(lambda: source.endpoint.connect(ticket, 0, PATIENCE_S), PATIENCE_S)
    source.core.sender(outbox, source.stream, num_stages=1, timeout_s=PATIENCE_S).send(3, torch.ones(4))
    receiver = target.core.receiver(inbox, target.stream, num_stages=1, timeout_s=PATIENCE_S)
    target.core.run(lambda: inbox.wait_connected(1, PATIENCE_S), PATIENCE_S)
    out = torch.zeros(1, 4)
    receiver.receive(3, [0], out)
    target.settle()
    assert out.tolist() == [[1.0] * 4]


def test_the_deadline_of_a_receive_names_who_is_missing(net: Net) -> None:
    inbox, sources, target = net.star(2)
    receiver = target.core.receiver(inbox, target.stream, num_stages=1, timeout_s=SHORT_S)
    sender = sources[0].core.sender(net.outboxes[0], sources[0].stream, num_stages=1, timeout_s=PATIENCE_S)
    sender.send(5, torch.ones(4))
    transfer = receiver.receive(5, [0, 1], torch.zeros(2, 4))
    target.stream.synchronize(PATIENCE_S)
    with pytest.raises(PeerTimeout, match=r"receiver receive: step 5: nothing from sender\[1\] within 0.1 s") as caught:
        transfer.wait(PATIENCE_S)
    assert caught.value.peers == ["sender[1]"]
    receiver.check()  # it was delivered


def test_the_deadline_of_a_send_says_who_gives_no_credit(net: Net) -> None:
    _, (source,), _ = net.star(1, slots=1)
    sender = source.core.sender(net.outboxes[0], source.stream, num_stages=1, timeout_s=SHORT_S)
    sender.send(0, torch.ones(4))
    sender.send(1, torch.ones(4))
    source.stream.synchronize(PATIENCE_S)
    with pytest.raises(NoCredit, match=r"a free slot for step 1: nothing from receiver within 0.1 s"):
        sender.wait_idle(PATIENCE_S)


def test_a_stream_that_does_not_come_is_named(shm: Net) -> None:
    _, (source,), _ = shm.star(1)
    core = shm.pool.enter_context(StreamCore(shm.endpoint("other"), stream_timeout_s=SHORT_S))
    sender = core.sender(shm.outboxes[0], source.stream, num_stages=1, timeout_s=PATIENCE_S)
    blocked = threading.Event()
    source.stream.enqueue(lambda: blocked.wait(PATIENCE_S))
    sender.send(0, torch.ones(4))
    with pytest.raises(PeerTimeout, match=r"step 0: nothing from sender\[0\] within 0.1 s"):
        sender.wait_idle(PATIENCE_S)
    blocked.set()


def test_abort_ends_what_was_outstanding_and_nothing_later(net: Net) -> None:
    inbox, (source,), target = net.star(1)
    lanes = [target.core.receiver(inbox, target.stream, num_stages=2, timeout_s=PATIENCE_S) for _ in range(2)]
    out = torch.zeros(1, 4)
    old = [lanes[0].receive(step, [0], out) for step in range(5)]
    target.core.abort("a worker died")
    new = lanes[1].receive(10, [0], out)
    for transfer in old:
        with pytest.raises(Interrupted, match="a worker died"):
            transfer.wait(PATIENCE_S)
    sender = source.core.sender(net.outboxes[0], source.stream, num_stages=1, timeout_s=PATIENCE_S)
    sender.send(10, torch.ones(4))
    new.wait(PATIENCE_S)
    target.settle()
    assert out.tolist() == [[1.0] * 4]


def close_core(end: End, lane: Lane) -> None:
    end.core.close()


def close_lane(end: End, lane: Lane) -> None:
    lane.close()


@pytest.mark.parametrize("close", [close_core, close_lane])
def test_closing_lets_streams_go(shm: Net, close: Callable[[End, Lane], None]) -> None:
    inbox, _, target = shm.star(1)
    receiver = target.core.receiver(inbox, target.stream, num_stages=1, timeout_s=PATIENCE_S)
    receiver.receive(0, [0], torch.zeros(1, 4))
    close(target, receiver)
    target.stream.synchronize(PATIENCE_S)
    with pytest.raises(Interrupted, match="was closed"):
        receiver.check()
    with pytest.raises((Interrupted, UserError), match="was closed"):
        receiver.receive(1, [0], torch.zeros(1, 4))


def test_a_bug_in_the_thread_lets_streams_go(shm: Net, monkeypatch: pytest.MonkeyPatch) -> None:
    inbox, _, target = shm.star(1)
    receiver = target.core.receiver(inbox, target.stream, num_stages=1, timeout_s=PATIENCE_S)

    def broken(stream_timeout_s: float) -> bool:
        raise KeyError("a bug")

    monkeypatch.setattr(receiver, "advance", broken)
    receiver.receive(0, [0], torch.zeros(1, 4))
    target.stream.synchronize(PATIENCE_S)
    with pytest.raises(KeyError, match="a bug"):
        receiver.wait_idle(PATIENCE_S)
    with pytest.raises(KeyError, match="a bug"):
        target.core.run(lambda: None, PATIENCE_S)


def test_user_mistakes_are_refused_at_once(shm: Net) -> None:
    inbox, (source,), target = shm.star(1)
    sender = source.core.sender(shm.outboxes[0], source.stream, num_stages=0, timeout_s=PATIENCE_S)
    receiver = target.core.receiver(inbox, target.stream, num_stages=1, stage_bytes=64, timeout_s=PATIENCE_S)
    with pytest.raises(UserError, match=r"a tensor of 68 bytes, slots hold 64: make the inbox with larger slots"):
        sender.send(0, torch.zeros(17))
    with pytest.raises(UserError, match=r"make it contiguous\(\)"):
        sender.send(0, torch.zeros(2, 2).t())
    with pytest.raises(UserError, match="a tensor on meta without stages: set num_stages"):
        sender.send(0, torch.zeros(4, device="meta"))
    with pytest.raises(UserError, match=r"out of shape \[2, 4\] for 1 sources: one row for each"):
        receiver.receive(0, [0], torch.zeros(2, 4))
    with pytest.raises(UserError, match="out has 80 bytes, a stage 64: raise stage_bytes"):
        receiver.receive(0, [0], torch.zeros(1, 20))
    source.stream.synchronize(PATIENCE_S)
    sender.send(0, torch.ones(4))
    with pytest.raises(UserError, match="16 bytes from source 0, a row of out has 8: give a larger out"):
        receiver.receive(0, [0], torch.zeros(1, 2)).wait(PATIENCE_S)
    with pytest.raises(UserError, match="num_stages is -1: 0 for tensors in memory of the host"):
        target.core.receiver(inbox, target.stream, num_stages=-1, timeout_s=PATIENCE_S)
    with pytest.raises(UserError, match="timeout_s is 0: it must be more than 0"):
        source.core.sender(shm.outboxes[0], source.stream, num_stages=1, timeout_s=0)
    with pytest.raises(UserError, match="does not run"):
        StreamCore(source.endpoint).run(lambda: None, PATIENCE_S)


# --- cost


def test_thousands_of_sends_do_not_grow(net: Net) -> None:
    inbox, (source,), target = net.star(1, slots=4)
    sender = source.core.sender(net.outboxes[0], source.stream, num_stages=4, timeout_s=PATIENCE_S)
    receiver = target.core.receiver(inbox, target.stream, num_stages=4, timeout_s=PATIENCE_S)
    tensor, out = torch.ones(8), torch.zeros(1, 8)
    process = psutil.Process()

    def exchange(first: int, count: int) -> int:
        for step in range(first, first + count):
            sender.send(step, tensor)
            receiver.receive(step, [0], out)
            if step % 64 == 0:
                target.settle()
                source.settle()
        target.settle()
        source.settle()
        return process.memory_info().rss

    count = int(4000 * net.backend.scale)
    exchange(0, count // 4)
    before = exchange(count, count // 4)
    after = exchange(2 * count, count)
    assert after - before < 2 << 20
    assert target.core.run(inbox.counters, PATIENCE_S)[0]["messages"] == count + 2 * (count // 4)


def test_an_idle_core_does_not_burn(shm: Net) -> None:
    inbox, _, target = shm.star(1)
    receiver = target.core.receiver(inbox, target.stream, num_stages=1, timeout_s=PATIENCE_S)
    own = target.core.run(threading.get_ident, PATIENCE_S)

    def used_s() -> float:
        time.sleep(0.1)
        clock = time.pthread_getcpuclockid(own)
        before = time.clock_gettime(clock)
        time.sleep(0.5)
        return time.clock_gettime(clock) - before

    assert used_s() < 0.05
    receiver.receive(0, [0], torch.zeros(1, 4))
    assert used_s() < 0.1


# --- flags and what is missing


def test_flags_compare_around_the_wrap() -> None:
    flag = FlagPage().new_flag()
    assert flag.reached(0)
    assert not flag.reached(1)
    flag.raise_to(2**32 - 1)
    assert flag.reached(2**32 - 1)
    assert not flag.reached(2**32)
    assert not flag.wait(2**32, 0.01)
    flag.raise_to(2**32 + 5)
    assert flag.wait(2**32, 0.0)
    assert flag.reached(2**32 - 1)


def test_a_stream_reports_what_its_work_raised() -> None:
    ran = []
    with HostStream() as stream:
        stream.enqueue(lambda: 1 // 0)
        stream.enqueue(lambda: ran.append(1))
        ready = stream.record()
        wait_until(ready.done, "events pass all the same")
        with pytest.raises(ZeroDivisionError):
            stream.synchronize(PATIENCE_S)
    assert not ran


def test_what_a_gpu_needs_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    if not torch.cuda.is_available():
        with pytest.raises(UserError, match=r"streams of a GPU: PyTorch .*: check nvidia-smi, or use HostStream"):
            load_driver()
    if importlib.util.find_spec("cuda") is None:
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        with pytest.raises(UserError, match=r"streams of a GPU need cuda-python .*: pip install 'cuda-python"):
            load_driver()

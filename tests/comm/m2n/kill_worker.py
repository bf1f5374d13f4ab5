"""A sender or receiver under load, made to be killed (test_kills.py).

    python kill_worker.py sender|receiver INDEX INCARNATION TRANSPORT

Orders come as JSON lines on standard input, events leave as JSON lines on standard output, with the monotonic time,
which all processes of a machine share. A sender writes to every receiver it has a ticket of, as fast as credits come
back; a receiver checks each byte, and that nothing comes twice or from a replaced incarnation. At the end of its
standard input a worker exits, so none outlives the test.
"""

import json
import os
import queue
import random
import sys
import threading
import time
from collections import defaultdict
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from antiphon import _m2n
from antiphon.base.errors import NoCredit, PeerLost, PeerTimeout, Refused

NUM_SENDERS, NUM_RECEIVERS = 3, 2
SLOTS = 4
SLOT_BYTES = 192 << 10
LENGTHS = (0, 1, 63, 64, 65, 1000, 5000, 60_000, SLOT_BYTES)
_REPORT_EVERY = 200  # messages
_BASE = np.random.default_rng(20).integers(0, 256, 2 * SLOT_BYTES, np.uint8)


class Label(NamedTuple):
    """What a message says about itself: its user words, and all that its content depends on."""

    source: int
    incarnation: int
    receiver: int
    number: int

    @property
    def step(self) -> int:
        """Nobody else's, ever."""
        return self.number << 24 | self.incarnation << 4 | self.source

    @property
    def payload(self) -> NDArray[np.uint8]:
        chance = random.Random(f"{self.source} {self.incarnation} {self.receiver} {self.number}")
        length = chance.choice(LENGTHS)
        start = chance.randrange(SLOT_BYTES)
        return _BASE[start : start + length]


class Checker:
    """Whether what one receiver got is what was sent, once, by the incarnation that is connected."""

    def __init__(self, receiver: int) -> None:
        self._receiver = receiver
        self._numbers: dict[tuple[int, int], set[int]] = defaultdict(set)
        self._newest: dict[int, int] = {}
        self.num_messages = 0

    def check(self, message: _m2n.Message) -> Label:
        """`AssertionError` says what is wrong with the message."""
        label = Label(*message.user[:4])
        assert label.source == message.source, f"{label} came from source {message.source}"
        assert label.receiver == self._receiver, f"{label} came to receiver {self._receiver}"
        assert label.step == message.step, f"{label} came as step {message.step:#x}"
        newest = self._newest.setdefault(label.source, label.incarnation)
        assert label.incarnation >= newest, f"{label} came after incarnation {newest}"
        self._newest[label.source] = label.incarnation
        numbers = self._numbers[label.source, label.incarnation]
        assert label.number not in numbers, f"{label} came twice"
        # Slots bound how far one message can overtake another.
        assert label.number < len(numbers) + SLOTS, f"{label} is the {len(numbers) + 1}th that came"
        numbers.add(label.number)
        assert np.array_equal(message.payload, label.payload), f"{label} has wrong content"
        self.num_messages += 1
        return label

    def is_first(self, label: Label) -> bool:
        return len(self._numbers[label.source, label.incarnation]) == 1


def tell(event: str, **details: Any) -> None:
    """One event to the driver."""
    print(json.dumps({"event": event, "at_ns": time.monotonic_ns(), **details}), flush=True)


class Worker:
    """What both kinds share: an endpoint and orders."""

    def __init__(self, role: str, index: int, incarnation: int, transport: str) -> None:
        self.index = index
        self.incarnation = incarnation
        self.endpoint = _m2n.Endpoint(f"{role}[{index}]#{incarnation}", transport, secret=b"kills")
        self.chance = random.Random(f"{role} {index} {incarnation}")
        self._orders: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        for line in sys.stdin:
            self._orders.put(json.loads(line))
        os._exit(1)

    def order(self) -> dict[str, Any] | None:
        try:
            return self._orders.get_nowait()
        except queue.Empty:
            return None


class Sender(Worker):
    """Floods every receiver whose ticket it has."""

    def run(self) -> None:
        outboxes: dict[int, _m2n.Outbox] = {}
        numbers: dict[int, int] = {}
        tell("ready")
        while True:
            while (order := self.order()) is not None:
                if order["order"] == "stop":
                    return self.finish(outboxes)
                former = outboxes.get(order["receiver"])
                if former is not None and former.peer == order["name"]:
                    continue  # introduced from both sides
                if (outbox := self.connect(order)) is not None:
                    outboxes[order["receiver"]] = outbox
                    numbers[order["receiver"]] = 0
            for receiver, outbox in list(outboxes.items()):
                try:
                    self.send(outbox, Label(self.index, self.incarnation, receiver, numbers[receiver]))
                except NoCredit:
                    continue
                except PeerLost as error:
                    tell("lost", peer=error.peer, reason=error.reason)
                    del outboxes[receiver]
                else:
                    numbers[receiver] += 1
            if not outboxes:
                time.sleep(0.002)

    def connect(self, order: dict[str, Any]) -> _m2n.Outbox | None:
        try:
            outbox = self.endpoint.connect(bytes.fromhex(order["ticket"]), self.index, 5.0)
        except (Refused, PeerLost, PeerTimeout, OSError) as error:
            tell("unreachable", peer=order["name"], reason=str(error))
            return None
        tell("joined", peer=outbox.peer)
        return outbox

    def send(self, outbox: _m2n.Outbox, label: Label) -> None:
        payload = label.payload
        if label.number % 2:
            outbox.send(label.step, payload, label, 1, 0.02)
        else:
            outbox.slot(0.02)[: len(payload)] = payload
            outbox.commit(label.step, len(payload), label, 1)

    def finish(self, outboxes: dict[int, _m2n.Outbox]) -> None:
        for outbox in outboxes.values():
            outbox.wait_credits(SLOTS, 10.0)
        tell("done")
        while True:  # the receivers have to finish first
            time.sleep(1.0)


class Receiver(Worker):
    """Checks everything, and holds messages back now and then, so that senders run out of credit."""

    def run(self) -> None:
        inbox = self.endpoint.inbox(NUM_SENDERS, SLOTS, SLOT_BYTES)
        checker = Checker(self.index)
        tell("ready", ticket=self.endpoint.ticket(inbox).hex())
        while True:
            order = self.order()
            if order is not None and order["order"] == "stop":
                tell("done", messages=checker.num_messages)
                while True:
                    time.sleep(1.0)
            try:
                step = inbox.wait_complete(0.02)
            except PeerLost as error:
                tell("lost", peer=error.peer, reason=error.reason)
                continue
            if step is None:
                continue
            for message in inbox.messages(step):
                label = checker.check(message)
                if checker.is_first(label):
                    tell("joined", peer=f"sender[{label.source}]#{label.incarnation}")
            inbox.release(step)
            if self.chance.random() < 0.002:
                time.sleep(0.01)


def main() -> None:
    role, index, incarnation, transport = sys.argv[1:]
    kind = {"sender": Sender, "receiver": Receiver}[role]
    try:
        kind(role, int(index), int(incarnation), transport).run()
    except BaseException as error:
        tell("wrong", what=f"{type(error).__name__}: {error}")
        raise


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[3]))
    main()

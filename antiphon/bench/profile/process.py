"""A process of the profiler: obeys it, and is blocked in a read in between.

python -m antiphon.bench.profile.process FD
"""

import os
import socket
import sys
import time

import psutil
import torch

from antiphon import _native
from antiphon.bench.obeying import FOREVER_S, Done, obey_orders
from antiphon.bench.peers.engine_child import end_with_parent
from antiphon.bench.profile.exchange import AttentionEnd, ExpertEnd
from antiphon.bench.profile.orders import (
    Busy,
    FromRig,
    JoinExchange,
    Open,
    Opened,
    OpenExchange,
    Settle,
    StopExchange,
    Ticket,
    Time,
    TimeExchange,
    TimeTraining,
    ToRig,
)
from antiphon.bench.profile.rig import Rig
from antiphon.bench.profile.training import time_training
from antiphon.serve.worker.channel import Channel

_MAX_REPETITIONS = 400


class RigProcess:
    """Carries out orders, one at a time."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._rig: Rig | None = None
        self._attention: AttentionEnd | None = None
        self._experts: ExpertEnd | None = None
        self._pending: ToRig | None = None

    def next_order(self) -> ToRig:
        """The next order; one that ended a `Busy` was read already."""
        if self._pending is not None:
            order, self._pending = self._pending, None
            return order
        received: ToRig = self._channel.receive(FOREVER_S)
        return received

    def obey(self, order: ToRig) -> FromRig | None:
        """Carry out one order; None if it was answered already. What goes wrong is raised."""
        if isinstance(order, Open):
            self._rig = Rig(order)
            return Opened(kernels=self._rig.backend.name, weight_bytes=self._rig.weight_bytes)
        if isinstance(order, Settle):
            settle(order, self._rig)
        elif isinstance(order, Time):
            return self._time(order)
        elif isinstance(order, Busy):
            self._stay_busy(order)
            return None
        elif isinstance(order, TimeTraining):
            return time_training(order)
        else:
            return self._obey_exchange(order)
        return Done()

    def _opened(self) -> Rig:
        assert self._rig is not None, "Open comes first"
        return self._rig

    def _time(self, order: Time) -> FromRig:
        rig = self._opened()
        rig.run_once(order.work)
        rig.times_of(order.work)
        deadline = time.monotonic() + order.seconds
        count = 0
        while count < order.min_repetitions or (time.monotonic() < deadline and count < _MAX_REPETITIONS):
            rig.run_once(order.work)
            count += 1
        return rig.times_of(order.work)

    def _stay_busy(self, order: Busy) -> None:
        rig = self._opened()
        rig.run_once(order.work)
        self._channel.send(Done())
        count = 0
        while (pending := self._channel.poll()) is None:
            rig.run_once(order.work)
            count += 1
            if count % 100 == 0:
                rig.times_of(order.work)
        rig.times_of(order.work)
        self._pending = pending

    def _obey_exchange(self, order: ToRig) -> FromRig | None:
        if isinstance(order, OpenExchange):
            if order.role == "experts":
                self._experts = ExpertEnd(order)
                return Ticket(self._experts.ticket)
            self._attention = AttentionEnd(order)
        elif isinstance(order, JoinExchange):
            if self._experts is not None:
                self._serve(self._experts)
                return None
            assert self._attention is not None, "OpenExchange comes first"
            self._attention.join(order.ticket)
        elif isinstance(order, TimeExchange):
            assert self._attention is not None, "OpenExchange comes first"
            return self._attention.time(order.rows, order.num_rounds)
        elif isinstance(order, StopExchange):
            if self._attention is not None:
                self._attention.close()
            if self._experts is not None:
                served = self._experts.served()
                self._experts.close()
                self._experts = None
                return served
            self._attention = None
        return Done()

    def _serve(self, experts: ExpertEnd) -> None:
        """Answer batches until the next order."""
        self._channel.send(Done())
        while (pending := self._channel.poll()) is None:
            experts.serve_one()
        self._pending = pending


def settle(order: Settle, rig: Rig | None) -> None:
    """Claim cores and threads as a worker of the engine does."""
    psutil.Process(os.getpid()).cpu_affinity(order.cores)
    if rig is None or rig.backend.name == "cpu":
        _native.set_num_threads(order.num_threads)
        torch.set_num_threads(1)  # PyTorch's own pool would compete with the kernels' pool for the same cores
    else:
        torch.set_num_threads(order.num_threads)


def main() -> int:
    end_with_parent()
    channel = Channel(socket.socket(fileno=int(sys.argv[1])), "the profiler", ToRig)
    process = RigProcess(channel)
    return obey_orders(channel, process.next_order, process.obey)


if __name__ == "__main__":
    sys.exit(main())

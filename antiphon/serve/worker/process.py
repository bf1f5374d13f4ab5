"""A worker process: joins the engine over an inherited socket, loads its half of the model, serves until it is stopped.

python -m antiphon.serve.worker.process --fd N
"""

import argparse
import gc
import os
import queue
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from functools import partial

import msgspec
import torch

from antiphon.base.errors import PeerLost, PeerTimeout, Refused, UserError, with_fix
from antiphon.base.logging import get_logger
from antiphon.base.system import give_memory_back, ignore_ending_signals
from antiphon.comm.m2n.api import StepAborted
from antiphon.serve.policy.handover import ExpectKV, WithdrawKV
from antiphon.serve.worker.build import AttentionWorker, ExpertWorker, Follower, LoadedWorker, build_worker
from antiphon.serve.worker.channel import Channel
from antiphon.serve.worker.messages import (
    Abort,
    Configure,
    ExchangeReport,
    LoadProgress,
    Place,
    Prepared,
    PreparePlacement,
    Reset,
    ResetDone,
    Retire,
    RunStep,
    Shutdown,
    StepFailed,
    StepResult,
    TakeSpans,
    ToWorker,
    WorkerFailure,
    WorkerReady,
)
from antiphon.serve.worker.side_by_side import SideBySide
from antiphon.serve.worker.spans import ANSWER

_log = get_logger("worker")
_IDLE_S = 0.2  # an idle expert worker looks for orders this often
_LOOK_S = 0.5  # a busy one says this often what it has done
_REPORT_S = 1.0  # attention workers say this often what the exchange has carried
_REST_ROUNDS = 10
_REST_S = _REST_ROUNDS * _IDLE_S  # a worker without work for so long gives freed memory back
_FOREVER_S = 365.0 * 86400
_LAST_WORDS_S = 1.0  # to exit in order, once the engine is gone


class Orders:
    """What the engine says, read by a thread of its own: an `Abort` must reach a worker that waits for a peer.

    Everything else waits in a queue until the worker asks. If the engine goes away, however that happens, the socket
    closes and the process ends: by itself at its next order, or by this thread if it is loading, computing or waiting
    then. `start` begins to read; from then on no other thread may. `on_abort` and `on_kv` are called on the reading
    thread: neither may wait for a step."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._queue: queue.SimpleQueue[object] = queue.SimpleQueue()
        self._lost: PeerLost | None = None
        self.on_abort: Callable[[int], None] | None = None
        self.on_kv: Callable[[ExpectKV | WithdrawKV], None] | None = None

    def start(self) -> int:
        """Returns the thread."""
        thread = threading.Thread(target=self._read, name="orders", daemon=True)
        thread.start()
        assert thread.ident is not None, "it has started"
        return thread.ident

    def _read(self) -> None:
        try:
            while True:
                message = self._channel.receive(_FOREVER_S)
                if isinstance(message, Abort):
                    if self.on_abort is not None:
                        self.on_abort(message.epoch)
                elif isinstance(message, ExpectKV | WithdrawKV):
                    if self.on_kv is not None:
                        self.on_kv(message)
                else:
                    self._queue.put(message)
        except (PeerLost, OSError, MemoryError) as error:  # whatever it is, orders would be missed from here on
            self._lost = error if isinstance(error, PeerLost) else PeerLost("engine", f"cannot be heard ({error!r})")
            self._queue.put(None)
            time.sleep(_LAST_WORDS_S)  # a deadline, not a look: this thread ends with the process if that ends in order
            os._exit(0)

    def next(self, timeout_s: float | None = None) -> object | None:
        """The next order; waits for it, or until None comes after `timeout_s`. `PeerLost` when the engine is gone.
        While it waits for long, what large steps took goes back to the system."""
        if timeout_s is None:
            with suppress(queue.Empty):
                return self._checked(self._queue.get(timeout=_REST_S))
            give_memory_back()
        try:
            return self._checked(self._queue.get(timeout=timeout_s))
        except queue.Empty:
            return None

    @property
    def waiting(self) -> bool:
        """There is an order; costs nothing worth counting."""
        return not self._queue.empty()

    def poll(self) -> object | None:
        """An order if there is one."""
        try:
            return self._checked(self._queue.get_nowait())
        except queue.Empty:
            return None

    def _checked(self, message: object | None) -> object:
        if message is None:
            assert self._lost is not None, "only the end of the channel is queued as None"
            raise self._lost
        return message


def serve_attention(worker: AttentionWorker, channel: Channel, orders: Orders) -> None:
    """Obey the engine: one message in, one answer out; now and then a word on the exchange."""
    last_report = 0.0
    moves = worker.moves
    while True:
        if moves is not None and (ended := moves.finished()) is not None:
            channel.send(Prepared(*ended))
        message = orders.next(_IDLE_S if moves is not None and moves.under_way else None)
        if isinstance(message, RunStep):
            if (result := _run_step(worker, message)) is not None:
                start_ns = time.monotonic_ns()
                channel.send(result)
                worker.recorder.add(ANSWER, start_ns)
            if time.monotonic() - last_report > _REPORT_S and (traffic := worker.exchange.traffic()).pairs:
                last_report = time.monotonic()
                channel.send(ExchangeReport(traffic))
                _report_experts(worker, channel)
        elif isinstance(message, Reset):
            _reset(worker, channel, message)
        elif message is not None and not _obey_any(worker, channel, message):
            return


def serve_side_by_side(worker: AttentionWorker, steps: SideBySide, channel: Channel, orders: Orders) -> None:
    """Obey the engine: several steps at a time, one answer to each. One that fails takes the others with it."""
    last_report = 0.0
    while True:
        message = orders.poll() if steps.num_running else orders.next()
        if isinstance(message, RunStep):
            _answer(steps, channel, partial(steps.begin, message))
        elif isinstance(message, Reset):
            steps.forget()
            _reset(worker, channel, message)
        elif message is not None:
            if not _obey_any(worker, channel, message):
                return
        elif _answer(steps, channel, steps.advance) and time.monotonic() - last_report > _REPORT_S:
            last_report = time.monotonic()
            channel.send(ExchangeReport(worker.exchange.traffic()))


def _answer(steps: SideBySide, channel: Channel, work: Callable[[], StepResult | None]) -> bool:
    """Do some work and say what came of it. True: a step ended."""
    result: StepResult | StepFailed | None
    try:
        result = work()
    except Exception as error:
        steps.fail()
        result = _failed(error, steps.recorder.step)
    if result is not None:
        channel.send(result)
    return isinstance(result, StepResult)


def _report_experts(worker: LoadedWorker, channel: Channel) -> bool:
    """Say what the experts here computed since the last time, if they did anything."""
    if worker.counters is None or (report := worker.counters.report()) is None:
        return False
    channel.send(report)
    return True


def _run_step(worker: AttentionWorker, step: RunStep) -> StepResult | StepFailed | None:
    assert not isinstance(worker.runner, SideBySide), "it has a loop of its own"
    try:
        return worker.runner.run(step)
    except Exception as error:
        return _failed(error, step.step)


def _failed(error: Exception, step: int) -> StepFailed:
    """Why a step did not finish, said while the error is handled."""
    if isinstance(error, StepAborted):
        return StepFailed(reason="aborted", message="the engine gave the step up")
    if isinstance(error, PeerTimeout | PeerLost):
        return _kept_waiting(error)
    # the engine decides what becomes of it; the traceback goes to the log
    _log.error("step %d failed:\n%s", step, traceback.format_exc())
    return StepFailed(reason="error", message=f"{type(error).__name__}: {error}", step=step)


def _kept_waiting(error: Exception) -> StepFailed:
    peers = error.peers if isinstance(error, PeerTimeout) else [error.peer] if isinstance(error, PeerLost) else []
    return StepFailed(reason="timeout", message=str(error), peers=peers)


def _reset(worker: LoadedWorker, channel: Channel, order: Reset) -> bool:
    """Begin the epoch and say so: True. A peer that cannot be reached is reported instead; the engine asks again."""
    try:
        if worker.moves is not None:
            worker.moves.prefetched.forget(order.epoch)
        worker.links.reset(order)
    except StepAborted:
        return False  # a newer epoch is on its way
    except (PeerTimeout, PeerLost, Refused, UserError, OSError) as error:
        channel.send(_kept_waiting(error))
    else:
        channel.send(ResetDone(order.epoch))
        return True
    return False


@torch.inference_mode()
def serve_batches(worker: ExpertWorker | Follower, channel: Channel, orders: Orders) -> None:
    """Answer batches, or follow the leader's steps; between them, and while idle, look for orders."""
    last_look = time.monotonic()
    num_idle = 0
    while True:
        try:
            busy = worker.runner.serve_one(_IDLE_S, worker.timeout_s)
        except Exception as error:
            num_idle = 0
            if not isinstance(error, StepAborted | PeerTimeout | PeerLost) and not isinstance(worker, Follower):
                raise
            if not isinstance(error, StepAborted):
                channel.send(_failed(error, worker.recorder.step))
            if not _await_reset(worker, channel, orders):
                return
            continue
        num_idle = 0 if busy else num_idle + 1
        if num_idle == _REST_ROUNDS:
            give_memory_back()
        if not busy or orders.waiting or time.monotonic() - last_look > _LOOK_S:
            last_look = time.monotonic()
            if _report_experts(worker, channel) and isinstance(worker, ExpertWorker):
                channel.send(ExchangeReport(worker.exchange.traffic()))
            while (message := orders.poll()) is not None:
                if not _obey(worker, channel, orders, message):
                    return
            if worker.moves is not None and (ended := worker.moves.finished()) is not None:
                channel.send(Prepared(*ended))


def _await_reset(worker: ExpertWorker | Follower, channel: Channel, orders: Orders) -> bool:
    """The step is void: do nothing until the engine names the new epoch. False: exit."""
    while True:
        message = orders.next()
        if not _obey(worker, channel, orders, message):
            return False
        if isinstance(message, Reset):
            return True


def _obey(worker: ExpertWorker | Follower, channel: Channel, orders: Orders, message: object) -> bool:
    """Carry out one order; an epoch that cannot begin is followed by the next. False: exit."""
    if isinstance(message, Reset):
        return _reset(worker, channel, message) or _await_reset(worker, channel, orders)
    return _obey_any(worker, channel, message)


def _obey_any(worker: LoadedWorker, channel: Channel, message: object) -> bool:
    """Orders that every worker takes between steps. False: exit."""
    if isinstance(message, TakeSpans):
        channel.send(worker.recorder.take(message.last_steps))
    elif isinstance(worker, AttentionWorker) and isinstance(message, Place):
        worker.exchange.place(message.placement)
    elif worker.moves is not None and isinstance(message, PreparePlacement):
        worker.moves.prepare(message.placement)
    elif worker.moves is not None and isinstance(message, Retire):
        worker.moves.retire(message.version)
    return not isinstance(message, Shutdown)


def _start(channel: Channel, configure: Configure) -> LoadedWorker:
    """Build the worker, telling the engine how far loading is."""
    last_report = 0.0

    def progress(done: int, total: int) -> None:
        nonlocal last_report
        if done == total or time.monotonic() - last_report > 0.2:
            last_report = time.monotonic()
            channel.send(LoadProgress(done, total))

    def say(message: msgspec.Struct) -> None:
        with suppress(PeerLost, PeerTimeout):  # the reader of orders notices that the engine is gone
            channel.send(message)

    return build_worker(configure, progress, say)


def _ready(worker: LoadedWorker) -> WorkerReady:
    return WorkerReady(
        kernels=worker.kernels,
        ticket=worker.exchange.ticket if isinstance(worker, ExpertWorker) else b"",
        rank_ticket=worker.links.ranks.ticket,
        kv_ticket=b"" if worker.kv is None else worker.kv.ticket,
    )


def run_worker(channel: Channel, adapt: Callable[[Configure], Configure] = lambda configure: configure) -> int:
    """Obey the engine at the other end of `channel` until it says `Shutdown` or goes away; returns the exit code.

    `adapt` may change the configuration to what this machine needs (a worker that joined from another one)."""
    try:
        configure = channel.receive(_FOREVER_S)
        assert isinstance(configure, Configure), "the first message configures the worker"
        orders = Orders(channel)
        thread = orders.start()
        try:
            worker = _start(channel, adapt(configure))
            worker.recorder.watch("orders", thread)
            orders.on_abort = worker.links.abort
            orders.on_kv = None if worker.kv is None else worker.kv.heard
            channel.send(_ready(worker))
        except UserError as error:
            channel.send(WorkerFailure(str(error), error.exit_code))
            return error.exit_code
        except (PeerLost, PeerTimeout):
            raise
        except Exception as error:  # said to the engine in one line; the traceback goes to the log
            _log.error("cannot start:\n%s", traceback.format_exc())
            channel.send(WorkerFailure(with_fix(f"{type(error).__name__}: {error}"), 1, passing=True))
            return 1
        try:
            _serve(worker, channel, orders)
        finally:
            _close(worker)
    except PeerLost:
        pass  # the engine is gone, and with it the work
    return 0


def _serve(worker: LoadedWorker, channel: Channel, orders: Orders) -> None:
    """Until the engine says `Shutdown`; `PeerLost` if it goes away."""
    if isinstance(worker, AttentionWorker) and isinstance(worker.runner, SideBySide):
        serve_side_by_side(worker, worker.runner, channel, orders)
    elif isinstance(worker, AttentionWorker):
        serve_attention(worker, channel, orders)
    elif isinstance(worker, ExpertWorker) or (isinstance(worker, Follower) and _await_reset(worker, channel, orders)):
        serve_batches(worker, channel, orders)  # before the first epoch a follower has no leader to hear


def _close(worker: LoadedWorker) -> None:
    if worker.moves is not None:
        worker.moves.close()  # Python cannot end while a thread of it computes
    if worker.kv is not None:
        worker.kv.close()
    worker.links.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--fd", type=int, required=True, help="inherited socket to the engine")
    arguments = parser.parse_args()
    ignore_ending_signals()
    gc.freeze()  # imported objects never become garbage; the exit need not look through them
    sys.exit(run_worker(Channel(socket.socket(fileno=arguments.fd), "engine", ToWorker)))


if __name__ == "__main__":
    main()

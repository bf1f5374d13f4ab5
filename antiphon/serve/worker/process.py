"""A worker process: joins the engine over an inherited socket, loads its half of the model, serves until told to stop.

    python -m antiphon.serve.worker.process --fd N

If the engine goes away, however that happens, the socket closes and the worker exits: by itself at its next message,
or by a watching thread if it is still loading, computing or waiting for another worker then.
"""

import argparse
import os
import select
import signal
import socket
import sys
import threading
import time
import traceback

import psutil

from antiphon.base.errors import PeerLost, PeerTimeout, UserError
from antiphon.base.logging import get_logger
from antiphon.comm.m2n.api import StepAborted
from antiphon.serve.worker.build import AttentionWorker, ExpertWorker, build_worker
from antiphon.serve.worker.channel import Channel
from antiphon.serve.worker.messages import (
    Configure,
    Failure,
    Progress,
    Ready,
    Reset,
    ResetDone,
    Shutdown,
    Step,
    StepFailed,
    StepResult,
    TakeSpans,
    ToWorker,
)

_log = get_logger("worker")
_IDLE_S = 0.2  # an idle expert worker looks for orders this often
_LOOK_S = 0.5  # a busy one this often
_FOREVER_S = 365.0 * 86400
_LAST_WORDS_S = 1.0  # to exit in order, once the engine is gone


def serve_attention(worker: AttentionWorker, channel: Channel) -> None:
    """Obey the engine: one message in, one answer out."""
    while True:
        message = channel.receive(_FOREVER_S)
        if isinstance(message, Step):
            channel.send(_run_step(worker, message))
        elif isinstance(message, Reset):
            worker.reset(message.epoch)
            channel.send(ResetDone(message.epoch))
        elif isinstance(message, TakeSpans):
            channel.send(worker.recorder.take())
        elif isinstance(message, Shutdown):
            return


def _run_step(worker: AttentionWorker, step: Step) -> StepResult | StepFailed:
    try:
        return worker.runner.run(step)
    except StepAborted:
        return StepFailed(step=step.step, reason="aborted", message="the engine gave the step up")
    except PeerTimeout as error:
        return StepFailed(step=step.step, reason="timeout", message=str(error), peers=error.peers)
    except Exception as error:  # the engine decides what becomes of it; the traceback goes to the log
        _log.error("step %d failed:\n%s", step.step, traceback.format_exc())
        return StepFailed(step=step.step, reason="error", message=f"{type(error).__name__}: {error}")


def serve_experts(worker: ExpertWorker, channel: Channel) -> None:
    """Answer batches; between them, and while idle, look for orders."""
    last_look = time.monotonic()
    while True:
        try:
            busy = worker.runner.serve_one(_IDLE_S, worker.timeout_s)
        except StepAborted:
            if not _await_reset(worker, channel):
                return
            continue
        except PeerTimeout as error:
            channel.send(StepFailed(step=-1, reason="timeout", message=str(error), peers=error.peers))
            if not _await_reset(worker, channel):
                return
            continue
        if not busy or time.monotonic() - last_look > _LOOK_S:
            last_look = time.monotonic()
            if report := worker.runner.report():
                channel.send(report)
            while (message := channel.poll()) is not None:
                if not _obey(worker, channel, message):
                    return


def _await_reset(worker: ExpertWorker, channel: Channel) -> bool:
    """The step is void: do nothing until the engine names the new epoch. False: exit."""
    while True:
        message = channel.receive(_FOREVER_S)
        if not _obey(worker, channel, message):
            return False
        if isinstance(message, Reset):
            return True


def _obey(worker: ExpertWorker, channel: Channel, message: object) -> bool:
    """Carry out one order. False: exit."""
    if isinstance(message, TakeSpans):
        channel.send(worker.recorder.take())
    elif isinstance(message, Reset):
        worker.exchange.reset(message.epoch)
        channel.send(ResetDone(message.epoch))
    return not isinstance(message, Shutdown)


def _start(channel: Channel, configure: Configure) -> AttentionWorker | ExpertWorker:
    """Build the worker, telling the engine how far loading is."""
    last_report = 0.0

    def progress(done: int, total: int) -> None:
        nonlocal last_report
        if done == total or time.monotonic() - last_report > 0.2:
            last_report = time.monotonic()
            channel.send(Progress(done, total))

    worker = build_worker(configure, progress)
    resident = psutil.Process().memory_info().rss
    channel.send(Ready(weight_bytes=worker.weight_bytes, resident_bytes=resident, kernels=worker.kernels))
    return worker


def _exit_after_engine(descriptor: int) -> None:
    """End this process soon after the other end of the engine's socket has closed. Runs in a thread of its own."""
    hang_up = select.poll()
    hang_up.register(descriptor, 0)  # no event is asked for: a hang-up is reported always
    hang_up.poll()
    time.sleep(_LAST_WORDS_S)
    os._exit(0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--fd", type=int, required=True, help="inherited socket to the engine")
    arguments = parser.parse_args()
    for number in (signal.SIGINT, signal.SIGTERM):  # sent to a whole group, or service: the engine decides
        signal.signal(number, signal.SIG_IGN)
    threading.Thread(target=_exit_after_engine, args=[arguments.fd], daemon=True).start()
    channel = Channel(socket.socket(fileno=arguments.fd), "engine", ToWorker)
    try:
        configure = channel.receive(_FOREVER_S)
        assert isinstance(configure, Configure), "the first message configures the worker"
        try:
            worker = _start(channel, configure)
        except UserError as error:
            channel.send(Failure(str(error), error.exit_code))
            sys.exit(error.exit_code)
        except (PeerLost, PeerTimeout):
            raise
        except Exception as error:
            _log.error("cannot start:\n%s", traceback.format_exc())
            channel.send(Failure(f"{type(error).__name__}: {error}", 1))
            sys.exit(1)
        if isinstance(worker, ExpertWorker):
            serve_experts(worker, channel)
        else:
            serve_attention(worker, channel)
    except PeerLost:
        sys.exit(0)  # the engine is gone: nobody is left to serve


if __name__ == "__main__":
    main()

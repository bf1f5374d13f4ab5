"""The system says no, at one call after the other: the work concerned fails, and the server answers as before.

A real server over a real engine of two workers, in this process. While requests run, an expert worker and the process
for texts are killed, so that others must be started. One call of one function fails meanwhile, with one error, in one
of the server's threads. Quick: a few calls, and the first of each function at once. Slow: all of the first ones.
"""

import builtins
import contextlib
import errno
import os
import resource
import selectors
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from antiphon.serve.api.context import ApiContext
from antiphon.serve.api.server import build_grammars, create_app, make_server, url_of
from antiphon.serve.api.settings import ServerSettings
from antiphon.serve.config import ServeConfig
from antiphon.serve.engine import Engine
from antiphon.serve.prepare import prepare
from antiphon.serve.text.tokenizer_reading import load_tokenizer
from antiphon.serve.worker_handle import WorkerName
from antiphon.serve.workforce import _LOOK_S
from tests.serve.api_harness import bind, text_pids
from tests.serve.engine_harness import running
from tests.serve.fork_server import PROGRAMS
from tests.waiting import wait_until

SERVER, ENGINE, TEXTS, GRAMMARS = "http", "engine", "short texts", "grammar trials"
EXPERTS = WorkerName("experts", 0)
_MOST_CALLS = 12  # of one function, counted from a kill on
NUMBERS = (errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EAGAIN, errno.ENOSPC)


@dataclass(frozen=True)
class Call:
    """A function that asks the system for something, the threads in which it fails, and how."""

    owner: Any
    name: str
    threads: tuple[str, ...]
    errors: tuple[BaseException, ...]
    quick: int = 0  # the call that fails in the quick lane, counted from 1; 0: only beside those of other functions

    def __str__(self) -> str:
        return f"{getattr(self.owner, '__name__', self.owner)}.{self.name} in {'+'.join(self.threads)}"


def system_errors(*numbers: int) -> tuple[OSError, ...]:
    return tuple(OSError(number, os.strerror(number)) for number in numbers or NUMBERS)


CALLS = [
    Call(socket, "socketpair", (ENGINE,), system_errors()),
    Call(socket, "socketpair", (TEXTS,), system_errors()),
    Call(subprocess.Popen, "__init__", (ENGINE,), (*system_errors(), MemoryError()), 1),
    Call(subprocess.Popen, "__init__", (TEXTS,), (*system_errors(), MemoryError())),
    Call(subprocess.Popen, "__init__", (GRAMMARS,), system_errors()),
    Call(psutil, "Process", (ENGINE,), (*system_errors(errno.EMFILE, errno.ENOENT), psutil.NoSuchProcess(1)), 1),
    Call(selectors.EpollSelector, "register", (ENGINE,), system_errors(errno.ENOMEM, errno.ENOSPC)),
    Call(selectors.EpollSelector, "select", (ENGINE,), (*system_errors(errno.ENOMEM), MemoryError()), 2),
    Call(socket.socket, "send", (ENGINE,), system_errors(errno.ENOBUFS, errno.EAGAIN, errno.EPIPE)),
    Call(socket.socket, "recv", (ENGINE,), (*system_errors(errno.ENOBUFS, errno.ECONNRESET), MemoryError())),
    Call(socket.socket, "recv", (TEXTS,), system_errors(errno.ENOBUFS, errno.ECONNRESET)),
    Call(socket.socket, "recv", (SERVER,), system_errors(errno.ENOBUFS, errno.ECONNRESET)),
    Call(socket.socket, "send", (SERVER,), system_errors(errno.ENOBUFS, errno.EPIPE)),
    Call(socket.socket, "accept", (SERVER,), system_errors(errno.EMFILE, errno.ENFILE, errno.ECONNABORTED)),
    Call(os, "kill", (ENGINE,), system_errors(errno.EPERM)),
    Call(builtins, "open", (ENGINE, TEXTS, GRAMMARS), system_errors()),
    Call(os, "pipe", (GRAMMARS,), system_errors(errno.EMFILE)),
    Call(threading.Thread, "start", (ENGINE, SERVER), (RuntimeError("can't start new thread"),)),
]


class Refusing:
    """In place of the function: its `number`-th call in these threads fails."""

    def __init__(self, call: Call, number: int, error: BaseException) -> None:
        self._real = getattr(call.owner, call.name)
        self._call, self._number, self._error = call, number, error
        self.num_calls = 0

    def install(self, patch: pytest.MonkeyPatch) -> None:
        def refuse(*arguments: Any, **options: Any) -> Any:
            of_forking = PROGRAMS.is_asked_by_this_thread  # in the place of what the server does
            if threading.current_thread().name in self._call.threads and not of_forking:
                self.num_calls += 1
                if self.num_calls == self._number:
                    raise self._error
            return self._real(*arguments, **options)

        patch.setattr(self._call.owner, self._call.name, refuse)


@dataclass
class Served:
    """The server, and what it is asked."""

    engine: Engine
    context: ApiContext
    url: str
    expected: dict[str, str] = field(default_factory=dict)

    def ask(self, path: str, body: dict[str, Any]) -> str | None:
        """The text; None when the system's refusal was this request's."""
        try:
            answer = httpx.post(f"{self.url}{path}", json=body, timeout=60.0, verify=False)
        except httpx.TransportError:
            return None
        if answer.status_code == 200:
            return answer.text if path == "/tokenize" else str(answer.json()["choices"][0]["text"])
        assert answer.status_code in (500, 503), answer.text
        if answer.status_code == 503:
            assert answer.headers["retry-after"]
        return None

    def texts(self) -> dict[str, str | None]:
        """All that is asked, once."""
        plain = {"prompt": "bada", "temperature": 0, "max_tokens": 24}
        grammar = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"enum": ["abc", "abd"]}}}
        return {
            "plain": self.ask("/v1/completions", plain),
            "grammar": self.ask("/v1/completions", plain | {"response_format": grammar}),
            "text": self.ask("/tokenize", {"prompt": "bada " * 2000}),
        }

    def kill_some(self) -> None:
        grammars = self.context.grammars
        assert grammars is not None
        grammars._verdicts.clear()  # so that the next one is tried
        process = grammars._trials._process
        trials = [] if process is None else [process.pid]
        for pid in (self.engine.worker_pid(EXPERTS), *text_pids(self.context.texts), *trials):
            with contextlib.suppress(ProcessLookupError):  # it ended by what was refused
                os.kill(pid, signal.SIGKILL)

    def check(self) -> None:
        """It answers as before, and all workers are there."""
        wait_until(lambda: self.texts() == self.expected, "the server answers as before")
        wait_until(lambda: self.engine.complete, "all workers are there")
        assert self.engine.fatal is None
        assert self.engine._thread.is_alive()


@pytest.fixture(scope="module")
def served(checkpoint: Path) -> Iterator[Served]:
    settings = ServeConfig(model=checkpoint, layout="disaggregated", num_attention=1, num_experts=1, num_threads=1)
    http = ServerSettings(port=0)
    tokenizer = load_tokenizer(checkpoint)
    grammars = build_grammars(prepare(settings).info, tokenizer)
    assert grammars is not None
    with running(settings, grammars.matcher) as engine:
        app = create_app(engine, tokenizer, http, grammars)
        context: ApiContext = app.state.context
        server, listener = make_server(app, http), bind("127.0.0.1", 0)
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, name=SERVER, daemon=True)
        thread.start()
        try:
            assert server.ready.wait(30.0)
            made = Served(engine, context, url_of(listener))
            wait_until(lambda: None not in made.texts().values(), "the first answers")
            made.expected = {what: text for what, text in made.texts().items() if text is not None}
            yield made
        finally:
            server.should_exit = server.force_exit = True
            thread.join(30.0)
            context.grammars.close()


@contextmanager
def quick_restarts(patch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in ("_SECOND_DELAY_S", "_LONGEST_DELAY_S", "_LONGEST_DELAY_AFTER_KILL_S"):
        patch.setattr(f"antiphon.serve.policy.restarts.{name}", 0.05)
    yield


def refuse_one(served: Served, *refusing: Refusing) -> int:
    """How often the function that was called most was called."""
    with pytest.MonkeyPatch.context() as patch, quick_restarts(patch):
        for each in refusing:
            each.install(patch)
        served.kill_some()
        served.texts()
        served.check()
    served.check()
    return max(each.num_calls for each in refusing)


@pytest.mark.parametrize("call", [call for call in CALLS if call.quick], ids=str)
def test_a_call_that_the_system_refuses_costs_only_its_own_work(served: Served, call: Call) -> None:
    assert refuse_one(served, Refusing(call, call.quick, call.errors[0])) >= call.quick


def test_calls_of_all_functions_that_the_system_refuses_at_once(served: Served) -> None:
    refuse_one(served, *(Refusing(call, 1, call.errors[0]) for call in CALLS))


def test_no_descriptor_is_left(served: Served) -> None:
    """For real: every call that needs one fails, until others are closed."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    held: list[int] = []
    with pytest.MonkeyPatch.context() as patch, quick_restarts(patch):
        try:
            with contextlib.suppress(OSError):
                resource.setrlimit(resource.RLIMIT_NOFILE, (psutil.Process().num_fds() + 100, before[1]))
                while True:
                    held.append(os.dup(0))
            served.kill_some()
            words = "cannot be started (Too many open files)"
            wait_until(lambda: words in served.engine.stats().status, "a worker that waits for a descriptor")
            time.sleep(3 * _LOOK_S)  # looks for stopped workers need one, too
            assert served.engine.fatal is None
        finally:
            for descriptor in held:
                os.close(descriptor)
            resource.setrlimit(resource.RLIMIT_NOFILE, before)
        served.check()


@pytest.mark.slow
@pytest.mark.parametrize("call", CALLS, ids=str)
def test_the_nth_call_with_the_nth_error(served: Served, call: Call) -> None:
    number, num_calls = 1, 1
    while number <= min(num_calls, _MOST_CALLS):
        error = call.errors[(number - 1) % len(call.errors)]
        num_calls = refuse_one(served, Refusing(call, number, error))
        number += 1

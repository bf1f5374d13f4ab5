"""Forks programs of Antiphon from one process that has them loaded: importing them takes most of such a test's time.

Tests and the engine start programs with `subprocess.Popen`; `ForkServer.Popen` stands in its place.

1. The fork server is a child of the test process. It imports what the programs import, each when it is first asked for,
   and waits. It starts no thread (NumPy's BLAS has one and takes it down around a fork). What it says itself (Python
   warns as it compiles a module or forks) is kept for the error of its end: standard error is the test's that happens
   to be the first to ask.
2. A request carries the program's descriptors, its arguments, folder and environment. The server forks twice and the
   one in between ends, so that the program becomes a child of who asked: that is a subreaper for as long.
3. The program runs its `main`, as after `python -m`, or its text, as after `python -c`. Signals, exit codes and waits
   are real.
4. It gets its caller's environment, and runs the `sitecustomize.py` that a test may have put there, as Python does.
   A test that changes what a loaded process cannot change any more gets a real start, and a warning.
5. A command that starts workers has a fork server of its own, forked before anything else: only what descends from a
   process can become its child. It is a child too, see `is_fork_server`.
6. The process in between may enter a node of a cluster in a box first, see `_enter_node`.

Rejected: forking the test process, which has threads.
"""

import ast
import atexit
import ctypes
import fcntl
import gc
import importlib
import inspect
import logging
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import IO, Any, NoReturn

import msgspec
import psutil

from antiphon.bench.box import namespaces

COMMAND = "antiphon.cli.main"
BOX_ENGINE = "tests.serve.box_engine"
WORKER = "antiphon.serve.worker.process"
TEXTS, READER = "antiphon.serve.text.text_process", "antiphon.serve.text.tokenizer_reading"
# Tests that run in the background inherit interrupts that are ignored.
HEARS_INTERRUPTS = (
    "import os, signal, sys\nsignal.signal(signal.SIGINT, signal.SIG_DFL)\nos.execv(sys.argv[1], sys.argv[1:])"
)
# What can be forked, and what each will import later.
PROGRAMS_TO_FORK: dict[str, tuple[str, ...]] = {
    COMMAND: (READER,),  # and the module of the command
    BOX_ENGINE: (),
    WORKER: (),
    TEXTS: (),
    READER: (),
    "antiphon.serve.worker.joined": (),
    "antiphon.bench.harness.child": ("antiphon.bench.m2n.gloo", "antiphon.bench.profile.rig"),
}
COMMANDS_WITH_WORKERS = ("serve", "generate", "bench")
_NAME = "fork server"  # of the process, as ps shows it
# What a loaded program can still change: GLOO_SOCKET_IFNAME, RAY_USAGE_STATS_ENABLED, TORCHINDUCTOR_CACHE_DIR.
_CHANGEABLE = (
    *("PYTEST_", "PYTHONPATH", "ANTIPHON_", "COLUMNS", "HOME", "OMP_", "OPENBLAS_", "MKL_"),
    *("GLOO_", "RAY_", "TORCHINDUCTOR_"),
    *("BOX_", "RANK", "WORLD_SIZE", "LOCAL_", "GROUP_RANK", "MASTER_"),
)
_PR_SET_NAME, _PR_SET_CHILD_SUBREAPER = 15, 36
_REPLY_TIMEOUT_S = 120.0  # the server's own imports come before its first reply
_MAX_REQUEST_BYTES = 2**18


class _Request(msgspec.Struct):
    """A program to run, a module or a text. Its descriptors travel beside: the first three are its standard ones, the
    others `numbers`; `in_node`: before them all, one of a process in the node that it enters."""

    program: str
    is_text: bool
    arguments: list[str]
    numbers: list[int]
    folder: str
    cores: list[int]
    environment: dict[str, str]
    new_session: bool
    in_node: bool
    blocked: list[int]  # signals, by the thread that asks: the server may have been started by one that blocks others


class ForkServer:
    """What stands in the place of the module `subprocess`."""

    PIPE = subprocess.PIPE
    STDOUT = subprocess.STDOUT
    DEVNULL = subprocess.DEVNULL
    TimeoutExpired = subprocess.TimeoutExpired

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._server: tuple[Callable[[], object], socket.socket] | None = None
        self._said: IO[bytes] | None = None  # by the server itself
        self._executable = sys.executable
        self._environment = dict(os.environ)

    def remember_environment(self) -> None:
        """What programs are started with from now on: modules of tests may have changed it."""
        assert self._server is None, "it has started with another one"
        self._environment = dict(os.environ)

    def Popen(self, command: Sequence[str], node: int | None = None, **options: Any) -> "subprocess.Popen[Any]":
        """Forks where it can, starts a program where it must. `node`: the pidfd of a process in a node of a box; what
        runs there must be forked."""
        command = list(command)
        if command[1:2] == ["-P"]:
            del command[1]  # a fork has loaded all it needs
        environment = os.environ if options.get("env") is None else options["env"]
        known = command[1:2] == ["-c"] or (command[1:2] == ["-m"] and command[2] in PROGRAMS_TO_FORK)
        if not known or command[0] != self._executable:
            assert node is None, f"cannot be forked: {command}"
            return subprocess.Popen(command, **options)
        if _constant(environment) != _constant(self._environment):
            assert node is None, _constant(environment).items() ^ _constant(self._environment).items()
            if changed := _constant(os.environ).items() ^ _constant(self._environment).items():
                names = ", ".join(sorted({name for name, _ in changed}))
                warnings.warn(f"not forked, which takes seconds: the environment has changed: {names}", stacklevel=2)
            return subprocess.Popen(command, **options)
        return _Forked(self, command, node, **options)

    def run(self, command: Sequence[str], *, timeout: float, **options: Any) -> "subprocess.CompletedProcess[Any]":
        """As `subprocess.run`; both outputs are always captured."""
        with self.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, **options) as process:
            try:
                output, error = process.communicate(timeout=timeout)
            except BaseException:
                process.kill()
                raise
        return subprocess.CompletedProcess(command, process.returncode, output, error)

    @property
    def is_asked_by_this_thread(self) -> bool:
        """Whether this thread is about to have a program forked."""
        return self._lock._is_owned()  # type: ignore[attr-defined,no-any-return]

    def fork(self, request: _Request, descriptors: Sequence[int]) -> int:
        """The process that runs it, a child of this one."""
        with self._lock:
            control = self._start()
            _be_subreaper(True)
            try:
                socket.send_fds(control, [msgspec.msgpack.encode(request)], list(descriptors))
                if reply := control.recv(64):
                    return int(reply)
                raise RuntimeError(f"the fork server ended: {self._last_words()}")
            finally:
                _be_subreaper(False)

    def _start(self) -> socket.socket:
        if self._server is None:
            ours, theirs = _control()
            command = [self._executable, __file__, str(theirs.fileno())]
            self._said = tempfile.TemporaryFile()  # noqa: SIM115
            process = subprocess.Popen(
                command,
                env=self._environment,
                pass_fds=(theirs.fileno(),),
                stdin=subprocess.DEVNULL,
                stderr=self._said,
            )
            theirs.close()
            self._server = lambda: process.wait(_REPLY_TIMEOUT_S), ours
        return self._server[1]

    def start_beside(self) -> None:
        """Fork the server from this process, which has no thread yet."""
        ours, theirs = _control()
        if os.fork() == 0:
            ours.close()
            for number in (signal.SIGINT, signal.SIGTERM):
                signal.signal(number, signal.SIG_IGN)
            run_what_is_asked_for(theirs)
            os._exit(0)
        theirs.close()
        self._server = lambda: None, ours

    def close(self) -> None:
        if self._server is not None:
            wait, control = self._server
            control.close()
            wait()
            self._server = None
            if self._said is not None:
                self._said.close()

    def _last_words(self) -> str:
        if self._said is None:
            return "what it said stands before this"
        self._said.seek(0)
        return self._said.read().decode(errors="replace")


class _Forked(subprocess.Popen[Any]):
    """`Popen` whose child comes from a fork server."""

    def __init__(self, server: ForkServer, command: Sequence[str], node: int | None, **options: Any) -> None:
        self._fork_server, self._node = server, [] if node is None else [node]
        super().__init__(command, **options)

    def _execute_child(self, *given: Any) -> None:
        """`Popen` calls it once its pipes are made."""
        asked = inspect.signature(subprocess.Popen._execute_child).bind(self, *given).arguments  # type: ignore[attr-defined]
        ends = ("p2cread", "p2cwrite", "c2pread", "c2pwrite", "errread", "errwrite")
        own = enumerate(("p2cread", "c2pwrite", "errwrite"))
        standard = [asked[end] if asked[end] != -1 else number for number, end in own]
        environment = os.environ if asked["env"] is None else asked["env"]
        request = _Request(
            program=asked["args"][2],
            is_text=asked["args"][1] == "-c",
            arguments=[str(argument) for argument in asked["args"][3:]],
            numbers=list(asked["pass_fds"]),
            folder=str(asked["cwd"] or Path.cwd()),
            cores=sorted(os.sched_getaffinity(0)),
            environment=dict(environment),
            new_session=asked["start_new_session"],
            in_node=bool(self._node),
            blocked=sorted(signal.pthread_sigmask(signal.SIG_BLOCK, ())),
        )
        try:
            self.pid = self._fork_server.fork(request, [*self._node, *standard, *request.numbers])
            self._child_created = True
        finally:
            self._close_pipe_fds(*(asked[name] for name in ends))  # type: ignore[attr-defined]


PROGRAMS = ForkServer()  # the one of this test process


def fork_workers() -> None:
    """Workers and text processes of this program, which has just begun and has no thread, will be forked from it as it
    is now."""
    from antiphon.serve import worker_handle
    from antiphon.serve.text import text_queue

    beside = ForkServer()
    beside.start_beside()
    worker_handle.subprocess = text_queue.subprocess = beside  # type: ignore[assignment]


def is_fork_server(process: psutil.Process) -> bool:
    return process.name() == _NAME


def _control() -> tuple[socket.socket, socket.socket]:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    ours.settimeout(_REPLY_TIMEOUT_S)
    return ours, theirs


def _constant(environment: Mapping[str, str]) -> dict[str, str]:
    """What a forked program could not change any more; the rest it gets with the request."""
    return {name: value for name, value in environment.items() if not name.startswith(_CHANGEABLE)}


def _be_subreaper(yes: bool) -> None:
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, int(yes), 0, 0, 0)


def _name_this_process(name: str) -> None:
    ctypes.CDLL(None).prctl(_PR_SET_NAME, name.encode(), 0, 0, 0)


def run_what_is_asked_for(control: socket.socket) -> None:
    """Fork for each request, until nobody can ask any more. A forked program ends in here."""
    _name_this_process(_NAME)
    while True:
        received, descriptors, _, _ = socket.recv_fds(control, _MAX_REQUEST_BYTES, 16)
        if not received:
            return
        request = msgspec.msgpack.decode(received, type=_Request)
        _load(request)
        gc.freeze()  # a collection in a program writes to no page that it shares with this process
        reading, writing = os.pipe()
        if (between := os.fork()) == 0:
            parent = os.getpid()
            if request.in_node:
                _enter_node(descriptors.pop(0))
            if (pid := os.fork()) != 0:
                os.write(writing, str(pid).encode())
                os._exit(0)
            while os.getppid() == parent:  # its end is not the end of who asked; in a node it has no number
                time.sleep(0.001)
            control.close()
            os.close(reading)
            os.close(writing)
            _name_this_process("python")
            _become(request, descriptors)
        os.waitpid(between, 0)
        for descriptor in (*descriptors, writing):
            os.close(descriptor)
        control.send(os.read(reading, 64))
        os.close(reading)


def _enter_node(process: int) -> None:
    """The node's network, files, names and shared memory from now on; its process numbers for children."""
    namespaces.enter(process, namespaces.CLONE_NEWNS | namespaces.CLONE_NEWUTS | namespaces.CLONE_NEWIPC)
    namespaces.enter(process, namespaces.CLONE_NEWNET | namespaces.CLONE_NEWPID)


def _load(request: _Request) -> None:
    """Import what the program will."""
    if request.is_text:
        modules = [node.module for node in ast.parse(request.program).body if isinstance(node, ast.ImportFrom)]
    else:
        modules = [request.program, *PROGRAMS_TO_FORK[request.program]]
    for module in modules:
        importlib.import_module(str(module))
    if request.program == COMMAND:
        commands = importlib.import_module(COMMAND).COMMANDS
        if (place := commands.get((request.arguments or [""])[0])) is not None:
            importlib.import_module(place.module)


def _become(request: _Request, descriptors: list[int]) -> NoReturn:
    """The program, from here to its end."""
    os.environ.clear()
    os.environ.update(request.environment)
    os.chdir(request.folder)
    os.sched_setaffinity(0, request.cores)
    signal.pthread_sigmask(signal.SIG_SETMASK, request.blocked)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # tests may run under nohup
    if request.new_session:
        os.setsid()
    numbers = [0, 1, 2, *request.numbers]
    beyond = [_above(descriptor, max(numbers)) for descriptor in descriptors]
    for descriptor, number in zip(beyond, numbers, strict=True):
        os.dup2(descriptor, number)
        os.close(descriptor)
    if "torch" in sys.modules and "OMP_NUM_THREADS" in os.environ:  # which is read as a library loads
        sys.modules["torch"].set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    sys.stdin = open(0, closefd=False)  # noqa: SIM115
    sys.stdout = sys.__stdout__ = open(1, "w", closefd=False)  # type: ignore[misc]  # noqa: SIM115
    errors = open(2, "w", buffering=1, errors="backslashreplace", closefd=False)  # noqa: SIM115
    sys.stderr = sys.__stderr__ = errors  # type: ignore[misc]
    logging.getLogger("antiphon").setLevel(request.environment.get("ANTIPHON_LOG", "info").upper())
    customize = Path(request.environment.get("PYTHONPATH", "").split(os.pathsep)[0], "sitecustomize.py")
    if customize.exists():
        exec(
            compile(customize.read_text(), customize, "exec"), {"__name__": "sitecustomize", "__file__": str(customize)}
        )
    sys.argv = ["-c" if request.is_text else request.program, *request.arguments]
    with_workers = request.program == COMMAND and bool({*request.arguments[:1]} & {*COMMANDS_WITH_WORKERS})
    if with_workers or request.program == BOX_ENGINE:
        fork_workers()
    code = None
    try:
        if request.is_text:
            exec(compile(request.program, "<string>", "exec"), {"__name__": "__main__"})
        else:
            code = importlib.import_module(request.program).main()
    except SystemExit as end:
        code = end.code
    except BaseException:
        traceback.print_exc()
        code = 1
    _end(code)


def _end(code: object) -> NoReturn:
    """What Python does at the end, except for taking everything apart: that takes a process with torch a second."""
    threading._shutdown()  # type: ignore[attr-defined]  # waits for threads
    atexit._run_exitfuncs()
    if isinstance(code, str):
        print(code, file=sys.stderr)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code if isinstance(code, int) else int(code is not None))


def _above(descriptor: int, number: int) -> int:
    """The same under a higher number."""
    copy = fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, number + 1)
    os.close(descriptor)
    return copy


def main() -> None:
    sys.path[0] = str(Path(__file__).parents[2])  # texts import modules of tests
    run_what_is_asked_for(socket.socket(fileno=int(sys.argv[1])))


if __name__ == "__main__":
    main()

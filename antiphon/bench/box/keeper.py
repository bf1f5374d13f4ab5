"""The owner's end of `namespaces.py`: starts that process, asks it, ends it; and says whether this machine can.

Every answer has a deadline. Requests may come from any thread, one at a time. The keeper is a fresh interpreter, so the
owner may be large and full of threads: it is never forked in Python. A `NodeProcess` is a process in a node as its
owner sees it.
"""

import json
import os
import select
import shutil
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from functools import cache
from pathlib import Path
from typing import IO, Any, BinaryIO, Self

from antiphon.base.errors import UserError

from . import topology

CAP_NET_ADMIN, CAP_SYS_ADMIN = 12, 21
REQUEST_TIMEOUT_S = 60.0
END_TIMEOUT_S = 30.0
SO_SNDBUFFORCE = 32
MAX_REQUEST_BYTES = 2 << 20
TOOL_PATH = f"{os.environ.get('PATH', os.defpath)}:/usr/sbin:/sbin"


class BoxError(RuntimeError):
    """A box could not do what was asked, or is gone. The message says what the kernel or the tool said."""


class Keeper:
    """A running keeper process. Use it as a context: when it ends, all nodes and their processes are gone."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._socket: socket.socket | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._number = 0

    def __enter__(self) -> Self:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        owner = os.pidfd_open(os.getpid())
        try:
            ours.setsockopt(socket.SOL_SOCKET, SO_SNDBUFFORCE, MAX_REQUEST_BYTES)
            theirs.setsockopt(socket.SOL_SOCKET, SO_SNDBUFFORCE, MAX_REQUEST_BYTES)
            ours.settimeout(REQUEST_TIMEOUT_S)
            # -I -S: nothing but the standard library. A session of its own: Ctrl-C is for the owner.
            script = str(Path(__file__).with_name("namespaces.py"))
            self._process = subprocess.Popen(
                [sys.executable, "-I", "-S", script, str(theirs.fileno()), str(owner)],
                pass_fds=(theirs.fileno(), owner),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                start_new_session=True,
            )
            self._socket = ours
        except BaseException:
            ours.close()
            raise
        finally:
            theirs.close()
            os.close(owner)
        return self

    def __exit__(self, *_: object) -> None:
        if self._socket is not None:
            self._socket.close()
            self._socket = None
        if self._process is not None:
            try:
                self._process.wait(END_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                self._process.kill()  # its inits die with it
                self._process.wait()

    @property
    def pid(self) -> int | None:
        """The keeper's process, for tests; None before it was started."""
        return None if self._process is None else self._process.pid

    def ask(self, do: str, descriptors: Sequence[int] = (), **values: Any) -> dict[str, Any]:
        """One request and its answer. BoxError with the keeper's words, or if the keeper is gone or silent."""
        with self._lock:
            if self._socket is None:
                raise BoxError(f"the box is closed; it cannot {do} any more")
            self._number += 1
            request = json.dumps({"do": do, "number": self._number, **values}).encode()
            reply: dict[str, Any] = {}
            try:
                socket.send_fds(self._socket, [request], list(descriptors))
                # Older numbers: answers that no call waited for, after a timeout or Ctrl-C.
                while reply.get("number") != self._number:
                    answer = self._socket.recv(MAX_REQUEST_BYTES * 2)
                    if not answer:
                        raise BoxError(f"the box's keeper is gone, and the nodes with it; it was asked to {do}")
                    reply = json.loads(answer)
            except TimeoutError:
                raise BoxError(f"the box's keeper did not {do} within {REQUEST_TIMEOUT_S:.0f} s") from None
            except OSError as error:
                raise BoxError(
                    f"cannot ask the box's keeper to {do}, {len(request):,} bytes: {error.strerror}"
                ) from None
        if "error" in reply:
            raise BoxError(reply["error"])
        return reply

    def configure(self, node: int | None, tool: str, lines: Sequence[str], options: Sequence[str] = ()) -> str:
        """Run `tool` (ip, bridge, tc) over `lines` in a node, or in the switch (None). Returns what it printed."""
        path = shutil.which(tool, path=TOOL_PATH)
        if path is None:
            raise BoxError(f"no {tool} on the PATH or in /usr/sbin; install iproute2")
        args = [path, *options, "-batch", "-"]
        return str(self.ask("configure", node=node, args=args, lines=list(lines))["output"])


@cache
def box_unavailable(*, netem: bool = False) -> str | None:
    """Why this machine cannot hold a box, in one line; None if it can. Tried once, on a box of one node, in 0.2 s.

    `netem`: whether delays and loss are needed as well.
    """
    if not sys.platform.startswith("linux"):
        return f"a box needs Linux namespaces; this is {sys.platform}"
    missing = _missing_capabilities()
    if missing:
        return f"a box needs root (missing here: {', '.join(missing)}); run it with sudo or in a privileged container"
    try:
        with Keeper() as keeper:
            _try(keeper, netem=netem)
    except BoxError as error:
        return f"a box cannot be made here: {' '.join(str(error).split())}"
    return None


def _missing_capabilities() -> list[str]:
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    effective = int(next(line.split()[1] for line in lines if line.startswith("CapEff")), 16)
    wanted = {"CAP_NET_ADMIN": CAP_NET_ADMIN, "CAP_SYS_ADMIN": CAP_SYS_ADMIN}
    return [name for name, bit in wanted.items() if not effective >> bit & 1]


def _try(keeper: Keeper, *, netem: bool) -> None:
    """Make one node with a shaped link. BoxError if anything is missing."""
    pids = keeper.ask("create", names=[topology.hostname(0)], hosts=topology.hosts_file(1))["pids"]
    keeper.configure(None, "ip", topology.switch_links(pids))
    keeper.configure(None, "bridge", topology.forwarding(0))
    keeper.configure(0, "ip", topology.node_links(0, 1))
    shape = topology.LinkShape(mbit=100, delay_us=1 if netem else 0)
    try:
        keeper.configure(0, "tc", topology.shaping(topology.NODE_DEVICE, shape, sends=True))
    except BoxError as error:
        needs = "sch_htb, cls_u32" + (" and sch_netem (for delay and loss)" if netem else "")
        raise BoxError(f"the kernel must have {needs}: {error}") from None


# --- a process in a node
#
# It is the keeper's child, not ours: its exit code comes through a pipe of its own. So a waiting thread polls a
# descriptor, and no thread has to sort messages for others.


Stream = int | IO[bytes] | IO[str] | None
"""None: this process's own. Or subprocess.PIPE, subprocess.DEVNULL, a descriptor, an open file."""


class NodeProcess:
    """A process in a node. `pid` is its number outside; inside it has another one. The streams are there if piped."""

    def __init__(self, keeper: Keeper, node: int, args: Sequence[str], pid: int, status: int) -> None:
        self.node = node
        self.args = tuple(args)
        self.pid = pid
        self.stdin: BinaryIO | None = None
        self.stdout: BinaryIO | None = None
        self.stderr: BinaryIO | None = None
        self.returncode: int | None = None
        self._keeper = keeper
        self._status = status
        self._lock = threading.Lock()

    def __repr__(self) -> str:
        return f"NodeProcess(node={self.node}, pid={self.pid}, {' '.join(self.args)!r})"

    def __del__(self) -> None:
        close_all([self._status])

    def fileno(self) -> int:
        """Becomes readable when the process ends and stays so, for select and poll."""
        return self._status

    def poll(self) -> int | None:
        """Exit code if it has ended, negative for a signal; None while it runs."""
        return self._collect(0.0)

    def wait(self, timeout_s: float | None = None) -> int:
        """Wait for its end. Returns the exit code, negative for a signal; TimeoutError names node and command."""
        code = self._collect(timeout_s)
        if code is None:
            assert timeout_s is not None, "a wait without end has one"
            raise TimeoutError(f"node {self.node}: {' '.join(self.args)!r} did not end within {timeout_s:.1f} s")
        return code

    def send_signal(self, number: int) -> None:
        """To the process and the children of its process group. Nothing if it has ended; does not collect its end."""
        if not self._ended(0.0):
            self._keeper.ask("signal", pid=self.pid, signal_number=int(number))

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def _collect(self, timeout_s: float | None) -> int | None:
        if self._ended(timeout_s):
            with self._lock:
                if self.returncode is None:
                    # Nothing written: the keeper died, and took everything with it.
                    self.returncode = int(os.read(self._status, 16) or -signal.SIGKILL)
        return self.returncode

    def _ended(self, timeout_s: float | None) -> bool:
        poll = select.poll()
        poll.register(self._status, select.POLLIN)
        return bool(poll.poll(None if timeout_s is None else max(0.0, timeout_s) * 1000))


def open_stream(stream: Stream, number: int, *, output: bool, stack: ExitStack) -> tuple[int, int]:
    """(descriptor for the command, our end of a pipe or -1). The former is closed by `stack` if it is new."""
    if stream is None:
        return number, -1
    if stream == subprocess.PIPE:
        read, write = os.pipe()
        theirs, ours = (write, read) if output else (read, write)
        stack.callback(os.close, theirs)
        return theirs, ours
    if stream == subprocess.DEVNULL:
        null = os.open(os.devnull, os.O_RDWR)
        stack.callback(os.close, null)
        return null, -1
    descriptor = stream if isinstance(stream, int) else stream.fileno()
    if descriptor < 0:
        raise UserError(f"{stream} is no stream; give PIPE, DEVNULL, a descriptor or an open file")
    return descriptor, -1


def close_all(descriptors: Sequence[int]) -> None:
    for descriptor in descriptors:
        with suppress(OSError):
            os.close(descriptor)

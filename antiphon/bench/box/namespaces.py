"""The process that holds a box's namespaces and runs commands in them. Long because a script without our imports.

    namespaces.py SOCKET OWNER      two inherited descriptors: requests, and a pidfd of the process that owns the box

It unshares its own network: that is the switch. Each node has an *init*: process 1 of a process namespace, in network,
mount, host-name and IPC namespaces of its own. Commands are forked here, moved into the node, and executed.

Nothing has a name on disk. The kernel removes network namespaces, devices and shaping with the last process and
descriptor, and kills everything in a process namespace, daemons too, with its process 1. So there are three ends and
no leftovers: the owner closes the socket; the owner dies (its pidfd wakes us, whatever killed it and what else still
holds the socket); or we are killed (PR_SET_PDEATHSIG kills the inits).

Requests are one JSON object per packet, with descriptors beside it; each gets one answer with its number: {"error":
text} or a result.

Rejected: `ip netns add` (names in /run stay after a kill -9, and two boxes can clash); commands as children of the
owner, by `nsenter` (their children survive the owner, and a signal to nsenter does not reach the command).
"""

import ctypes
import json
import os
import select
import signal
import socket
import sys
import time
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

CLONE_NEWNS = 0x00020000
CLONE_NEWUTS = 0x04000000
CLONE_NEWIPC = 0x08000000
CLONE_NEWPID = 0x20000000
CLONE_NEWNET = 0x40000000
MS_BIND, MS_REC, MS_PRIVATE = 0x1000, 0x4000, 0x40000
PR_SET_PDEATHSIG = 1

MAX_REQUEST_BYTES = 4 << 20  # arguments and environment; the kernel's own limit for both is 2 MiB by default
COMMAND_TIMEOUT_S = 20.0

libc = ctypes.CDLL(None, use_errno=True)


def _call(what: str, *arguments: Any) -> None:
    if getattr(libc, what)(*arguments) != 0:
        error = ctypes.get_errno()
        raise OSError(error, f"{what}{arguments}: {os.strerror(error)}")


def unshare(flags: int) -> None:
    _call("unshare", flags)


def enter(descriptor: int, flags: int) -> None:
    _call("setns", descriptor, flags)


def mount(source: str, target: str, kind: str, flags: int = 0) -> None:
    _call("mount", source.encode(), target.encode(), kind.encode(), ctypes.c_ulong(flags), None)


def set_system_value(path: str, value: str) -> None:
    """Write /proc/sys/`path` of the network namespace we are in, if this kernel has it."""
    with suppress(FileNotFoundError):
        Path("/proc/sys", path).write_text(value, encoding="ascii")


@dataclass(kw_only=True)
class Node:
    """`net`: its network namespace, held open so that the wire survives the node's processes. -1: not there yet."""

    name: str
    hosts: str
    net: int = -1
    pid: int = -1
    pidfd: int = -1


@dataclass(frozen=True, kw_only=True)
class NodeChild:
    """A process we forked. Its exit code is written to `status` (-1: not asked for)."""

    pid: int
    pidfd: int
    status: int = -1


@dataclass(kw_only=True)
class NodeKeeper:
    """All nodes and children, and the requests about them."""

    requests: socket.socket
    owner: int
    nodes: list[Node] = field(default_factory=list)
    children: dict[int, NodeChild] = field(default_factory=dict)
    own_pids: int = field(default_factory=lambda: os.open("/proc/self/ns/pid", os.O_RDONLY))
    own_pidfd: int = field(default_factory=lambda: os.pidfd_open(os.getpid()))

    def serve(self) -> None:
        """Answer requests and collect exit codes until the owner is gone."""
        unshare(CLONE_NEWNET)
        for table in ("iptables", "ip6tables", "arptables"):
            set_system_value(f"net/bridge/bridge-nf-call-{table}", "0")
        set_system_value("net/ipv6/conf/all/disable_ipv6", "1")
        set_system_value("net/ipv6/conf/default/disable_ipv6", "1")
        while True:
            ready = self._wait([self.owner, self.requests.fileno(), *self.children], None)
            if self.owner in ready:
                return
            for descriptor in ready & self.children.keys():
                self._reap(descriptor)
            if self.requests.fileno() in ready and not self._answer():
                return

    def end(self) -> None:
        """Kill every node, and wait until all their processes are gone."""
        for node in self.nodes:
            self._kill_init(node)
        with suppress(ChildProcessError):
            while True:
                os.waitpid(-1, 0)

    def _answer(self) -> bool:
        data, descriptors, _, _ = socket.recv_fds(self.requests, MAX_REQUEST_BYTES, 8)
        if not data:
            return False
        request = json.loads(data)
        number = request.pop("number")
        try:
            handler = getattr(self, "handle_" + request.pop("do"))
            reply = handler(**request, **({"descriptors": descriptors} if descriptors else {}))
        except (OSError, RuntimeError) as error:
            reply = {"error": error.strerror if isinstance(error, OSError) and error.strerror else str(error)}
        finally:
            for descriptor in descriptors:
                os.close(descriptor)
        try:
            self.requests.sendall(json.dumps({**reply, "number": number}).encode())
        except OSError:
            return False
        return True

    # What the owner may ask.

    def handle_create(self, names: list[str], hosts: str) -> dict[str, Any]:
        self.nodes = [Node(name=name, hosts=hosts) for name in names]
        for node in self.nodes:
            self._start_init(node)
        return {"pids": [node.pid for node in self.nodes]}

    def handle_configure(self, node: int | None, args: list[str], lines: list[str]) -> dict[str, Any]:
        """Run `args` with `lines` as its input, in the switch (None) or a node. Answers what it printed."""
        streams = [os.memfd_create(name) for name in ("in", "out", "error")]
        try:
            os.write(streams[0], "\n".join([*lines, ""]).encode())
            os.lseek(streams[0], 0, os.SEEK_SET)
            target = None if node is None else self._live(node)
            child = self._spawn(target, args, dict(os.environ), "/", streams)
            code = self._wait_for(child)
            out, error = (os.pread(stream, 1 << 22, 0).decode(errors="replace") for stream in streams[1:])
        finally:
            for stream in streams:
                os.close(stream)
        if code != 0 or error:
            place = "the switch" if node is None else self.nodes[node].name
            raise RuntimeError(f"{' '.join(args)} in {place} ended with {code}: {error.strip()}")
        return {"output": out}

    def handle_start(
        self, node: int, args: list[str], env: dict[str, str], cwd: str, descriptors: list[int]
    ) -> dict[str, Any]:
        """Start a command; `descriptors`: its three streams, and where its exit code goes."""
        *streams, status = descriptors
        return {"pid": self._spawn(self._live(node), args, env, cwd, streams, os.dup(status)).pid}

    def handle_signal(self, pid: int, signal_number: int) -> dict[str, Any]:
        """Signal a command and the children in its process group; nothing if its end was noticed already."""
        if any(child.pid == pid for child in self.children.values()):
            with suppress(ProcessLookupError):
                os.killpg(pid, signal_number)
        return {}

    def handle_kill(self, node: int) -> dict[str, Any]:
        """Kill all processes of a node and wait for their end. Its next start brings it back."""
        target = self.nodes[node]
        self._kill_init(target)
        init = self.children.get(target.pidfd)
        if init is not None:
            self._wait_for(init)
        return {}

    # Processes.

    def _live(self, index: int) -> Node:
        """A node with a living init."""
        node = self.nodes[index]
        if node.pidfd not in self.children:
            self._start_init(node)
        return node

    def _start_init(self, node: Node) -> None:
        heard, said = os.pipe()
        unshare(CLONE_NEWPID)  # for children; ours stays
        try:
            pid = os.fork()
            if pid == 0:
                run_init(node, said, self.own_pidfd)
        finally:
            enter(self.own_pids, CLONE_NEWPID)
        os.close(said)
        node.pid, node.pidfd = pid, os.pidfd_open(pid)
        self.children[node.pidfd] = NodeChild(pid=pid, pidfd=node.pidfd)
        if error := _read_all(heard):
            raise RuntimeError(f"{node.name}: {error}")
        if node.net < 0:
            node.net = os.open(f"/proc/{pid}/ns/net", os.O_RDONLY)

    def _kill_init(self, node: Node) -> None:
        if node.pidfd in self.children:
            signal.pidfd_send_signal(node.pidfd, signal.SIGKILL)

    def _spawn(
        self, node: Node | None, args: list[str], env: dict[str, str], cwd: str, streams: list[int], status: int = -1
    ) -> NodeChild:
        """Fork, move the child into `node` (None: the switch), execute. Returns once it executes. Owns `status`."""
        heard, said = os.pipe()
        if node is not None:
            enter(node.pidfd, CLONE_NEWPID)  # for children; ours stays
        try:
            pid = os.fork()
            if pid == 0:
                execute(node, args, env, cwd, streams, said)
        finally:
            if node is not None:
                enter(self.own_pids, CLONE_NEWPID)
            os.close(said)
        child = NodeChild(pid=pid, pidfd=os.pidfd_open(pid), status=status)
        self.children[child.pidfd] = child
        if error := _read_all(heard):
            self._wait_for(child)
            raise RuntimeError(error)
        return child

    def _reap(self, pidfd: int) -> int:
        """Collect the exit code of an ended child and pass it on."""
        child = self.children.pop(pidfd)
        code = os.waitstatus_to_exitcode(os.waitpid(child.pid, 0)[1])
        os.close(pidfd)
        for node in self.nodes:
            if node.pidfd == pidfd:
                node.pidfd = -1  # the number may soon be another child's
        if child.status >= 0:
            with suppress(BrokenPipeError):
                os.write(child.status, str(code).encode())
            os.close(child.status)
        return code

    def _wait_for(self, child: NodeChild) -> int:
        """Exit code of `child`. Others are collected meanwhile: an init ends only after those of its namespace."""
        deadline = time.monotonic() + COMMAND_TIMEOUT_S
        while True:
            ready = self._wait([*self.children], deadline)
            if not ready:
                signal.pidfd_send_signal(child.pidfd, signal.SIGKILL)
                raise RuntimeError(f"process {child.pid} did not end within {COMMAND_TIMEOUT_S:.0f} s")
            for pidfd in ready - {child.pidfd}:
                self._reap(pidfd)
            if child.pidfd in ready:
                return self._reap(child.pidfd)

    @staticmethod
    def _wait(descriptors: list[int], deadline: float | None) -> set[int]:
        poll = select.poll()
        for descriptor in descriptors:
            poll.register(descriptor, select.POLLIN)
        left = None if deadline is None else max(0.0, deadline - time.monotonic()) * 1000
        return {descriptor for descriptor, _ in poll.poll(left)}


def _read_all(pipe: int) -> str:
    """What the other end wrote before it closed or executed. Closes `pipe`."""
    with os.fdopen(pipe, "rb") as stream:
        return stream.read().decode(errors="replace")


def run_init(node: Node, said: int, keeper: int) -> NoReturn:
    """Process 1 of a node: makes its namespaces, collects orphans until it is killed. Says nothing if all is well."""
    try:
        _call("prctl", PR_SET_PDEATHSIG, ctypes.c_ulong(signal.SIGKILL))
        if select.select([keeper], [], [], 0)[0]:
            os._exit(1)  # the keeper died before the line above: no signal will come
        os.setsid()
        if node.net < 0:
            unshare(CLONE_NEWNS | CLONE_NEWUTS | CLONE_NEWIPC | CLONE_NEWNET)
        else:
            unshare(CLONE_NEWNS | CLONE_NEWUTS | CLONE_NEWIPC)
            enter(node.net, CLONE_NEWNET)
        furnish(node)
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGCHLD})
        silence = os.open(os.devnull, os.O_RDWR)
        for stream in (0, 1, 2):
            os.dup2(silence, stream)
        os.closerange(3, said)
        os.closerange(said + 1, 4096)
        os.close(said)
        while True:
            signal.sigwait({signal.SIGCHLD})
            with suppress(ChildProcessError):
                while os.waitpid(-1, os.WNOHANG)[0]:
                    pass
    except BaseException as error:
        os.write(said, f"{type(error).__name__}: {error}".encode())
        os._exit(1)


def furnish(node: Node) -> None:
    """What belongs to a node alone: host name, /etc/hosts, /proc, /sys, /dev/shm. Other files are the host's."""
    socket.sethostname(node.name)
    mount("none", "/", "none", MS_REC | MS_PRIVATE)
    groups = os.open("/sys/fs/cgroup", os.O_PATH) if Path("/sys/fs/cgroup").is_dir() else -1
    mount("proc", "/proc", "proc")
    mount("sysfs", "/sys", "sysfs")
    if groups >= 0:
        mount(f"/proc/self/fd/{groups}", "/sys/fs/cgroup", "none", MS_BIND | MS_REC)
        os.close(groups)
    mount("shm", "/dev/shm", "tmpfs")
    if Path("/etc/hosts").exists():
        hosts = Path("/dev/shm/hosts")
        hosts.write_text(node.hosts, encoding="ascii")
        mount(str(hosts), "/etc/hosts", "none", MS_BIND)
        hosts.unlink()  # the mount keeps it
    # eth0 comes later and takes the default: no IPv6 chatter on the wire, while ::1 stays.
    set_system_value("net/ipv6/conf/default/disable_ipv6", "1")
    # The same on every machine. BBR, the default of some, falls to 4 packets for 200 ms every 10 s, to probe; and cubic
    # may be set in a namespace only where the host lists it as allowed. A socket can still choose for itself.
    set_system_value("net/ipv4/tcp_congestion_control", "reno")


def execute(
    node: Node | None, args: list[str], env: dict[str, str], cwd: str, streams: list[int], said: int
) -> NoReturn:
    """In a forked child: become the command. Says why if that fails."""
    try:
        if node is not None:
            enter(node.pidfd, CLONE_NEWNS | CLONE_NEWUTS | CLONE_NEWIPC | CLONE_NEWNET)
        os.setsid()
        os.chdir(cwd)
        for number in (signal.SIGPIPE, signal.SIGXFSZ):
            signal.signal(number, signal.SIG_DFL)  # ignored by Python, and that would be inherited
        # Above 2 first: a stream may sit where another one goes.
        for target, stream in enumerate([os.dup(stream) for stream in streams]):
            os.dup2(stream, target)
        os.execvpe(args[0], args, env)
    except BaseException as error:
        os.write(said, f"{error.strerror or error}: {args[0]}".encode() if isinstance(error, OSError) else b"failed")
        os._exit(127)


def main() -> int:
    requests, owner = (int(argument) for argument in sys.argv[1:])
    for descriptor in (requests, owner):
        os.set_inheritable(descriptor, False)
    keeper = NodeKeeper(requests=socket.socket(fileno=requests), owner=owner)
    try:
        keeper.serve()
    finally:
        keeper.end()
    return 0


if __name__ == "__main__":
    sys.exit(main())

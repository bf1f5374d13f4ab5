"""A worker's process as the engine holds it, here or on another machine: start, signal, kill, and how it ended.

A worker of this machine inherits one end of a socket pair. When its process dies the kernel closes that end.

`RemoteWorkers` are places that workers of other machines fill, and the spares that joined before they were needed. A
worker that joins takes the first free place of its role; one too many waits as a spare and takes the place of the next
that is lost. Ranks that reach each other over shared memory take their places together, when one machine has enough of
them; ranks that could be anywhere and are at several addresses are worth a warning, because every layer's sums then go
between these. Workers of one machine are counted here, over all roles, because they take its GPUs in turn. The engine's
thread asks for `arrivals`; workers arrive on the listener's thread.
"""

import contextlib
import signal
import socket
import subprocess
import threading
from collections import Counter
from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass, replace
from itertools import count

import msgspec
import psutil

from antiphon.base.errors import PeerLost
from antiphon.base.logging import get_logger
from antiphon.base.system import ending_signals_blocked, memory_kills, python_module, signal_name
from antiphon.base.units import split_address
from antiphon.serve.joining import JoinedPeer, JoinListener
from antiphon.serve.worker.channel import Channel
from antiphon.serve.worker.messages import Configure, FromWorker, Pool, Role, Shutdown

_log, _join_log = get_logger("fleet"), get_logger("join")
_HUNG_UP_S = 0.2  # for a worker that closed its socket to end by itself
_EXIT_TIMEOUT_S = 10.0  # for the kernel to take apart a process that was killed


@dataclass(frozen=True)
class WorkerName:
    """`attention[0]`, `experts[2]`, `replica[1]`; `replica[1][2]` is rank 2 of the last one. A worker is a group of
    ranks, each a process; rank 0 leads it and has the worker's name. Indices begin anew in every instance of the model;
    `1/experts[2]` is one of the second. Where prefill and decode are apart, `prefill/replica[0]` is in the pool for
    prompts."""

    role: Role
    index: int
    rank: int = 0
    instance: int = 0
    pool: Pool = ""

    def __str__(self) -> str:
        where = (f"{self.pool}/" if self.pool else "") + (f"{self.instance}/" if self.instance else "")
        return f"{where}{self.role}[{self.index}]" + (f"[{self.rank}]" if self.rank else "")

    @property
    def leader(self) -> "WorkerName":
        return replace(self, rank=0)

    @property
    def among_peers(self) -> tuple[str, str]:
        """What the other workers of its instance call it, and what the other ranks of its worker do."""
        worker = f"{self.role}[{self.index}]"
        return worker, f"{worker}[{self.rank}]"

    def ranks(self, num_ranks: int) -> "tuple[WorkerName, ...]":
        """All ranks of the worker, the leader first."""
        return tuple(replace(self, rank=rank) for rank in range(num_ranks))


class WorkerProcess:
    """One incarnation of a worker: a process and the channel to it."""

    is_remote = False

    def __init__(self, name: WorkerName) -> None:
        self.name = name
        self.ready = False
        self.explanation = ""  # why it ended: the reason of `kill`, or what the worker said itself
        self.fell_blameless = False  # killed because another rank of its worker was, from outside
        self.heard_s = 0.0  # when it was started or last said something, by the fleet's clock
        self.channel: Channel | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._memory_kills = memory_kills()  # before it was started

    def start(self) -> None:
        """Launch the process; it waits for `Configure`. `OSError` if the system refuses another process."""
        ours, theirs = socket.socketpair()
        command = python_module("antiphon.serve.worker.process", "--fd", str(theirs.fileno()))
        try:
            with theirs, ending_signals_blocked():
                self._process = subprocess.Popen(command, pass_fds=(theirs.fileno(),), stdin=subprocess.DEVNULL)
            self.channel = Channel(ours, str(self.name), FromWorker)
        except BaseException:
            ours.close()
            self.kill("its channel cannot be opened")
            self.wait_until_gone(_HUNG_UP_S)
            raise

    @property
    def pid(self) -> int:
        assert self._process is not None, "start() comes first"
        return self._process.pid

    @property
    def is_stopped(self) -> bool:
        """The process was stopped (SIGSTOP, SIGTSTP) and does nothing until it is continued. False where the
        process table cannot be read: no descriptor is free, or there is no such table."""
        with contextlib.suppress(psutil.Error, OSError, LookupError, ValueError):
            return self.channel is not None and psutil.Process(self.pid).status() == psutil.STATUS_STOPPED
        return False

    @property
    def was_killed_from_outside(self) -> bool:
        """The process has ended by SIGKILL, and not for a reason of ours."""
        if self.fell_blameless:
            return True
        return self._process is not None and self._process.poll() == -signal.SIGKILL and not self.explanation

    def send_signal(self, number: signal.Signals) -> None:
        """Send a signal to the process if it lives."""
        assert self._process is not None, "start() comes first"
        self._process.send_signal(number)

    def kill(self, reason: str = "") -> None:
        """SIGKILL: for a worker that hangs. Its death is then noticed as any other, and explained by `reason`."""
        if self._process is not None and self._process.poll() is None:
            self.explanation = self.explanation or reason
            try:
                self._process.kill()
            except OSError as error:  # a system that forbids it; the worker ends when it notices its closed channel
                _log.error("%s, process %d, cannot be killed: %s", self.name, self.pid, error.strerror or error)
                if self.channel is not None:
                    self.channel.hang_up()

    def end_after_hanging_up(self, reason: str) -> None:
        """The channel is closed: the process is about to end. Kill it, because of `reason`, if it goes on."""
        if self._process is not None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(_HUNG_UP_S)
        self.kill(reason)

    def ask_to_exit(self) -> None:
        """Send `Shutdown`. A worker that does not take it at once is killed, as is one that loads or was stopped: it
        would not obey."""
        if self.channel is None:
            return
        with contextlib.suppress(PeerLost):
            self.channel.enqueue(Shutdown())
            if self.ready and not self.channel.has_unsent and not self.is_stopped:
                return
        self.kill()

    def wait_until_gone(self, timeout_s: float) -> None:
        """Wait for the process to end; kill it after `timeout_s`."""
        if self._process is not None:
            try:
                self._process.wait(timeout_s)
            except subprocess.TimeoutExpired:
                self.kill()
                self.describe_exit()
        self.close()

    def describe_exit(self) -> str:
        """How the process ended, in words. It must have been killed, or be about to exit."""
        assert self._process is not None, "start() comes first"
        try:
            code = self._process.wait(_EXIT_TIMEOUT_S)
        except subprocess.TimeoutExpired:  # stuck in the kernel, for example in a driver: nothing can end it
            _log.error("%s, process %d, was killed and does not end", self.name, self.pid)
            return "does not end, although killed"
        if self.was_killed_from_outside and memory_kills() > self._memory_kills:
            return f"killed by {signal_name(-code)}, probably because memory was short: see dmesg"
        return f"killed by {signal_name(-code)}" if code < 0 else f"exited with {code}"

    def close(self) -> None:
        if self.channel is not None:
            self.channel.close()
            self.channel = None


class JoinedWorker(WorkerProcess):
    """A worker of another machine: only its channel can be reached, and its end is the end of the channel."""

    is_remote = True

    def __init__(self, name: WorkerName, peer: JoinedPeer, configure: Configure) -> None:
        """`configure`: what it is to be sent first."""
        super().__init__(name)
        self.configure = configure
        self.channel = peer.channel
        self.channel.speak(str(name), FromWorker)
        self._peer = peer

    @property
    def pid(self) -> int:
        return self._peer.pid

    @property
    def is_stopped(self) -> bool:
        """Cannot be seen from here: only timeouts show it."""
        return False

    @property
    def was_killed_from_outside(self) -> bool:
        """Always: how often it returns is decided on its own machine."""
        return True

    def send_signal(self, number: signal.Signals) -> None:
        """Nothing happens: it runs on another machine."""

    def kill(self, reason: str = "") -> None:
        """Hang up: the worker ends when it notices, and this end hears of it as of any other death."""
        if self.channel is not None:
            self.explanation = self.explanation or reason
            self.channel.hang_up()

    def wait_until_gone(self, timeout_s: float) -> None:
        self.close()

    def describe_exit(self) -> str:
        return f"{self._peer.name} at {self._peer.host} left"


class RemoteWorkers:
    """`start` listens; `ask` names a place to fill; `on_arrival` is called when `arrivals` may return something."""

    def __init__(
        self, address: str, secret: bytes, places: Set[WorkerName], *, local: Sequence[WorkerName] = ()
    ) -> None:
        """`local`: workers that the engine starts itself, which come first where its address is."""
        self._places = places
        here = split_address(address)[0]
        # The host of each worker, and which worker of that host it is.
        self._hosts: dict[WorkerName, tuple[str, int]] = {name: (here, index) for index, name in enumerate(local)}
        self._listener = JoinListener(address, secret, self._welcome, roles={name.role for name in places})
        self._lock = threading.Lock()
        self._asked: dict[WorkerName, Configure] = {}
        self._peers: list[JoinedPeer] = []
        # Leaders whose ranks no one machine has come for, and the addresses of the spares at the last warning.
        self._warned: dict[WorkerName, Counter[str]] = {}
        self._on_arrival: Callable[[], None] = lambda: None

    def start(self, on_arrival: Callable[[], None]) -> None:
        """Listen. `ResourceError` if the address cannot be had."""
        self._on_arrival = on_arrival
        address = self._listener.start()
        _join_log.info("workers can join at %s", address)

    def close(self) -> None:
        self._listener.close()
        with self._lock:
            for peer in self._peers:
                peer.channel.close()
            self._peers.clear()

    def expects(self, name: WorkerName) -> bool:
        """Whether this place is filled from another machine."""
        return name in self._places

    def ask(self, name: WorkerName, configure: Configure) -> None:
        """The place is free: the next to come takes it, or a spare at once."""
        with self._lock:
            self._asked[name] = configure
            self._hosts.pop(name, None)
            spare = any(peer.role == name.role for peer in self._peers)
        if spare:
            self._on_arrival()
        else:
            _join_log.info("%s: waiting for a worker to join", name)

    def _welcome(self, peer: JoinedPeer) -> None:
        with self._lock:
            self._peers.append(peer)
        self._on_arrival()

    def arrivals(self) -> list[JoinedWorker]:
        """The workers that take a place now."""
        with self._lock:
            for peer in [each for each in self._peers if each.channel.has_ended]:
                self._peers.remove(peer)
                peer.channel.close()
                _join_log.info("%s at %s left before it had a place", peer.name, peer.host)
            found = []
            for names in self._asked_together():
                peers = self._peers_for(names)
                if not peers:
                    self._say_who_is_apart(names)
                for name, peer in zip(names, peers, strict=False):
                    self._peers.remove(peer)
                    self._say_if_apart(name, peer.host)
                    self._warned.pop(name.leader, None)
                    self._hosts[name] = (peer.host, self._free_index(peer.host))
                    _join_log.info("%s is %s at %s", name, peer.name, peer.host)
                    configure = _at(self._asked.pop(name), peer, self._hosts[name][1])
                    found.append(JoinedWorker(name, peer, configure))
            return found

    def _asked_together(self) -> list[list[WorkerName]]:
        """Free places, those of one worker's ranks as one if they must be on one machine."""
        groups: dict[WorkerName, list[WorkerName]] = {}
        for name in sorted(self._asked, key=lambda name: (name.instance, name.role, name.index, name.rank)):
            groups.setdefault(name.leader if _shares_memory(self._asked[name]) else name, []).append(name)
        return list(groups.values())

    def _peers_for(self, names: list[WorkerName]) -> list[JoinedPeer]:
        """One machine's spares for all of these places; none while there are too few."""
        role, configure, machines = names[0].role, self._asked[names[0]], set[str]()
        if _shares_memory(configure):
            hosts = [host for name, (host, _) in self._hosts.items() if name.leader == names[0].leader]
            if len(hosts) + len(names) < configure.num_ranks:
                return []  # the engine is about to ask for the others
            machines = set(hosts)
        for host in dict.fromkeys(peer.host for peer in self._peers if peer.role == role):
            peers = [peer for peer in self._peers if peer.role == role and peer.host == host]
            if len(peers) >= len(names) and machines <= {host}:
                return peers[: len(names)]
        return []

    def _say_who_is_apart(self, names: list[WorkerName]) -> None:
        """A warning if as many wait as there are places, and these cannot be filled all the same."""
        leader, role = names[0].leader, names[0].role
        waiting = Counter(peer.host for peer in self._peers if peer.role == role)
        num_asked = sum(name.role == role for name in self._asked)
        if (
            waiting.total() < num_asked
            or not _shares_memory(self._asked[names[0]])
            or self._warned.get(leader) == waiting
        ):
            return
        self._warned[leader] = waiting
        _join_log.warning(
            "%s: its %d ranks share memory, so they join from one address; those who wait are at %s: start them on one "
            "machine, give one address with --host, or let them reach each other over --transport tcp",
            leader,
            self._asked[names[0]].num_ranks,
            ", ".join(f"{host} ({count})" for host, count in sorted(waiting.items())),
        )

    def _say_if_apart(self, name: WorkerName, host: str) -> None:
        """A warning if the other ranks of this worker are somewhere else."""
        others = {other for each, (other, _) in self._hosts.items() if each.leader == name.leader}
        if others and host not in others:
            _join_log.warning(
                "%s is at %s, other ranks of it at %s: every layer's sums go between them; a worker is faster on one "
                "machine",
                name,
                host,
                ", ".join(sorted(others)),
            )

    def _free_index(self, host: str) -> int:
        """The lowest number that no worker of `host` has."""
        taken = {index for other, index in self._hosts.values() if other == host}
        return next(index for index in count() if index not in taken)


def _shares_memory(configure: Configure) -> bool:
    """Whether the ranks of its worker must be on one machine."""
    exchange = configure.exchange
    return configure.num_ranks > 1 and exchange is not None and exchange.rank_transport == "shm"


def _at(configure: Configure, peer: JoinedPeer, device_index: int) -> Configure:
    """The configuration for a worker on that machine: where others reach it, and which of its workers it is; how it
    waits is its own choice there."""
    exchange = configure.exchange
    if exchange is not None:
        exchange = msgspec.structs.replace(exchange, host=peer.host, waiting="auto", local_processes=0, secret=b"")
    kv = configure.kv
    if kv is not None:
        kv = msgspec.structs.replace(kv, host=peer.host, secret=b"")
    return msgspec.structs.replace(configure, exchange=exchange, kv=kv, device_index=device_index)

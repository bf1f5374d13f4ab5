"""Workers that come from other machines: the opening, the places they fill, and their loss."""

import contextlib
import errno
import json
import logging
import os
import queue
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from antiphon import __version__
from antiphon.base.errors import PeerTimeout, Refused, ResourceError, UserError
from antiphon.base.units import split_address
from antiphon.serve.config import ServeConfig
from antiphon.serve.engine import Engine
from antiphon.serve.joining import (
    Accepted,
    Challenge,
    Join,
    JoinedPeer,
    JoinListener,
    exchange_secret,
    prove,
    read_join_secret,
    set_stream_options,
)
from antiphon.serve.launch import start_engine
from antiphon.serve.worker.channel import Channel
from antiphon.serve.worker.joined import join_engine
from antiphon.serve.worker_handle import WorkerName
from tests.serve.engine_harness import GREEDY, Prompts, Run, TinyModel, Tokens, complete, config
from tests.serve.fork_server import PROGRAMS
from tests.waiting import wait_until

SECRET = b"correct horse battery staple"


class Guests:
    """A listener, and those who came."""

    def __init__(self) -> None:
        self.came: queue.SimpleQueue[JoinedPeer] = queue.SimpleQueue()
        self.listener = JoinListener("127.0.0.1:0", SECRET, self.came.put)
        self.address = self.listener.start()

    @property
    def at(self) -> tuple[str, int]:
        return split_address(self.address)

    def join(self, secret: bytes = SECRET, host: str = "") -> None:
        join_engine(self.address, secret, role="experts", name="experts on box", host=host, pid=7, patience_s=60.0)

    def stranger(self) -> socket.socket:
        return socket.create_connection(self.at, timeout=20.0)


@pytest.fixture
def guests() -> Iterator[Guests]:
    made = Guests()
    yield made
    made.listener.close()


def test_a_worker_that_knows_the_secret_is_let_in(guests: Guests) -> None:
    guests.join()
    peer = guests.came.get(timeout=10.0)
    assert (peer.role, peer.name, peer.host, peer.pid) == ("experts", "experts on box", "127.0.0.1", 7)
    guests.join(host="10.1.2.3")
    assert guests.came.get(timeout=10.0).host == "10.1.2.3"


@pytest.mark.parametrize(
    ("family", "address", "level", "option"),
    [
        (socket.AF_INET, "127.0.0.1", socket.IPPROTO_IP, socket.IP_TOS),
        (socket.AF_INET6, "::1", socket.IPPROTO_IPV6, socket.IPV6_TCLASS),
    ],
    ids=["IPv4", "IPv6"],
)
def test_orders_go_ahead_of_data_on_a_link_that_obeys_marks(
    family: socket.AddressFamily, address: str, level: int, option: int
) -> None:
    try:
        server = socket.create_server((address, 0), family=family)
    except OSError as error:
        pytest.skip(f"no {family.name} here: {error}")
    with server, socket.create_connection(server.getsockname()[:2]) as stream:
        set_stream_options(stream)
        assert stream.getsockopt(level, option) == 0x10


def test_a_wrong_secret_is_turned_away_in_words(guests: Guests) -> None:
    with pytest.raises(Refused, match="turned this worker away: the secret is not the one the engine has"):
        guests.join(b"something else entirely")
    wait_until(lambda: guests.listener.num_rejected == 1, "the stranger is counted")
    assert guests.came.empty()


def test_a_role_without_a_place_is_turned_away_in_words() -> None:
    listener = JoinListener("127.0.0.1:0", SECRET, lambda peer: None, roles={"replica"})
    address = listener.start()
    with pytest.raises(Refused, match="workers that join here are replica, not experts: use --role replica"):
        join_engine(address, SECRET, role="experts", name="experts on box", host="", pid=7, patience_s=5.0)
    listener.close()


def test_a_worker_of_another_version_is_turned_away_in_words(guests: Guests, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("antiphon.serve.joining.__version__", "9.9")
    with pytest.raises(Refused, match=r"the engine is Antiphon 9\.9, the worker .*: install the same"):
        guests.join()
    assert guests.came.empty()


def test_an_engine_that_does_not_know_the_secret_is_not_obeyed() -> None:
    """It lets everybody in, hoping that somebody obeys."""
    server = socket.create_server(("127.0.0.1", 0))
    address = f"127.0.0.1:{server.getsockname()[1]}"
    code = f"""
import socket, msgspec
from antiphon.serve.joining import Accepted, Challenge, Join
from antiphon.serve.worker.channel import Channel
print(flush=True)
stream, _ = socket.socket(fileno={server.fileno()}).accept()
channel = Channel(stream, "worker", Join)
channel.send(Challenge(bytes(32)))
channel.receive(10.0)
channel.send(Accepted(bytes(32)))
channel.receive(10.0)
"""
    impostor = subprocess.Popen(
        [sys.executable, "-c", code], pass_fds=(server.fileno(),), stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    )
    try:
        assert impostor.stdout is not None
        assert impostor.stdout.readline(), "it ended early"  # its imports take seconds on a busy machine
        with pytest.raises(Refused, match="does not know the secret: it is not our engine"):
            join_engine(address, SECRET, role="experts", name="e", host="", pid=1, patience_s=10.0)
    finally:
        impostor.kill()
        impostor.wait()
        server.close()


def nested(depth: int) -> bytes:
    """A frame of arrays in arrays, in a field that nobody asked for."""
    payload = b"\x82\xa4type\xa4Join\xa1x" + b"\x91" * depth + b"\xc0"
    return len(payload).to_bytes(4, "little") + payload


GARBAGE = [b"GET / HTTP/1.1\r\n\r\n", b"\xff\xff\xff\x7f" + bytes(64), bytes(8), b"", nested(4000)]


@pytest.mark.parametrize("garbage", GARBAGE)
def test_strangers_are_turned_away_and_counted(guests: Guests, garbage: bytes) -> None:
    stranger = guests.stranger()
    with stranger:
        stranger.sendall(garbage)
        stranger.shutdown(socket.SHUT_WR)
        stranger.settimeout(20.0)
        with contextlib.suppress(ConnectionResetError):
            while stranger.recv(4096):
                pass
    wait_until(lambda: guests.listener.num_rejected == 1, "the stranger is counted")
    guests.join()
    assert guests.came.get(timeout=10.0).role == "experts"


@pytest.mark.parametrize("begins", [b"", b"\x80\x00\x00\x00half", nested(20)[:-1]], ids=["silent", "half", "trickling"])
def test_a_flood_of_strangers_keeps_no_worker_out(begins: bytes, caplog: pytest.LogCaptureFixture) -> None:
    """As many as there are places for openings, three times over, and all of them wait for their time to run out."""
    guests = Guests()
    num_places = guests.listener._max_openings
    with ExitStack() as stack:
        strangers = [stack.enter_context(guests.stranger()) for _ in range(3 * num_places)]
        for stranger in strangers:
            with contextlib.suppress(OSError):  # it had to make room already
                stranger.sendall(begins)
        wait_until(lambda: guests.listener.num_rejected >= 2 * num_places, "the oldest made room")
        for _ in range(3):
            guests.join()
            assert guests.came.get(timeout=10.0).role == "experts"
        assert guests.listener.num_rejected < 2 * num_places + 10, "the worker needs one place, and gives it back"
        guests.listener.close()
    lines = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert len(lines) < 60, "one a second"
    assert any("connections, the last from 127.0.0.1: made room for others (" in line for line in lines)


def test_a_worker_from_elsewhere_does_not_make_room_for_a_crowd(guests: Guests) -> None:
    """It is slow to answer: its machine is busy. Strangers of one other address have come meanwhile."""
    slow = socket.create_connection(guests.at, source_address=("127.0.0.2", 0))
    wait_until(lambda: guests.listener._hosts["127.0.0.2"] == 1, "its opening began")
    with ExitStack() as stack:
        for _ in range(2 * guests.listener._max_openings):
            stack.enter_context(guests.stranger())
        wait_until(lambda: guests.listener.num_rejected >= guests.listener._max_openings, "strangers made room")
        channel = Channel(slow, "engine", Challenge | Accepted)
        challenge, nonce = channel.receive(20.0), bytes(32)
        fields = (challenge.nonce, nonce, b"experts", b"slow", b"")
        proof = prove(SECRET, "worker", *fields)
        channel.send(Join(role="experts", name="slow", host="", pid=1, nonce=nonce, proof=proof, version=__version__))
        assert isinstance(channel.receive(20.0), Accepted)
    channel.close()


@pytest.mark.parametrize("number", [errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOBUFS, errno.ECONNABORTED])
def test_a_system_that_accepts_nothing_closes_the_door_for_a_moment(
    number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    refusals = [number] * 5
    accept = socket.socket.accept

    def refuse(server: socket.socket) -> tuple[socket.socket, object]:
        if refusals:
            raise OSError(refusals.pop(), os.strerror(number))
        return accept(server)

    guests = Guests()
    with guests.stranger():
        wait_until(lambda: len(guests.listener._openings) == 1, "a stranger has a place")
        monkeypatch.setattr(socket.socket, "accept", refuse)
        guests.join()
    assert guests.came.get(timeout=10.0).role == "experts"
    assert not refusals
    guests.listener.close()


def test_a_worker_that_is_turned_out_unheard_comes_again(guests: Guests, monkeypatch: pytest.MonkeyPatch) -> None:
    challenge, turned_out = guests.listener._challenge, []

    def turn_out_three(stream: socket.socket, host: str, now_s: float) -> None:
        if len(turned_out) < 3:
            turned_out.append(host)
            stream.close()
        else:
            challenge(stream, host, now_s)

    monkeypatch.setattr(guests.listener, "_challenge", turn_out_three)
    guests.join()
    assert guests.came.get(timeout=10.0).role == "experts"
    assert len(turned_out) == 3


def test_a_worker_whose_engine_hangs_up_on_it_again_and_again_says_so(guests: Guests) -> None:
    guests.listener._challenge = lambda stream, host, now_s: stream.close()  # type: ignore[method-assign]
    with pytest.raises(PeerTimeout, match=r"no engine within 0.3 s \(lost engine: connection closed"):
        join_engine(guests.address, SECRET, role="experts", name="e", host="", pid=1, patience_s=0.3)


def test_an_address_in_use_and_nobody_there_are_one_line(guests: Guests) -> None:
    with pytest.raises(ResourceError, match=f"cannot listen at {guests.address}: .*choose another --join-address"):
        JoinListener(guests.address, SECRET, lambda peer: None).start()
    with pytest.raises(PeerTimeout, match=r"join 127\.0\.0\.1:1: no engine .*refused.*--join-address"):
        join_engine("127.0.0.1:1", SECRET, role="experts", name="e", host="", pid=1, patience_s=0.2)
    with pytest.raises(UserError, match=r"cannot join 127\.0\.0\.1:0: 0 means any free port"):
        join_engine("127.0.0.1:0", SECRET, role="experts", name="e", host="", pid=1, patience_s=60.0)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"joined_experts": 1}, "say where with --join-address"),
        ({"join_address": "127.0.0.1:7700"}, "say how many workers join"),
        (
            {"join_address": "127.0.0.1:7700", "joined_experts": 2},
            "--join-workers has 2 experts: it must be 0 to 1, which is --experts",
        ),
        ({"join_address": "0.0.0.0:7700", "joined_experts": 1}, "name the address by which the other machines"),
        ({"join_address": "127.0.0.1:x", "joined_experts": 1}, "must be HOST:PORT"),
        ({"join_address": "127.0.0.1:1", "joined_experts": 1, "exchange": "shm"}, "does not reach other machines"),
        (
            {"join_address": "127.0.0.1:1", "joined_experts": 1, "expert_tp": 3, "ranks_here": 3},
            r"--ranks-here is 3: it must be 0 to 2: of the 1 workers that join \(--join-workers\) the first has 3",
        ),
        ({"ranks_here": 1}, "--ranks-here is 1: it must be 0 to 0"),
        (
            {"join_address": "127.0.0.1:1", "joined_experts": 1, "layout": "hybrid", "expert_tp": 1},
            r"--join-workers 0\+1: a hybrid layout has no expert workers, only replicas: write 1\+0",
        ),
        (
            {"join_address": "127.0.0.1:1", "joined_experts": 1, "num_attention": 2, "num_instances": 3},
            r"--join-workers 0\+1 with --instances 3: all workers join or none; write 2\+1, those of one instance",
        ),
    ],
)
def test_what_cannot_be_joined_is_refused(changes: dict[str, object], message: str) -> None:
    settings: dict[str, object] = {"layout": "disaggregated", "join_secret": SECRET} | changes
    with pytest.raises(UserError, match=message):
        ServeConfig(model=Path("m"), **settings)  # type: ignore[arg-type]


def test_the_secret_comes_from_a_file_or_the_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("ANTIPHON_JOIN_SECRET", raising=False)
    with pytest.raises(UserError, match="give --secret-file FILE or set ANTIPHON_JOIN_SECRET"):
        read_join_secret(None)
    monkeypatch.setenv("ANTIPHON_JOIN_SECRET", "short")
    with pytest.raises(UserError, match="has 5 bytes: it must have at least 16"):
        read_join_secret(None)
    path = tmp_path / "secret"
    path.write_bytes(SECRET + b"\n")
    assert read_join_secret(path) == SECRET
    assert exchange_secret(SECRET) != SECRET
    with pytest.raises(UserError, match="No such file"):
        read_join_secret(tmp_path / "none")


def free_address() -> str:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return f"127.0.0.1:{server.getsockname()[1]}"


@contextmanager
def worker_command(address: str, role: str, *options: str) -> Iterator[subprocess.Popen[bytes]]:
    """`antiphon worker` as a user of another machine would type it."""
    command = [sys.executable, "-m", "antiphon.cli.main", "worker", "--role", role, "--join", address, *options]
    process = PROGRAMS.Popen([*command, "--threads", "1"], env=os.environ | {"ANTIPHON_JOIN_SECRET": SECRET.decode()})
    try:
        yield process
    finally:
        process.kill()
        process.wait()


@contextmanager
def serving(settings: ServeConfig) -> Iterator[Engine]:
    """A started engine. Joined workers end by themselves, soon after it."""
    engine = start_engine(settings)
    try:
        yield engine
    finally:
        engine.stop()


@pytest.mark.parametrize(
    ("layout", "joined_attention", "joined_experts", "num_instances"),
    [("1+1/m2", 0, 1, 1), ("2+2/m2", 1, 2, 1), ("1+1/m2", 1, 1, 2)],
)
def test_joined_workers_serve_the_same_text(
    layout: str,
    joined_attention: int,
    joined_experts: int,
    num_instances: int,
    tiny_model: TinyModel,
    prompts: Prompts,
    reference: Tokens,
) -> None:
    address = free_address()
    settings = config(
        tiny_model,
        layout,
        join_address=address,
        join_secret=SECRET,
        joined_attention=joined_attention,
        joined_experts=joined_experts,
        num_instances=num_instances,
    )
    roles = num_instances * (["attention"] * joined_attention + ["experts"] * joined_experts)
    with ExitStack() as stack:
        guests = [stack.enter_context(worker_command(address, role)) for role in roles]
        with serving(settings) as engine:
            assert complete(engine, prompts) == reference
        for guest in guests:
            assert guest.wait(20.0) == 0, "a worker ends when its engine ends"


def test_a_spare_takes_the_place_of_a_joined_worker_that_was_killed(
    tiny_model: TinyModel, prompts: Prompts, reference: Tokens
) -> None:
    address = free_address()
    settings = config(tiny_model, "1+1/m2", join_address=address, join_secret=SECRET, joined_experts=1)
    with worker_command(address, "experts"), worker_command(address, "experts"), serving(settings) as engine:
        run = Run(engine, prompts, GREEDY)
        killed: list[int] = []

        def kill_once(num_tokens: int) -> None:
            if num_tokens > 300 and not killed:
                pid = engine._fleet.workers[WorkerName("experts", 0)].pid
                os.kill(pid, signal.SIGKILL)
                killed.append(pid)

        finished = run.finish(kill_once)
        assert killed
        assert [request.error for request in finished] == [None] * len(prompts)
        assert [request.token_ids for request in finished] == reference
        assert engine.stats().num_worker_restarts == 1
        wait_until(lambda: engine.complete, "all workers again", 30.0)
        assert engine._fleet.workers[WorkerName("experts", 0)].pid not in killed


def test_a_guest_that_cannot_load_does_not_end_the_server(
    tiny_model: TinyModel, prompts: Prompts, reference: Tokens, tmp_path: Path
) -> None:
    """The checkpoint on its machine is not there, or has other weights, or another config.json; the next has one."""
    address = free_address()
    settings = config(tiny_model, "1+1/m2", join_address=address, join_secret=SECRET, joined_experts=1)
    with worker_command(address, "experts") as first, serving(settings) as engine:
        first.kill()
        status = "waiting for experts[0] (waiting for a worker to join)"
        wait_until(lambda: engine.stats().status == status, "the place is free and nothing can be served")
        run = Run(engine, prompts[:4], GREEDY)
        with worker_command(address, "experts", "--model", str(tmp_path / "nowhere")) as broken:
            assert broken.wait(60.0) == 1
        for other in (_other_weights(settings, tmp_path), _other_config(settings, tmp_path)):
            with worker_command(address, "experts", "--model", str(other)) as wrong:
                assert wrong.wait(60.0) == 1
        with worker_command(address, "experts"):
            assert [request.token_ids for request in run.finish()] == reference[:4]
        assert engine.fatal is None


def _other_weights(settings: ServeConfig, tmp_path: Path) -> Path:
    """A checkpoint of the same shape."""
    folder = tmp_path / "other"
    shutil.copytree(settings.model, folder)
    file = folder / "model.safetensors"
    save_file({name: tensor * 1.5 for name, tensor in load_file(file).items()}, file)
    return folder


def _other_config(settings: ServeConfig, tmp_path: Path) -> Path:
    folder = tmp_path / "another"
    shutil.copytree(settings.model, folder)
    keys = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(keys | {"hidden_act": "gelu"}))
    return folder

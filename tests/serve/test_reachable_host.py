"""Addresses that nobody can dial are refused wherever others are told to dial them."""

import sys
from pathlib import Path

import pytest

from antiphon.base.errors import Refused, UserError
from antiphon.serve.config import ServeConfig
from antiphon.serve.joining import JoinedPeer, JoinListener, is_wildcard, refuse_wildcard
from antiphon.serve.worker.joined import join_engine
from tests.serve.fork_server import PROGRAMS

SECRET = b"correct horse battery staple"
WILDCARDS = ("0.0.0.0", "::", "0", "0:0:0:0:0:0:0:0", "::ffff:0.0.0.0", "0x0")
HOSTS = ("127.0.0.1", "::1", "10.0.0.1", "fe80::1%lo", "node7", "node7.example", "", "0.example")


@pytest.mark.parametrize("host", WILDCARDS)
def test_every_spelling_of_a_wildcard_is_one(host: str) -> None:
    assert is_wildcard(host)
    with pytest.raises(UserError, match=f"^--host is {host}: it cannot be dialled; name the address by which"):
        refuse_wildcard("--host", host, host)


@pytest.mark.parametrize("host", HOSTS)
def test_addresses_and_names_are_none(host: str) -> None:
    assert not is_wildcard(host)
    refuse_wildcard("--host", host, host)


@pytest.mark.parametrize("host", ["a..b", "\ud800"])
def test_what_no_machine_can_be_called_is_refused(host: str) -> None:
    assert not is_wildcard(host)
    with pytest.raises(UserError, match=r"^--host '.*' is no name of a machine"):
        refuse_wildcard("--host", host, host)


@pytest.mark.parametrize("host", ["0.0.0.0", "[::]", "0"])
def test_the_engine_s_door_needs_an_address(host: str) -> None:
    with pytest.raises(UserError, match=r"--join-address is .*:7700: it cannot be dialled"):
        ServeConfig(
            model=Path("m"),
            layout="disaggregated",
            join_address=f"{host}:7700",
            join_secret=SECRET,
            joined_experts=1,
        )


def test_the_worker_command_refuses_one(tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_bytes(SECRET)
    command = ["worker", "--role", "experts", "--join", "127.0.0.1:1", "--host", "::", "--secret-file", str(secret)]
    done = PROGRAMS.run([sys.executable, "-m", "antiphon.cli.main", *command], text=True, timeout=60)
    assert done.returncode == 2
    assert done.stderr == (
        "error: --host is ::: it cannot be dialled; name the address by which the other machines reach this one\n"
    )


def test_the_engine_turns_away_a_worker_that_says_so() -> None:
    came: list[JoinedPeer] = []
    listener = JoinListener("127.0.0.1:0", SECRET, came.append)
    address = listener.start()
    try:
        with pytest.raises(Refused, match=r"turned this worker away: 0\.0\.0\.0"):
            join_engine(address, SECRET, role="experts", name="e", host="0.0.0.0", pid=1, patience_s=5.0)
        assert came == []
    finally:
        listener.close()

"""Which of those who join take the places of a worker's ranks, and what is said of ranks at several addresses."""

import logging
import socket
from collections.abc import Iterator, Sequence

import pytest

from antiphon.serve.launch import configure
from antiphon.serve.prepare import PreparedEngine, prepare
from antiphon.serve.worker.channel import Channel
from antiphon.serve.worker.joined import join_engine
from antiphon.serve.worker_handle import RemoteWorkers, WorkerName
from tests.serve.engine_harness import TinyModel, config
from tests.waiting import wait_until

SECRET = b"correct horse battery staple"
ALL = [WorkerName("replica", index, rank) for index in range(2) for rank in range(2)]


class Entrance:
    """All places of two replicas of two ranks are free, and workers come for them."""

    def __init__(
        self, run: PreparedEngine, places: Sequence[WorkerName] = ALL, local: Sequence[WorkerName] = ()
    ) -> None:
        with socket.create_server(("127.0.0.1", 0)) as free:
            self._address = f"127.0.0.1:{free.getsockname()[1]}"
        self._num_came = 0
        self._num_welcome = 0
        self._channels: list[Channel] = []
        self.seats: dict[str, str] = {}
        self._remote = RemoteWorkers(self._address, SECRET, frozenset(places), local=local)
        self._remote.start(self._welcome)
        for name in places:
            self._remote.ask(name, configure(run, name, run.placement))

    def _welcome(self) -> None:
        self._num_welcome += 1

    def come(self, *hosts: str) -> None:
        """A worker of each of these, one after the other; who can sit down does."""
        for host in hosts:
            channel = join_engine(
                self._address, SECRET, role="replica", name="guest", host=host, pid=1, patience_s=10.0
            )
            self._channels.append(channel)
            self._num_came += 1
            wait_until(lambda: self._num_welcome == self._num_came, "the worker was heard")
            self.sit_down()

    def sit_down(self) -> None:
        for worker in self._remote.arrivals():
            assert worker.configure.exchange is not None
            self.seats[str(worker.name)] = worker.configure.exchange.host

    def close(self) -> None:
        for channel in self._channels:
            channel.close()
        self._remote.close()


@pytest.fixture
def entrance(tiny_model: TinyModel, transport: str) -> Iterator[Entrance]:
    joining = {"join_address": "127.0.0.1:1", "join_secret": SECRET, "joined_attention": 2}
    made = Entrance(prepare(config(tiny_model, "2t2*2", exchange=transport, **joining)))
    yield made
    made.close()


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


@pytest.mark.parametrize("transport", ["auto"])
def test_ranks_that_share_memory_come_from_one_address(entrance: Entrance, caplog: pytest.LogCaptureFixture) -> None:
    """However the workers of two machines mix on their way, nothing is wrong."""
    entrance.come("10.0.0.1", "10.0.0.2", "10.0.0.2", "10.0.0.1")
    assert entrance.seats == dict(zip(map(str, ALL), ["10.0.0.2"] * 2 + ["10.0.0.1"] * 2, strict=True))
    assert warnings(caplog) == []


@pytest.mark.parametrize("transport", ["auto"])
def test_ranks_that_cannot_share_memory_wait_and_it_is_said_once(
    entrance: Entrance, caplog: pytest.LogCaptureFixture
) -> None:
    entrance.come("10.0.0.1", "10.0.0.2", "10.0.0.2", "10.0.0.3")
    entrance.sit_down()
    assert entrance.seats == {"replica[0]": "10.0.0.2", "replica[0][1]": "10.0.0.2"}
    assert warnings(caplog) == [
        "replica[1]: its 2 ranks share memory, so they join from one address; those who wait are at 10.0.0.1 (1), "
        "10.0.0.3 (1): start them on one machine, give one address with --host, or let them reach each other over "
        "--transport tcp"
    ]
    entrance.come("10.0.0.3")
    assert entrance.seats["replica[1]"] == entrance.seats["replica[1][1]"] == "10.0.0.3"
    assert len(warnings(caplog)) == 1


def test_a_rank_apart_from_those_of_the_engines_machine_is_a_warning(
    tiny_model: TinyModel, caplog: pytest.LogCaptureFixture
) -> None:
    """Of one replica rank 0 is here. Ranks of it that are not reach it over TCP."""
    joining = {"join_address": "127.0.0.1:1", "join_secret": SECRET, "joined_attention": 1, "ranks_here": 1}
    run = prepare(config(tiny_model, "1t2", **joining))
    assert run.local_names() == ALL[:1]
    assert run.config.num_workers == 1
    configured = configure(run, ALL[1], run.placement)
    assert configured.exchange is not None
    assert configured.exchange.rank_transport == "tcp"
    entrance = Entrance(run, places=ALL[1:2], local=ALL[:1])
    entrance.come("10.0.0.2")
    entrance.close()
    assert entrance.seats == {"replica[0][1]": "10.0.0.2"}
    assert warnings(caplog) == [
        "replica[0][1] is at 10.0.0.2, other ranks of it at 127.0.0.1: every layer's sums go between them; a worker is "
        "faster on one machine"
    ]


@pytest.mark.parametrize("transport", ["tcp"])
def test_ranks_apart_that_can_reach_each_other_are_a_warning(
    entrance: Entrance, caplog: pytest.LogCaptureFixture
) -> None:
    entrance.come("10.0.0.1", "10.0.0.2", "10.0.0.3", "10.0.0.3")
    assert list(entrance.seats.values()) == ["10.0.0.1", "10.0.0.2", "10.0.0.3", "10.0.0.3"]
    assert warnings(caplog) == [
        "replica[0][1] is at 10.0.0.2, other ranks of it at 10.0.0.1: every layer's sums go between them; a worker is "
        "faster on one machine"
    ]

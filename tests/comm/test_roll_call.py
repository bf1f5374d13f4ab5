"""What is said of ranks that ended, and of a store that is another run's."""

import os
import subprocess
import sys
from collections.abc import Iterator

import pytest
from torch.distributed import DistNetworkError, HashStore

from antiphon.base.errors import ResourceError, UserError
from antiphon.comm.roll_call import RankProcess, RollCall


@pytest.fixture
def other() -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        yield process
        process.kill()


def place(number: int) -> str:
    own = RankProcess.own()
    return str(RankProcess(number, own.machine, own.host))


def test_a_rank_that_ended_is_named(other: subprocess.Popen[bytes]) -> None:
    store = HashStore()
    store.set("here/1", place(other.pid))
    roll = RollCall(store, 0, 2, 30.0)
    roll.await_all()
    by_gloo = RuntimeError("[pair.cc:553] Connection closed by peer [127.0.0.1]:31653")
    for waiting, error in (
        (roll, by_gloo),
        (roll.beside(60.0), by_gloo),
        (roll, DistNetworkError("Failed to recv, got 0 bytes")),
    ):
        other.kill()
        words = rf"rank 0 waited for counts, and rank 1 \(process {other.pid}\) ended: see what"
        with pytest.raises(ResourceError, match=words), waiting.waiting("counts"):
            raise error


def test_what_began_long_before_the_wait_ends_in_our_words() -> None:
    with pytest.raises(ResourceError, match="for counts, begun 30 s before: another rank hangs"):  # noqa: SIM117
        with RollCall(HashStore(), 0, 2, 30.0).waiting("counts"):
            raise RuntimeError("[unbound_buffer.cc:129] Timed out waiting 30000ms for send operation to complete")


def test_the_store_of_another_run_is_refused(other: subprocess.Popen[bytes]) -> None:
    store = HashStore()
    store.set("ranks", "2")
    store.set("here/1", place(other.pid))
    with pytest.raises(UserError, match=rf"host:1 is the store of another run, whose rank 1 is process {other.pid}"):
        RollCall(store, 1, 2, 30.0).await_all("host:1")
    with pytest.raises(UserError, match="of a run of 2 ranks, and this one has 4: give this run a port of its own"):
        RollCall(store, 3, 4, 30.0).await_all("host:1")
    other.kill()
    other.wait()
    store.set("here/0", place(os.getpid()))
    RollCall(store, 1, 2, 30.0).await_all("host:1")  # the former process of this rank is no more

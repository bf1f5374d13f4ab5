"""Stream-ordered sends and receives on a GPU: flags, stages, two processes on one device, a peer that dies.

The same exchange runs on the CPU's form of a stream in tests/comm/m2n/test_streams.py.
"""

import importlib.util
from collections.abc import Iterator
from contextlib import ExitStack

import pytest
import torch

from antiphon.base.errors import PeerLost
from antiphon.comm.m2n.streams.cuda import CudaStream
from tests.comm.m2n.backends import PATIENCE_S
from tests.comm.m2n.stream_peer import SHAPE, Side, experts, peer
from tests.waiting import wait_until

has_cuda_python = importlib.util.find_spec("cuda") and importlib.util.find_spec("cuda.bindings")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device on this machine"),
    pytest.mark.skipif(not has_cuda_python, reason="no cuda-python: pip install 'cuda-python>=12.6'"),
]


@pytest.fixture
def side() -> Iterator[Side]:
    with ExitStack() as pool:
        yield Side(pool, "experts", "cuda")


def test_a_stream_waits_for_its_flag() -> None:
    with CudaStream("stream") as stream:
        flags = [stream.new_flag() for _ in range(3)]
        stage = stream.new_stage(64)
        target = torch.zeros(64, dtype=torch.uint8, device="cuda")
        torch.cuda.synchronize()
        for value, flag in enumerate(flags, start=2**32 - 1):  # beyond the wrap, too
            flag.raise_to(value - 1)
            stream.wait_flag(flag, value)
            stream.copy(target, stage)
            ready = stream.record()
            assert not ready.done()
            stage.fill_(value % 251)
            assert not ready.done()
            flag.raise_to(value)
            wait_until(ready.done, "the stream goes on")
            assert target.tolist() == [value % 251] * 64


def test_two_processes_exchange_in_stream_order(side: Side) -> None:
    with peer(side, "exchange") as process:
        experts(side)
        assert process.wait(PATIENCE_S) == 0


def test_a_killed_peer_lets_the_stream_go(side: Side) -> None:
    with peer(side, "hold") as process:
        transfer = side.receiver.receive(0, [0], torch.zeros(1, *SHAPE, device="cuda"))
        ready = side.stream.record()
        assert not ready.done()
        process.kill()
        wait_until(ready.done, "the stream goes on")
        with pytest.raises(PeerLost, match="lost attention"):
            transfer.wait(PATIENCE_S)

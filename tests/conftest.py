"""What tests of several packages share: a tiny checkpoint and a server over it; and the count of tests left out.

`make test` leaves out the tests that carry the mark `slow`, and says how many at its end. pytest-xdist's processes
collect the tests, so each reports its count to the one that prints. That one runs no test, and imports no torch.
"""

import gc
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.serve.fork_server import PROGRAMS

if TYPE_CHECKING:
    from tests.serve.server_harness import ServerProcess

LEFT_OUT = pytest.StashKey[int]()

# An environment may forbid to keep what is compiled. Then each process of each run would compile all tests, 6 s a time.
sys.dont_write_bytecode = False
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

# Without a GPU, Triton's kernels are tested in its interpreter, which it has to know before it is imported.
if not Path("/dev/nvidiactl").exists():
    os.environ.setdefault("TRITON_INTERPRET", "1")


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[object]:
    """What imports make stays: nobody looks through it for garbage, now or later, nor takes it apart at the end."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


def pytest_deselected(items: list[pytest.Item]) -> None:
    if items:
        config = items[0].config
        slow = sum(item.get_closest_marker("slow") is not None for item in items)
        config.stash[LEFT_OUT] = config.stash.get(LEFT_OUT, 0) + slow


def pytest_sessionfinish(session: pytest.Session) -> None:
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput["left_out"] = session.config.stash.get(LEFT_OUT, 0)


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    """Every process collects all tests: one's count is that of all."""
    node.config.stash[LEFT_OUT] = getattr(node, "workeroutput", {}).get("left_out", 0)


def pytest_unconfigure(config: pytest.Config) -> None:
    """The last line of all."""
    num_left_out = config.stash.get(LEFT_OUT, 0)
    if num_left_out and "not slow" in config.option.markexpr and not hasattr(config, "workeroutput"):
        print(f"left out: {num_left_out} slow tests; `make test-all` runs them too")


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A complete checkpoint folder. Do not change it: copy it."""
    from tests.serve.server_harness import write_checkpoint

    return write_checkpoint(tmp_path_factory.mktemp("checkpoint") / "tiny")


@pytest.fixture(scope="session")
def live_server(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> "Iterator[ServerProcess]":
    """One attention worker, one expert worker, two micro-batches."""
    from tests.serve.server_harness import serve

    with serve(checkpoint, tmp_path_factory.mktemp("server"), "--experts", "1", "--micro-batches", "2") as server:
        yield server


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> None:
    """Tests run side by side, a process for each core: more threads would wait for each other most of the time."""
    import torch

    torch.set_num_threads(1)


@pytest.fixture(scope="session", autouse=True)
def forked_workers() -> Iterator[None]:
    """Workers of engines in this process are forked, and what works on texts, see `serve/fork_server`."""
    from antiphon.serve import worker_handle
    from antiphon.serve.text import text_queue

    PROGRAMS.remember_environment()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(worker_handle, "subprocess", PROGRAMS)
        patch.setattr(text_queue, "subprocess", PROGRAMS)
        yield
    PROGRAMS.close()

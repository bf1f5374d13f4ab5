"""Threads, instruction sets and the words on which processes wait."""

import ctypes
import mmap
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from antiphon import _native
from antiphon.kernels.cpu import CpuBackend


@pytest.fixture
def word() -> Iterator[int]:
    memory = mmap.mmap(-1, 4096)
    first = ctypes.c_char.from_buffer(memory)
    yield ctypes.addressof(first)
    del first  # only now may the mapping go


def test_waiting_times_out(word: int) -> None:
    start = time.monotonic()
    assert not _native.wait_u32(word, 0, 20_000_000, 1_000)
    assert time.monotonic() - start >= 0.019
    assert _native.wait_u32(word, 5, 0, 0)


@pytest.mark.parametrize("spin_ns", [0, 2_000_000_000])
def test_a_store_wakes_the_waiter(word: int, spin_ns: int) -> None:
    threading.Timer(0.02, _native.fetch_add_wake_u32, (word, 7)).start()
    assert _native.wait_u32(word, 0, 10_000_000_000, spin_ns)
    assert _native.load_u32(word) == 7
    assert _native.fetch_add_wake_u32(word, 3) == 7
    assert _native.load_u32(word) == 10


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_another_process_wakes_the_waiter(word: int) -> None:
    child = os.fork()
    if child == 0:
        _native.fetch_add_wake_u32(word, 1)
        os._exit(0)
    assert _native.wait_u32(word, 0, 10_000_000_000, 0)
    os.waitpid(child, 0)


def test_isa_can_be_forced_and_a_wrong_name_is_refused() -> None:
    code = "from antiphon import _native; print(_native.isa())"
    environment = {**os.environ, "ANTIPHON_ISA": "plain"}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "plain"
    with pytest.raises(ValueError, match=r'instruction set "sse" is not available here; choose one of: .*plain'):
        _native.set_isa("sse")


def product(seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    backend = CpuBackend(torch.float32)
    packed = backend.pack_linear(torch.randn(512, 64, generator=generator))
    return backend.linear(torch.randn(70, 64, generator=generator), packed)


def test_thread_counts_give_the_same_bits() -> None:
    before = _native.num_threads()
    results = []
    for count in (1, 2, 7, 3):
        _native.set_num_threads(count)
        assert _native.num_threads() == count
        results.append(product(0))
    _native.set_num_threads(before)
    assert all(torch.equal(result, results[0]) for result in results)


def test_callers_on_several_threads(num_threads: int) -> None:
    expected = [product(seed) for seed in range(4)]
    wrong: list[int] = []

    def work(seed: int) -> None:
        for _ in range(20):
            if not torch.equal(product(seed), expected[seed]):
                wrong.append(seed)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_forked_child_computes() -> None:
    code = (
        "import os, torch\n"
        "from antiphon import _native\n"
        "from tests.kernels.test_cpu_runtime import product\n"
        "torch.set_num_threads(1); _native.set_num_threads(3)\n"
        "expected = product(1)\n"
        "child = os.fork()\n"
        "same = torch.equal(product(1), expected)\n"
        "os._exit(not same) if child == 0 else None\n"
        "assert same and os.waitpid(child, 0)[1] == 0\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_sleeping_workers_wake_up() -> None:
    before = _native.num_threads()
    _native.set_num_threads(2)
    _native.set_spin_ns(0)
    expected = product(2)
    for _ in range(20):
        time.sleep(0.001)
        assert torch.equal(product(2), expected)
    _native.set_spin_ns(150_000)
    _native.set_num_threads(before)


def await_spinning(workers: set[str], count: int) -> bool:
    """Wait until `count` of these threads run, or want to."""
    deadline = time.monotonic() + 30.0
    while time.monotonic() < deadline:
        states = [Path(f"/proc/self/task/{each}/stat").read_text().rpartition(")")[2].split()[0] for each in workers]
        if states.count("R") == count:
            return True
        time.sleep(0.001)
    return False


def thread_ids() -> set[str]:
    return {each.name for each in Path("/proc/self/task").iterdir()}


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="needs Linux's table of threads")
def test_one_spinning_worker_sleeps_at_once_until_the_next_kernel() -> None:
    before, others = _native.num_threads(), thread_ids()
    _native.set_num_threads(3)
    _native.set_spin_ns(60_000_000_000)
    try:
        expected = product(2)
        workers = thread_ids() - others
        assert len(workers) == 2
        for _ in range(2):
            assert await_spinning(workers, 2)
            _native.release_core()
            assert await_spinning(workers, 1)
            assert torch.equal(product(2), expected)
    finally:
        _native.set_spin_ns(150_000)
        _native.set_num_threads(before)


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="needs Linux's affinity of threads")
def test_workers_leave_the_core_of_a_caller_that_moves() -> None:
    before, others, allowed = _native.num_threads(), thread_ids(), os.sched_getaffinity(0)
    if len(allowed) < 2:
        pytest.skip("needs two cores")
    _native.set_num_threads(2)
    try:
        expected = product(2)
        (worker,) = thread_ids() - others
        for core in (*sorted(allowed), min(allowed)):
            os.sched_setaffinity(0, {core})
            assert torch.equal(product(2), expected)
            assert os.sched_getaffinity(int(worker)) == allowed - {core}
    finally:
        os.sched_setaffinity(0, allowed)
        _native.set_num_threads(before)

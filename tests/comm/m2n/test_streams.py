"""Exchanges in the order of a stream pass the tests of those that are not: the CPU's form, and CUDA's over a driver
without a device, which counts what it is asked."""

import ctypes
import gc
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from antiphon import _m2n
from antiphon.base.errors import PeerTimeout, UserError
from antiphon.cli.doctor import probe_stream_driver
from antiphon.comm.m2n.api import StepAborted
from antiphon.specs.placement import ExpertPlacement, contiguous_placement
from tests.comm import test_m2n_exchange as unordered
from tests.comm.exchange_harness import LAYERS, TIMEOUT_S, exchange, random_traffic
from tests.comm.m2n.backends import Backend, by_name
from tests.comm.m2n.compile import usable_build

SHM = by_name("shm")[0]
SOURCE = Path(__file__).with_name("fake_cuda.cpp")


@pytest.fixture(scope="module")
def driver(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The driver without a device."""
    build = usable_build("plain", tmp_path_factory.mktemp("driver"))
    return replace(build, flags=("-fPIC", "-shared")).program("fake_cuda", [SOURCE])


@pytest.fixture(params=["cpu", "cuda"])
def backend(request: pytest.FixtureRequest) -> Backend:
    """Shared memory, with streams of either kind."""
    driver = "cpu" if request.param == "cpu" else str(request.getfixturevalue("driver"))
    return replace(SHM, name=f"streams-{request.param}", streams=driver)


def test_any_exchange_equals_one_dense_process(backend: Backend) -> None:
    @settings(max_examples=12, deadline=None)
    @given(placement=unordered.placements(), data=st.data())
    def check(placement: ExpertPlacement, data: st.DataObject) -> None:
        unordered.check_any_exchange(backend, placement, data)

    check()


@pytest.mark.parametrize(
    "test",
    [
        unordered.test_missing_experts_are_named,
        unordered.test_missing_attention_workers_are_named,
        unordered.test_an_idle_expert_worker_is_no_error,
        unordered.test_a_lost_peer_is_named_to_all_who_need_it,
        unordered.test_a_new_epoch_wakes_all_who_wait,
        unordered.test_messages_of_an_old_epoch_are_forgotten,
        unordered.test_many_epochs_use_up_nothing,
        unordered.test_closing_lets_go_of_memory_sockets_and_threads,
    ],
    ids=lambda test: test.__name__.removeprefix("test_"),
)
def test_as_without_streams(backend: Backend, test: object) -> None:
    assert callable(test)
    test(backend)


@pytest.mark.parametrize("farewell", [True, False])
def test_a_replacement_joins_where_the_dead_one_left(backend: Backend, farewell: bool) -> None:
    unordered.test_a_replacement_joins_where_the_dead_one_left(backend, farewell)


def test_the_driver_is_asked_for_each_call(driver: Path) -> None:
    """A word and a wait for a combine, a word for a dispatch and for a reply; pages are let go of at the end."""
    counts = ctypes.CDLL(str(driver)).fake_count
    gc.collect()
    before = [counts(which) for which in range(4)]
    with exchange(contiguous_placement(4, 2, LAYERS), backend=replace(SHM, streams=str(driver))) as made:
        made.serve()
        data = random_traffic(5, 6, 4, 2, 3)
        made.attention[0].begin_step(0, [[0]])
        made.attention[0].dispatch(0, 0, data.rows_TH, data.ids_TK, data.weights_TK)
        made.attention[0].combine(0, 0, TIMEOUT_S)
        made.join()
        assert [counts(which) - before[which] for which in range(4)] == [3, 2 + 2, 1, 0]
    del made
    gc.collect()
    assert counts(0) == before[0]


def test_calls_behind_a_failed_one_are_dropped(backend: Backend) -> None:
    """They would each wait for their own deadline, and the stream with them."""
    with exchange(contiguous_placement(4, 1, LAYERS), backend=backend, num_micro_batches=3) as made:
        attention, data = made.attention[0], random_traffic(3, 6, 4, 2, 3)
        attention.begin_step(0, [[0]] * 3)
        for micro_batch in range(3):
            attention.dispatch(0, micro_batch, data.rows_TH, data.ids_TK, data.weights_TK)
        with pytest.raises(PeerTimeout, match=r"experts\[0\].* after 0.05 s"):
            attention.combine(0, 0, 0.05)
        with pytest.raises(PeerTimeout):
            attention.combine(0, 1, TIMEOUT_S)  # at once
        made.control.reset(made.control.abort_step())
        made.serve()
        attention.begin_step(1, [[0]] * 3)
        attention.dispatch(0, 0, data.rows_TH, data.ids_TK, data.weights_TK)
        assert attention.combine(0, 0, TIMEOUT_S).shape == (3, 6)
        made.join()


def test_a_step_that_was_given_up_sends_nothing(backend: Backend) -> None:
    with exchange(contiguous_placement(4, 1, LAYERS), backend=backend) as made:
        data = random_traffic(3, 6, 4, 2, 3)
        made.attention[0].begin_step(0, [[0]])
        made.control.abort_step()
        with pytest.raises(StepAborted):
            made.attention[0].dispatch(0, 0, data.rows_TH, data.ids_TK, data.weights_TK)


def test_too_many_rows_are_refused_before_they_are_staged(backend: Backend) -> None:
    with exchange(contiguous_placement(4, 1, LAYERS), backend=backend, max_rows=2) as made:
        data = random_traffic(3, 6, 4, 2, 3)
        made.attention[0].begin_step(0, [[0]])
        with pytest.raises(UserError, match="3 rows in one micro-batch: the exchange was made for 2; lower"):
            made.attention[0].dispatch(0, 0, data.rows_TH, data.ids_TK, data.weights_TK)


def test_a_network_cards_writes_are_seen_after_a_flush(driver: Path) -> None:
    library = ctypes.CDLL(str(driver))
    device = _m2n.stream_device("cuda", str(driver))
    assert device.needs_flush
    memory, written = torch.zeros(8, dtype=torch.uint8), torch.arange(8, dtype=torch.uint8)
    library.fake_remote_write(
        ctypes.c_void_p(memory.data_ptr()), ctypes.c_void_p(written.data_ptr()), ctypes.c_size_t(8)
    )
    assert not memory.any()
    found = probe_stream_driver(str(driver))
    assert (found.status, found.detail) == (
        "ok",
        "writes of network cards need a flush before the GPU sees them; rows are staged",
    )
    device.flush_writes()
    assert torch.equal(memory, written)
    assert not _m2n.stream_device("cpu").needs_flush


@pytest.mark.parametrize(
    ("kind", "library", "message"),
    [
        ("tpu", "", "streams of tpu: they can be those of cpu or cuda"),
        (
            "cuda",
            "/nowhere/libcuda.so",
            r"streams of a GPU: /nowhere/libcuda.so cannot be opened .* install NVIDIA's driver",
        ),
        ("cuda", "libc.so.6", "streams of a GPU: the driver lacks cuInit: it is older than CUDA 11.7, update it"),
    ],
)
def test_what_streams_need_is_named(kind: str, library: str, message: str) -> None:
    if kind == "cuda":
        assert re.search(message, probe_stream_driver(library).detail)
    with pytest.raises(UserError, match=message):
        _m2n.stream_device(kind, library)

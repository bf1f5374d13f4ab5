"""Exchanges in the order of a stream pass the tests of those that are not: the CPU's form, and CUDA's over a driver
without a device, which counts what it is asked."""

import ctypes
import gc
import re
import time
import weakref
from collections.abc import Iterator
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
from antiphon.comm.m2n.streams import StreamAttentionExchange
from antiphon.specs.placement import ExpertPlacement, contiguous_placement
from tests.comm import test_m2n_exchange as unordered
from tests.comm.exchange_harness import LAYERS, TIMEOUT_S, dense, exchange, random_traffic
from tests.comm.m2n.backends import Backend, by_name, need
from tests.comm.m2n.compile import usable_build
from tests.comm.m2n.test_native_libfabric import include_folder

SHM = by_name("shm")[0]
SOURCE = Path(__file__).with_name("fake_cuda.cpp")


@pytest.fixture(scope="module")
def driver(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The driver without a device."""
    build = usable_build("plain", tmp_path_factory.mktemp("driver"))
    return replace(build, flags=("-fPIC", "-shared")).program("fake_cuda", [SOURCE])


@pytest.fixture(scope="module")
def card(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Backend]:
    """The same with a network card that writes into the device's memory, over libfabric's tcp."""
    need(by_name("libfabric")[0])
    build = usable_build("plain", tmp_path_factory.mktemp("card"))
    include = include_folder()
    system = () if include == Path("/usr/include") else ("-isystem", str(include))  # naming it again changes its place
    flags = ("-fPIC", "-shared", "-DANTIPHON_HAVE_LIBFABRIC", *system)
    driver = str(replace(build, flags=flags).program("fake_card", [SOURCE]))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FAKE_CARD_OVER", _m2n.libfabric_info()["library"])
        yield replace(by_name("libfabric")[0], name="streams-card", streams=driver, library=driver)


@pytest.fixture(params=["cpu", "cuda"])
def backend(request: pytest.FixtureRequest) -> Backend:
    """Shared memory, with streams of either kind."""
    driver = "cpu" if request.param == "cpu" else str(request.getfixturevalue("driver"))
    return replace(SHM, name=f"streams-{request.param}", streams=driver)


def check_exchanges(backend: Backend, examples: int) -> None:
    @settings(max_examples=examples, deadline=None)
    @given(placement=unordered.placements(), data=st.data())
    def check(placement: ExpertPlacement, data: st.DataObject) -> None:
        unordered.check_any_exchange(backend, placement, data)

    check()


def test_any_exchange_equals_one_dense_process(backend: Backend) -> None:
    check_exchanges(backend, 12)


def test_any_exchange_by_way_of_the_devices_memory(card: Backend) -> None:
    check_exchanges(card, 4)


def test_epochs_by_way_of_the_devices_memory(card: Backend) -> None:
    unordered.test_many_epochs_use_up_nothing(card)


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
    before = [counts(which) for which in range(6)]
    with exchange(contiguous_placement(4, 2, LAYERS), backend=replace(SHM, streams=str(driver))) as made:
        made.serve()
        data = random_traffic(5, 6, 4, 2, 3)
        made.attention[0].begin_step(0, [[0]])
        made.attention[0].dispatch(0, 0, data.rows_TH, data.ids_TK, data.weights_TK)
        made.attention[0].combine(0, 0, TIMEOUT_S)
        made.join()
        assert [counts(which) - before[which] for which in range(6)] == [3, 2 + 2, 1, 0, 0, 0]
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


def test_a_network_cards_writes_are_seen_after_a_flush(card: Backend, caplog: pytest.LogCaptureFixture) -> None:
    """Rows of two attention workers arrive in the device's memory, which shows them after a flush alone, and are put
    together there; the memory is let go of with the exchange."""
    count = ctypes.CDLL(card.streams).fake_count
    gc.collect()
    before = [count(which) for which in range(6)]
    with caplog.at_level("INFO"), exchange(contiguous_placement(4, 1, LAYERS), num_attention=2, backend=card) as made:
        made.serve()
        data = [random_traffic(5, 6, 4, 2, seed) for seed in range(2)]
        for end, sent in zip(made.attention, data, strict=True):
            end.begin_step(0, [[0, 1]])
            end.dispatch(0, 0, sent.rows_TH, sent.ids_TK, sent.weights_TK)
        for end, sent in zip(made.attention, data, strict=True):
            torch.testing.assert_close(end.combine(0, 0, TIMEOUT_S), dense(sent, 0), rtol=1e-5, atol=1e-5)
        made.join()
        _, _, _, flushes, allocations, copies = (count(which) - before[which] for which in range(6))
        assert flushes >= 2  # at least one for the introductions and one for the rows
        assert allocations == 2  # the slots of each attention worker
        assert copies >= 2 * (2 + 3)  # headers; rows, ids and weights
    assert "rows arrive in the memory of cpu over libfabric:tcp, each arrival is flushed" in caplog.text
    del made, end
    gc.collect()
    assert count(4) == before[4]


def test_why_rows_are_staged_is_logged(card: Backend, driver: Path, caplog: pytest.LogCaptureFixture) -> None:
    library = ctypes.CDLL(card.streams)
    for backend, takes_writes, reason in (
        (replace(SHM, streams=str(driver)), 1, "the transport shm writes to host memory"),
        (replace(card, library=""), 1, "libfabric's provider tcp registers no memory of devices"),
        (card, 0, "this GPU takes no writes of network cards"),
    ):
        library.fake_device(takes_writes, 0)
        caplog.clear()
        with caplog.at_level("INFO"), exchange(contiguous_placement(4, 1, LAYERS), backend=backend):
            assert f"experts[0]: rows are staged in pinned memory: {reason}" in caplog.text
    assert probe_stream_driver(card.streams).detail.startswith("rows are staged in pinned memory: this GPU takes no")
    library.fake_device(1, 0)
    assert probe_stream_driver(card.streams).detail == "writes of network cards need a flush before the GPU sees them"
    library.fake_device(1, 100)
    assert probe_stream_driver(card.streams).detail == "writes of network cards are seen by the GPU in order"
    library.fake_device(1, 0)


def test_memory_of_a_device_needs_a_card(driver: Path) -> None:
    with pytest.raises(UserError, match="messages for the memory of cuda: the transport shm writes to host memory"):
        SHM.endpoint("experts[0]").inbox(1, 2, 4096, [], _m2n.stream_device("cuda", str(driver)))


def test_a_late_stream_costs_no_processor(driver: Path) -> None:
    """Until it comes the core sleeps between looks."""
    library = ctypes.CDLL(str(driver))
    with exchange(contiguous_placement(4, 1, LAYERS), backend=replace(SHM, streams=str(driver))) as made:
        end, data = made.attention[0], random_traffic(3, 6, 4, 2, 3)
        assert isinstance(end, StreamAttentionExchange)
        core = end._streaming.core
        end.begin_step(0, [[0]])
        library.fake_hold(1)
        try:
            end.dispatch(0, 0, data.rows_TH, data.ids_TK, data.weights_TK)
            before_s = time.process_time()
            assert not core.wait_idle(0.5)
            assert time.process_time() - before_s < 0.25
        finally:
            library.fake_hold(0)
        assert core.wait_idle(TIMEOUT_S)


def test_an_end_that_is_dropped_ends_what_is_under_way(backend: Backend) -> None:
    """Without `close`: a dispatch that waits for a slot refers to the end and to its memory."""
    with exchange(contiguous_placement(4, 1, LAYERS), backend=backend) as made:
        data = random_traffic(3, 6, 4, 2, 3)
        end = made.attention.pop()
        end.begin_step(0, [[0]])
        for layer in range(3):  # there are two slots, and nothing takes a message out
            end.dispatch(layer, 0, data.rows_TH, data.ids_TK, data.weights_TK)
        dropped = weakref.ref(end)
        del end
        gc.collect()
        assert dropped() is None


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

"""Messages that arrive in the GPU's memory: it is registered with the network card, each arrival is flushed where the
GPU does not order such writes itself, and rows come out as they were sent. Where that is not possible, the reason."""

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

from antiphon import _m2n
from antiphon.specs.placement import contiguous_placement
from tests.comm.exchange_harness import LAYERS, TIMEOUT_S, dense, exchange, random_traffic
from tests.comm.m2n.backends import Backend, by_name, need

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device on this machine"),
]
LIBFABRIC = by_name("libfabric")[0]


@pytest.fixture
def device() -> _m2n.StreamDevice:
    torch.zeros(1, device="cuda")  # the driver's context is this thread's
    return _m2n.stream_device("cuda")


@pytest.fixture
def card(device: _m2n.StreamDevice) -> Iterator[Backend]:
    """libfabric by a provider that registers this GPU's memory; a skip says why there is none."""
    need(LIBFABRIC)
    if why := device.why_not_written:
        pytest.skip(why)
    reasons = []
    for provider in ("efa", "verbs;ofi_rxm", "verbs", "tcp"):
        backend = replace(LIBFABRIC, provider=provider, streams="cuda")
        try:
            endpoint = backend.endpoint("probe")
        except (OSError, ValueError) as error:
            reasons.append(f"{provider}: {error}")
            continue
        why = endpoint.why_staged(device)
        endpoint.close()
        if not why:
            yield backend
            return
        reasons.append(f"{provider}: {why}")
    pytest.skip("; ".join(reasons))


def test_the_devices_memory_is_registered(card: Backend, device: _m2n.StreamDevice) -> None:
    endpoint = card.endpoint("experts[0]")
    try:
        inbox = endpoint.inbox(2, 2, 1 << 16, [], device)
        assert endpoint.why_staged(device) == ""
        del inbox
    finally:
        endpoint.close()


@pytest.mark.parametrize("num_steps", [1, 40])
def test_rows_are_seen_on_the_gpu_after_they_arrived(
    card: Backend, num_steps: int, caplog: pytest.LogCaptureFixture
) -> None:
    """Slots are used again and again, so a row that is read before it is flushed would be an earlier step's."""
    with caplog.at_level("INFO"), exchange(contiguous_placement(4, 1, LAYERS), num_attention=2, backend=card) as made:
        made.serve()
        for step in range(num_steps):
            data = [random_traffic(5, 6, 4, 2, 2 * step + index) for index in range(2)]
            for end, sent in zip(made.attention, data, strict=True):
                end.begin_step(step, [[0, 1]])
                end.dispatch(0, 0, *(each.cuda() for each in (sent.rows_TH, sent.ids_TK, sent.weights_TK)))
            for end, sent in zip(made.attention, data, strict=True):
                sums = end.combine(0, 0, TIMEOUT_S)
                assert end.bytes_sent > 0  # waits for the device, and raises what went wrong
                torch.testing.assert_close(sums.cpu(), dense(sent, 0), rtol=1e-5, atol=1e-5)
        made.join()
        assert all(batch.rows_RH.is_cuda for batch in made.served.batches[0])
    assert "rows arrive in the memory of cuda" in caplog.text

"""Exchanges in the order of a GPU's stream: rows on the device, two expert workers, a peer that never answers."""

import pytest
import torch

from antiphon.base.errors import PeerTimeout
from antiphon.comm.m2n.streams import StreamAttentionExchange
from antiphon.specs.placement import contiguous_placement
from tests.comm.exchange_harness import LAYERS, TIMEOUT_S, dense, exchange, random_traffic
from tests.comm.m2n.backends import by_name

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device on this machine"),
]
SHM = by_name("shm")[0]


def test_rows_of_the_device_come_back_as_sums_on_it() -> None:
    """The attention worker's thread runs ahead of the device: it puts all layers on the stream, then looks."""
    device = torch.device("cuda", 0)
    torch.zeros(1, device=device)
    with exchange(contiguous_placement(6, 2, LAYERS), backend=SHM, num_micro_batches=2, max_rows=9) as made:
        made.replace_attention(0, farewell=True)
        end = StreamAttentionExchange(SHM.endpoint("attention[0]"), made.shape, 0, made.placement, TIMEOUT_S, device)
        made.attention[0] = end
        made.control.reset(made.control.abort_step())
        made.serve()
        end.begin_step(0, [[0], [0]])
        found, expected = [], []
        for layer in range(4):
            for micro_batch in range(2):
                data = random_traffic(7, 6, 6, 2, 10 * layer + micro_batch)
                expected.append(dense(data, layer))
                torch.cuda._sleep(10_000_000)
                rows = data.rows_TH.to(device, non_blocking=True)
                end.dispatch(layer, micro_batch, rows, data.ids_TK.to(device), data.weights_TK.to(device))
                rows.zero_()  # the arguments may be reused by later work on the stream
            found += [end.combine(layer, micro_batch, TIMEOUT_S) for micro_batch in range(2)]
        assert end.bytes_sent > 0  # waits for the device, and raises what went wrong
        for one, other in zip(found, expected, strict=True):
            assert one.is_cuda
            torch.testing.assert_close(one.cpu(), other, rtol=1e-5, atol=1e-5)
        made.join()


def test_a_peer_that_does_not_answer_lets_the_stream_go() -> None:
    device = torch.device("cuda", 0)
    torch.zeros(1, device=device)
    with exchange(contiguous_placement(4, 1, LAYERS), backend=SHM) as made:
        made.replace_attention(0, farewell=True)
        end = StreamAttentionExchange(SHM.endpoint("attention[0]"), made.shape, 0, made.placement, TIMEOUT_S, device)
        made.attention[0] = end
        made.control.reset(made.control.abort_step())
        data = random_traffic(3, 6, 4, 2, 3)
        end.begin_step(0, [[0]])
        end.dispatch(0, 0, *(each.to(device) for each in (data.rows_TH, data.ids_TK, data.weights_TK)))
        end.combine(0, 0, 0.2)  # returns at once
        torch.cuda.synchronize()  # the stream was let go
        with pytest.raises(PeerTimeout, match=r"experts\[0\]"):
            _ = end.bytes_sent

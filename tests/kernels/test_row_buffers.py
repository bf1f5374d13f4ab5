"""Memory of rows that is used again: only when nothing reads it any more, and as many buffers as are in use at once."""

import gc

import pytest
import torch

from antiphon.kernels.ops.feed_forward import RowBuffers, rounded_up
from antiphon.kernels.ops.products import Products


def test_memory_is_used_again_once_the_last_view_is_gone() -> None:
    buffers = RowBuffers()
    first = buffers.empty(100, 8, torch.float32)
    place, view = first.data_ptr(), first[3:5].t()
    view.fill_(7.0)
    del first
    assert buffers.empty(90, 8, torch.float32).data_ptr() != place, "a view is left"
    assert view.eq(7.0).all()
    del view
    again = buffers.empty(99, 8, torch.float32)
    assert again.data_ptr() == place or buffers.num_made == 2
    assert buffers.num_made == 2


def test_what_autograd_saved_is_not_overwritten() -> None:
    buffers = RowBuffers()
    weight = torch.randn(2, 4, 3, requires_grad=True)
    rows = torch.randn(5, 3, requires_grad=True)
    made = Products(buffers=buffers).forward(rows, weight, (2, 3))
    squared = made * made  # saves it
    del made
    for _ in range(4):
        buffers.empty(5, 4, torch.float32).fill_(99.0)
    squared.sum().backward()
    found, rows.grad, weight.grad = (rows.grad, weight.grad), None, None
    (Products().forward(rows, weight, (2, 3)) ** 2).sum().backward()
    for each, expected in zip(found, (rows.grad, weight.grad), strict=True):
        assert each is not None
        assert expected is not None
        torch.testing.assert_close(each, expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_sizes_that_change_take_as_much_as_the_largest(dtype: torch.dtype) -> None:
    """A hundred sizes one after another, two at once."""
    buffers, generator = RowBuffers(), torch.Generator().manual_seed(0)
    largest, kept = 0, None
    for _ in range(100):
        count = int(torch.randint(1, 5000, (1,), generator=generator))
        largest = max(largest, count)
        kept = buffers.empty(count, 16, dtype), kept[0] if kept else None
        assert kept[0].shape == (count, 16)
    gc.collect()
    assert buffers.num_bytes <= 4 * rounded_up(largest * 16 * dtype.itemsize)
    assert buffers.num_made < 40


def test_no_rows() -> None:
    assert RowBuffers().empty(0, 8, torch.float32).shape == (0, 8)


def test_sizes() -> None:
    for size in (1, 2, 3, 7, 8, 9, 1000, 1024, 1025, 10**9 + 1):
        assert size <= rounded_up(size) <= max(size + 1, size * 1.25)

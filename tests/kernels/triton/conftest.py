"""Where the kernels run: natively on a GPU, or, without one, on CPU tensors in Triton's interpreter."""

import pytest
import torch

from antiphon.kernels.triton import interprets, is_installed

HAS_GPU = torch.cuda.is_available()


@pytest.fixture
def device() -> torch.device:
    if not is_installed():
        pytest.skip("Triton is not installed")
    if not HAS_GPU and not interprets():
        pytest.skip("Triton was not asked to interpret before the tests began")
    torch.manual_seed(0)
    return torch.device("cuda" if HAS_GPU else "cpu")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """With a GPU these tests need it."""
    if HAS_GPU:
        for item in items:
            if "/kernels/triton/" in item.path.as_posix():
                item.add_marker(pytest.mark.gpu)

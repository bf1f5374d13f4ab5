"""Every instruction set this machine can run, AMX in emulation and portable C++ included."""

from collections.abc import Iterator

import pytest

from antiphon import _native
from antiphon.kernels import ops


@pytest.fixture(params=_native.available_isas())
def isa(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Native kernels run even where PyTorch's products are faster."""
    monkeypatch.setattr(ops, "SLOWER", ((), ()))
    before = _native.isa()
    _native.set_isa(request.param)
    yield request.param
    _native.set_isa(before)


@pytest.fixture(params=[1, 3])
def num_threads(request: pytest.FixtureRequest) -> Iterator[int]:
    before = _native.num_threads()
    _native.set_num_threads(request.param)
    yield request.param
    _native.set_num_threads(before)

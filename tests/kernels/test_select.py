"""Which back-end is chosen, and what is said when it cannot be had."""

import pytest
import torch

from antiphon.base.errors import UserError
from antiphon.kernels import select, triton
from antiphon.kernels.select import check_backend, make_backend

CPU, GPU = torch.device("cpu"), torch.device("cuda")


@pytest.fixture
def not_interpreting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setattr(select, "check_gpu_dtype", lambda device, dtype: None)


def test_cpus_get_native_kernels() -> None:
    assert make_backend("auto", CPU, torch.float32).name == "cpu"
    assert make_backend("auto", CPU, torch.float16).name == "reference"
    assert make_backend("reference", CPU, torch.float32).name == "reference"


@pytest.mark.skipif(not triton.is_installed(), reason="Triton is not installed")
@pytest.mark.usefixtures("not_interpreting")
def test_triton_needs_a_gpu() -> None:
    check_backend("triton", GPU, torch.bfloat16)
    with pytest.raises(UserError) as caught:
        check_backend("triton", CPU, torch.bfloat16)
    assert str(caught.value) == (
        "--kernels triton: they need a GPU, not cpu (or TRITON_INTERPRET=1 in the environment, for tests); "
        "or use --kernels reference"
    )


@pytest.mark.skipif(not triton.is_installed(), reason="Triton is not installed")
@pytest.mark.usefixtures("not_interpreting")
def test_triton_needs_compute_capability_8(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton, "_capability", lambda index: (7, 5))
    with pytest.raises(UserError, match=r"--kernels triton: they need compute capability 8.0, cuda has 7.5; or use"):
        check_backend("triton", GPU, torch.float16)
    monkeypatch.setattr(triton, "_capability", lambda index: (8, 0))
    check_backend("triton", GPU, torch.float16)


def test_triton_is_asked_for_and_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton, "is_installed", lambda: False)
    with pytest.raises(UserError, match=r"Triton is not installed \(pip install 'antiphon\[triton\]'\)"):
        check_backend("triton", GPU, torch.bfloat16)


def test_names_that_do_not_exist() -> None:
    with pytest.raises(UserError, match="--kernels cuda do not exist: use auto, cpu, triton or reference"):
        check_backend("cuda", GPU, torch.bfloat16)

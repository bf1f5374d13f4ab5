"""Kernels noted once and made again: for any number of rows, on buffers that are used again; what cannot be noted."""

import subprocess
import sys
import time
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from antiphon import _native
from antiphon.kernels.cpu import CpuBackend
from antiphon.kernels.cpu_weights import CpuLinear
from antiphon.kernels.noted_calls import CannotNote, NotedCalls

MOST_ROWS, WIDTH = 9, 40


Weights = list[tuple[CpuLinear, Tensor]]
KEPT: list[Weights] = []  # calls have their addresses


@pytest.fixture(autouse=True)
def kept() -> Iterator[None]:
    yield
    KEPT.clear()


def weights_of(dtype: torch.dtype) -> Weights:
    torch.manual_seed(0)
    backend = CpuBackend(dtype)
    return [(backend.pack_linear(torch.randn(WIDTH, WIDTH) / 6), torch.rand(WIDTH).to(dtype) + 0.5) for _ in range(20)]


def layers(backend: CpuBackend, calls: NotedCalls | None, x_TH: Tensor, count: int = 5) -> Tensor:
    """Norm, product with the residual, sum; as often as there are layers. Weights are the same every time."""
    weights = weights_of(backend.dtype)[:count]
    KEPT.append(weights)
    if calls is None:
        return run_layers(backend, weights, None, x_TH)
    return calls.note(lambda: run_layers(backend, weights, calls, x_TH))


def run_layers(backend: CpuBackend, weights: Weights, calls: NotedCalls | None, x_TH: Tensor) -> Tensor:
    for packed, norm_H in weights:
        y_TH = backend.linear(backend.rms_norm(x_TH, norm_H, 1e-6), packed, residual_TO=x_TH)
        x_TH = backend.add_rows(y_TH, x_TH)
        if calls is not None:
            calls.mark()
            calls.next_layer()
    return backend.linear(x_TH, weights[0][0], out_dtype=torch.float32)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@torch.inference_mode()
def test_the_same_bits_for_any_number_of_rows(isa: str, num_threads: int, dtype: torch.dtype) -> None:
    backend, calls = CpuBackend(dtype), NotedCalls()
    x_TH = torch.zeros(MOST_ROWS, WIDTH, dtype=dtype)
    made_TH = layers(backend, calls, x_TH)
    assert len(calls) == 5 * 4 + 1
    for num_rows in (MOST_ROWS, 1, 4, MOST_ROWS):
        torch.manual_seed(num_rows)
        x_TH[:num_rows] = torch.randn(num_rows, WIDTH).to(dtype)
        calls.run(num_rows)
        expected_TH = layers(backend, None, x_TH[:num_rows].clone())
        assert torch.equal(made_TH[:num_rows], expected_TH)


@torch.inference_mode()
def test_nothing_is_computed_while_calls_are_noted_and_buffers_are_few() -> None:
    backend, calls = CpuBackend(torch.float32), NotedCalls()
    x_TH = torch.full((MOST_ROWS, WIDTH), 3.0)
    layers(backend, calls, x_TH, count=20)
    assert torch.equal(x_TH, torch.full((MOST_ROWS, WIDTH), 3.0))
    assert len(calls._buffers._kept) <= 2 * 3 + 1, "those of two layers, and the last one"


@torch.inference_mode()
def test_times_of_the_start_and_of_all_marks() -> None:
    backend, calls = CpuBackend(torch.float32), NotedCalls()
    layers(backend, calls, torch.zeros(MOST_ROWS, WIDTH))
    before_ns = time.monotonic_ns()
    times_ns = calls.run(3).tolist()
    assert len(times_ns) == 6
    assert times_ns == sorted(times_ns)
    assert before_ns <= times_ns[0] <= times_ns[-1] <= time.monotonic_ns()


@pytest.mark.parametrize(
    ("work", "named"),
    [
        (lambda x: x + 1, "add"),
        (lambda x: x.mul_(2.0), "mul_"),
        (lambda x: x.t().contiguous(), "clone"),
        (lambda x: torch.cat([x, x]), "cat"),
        (lambda x: x.double(), "_to_copy"),
        (lambda x: torch.nn.functional.layer_norm(x, (WIDTH,)), "layer_norm"),
    ],
)
@pytest.mark.parametrize("inference", [True, False])
def test_what_pytorch_computes_cannot_be_noted(work: object, named: str, inference: bool) -> None:
    assert callable(work)
    with torch.inference_mode(inference), pytest.raises(CannotNote, match=f"PyTorch computes .*{named}"):
        NotedCalls().note(lambda: work(torch.zeros(MOST_ROWS, WIDTH)))
    weight = CpuBackend(torch.float32).pack_linear(torch.eye(WIDTH))
    x_TH = torch.randn(2, WIDTH)
    assert torch.equal(CpuBackend(torch.float32).linear(x_TH, weight), x_TH), "calls are made again"


@torch.inference_mode()
def test_views_and_constants_can() -> None:
    backend, calls = CpuBackend(torch.float32), NotedCalls()
    x_TH = torch.randn(MOST_ROWS, WIDTH)

    def work() -> Tensor:
        ones = torch.full_like(x_TH, 1.0)
        return backend.add_rows(x_TH[0:MOST_ROWS].view(MOST_ROWS, 2, -1).flatten(1), ones)

    made_TH = calls.note(work)
    calls.run(4)
    assert torch.equal(made_TH[:4], x_TH[:4] + 1.0)


def test_time_in_kernels_is_counted_on_demand() -> None:
    backend = CpuBackend(torch.float32)
    x = torch.randn(64, WIDTH)
    _native.count_kernel_time(False)  # an engine of another test may have left it on
    backend.add_rows(x, x)
    before = _native.kernel_time()
    backend.add_rows(x, x)
    assert _native.kernel_time() == before
    _native.count_kernel_time(True)
    try:
        backend.add_rows(x, x)
        processor_ns, elapsed_ns, num_calls = _native.kernel_time()
    finally:
        _native.count_kernel_time(False)
    assert num_calls == before[2] + 1
    assert elapsed_ns > before[1]
    assert processor_ns >= before[0]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("shape", [(0, 64), (1, 1), (3, 17), (400, 100)])
def test_sums_of_rows_have_pytorchs_bits(
    isa: str, num_threads: int, dtype: torch.dtype, shape: tuple[int, int]
) -> None:
    torch.manual_seed(0)
    x_TH, delta_TH = torch.randn(shape).to(dtype), torch.randn(shape).to(dtype)
    assert torch.equal(CpuBackend(dtype).add_rows(x_TH, delta_TH), x_TH + delta_TH)


def test_noting_imports_no_compiler() -> None:
    """It takes 0.7 s and 160 MB, which the first request would wait for."""
    code = "import sys, torch; from antiphon.kernels.noted_calls import NotedCalls; "
    code += "NotedCalls().note(lambda: torch.empty(3)); print('torch._dynamo' in sys.modules)"
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    assert said.stdout.strip() == "False"

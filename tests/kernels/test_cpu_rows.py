"""Norms, the greedy choice and draws."""

from random import Random

import pytest
import torch
from torch import Tensor

from antiphon.kernels.cpu import CpuBackend
from antiphon.serve.worker.row_sampler import RowOperations
from antiphon.serve.worker.sampling import RowDraw, TokenCounts, choose_tokens
from antiphon.specs.sampling import SamplingParams

DTYPES = [torch.bfloat16, torch.float32]


def hugging_face_rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    wide = x.float()
    return weight * (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)).to(x.dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(0, 64), (1, 1), (3, 17), (5, 1024), (2, 3, 48), (400, 100)])
def test_rms_norm(isa: str, num_threads: int, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    backend = CpuBackend(dtype)
    x, weight = torch.randn(shape).to(dtype), torch.rand(shape[-1]).to(dtype) + 0.5
    tolerance = 1e-2 if dtype == torch.bfloat16 else 1e-5
    y = backend.rms_norm(x, weight, 1e-6)
    torch.testing.assert_close(y, hugging_face_rms_norm(x, weight, 1e-6), atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("width", "first"), [(16, 0), (33, 5), (64, 48)])
def test_rms_norm_in_place_of_a_part_of_wider_rows(isa: str, dtype: torch.dtype, width: int, first: int) -> None:
    torch.manual_seed(0)
    backend, rows = CpuBackend(dtype), torch.randn(7, first + width + 3).to(dtype)
    weight, kept = torch.rand(width).to(dtype) + 0.5, rows.clone()
    backend.rms_norm_(rows[:, first : first + width], weight, 1e-6)
    kept[:, first : first + width] = backend.rms_norm(kept[:, first : first + width].contiguous(), weight, 1e-6)
    assert torch.equal(rows, kept)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 8), (7, 33), (300, 256)])
def test_add_rms_norm(isa: str, num_threads: int, dtype: torch.dtype, shape: tuple[int, int]) -> None:
    torch.manual_seed(0)
    backend = CpuBackend(dtype)
    x, delta, weight = torch.randn(shape).to(dtype), torch.randn(shape).to(dtype), torch.rand(shape[1]).to(dtype)
    total, y = backend.add_rms_norm(x, delta, weight, 1e-5)
    assert torch.equal(total, x + delta)
    assert torch.equal(y, backend.rms_norm(x + delta, weight, 1e-5))
    assert torch.equal(backend.add_rms_norm(x[:1], delta[:1], weight, 1e-5)[1], y[:1])


@pytest.mark.parametrize("shape", [(1, 1), (3, 17), (2, 1024), (5, 40000), (1, 151936)])
def test_argmax(isa: str, num_threads: int, shape: tuple[int, int]) -> None:
    torch.manual_seed(0)
    logits = torch.randn(shape)
    assert torch.equal(CpuBackend(torch.float32).argmax_rows(logits), logits.argmax(-1))


def test_argmax_takes_the_first_of_equals(isa: str) -> None:
    logits = torch.zeros(3, 40000)
    logits[1, [39999, 20000, 16384]] = 1.0
    logits[2] = float("-inf")
    assert CpuBackend(torch.float32).argmax_rows(logits).tolist() == [0, 16384, 0]


def choose(logits: Tensor, rows: list[RowDraw]) -> list[int]:
    return RowOperations.of(CpuBackend(torch.float32)).choose(logits, rows)


def drawn(logits: Tensor, temperature: float, uniforms: list[float]) -> list[int]:
    """One row, with one uniform after the other."""
    params = SamplingParams(temperature=temperature)
    return choose(logits.expand(len(uniforms), -1), [RowDraw(params, uniform) for uniform in uniforms])


@pytest.mark.parametrize(("width", "temperature"), [(1, 1.0), (17, 0.7), (512, 1.0), (513, 2.5), (40000, 0.9)])
def test_draws_follow_the_running_sum(isa: str, num_threads: int, width: int, temperature: float) -> None:
    """The token's own part of the sum, in float64, holds the uniform, but for rounding at its borders."""
    torch.manual_seed(width)
    logits = 3.0 * torch.randn(width)
    uniforms = [0.0, *torch.rand(200, dtype=torch.float64).tolist(), 1.0 - 2.0**-53]
    ends = torch.softmax(logits.double() / temperature, 0).cumsum(0)
    for token, uniform in zip(drawn(logits, temperature, uniforms), uniforms, strict=True):
        begin = float(ends[token - 1]) if token else 0.0
        assert begin - 1e-6 <= uniform <= float(ends[token]) + 1e-6


def test_nothing_improbable_is_drawn(isa: str) -> None:
    logits = torch.full((2000,), float("-inf"))
    allowed = [3, 700, 1023, 1024, 1999]
    logits[allowed] = 0.0
    uniforms = [step / 300 for step in range(300)] + [1.0 - 2.0**-53]
    tokens = drawn(logits, 1.0, uniforms)
    assert sorted(set(tokens)) == allowed
    assert tokens == sorted(tokens)
    assert (tokens[0], tokens[-1]) == (3, 1999)


def rows_of_every_kind(width: int, random: torch.Generator) -> Tensor:
    """Spread wide and little, tied, all equal, masked but for some or for one, with values that overflow."""
    normal = torch.randn((8, width), generator=random)
    masked = normal.masked_fill(torch.rand((8, width), generator=random) < 0.9, -torch.inf)
    single = torch.full((2, width), -torch.inf)
    single[0, width // 2], single[1, -1] = 1.0, -1e30
    huge = torch.cat([3e38 * normal[:1].sign(), 1e30 * normal[:1]])
    spread = [normal * scale for scale in (0.0, 1e-7, 0.01, 3.0, 30.0)]
    return torch.cat([*spread, (3.0 * normal).round(), (3.0 * normal).bfloat16().float(), masked, single, huge])


def rows_to_choose(count: int, width: int, random: Random) -> list[RowDraw]:
    rows = []
    for _ in range(count):
        params = SamplingParams(
            temperature=random.choice([0.0, 0.05, 0.7, 1.0, 2.5]),
            top_k=random.choice([-1, 0, 0, 1, 2, 50, width - 1, width, 10**6]),
            top_p=random.choice([1.0, 1.0 - 2.0**-53, 0.95, 0.95, 0.5, 0.01, 1e-300]),
            min_p=random.choice([0.0, 0.0, 1e-30, 0.05, 1.0]),
            presence_penalty=random.choice([0.0, 0.5, -2.0]),
            frequency_penalty=random.choice([0.0, 0.7]),
            repetition_penalty=random.choice([1.0, 1.3, 0.8]),
        )
        counted = TokenCounts() if random.random() < 0.5 else None
        if counted is not None:
            counted.add_prompt([random.randrange(width) for _ in range(20)])
            for _ in range(20):
                counted.add_output(random.randrange(width))
        uniform = random.choice([0.0, 1.0 - 2.0**-53, *(random.random() for _ in range(6))])
        rows.append(RowDraw(params, uniform, counted))
    return rows


@pytest.mark.parametrize("width", [1, 2, 17, 511, 512, 513, 1537, 4099])
def test_tokens_are_those_of_the_reference(isa: str, width: int) -> None:
    """Token for token: filters, penalties, draws."""
    logits, random = rows_of_every_kind(width, torch.Generator().manual_seed(width)), Random(width)
    for _ in range(3):
        rows = rows_to_choose(len(logits), width, random)
        assert choose(logits, rows) == choose_tokens(logits, rows)


def test_tokens_of_a_large_vocabulary_are_those_of_the_reference(num_threads: int) -> None:
    random = torch.Generator().manual_seed(4)
    logits = torch.randn((9, 151936), generator=random) * torch.tensor([0.0, 1.0, 3.0]).repeat(3).unsqueeze(1)
    rows = [
        RowDraw(SamplingParams(top_p=top_p, top_k=top_k), uniform)
        for top_p, top_k in ((0.95, 0), (0.9, 1000), (1.0, 100_000))
        for uniform in (0.1, 0.6, 0.999999)
    ]
    assert choose(logits, rows) == choose_tokens(logits, rows)
    assert [choose(logits[row : row + 1], [each])[0] for row, each in enumerate(rows)] == choose(logits, rows)


def test_greedy_rows_and_rows_without_mass_get_the_largest(isa: str, num_threads: int) -> None:
    torch.manual_seed(0)
    logits = torch.randn(6, 20000)
    logits[1] = float("-inf")
    logits[2, 7] = float("nan")
    logits[4, 9] = 90.0
    logits[5, 11] = float("inf")
    params = [SamplingParams(temperature=t, top_p=0.9) for t in (0.0, 1.0, 1.0, 0.6, 0.01, 1.0)]
    rows = [RowDraw(each, uniform) for each, uniform in zip(params, [0.5, 0.5, 0.5, 0.25, 0.9, 0.5], strict=True)]
    together = choose(logits, rows)
    assert together[0] == logits[0].argmax()
    assert together[1] == 0
    assert together[2] == logits[2].nan_to_num(-torch.inf).argmax()
    assert (together[4], together[5]) == (9, 11)
    for row, each in enumerate(rows):
        assert choose(logits[row : row + 1], [each]) == together[row : row + 1], "its neighbours do not matter"


def test_choices_must_be_as_many_as_rows() -> None:
    packed = RowDraw(SamplingParams(), 0.5).packed()
    with pytest.raises(ValueError, match="3 rows and 144 bytes of choices: a row has 72"):
        CpuBackend(torch.float32).choose_rows(torch.zeros(3, 5), 2 * packed)


def test_norm_weights_may_lie_apart() -> None:
    backend, x, apart = CpuBackend(torch.float32), torch.randn(3, 40), torch.randn(80)[::2]
    expected, inside = backend.rms_norm(x, apart.clone(), 1e-6), x.clone()
    assert torch.equal(backend.rms_norm(x, apart, 1e-6), expected)
    backend.rms_norm_(inside, apart, 1e-6)
    assert torch.equal(inside, expected)
    assert torch.equal(backend.add_rms_norm(x, torch.zeros_like(x), apart, 1e-6)[1], expected)


def test_rows_that_overlap_and_logits_of_no_column_are_refused() -> None:
    backend = CpuBackend(torch.float32)
    with pytest.raises(ValueError, match=r"rows of strides \(0, 1\)"):
        backend.rms_norm_(torch.randn(1, 4).expand(2, 4), torch.ones(4), 1e-6)
    with pytest.raises(ValueError, match=r"one at least, got torch.float32 \(3, 0\)"):
        backend.argmax_rows(torch.zeros(3, 0))

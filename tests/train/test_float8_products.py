"""Products whose factors are rounded to FP8: the rounding against every number of the formats, layers against the same
in float64, the router's weight in its two places, and runs."""

import itertools
import math
from pathlib import Path

import pytest
import torch
from torch import Tensor

from antiphon.base.errors import UserError
from antiphon.comm.float8 import bytes_of_numbers, decode_numbers, encode_numbers
from antiphon.comm.mesh import Sizes, connect
from antiphon.kernels.ops.products import Products, rounded, rounded_by_groups
from antiphon.models.config import model_spec
from antiphon.train.config_tables import CommunicationConfig, LossConfig
from antiphon.train.layer_plan import PlanOptions
from antiphon.train.model import MoeModel
from antiphon.train.passes import Passes
from antiphon.train.setup import prepare
from antiphon.train.shards import Shards
from antiphon.train.spans import StepSpans
from antiphon.train.trainer import Trainer
from antiphon.train.weights import FirstValues
from tests.models.conftest import family_config
from tests.train.harness import config_of, losses
from tests.train.parallel_forms import batch_of

FORMATS = {torch.float8_e4m3fn: (4, 3, 7), torch.float8_e5m2: (5, 2, 15)}  # bits of exponent and fraction, bias


def numbers_of(kind: torch.dtype) -> list[float]:
    """All finite numbers from 0 on, by the definition of the format."""
    exponent_bits, fraction_bits, bias = FORMATS[kind]
    found = set()
    for exponent in range(2**exponent_bits):
        for fraction in range(2**fraction_bits):
            if exponent == 0:
                found.add(fraction / 2**fraction_bits * 2.0 ** (1 - bias))
            else:
                found.add((1 + fraction / 2**fraction_bits) * 2.0 ** (exponent - bias))
    return sorted(each for each in found if each <= torch.finfo(kind).max)


@pytest.mark.parametrize("kind", FORMATS)
def test_rounding_is_to_the_nearest_number_ties_to_even(kind: torch.dtype) -> None:
    """With the largest number in the row the scale is 1, so what comes back is a number of the format."""
    numbers = numbers_of(kind)
    assert numbers[-1] == torch.finfo(kind).max
    middles = [(a + b) / 2 for a, b in itertools.pairwise(numbers)]
    for scale in (1.0, -1.0):
        row = torch.tensor([[*numbers, *middles, numbers[-1]]], dtype=torch.float64) * scale
        found = (rounded(row, 1, kind) * scale)[0].tolist()
        assert found[: len(numbers)] == numbers
        even = [pair[index % 2] for index, pair in enumerate(itertools.pairwise(numbers))]
        assert found[len(numbers) : -1] == even


def test_what_is_not_finite_stays_so_and_takes_no_part_in_a_scale() -> None:
    x = torch.tensor([[1.0, float("inf"), float("nan"), 0.5], [0.0, 0.0, 0.0, 0.0]])
    found = rounded(x, 1)
    assert found[0, :2].tolist() == [1.0, float("inf")]
    assert math.isnan(found[0, 2])
    assert found[1].tolist() == [0.0] * 4
    assert rounded_by_groups(torch.empty(0, 3)).shape == (0, 3)


def test_a_row_far_below_the_others_is_not_lost() -> None:
    """What SwiGLU does to a scale for the whole tensor."""
    x = torch.tensor([[1.0, 0.7], [1e-6, 0.7e-6]])
    of_tensor = rounded(x.flatten(), 0).view_as(x)
    assert float((rounded(x, 1)[1] / x[1] - 1).abs().max()) < 0.07
    assert float((of_tensor[1] / x[1] - 1).abs().max()) > 0.9


@pytest.mark.parametrize("counts", [None, (3, 0, 130)])
@pytest.mark.parametrize("kind", ["float8", "hybrid"])
def test_products_are_those_of_rounded_factors(kind: str, counts: tuple[int, ...] | None) -> None:
    generator = torch.Generator().manual_seed(1)
    x, grad = (torch.randn(133, width, generator=generator, dtype=torch.float64) for width in (16, 12))
    weight = torch.randn(*(() if counts is None else (3,)), 12, 16, generator=generator, dtype=torch.float64)
    x.requires_grad_()
    weight.requires_grad_()
    products = Products(kind)  # type: ignore[arg-type]
    y = products.forward(x, weight, counts)
    y.backward(grad)
    of_gradients = torch.float8_e5m2 if kind == "hybrid" else torch.float8_e4m3fn
    expected = []
    for expert, rows in [(0, slice(0, 133))] if counts is None else [(0, slice(0, 3)), (2, slice(3, 133))]:
        own = weight.detach() if counts is None else weight.detach()[expert]
        expected.append(rounded(x.detach()[rows], 1) @ rounded(own, 1, by_two=True).T)
        assert x.grad is not None
        wanted = rounded(grad[rows], 1, of_gradients) @ rounded(own, 0, by_two=True)
        assert torch.allclose(x.grad[rows], wanted, atol=1e-12)
    assert torch.allclose(y, torch.cat(expected), atol=1e-12)
    plain = torch.autograd.grad(Products().forward(x, weight, counts), weight, grad)[0]
    assert weight.grad is not None
    assert float((weight.grad - plain).abs().max() / plain.abs().max()) < 0.1


def test_parameters_as_e4m3_are_exact_in_bfloat16_and_are_not_rounded_again() -> None:
    x = torch.randn(300, generator=torch.Generator().manual_seed(1)) * 0.02
    x[130:140] = 0.0
    encoded = torch.cat([encode_numbers(x[:130]), encode_numbers(x[130:])])
    assert encoded.shape[0] == bytes_of_numbers(130) + bytes_of_numbers(170) == 300 + 4
    back = decode_numbers(encoded, (130, 170), torch.float32)
    assert torch.equal(decode_numbers(encoded, (130, 170), torch.bfloat16).float(), back)
    assert float(((back - x).abs() / x.abs().clamp(min=1e-4)).max()) < 0.07
    assert torch.equal(rounded(back[:128], 0, by_two=True), back[:128])
    assert encode_numbers(torch.empty(0)).shape == (0,)


def step(kind: str, keep: str = "none", gate_weights: str = "combine") -> tuple[Tensor, dict[str, Tensor]]:
    model = MoeModel(
        model_spec(family_config("deepseek_v3").to_dict()),
        connect(Sizes(), 0),
        max_positions=11,
        dtype=torch.float64,
        first=FirstValues(1, 0.05),
        communication=CommunicationConfig(gate_weights=gate_weights),  # type: ignore[arg-type]
        options=PlanOptions(keep=keep, products=Products(kind)),  # type: ignore[arg-type]
    ).double()
    shards = Shards(model)
    loss = Passes(model, LossConfig(balance=0.1), StepSpans()).run([batch_of(slice(0, 4))]).loss
    shards.reduce()
    return loss, {piece.name: piece.values.grad for piece in shards.pieces if piece.values.grad is not None}


def test_a_step_in_float8() -> None:
    """Near the same in float64 but not the same; memory policies change no bit, for the router's weight stays behind
    the second product. Before it, forward is the same, and gradients are others."""
    loss, gradients = step("float8")
    wide, exact = step("plain")
    assert loss != wide
    assert abs(float(loss - wide)) < 0.05
    for name, each in gradients.items():
        distance = (each - exact[name]).norm() / exact[name].norm().clamp(min=1e-9)
        assert float(distance) < 0.5, name
    for keep in ("selective", "full"):
        again, others = step("float8", keep)
        assert torch.equal(again, loss)
        assert all(torch.equal(each, others[name]) for name, each in gradients.items()), keep
    early, others = step("float8", gate_weights="experts")
    assert float(early) == pytest.approx(float(loss), abs=1e-9), "a row's scale takes its weight along"
    assert not torch.equal(others["layers.1.experts_down"], gradients["layers.1.experts_down"])


def test_a_run_in_float8_learns_as_one_in_float32(tmp_path: Path) -> None:
    found = {}
    for kind in ("plain", "float8", "hybrid"):
        Trainer(prepare(config_of(tmp_path / kind, f"products={kind}"))).run()
        found[kind] = [loss for _, loss in losses(tmp_path / kind)]
    for kind in ("float8", "hybrid"):
        assert found[kind] != found["plain"]
        assert found[kind] == pytest.approx(found["plain"], abs=0.1)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (("products=float4",), "products is 'float4': it must be 'plain', 'float8' or 'hybrid'"),
        (("products=float8", "overlap.inside=true"), "overlap.inside is true and products is 'float8': tiles are"),
    ],
)
def test_products_that_cannot_be(tmp_path: Path, changes: tuple[str, ...], message: str) -> None:
    with pytest.raises(UserError, match=message):
        config_of(tmp_path, *changes)

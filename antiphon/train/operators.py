"""What a layer is made of: operators between named tensors (MegaScale-MoE, section 4.1, Figure 9).

    Compute     a function; its backward is autograd's, of this operator alone
    Product     rows times a parameter; the gradients of rows and of the parameter are two steps
    Exchange    a collective, started and waited for; its backward is the reverse one

An operator reads and makes tensors by name; some of what it makes are `facts`, without gradients (choices, maps of
rows). `saves` names what its backward reads of them, and so what has to be held, or made again, until then. Operators
marked `once` decide something (routing) and are never run again: what they made is kept.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from antiphon.base.errors import UserError
from antiphon.comm.collectives import Collective
from antiphon.comm.dispatch import Dispatcher
from antiphon.kernels.ops.feed_forward import (
    grouped_bias_gradient,
    grouped_input_gradient,
    grouped_product,
    grouped_weight_gradient,
)
from antiphon.specs.model import ModelSpec
from antiphon.train.routing import Routing
from antiphon.train.row_budget import RowBudget
from antiphon.train.sequences import Sequences
from antiphon.train.spans import Spans
from antiphon.train.weights import Recorder, Weights

Gate = Callable[[Weights, Tensor], tuple[Tensor, Tensor, Tensor]]


@dataclass(frozen=True)
class Here:
    """What operators know besides their tensors: the layer, the micro-batch, and its routing."""

    spec: ModelSpec
    layer: int
    adds_bias: bool
    weights: Recorder
    sequences: Sequences
    routing: Routing
    dispatcher: Dispatcher
    budget: RowBudget
    gate: Gate
    spans: Spans = field(default_factory=Spans)

    @property
    def wide(self) -> torch.dtype:
        """The type of what needs float32 at least."""
        return torch.promote_types(self.weights.dtype, torch.float32)


@dataclass(frozen=True, kw_only=True)
class Operator:
    name: str
    reads: tuple[str, ...]
    makes: tuple[str, ...]
    saves: tuple[str, ...] = ()
    facts: tuple[str, ...] = ()
    once: bool = False
    has_gradient: bool = True


@dataclass(frozen=True, kw_only=True)
class Compute(Operator):
    """`function(here, *values)` gives what is made: one value, or a tuple of several. `leads_to`: the exchange that
    begins as soon as its backward is done, for which sums of gradients make way."""

    leads_to: str = ""
    function: Callable[..., Any]


@dataclass(frozen=True, kw_only=True)
class Product(Operator):
    """The first of `reads` times parameter `weight`, plus parameter `bias`. With `counts`, the second of `reads` is a
    `RowMap`: rows in order of expert, each times its expert's matrix."""

    weight: str
    bias: Callable[[Weights], Tensor | None] = field(default=lambda weights: None)
    grouped: bool = False

    def forward(self, weights: Weights, values: Sequence[Any]) -> Tensor:
        x, weight, bias = values[0], weights[self.weight], self.bias(weights)
        if not self.grouped:
            return F.linear(x, weight, bias)
        counts_E = values[1].counts_E
        y = grouped_product(x, weight, counts_E)
        return y if bias is None else y + bias.repeat_interleave(torch.tensor(counts_E, device=y.device), dim=0)

    def input_gradient(self, weights: Weights, values: Sequence[Any], grad: Tensor) -> Tensor:
        weight = weights[self.weight]
        if not self.grouped:
            return grad @ weight
        return grouped_input_gradient(grad.contiguous(), weight, values[1].counts_E)

    def weight_gradients(self, values: Sequence[Any], grad: Tensor) -> tuple[Tensor, Tensor]:
        """Gradients of the weight and of the bias."""
        if self.grouped:
            grad, counts_E = grad.contiguous(), values[1].counts_E
            return grouped_weight_gradient(grad, values[0], counts_E), grouped_bias_gradient(grad, counts_E)
        rows = grad.flatten(0, -2)
        return rows.t() @ values[0].flatten(0, -2), rows.sum(0)


@dataclass(frozen=True, kw_only=True)
class Exchange(Operator):
    """The first of `reads`, along dimension `dim`, through the collective that `collective(here, *values)` gives.
    `part`: its number among how many that follow each other."""

    collective: Callable[..., Collective]
    dim: int = 0
    part: tuple[int, int] = (0, 1)


def part_name(name: str, number: int) -> str:
    """The name of part `number`, the first is 0, of an operator or a tensor that comes in parts."""
    return f"{name}/{number + 1}"


def whole_name(name: str) -> str:
    """The name without its part."""
    return name.partition("/")[0]


class Graph:
    """Operators in an order in which they can run. `begin` and `end`: the names of what the layer is given and gives.
    A mistake in an operator's names is refused."""

    def __init__(self, operators: Sequence[Operator], begin: str, end: str) -> None:
        self.operators: Mapping[str, Operator] = {each.name: each for each in operators}
        self.begin, self.end = begin, end
        self.maker_of: dict[str, Operator] = {}
        known = {begin}
        for each in operators:
            missing = [name for name in each.reads if name not in known]
            if missing:
                raise UserError(f"operator {each.name} reads {', '.join(missing)}, which no operator before it makes")
            known.update(each.makes)
            for name in each.makes:
                assert name not in self.maker_of, f"{name} is made twice"
                self.maker_of[name] = each
        assert len(self.operators) == len(operators), "two operators have one name"
        assert end in known, f"nothing makes {end}"

    @property
    def facts(self) -> set[str]:
        """Names of what has no gradient."""
        return {name for each in self.operators.values() for name in each.facts}

    @property
    def saved(self) -> set[str]:
        """Names of all that backward reads."""
        return {name for each in self.operators.values() for name in each.saves}

"""What a layer is made of: operators between named tensors (MegaScale-MoE, section 4.1, Figure 9).

    Compute         a function; its backward is autograd's, of this operator alone
    WeightProduct   rows times a parameter; the gradients of rows and of the parameter are two steps
    RowExchange     a collective, started and waited for; its backward is the reverse one

An operator reads and makes tensors by name; some of what it makes are `facts`, without gradients (choices, maps of
rows). `saves` names what its backward reads of them, and so what has to be held, or made again, until then. Operators
marked `once` decide something (routing) and are never run again: what they made is kept.

The backward of a `Compute` is an `OperatorGraph`: a graph of autograd's that is cut from all others and holds none of
the named tensors. What autograd saves of a named tensor is remembered as a view of that name, and looked up when
backward wants it: by then the tensor may have been freed and made again. The rest (a norm's factors, attention's
log-sum-exp) is small and is held as it is. This is also where activations are counted, in bytes of what is held.
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge, saved_tensors_hooks

from antiphon.base.errors import UserError
from antiphon.comm.collectives import Collective
from antiphon.comm.dispatch import Dispatcher
from antiphon.kernels.ops import differentiable
from antiphon.kernels.ops.feed_forward import grouped_bias_gradient
from antiphon.specs.model import ModelSpec
from antiphon.train.routing import Routing
from antiphon.train.row_budget import RowBudget
from antiphon.train.sequence_parallel import Sequences
from antiphon.train.spans import StepSpans
from antiphon.train.weights import Recorder, Weights

Bias = Callable[[Weights], Tensor | None]


@dataclass(frozen=True)
class LayerContext:
    """What operators know besides their tensors: the layer, the micro-batch, and its routing."""

    spec: ModelSpec
    layer: int
    adds_bias: bool
    weights: Recorder
    sequences: Sequences
    routing: Routing
    dispatcher: Dispatcher
    budget: RowBudget
    spans: StepSpans = field(default_factory=StepSpans)

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

    @property
    def has_gradient(self) -> bool:
        """Whether there is something to do for it in backward."""
        return not set(self.makes) <= set(self.facts)


@dataclass(frozen=True, kw_only=True)
class Compute(Operator):
    """`function(here, *values)` gives what is made: one value, or a tuple of several. `leads_to`: the exchange that
    begins as soon as its backward is done, for which sums of gradients make way."""

    leads_to: str = ""
    function: Callable[..., Any]


@dataclass(frozen=True, kw_only=True)
class WeightProduct(Operator):
    """The first of `reads` times parameter `weight`, plus parameter `bias`. With `counts`, the second of `reads` is a
    `RowMap`: rows in order of expert, each times its expert's matrix."""

    weight: str
    bias: Bias = field(default=lambda weights: None)
    grouped: bool = False

    def forward(self, weights: Recorder, values: Sequence[Any]) -> Tensor:
        bias = self.bias(weights)
        counts_E = values[1].counts_E if self.grouped else None
        y = weights.products.forward(values[0], weights[self.weight], counts_E)
        if bias is None:
            return y
        return y + (bias if counts_E is None else bias.repeat_interleave(torch.tensor(counts_E, device=y.device), 0))

    def input_gradient(self, weights: Recorder, values: Sequence[Any], grad: Tensor) -> Tensor:
        counts_E = values[1].counts_E if self.grouped else None
        return weights.products.input_gradient(grad, weights[self.weight], counts_E)

    def weight_gradients(self, weights: Recorder, values: Sequence[Any], grad: Tensor) -> tuple[Tensor, Tensor | None]:
        """Gradients of the weight, and of the bias if there is one."""
        counts_E = values[1].counts_E if self.grouped else None
        found = weights.products.weight_gradient(grad, values[0], counts_E)
        if self.bias(weights) is None:
            return found, None
        if counts_E is not None:
            return found, grouped_bias_gradient(grad, counts_E)
        return found, grad.flatten(0, -2).sum(0)


@dataclass(frozen=True, kw_only=True)
class RowExchange(Operator):
    """The first of `reads`, along dimension `dim`, through the collective that `collective(here, *values)` gives.
    `part`: its number among how many that follow each other."""

    collective: Callable[..., Collective]
    dim: int = 0
    part: tuple[int, int] = (0, 1)


def compute(
    name: str,
    flow: str,
    function: Callable[..., Any],
    *,
    saves: str = "",
    facts: str = "",
    once: bool = False,
    leads_to: str = "",
) -> Compute:
    """The operator `name` of a layer. `flow`: "what it reads -> what it makes"; names stand between blanks, as in
    `saves` and `facts`."""
    return Compute(name=name, function=function, once=once, leads_to=leads_to, **_tensor_names(flow, saves, facts))


def product(
    name: str, flow: str, weight: str, bias: Bias = lambda weights: None, *, saves: str, grouped: bool = False
) -> WeightProduct:
    """A product with parameter `weight`; the other arguments are those of `compute`."""
    return WeightProduct(name=name, weight=weight, bias=bias, grouped=grouped, **_tensor_names(flow, saves))


def exchange(
    name: str, flow: str, collective: Callable[..., Collective], *, dim: int = 0, once: bool = False
) -> RowExchange:
    """An exchange; the other arguments are those of `compute`."""
    return RowExchange(name=name, collective=collective, dim=dim, once=once, **_tensor_names(flow))


def _tensor_names(flow: str, saves: str = "", facts: str = "") -> dict[str, Any]:
    """The fields of an `Operator` that name tensors."""
    reads, _, makes = flow.partition("->")
    names = {"reads": reads, "makes": makes, "saves": saves, "facts": facts}
    return {key: tuple(text.split()) for key, text in names.items()}


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


@dataclass
class HeldBytes:
    """Bytes of activations that layers hold between forward and backward: `now`, and the `peak` since it was taken."""

    now: int = 0
    peak: int = 0

    def add(self, num_bytes: int) -> None:
        self.now += num_bytes
        self.peak = max(self.peak, self.now)

    def take_peak(self) -> int:
        """The peak, which begins anew."""
        taken, self.peak = self.peak, self.now
        return taken


def _to_token_forward(ctx: Any, token: Tensor, x: Tensor) -> Tensor:
    """`x` with its gradient going to `token`, which has its shape and no memory: so the graph does not hold `x`."""
    return x.view_as(x)


def _to_token_backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
    return grad, None


_to_token = differentiable(_to_token_forward, _to_token_backward)


@dataclass
class _Slot:
    """Something that an operator's backward reads: a tensor, or a view of a named one. `own`: it belongs to this
    layer's micro-batch alone."""

    tensor: Tensor | None
    own: bool
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    name: str = ""

    def give_name(self, name: str, base: Tensor) -> None:
        self.tensor, self.name, self.offset = None, name, self.offset - int(base.storage_offset())


class OperatorGraph:
    """The graph of `operator`, which takes and leaves `values`."""

    def __init__(self, operator: Compute, values: Mapping[str, Any]) -> None:
        self._operator = operator
        self._values = values
        self._edges: dict[str, GradientEdge] = {}
        self._tokens: dict[str, Tensor] = {}
        self._parameters: list[nn.Parameter] = []
        self._slots: list[_Slot] = []

    def record(self, here: LayerContext, values: list[Any], constants: Collection[str]) -> tuple[Any, set[str]]:
        """What the operator makes of `values`, and the names in it without a gradient. `constants`: those it reads."""
        operator, given = self._operator, dict(zip(self._operator.reads, values, strict=True))
        with torch.enable_grad(), saved_tensors_hooks(self._pack, self._unpack):
            fed = [value if name in constants else self._feed(name, value) for name, value in given.items()]
            made = operator.function(here, *fed)
        self._parameters, places = here.weights.take()
        made_by_name = by_name(operator, made)
        for name in operator.saves:
            self._name_slots(name, (given | made_by_name)[name])
        places |= {_place(each) for each in here.sequences.tensors}
        for slot in self._slots:
            slot.own = slot.tensor is None or _place(slot.tensor) not in places
        for name, value in made_by_name.items():
            if isinstance(value, Tensor) and value.requires_grad:
                self._edges[name] = get_gradient_edge(value)
        return made, made_by_name.keys() - self._edges.keys()

    def gradients(self, grads: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], list[tuple[nn.Parameter, Tensor]]]:
        """Gradients of what was read, by name, and of parameters, from those of what was made. To be called once."""
        made = {name: grad for name, grad in grads.items() if name in self._edges}
        inputs, edges = [*self._tokens.values(), *self._parameters], [self._edges[name] for name in made]
        self._edges.clear()  # else this object and what its hooks are known to would keep each other
        if not edges or not inputs:
            return {}, []
        found = torch.autograd.grad(edges, inputs, list(made.values()), allow_unused=True)
        of_read = {name: grad for name, grad in zip(self._tokens, found, strict=False) if grad is not None}
        of_parameters = zip(self._parameters, found[len(self._tokens) :], strict=True)
        return of_read, [(parameter, grad) for parameter, grad in of_parameters if grad is not None]

    def own_tensors(self) -> Iterator[Tensor]:
        """What it holds itself and belongs to this micro-batch alone."""
        return (slot.tensor for slot in self._slots if slot.own and slot.tensor is not None)

    def _feed(self, name: str, value: Tensor) -> Tensor:
        token = self._tokens[name] = value.new_zeros(()).expand(value.shape).requires_grad_()
        fed: Tensor = _to_token(token, value)
        return fed

    def _pack(self, x: Tensor) -> _Slot:
        slot = _Slot(x, True, tuple(x.shape), x.stride(), int(x.storage_offset()))
        self._slots.append(slot)
        return slot

    def _unpack(self, slot: _Slot) -> Tensor:
        if slot.tensor is not None:
            return slot.tensor
        base: Tensor = self._values[slot.name]
        return base.as_strided(slot.shape, slot.stride, int(base.storage_offset()) + slot.offset)

    def _name_slots(self, name: str, base: Any) -> None:
        """What was saved of `base` is to be looked up by its name."""
        for slot in self._slots if isinstance(base, Tensor) else ():
            if slot.tensor is not None and slot.tensor.numel() and _place(slot.tensor) == _place(base):
                slot.give_name(name, base)


def by_name(operator: Operator, made: Any) -> dict[str, Any]:
    """What an operator's function gave."""
    return dict(zip(operator.makes, made if len(operator.makes) > 1 else (made,), strict=True))


def bytes_of(tensors: Iterable[Tensor]) -> int:
    """The bytes of their storages, each counted once."""
    return sum({_place(each): each.untyped_storage().nbytes() for each in tensors}.values())


def _place(x: Tensor) -> int:
    return x.untyped_storage().data_ptr()

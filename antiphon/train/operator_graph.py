"""The backward of one operator: a graph of autograd's that is cut from all others and holds none of the named tensors.

What autograd saves of a named tensor is remembered as a view of that name, and looked up when backward wants it: by
then the tensor may have been freed and made again. The rest (a norm's factors, attention's log-sum-exp) is small and is
held as it is. This is also where activations are counted: in bytes of what is held, by what was saved.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge, saved_tensors_hooks

from antiphon.train.operators import Compute, Here, Operator


@dataclass
class Held:
    """Bytes of activations that layers hold between forward and backward: `now`, the `peak` since it was reset, and of
    one layer's forward the `largest`."""

    now: int = 0
    peak: int = 0
    largest: int = 0

    def add(self, num_bytes: int) -> None:
        self.now += num_bytes
        self.peak = max(self.peak, self.now)
        self.largest = max(self.largest, num_bytes)

    def take(self) -> "Held":
        """What was counted; the peak begins anew."""
        taken, self.peak, self.largest = Held(self.now, self.peak, self.largest), self.now, 0
        return taken


class _Feed(torch.autograd.Function):
    """`x` with its gradient going to `token`, which has its shape and no memory: so the graph does not hold `x`."""

    @staticmethod
    def forward(ctx: Any, token: Tensor, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


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

    def record(self, here: Here, values: list[Any], constants: Collection[str]) -> tuple[Any, set[str]]:
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
        fed: Tensor = _Feed.apply(token, value)  # type: ignore[no-untyped-call]
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

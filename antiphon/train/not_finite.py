"""Finds where a step's first number that is not finite was made: layer, operator, forward or backward.

A loss or gradient norm that is not finite says nothing of its origin, and watching every result would slow every step.
So the step's passes run once more, with the same weights (the optimizer has not moved), and each result of each
operator is looked at. They run to their end, so that ranks that exchange rows do not wait for each other.

Minus infinity is what masks are made of: where an operator was given it, it is no fault. NaN and plus infinity always
are.
Rejected: autograd's anomaly mode. It sees NaN in backward only, and no layer.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from antiphon.base.errors import UserError
from antiphon.train.shards import Shards
from antiphon.train.spans import OUTSIDE, StepSpans

_UNWRITTEN = ("empty", "new_empty", "empty_like", "empty_strided", "new_empty_strided", "resize_", "set_")
_ON_THE_WAY = ("c10d", "_c10d_functional")  # results that are there only after a wait
_NUM_NAMED = 3
_TURN, _NEVER = 1 << 32, 1 << 62
Begin = Callable[[int, int], None]  # to be called before each pass: its micro-batch, its turn among those of all ranks


def check_parameters(shards: Shards, step: int) -> None:
    """`UserError` if a parameter is not finite: to be called before a checkpoint is written."""
    spoiled = _not_finite_of(_values(shards))
    if spoiled:
        raise UserError(
            f"step {step}: {_names(spoiled)}: no checkpoint is written; the newest one is from before it; lower "
            "optimizer.learning_rate or raise optimizer.eps"
        )


def explain(model: nn.Module, shards: Shards, passes: Callable[[Begin], object], spans: StepSpans) -> tuple[int, str]:
    """(when it was found, why loss or gradients are not finite). When: the turn of the pass (`turn_of`), then how many
    results had been looked at in it. Ranks of a stage run the same operators, so the finding with the least number is
    the cause, and the others follow from it. `passes` runs forward and backward of the step's micro-batches, one after
    another, and records into `spans`. All ranks call it together. Gradients are made anew."""
    spoiled = _not_finite_of([*_values(shards), *model.named_buffers()])
    words = [f"{_names(spoiled)} before it"] if spoiled else []
    shards.zero_grad()
    model.zero_grad()
    origin, number = _first(passes, spans)
    shards.reduce()
    words += [origin] if origin else _of_gradients(shards)
    return 0 if spoiled else number, "; ".join(words) or "nothing that is not finite was made here"


def _values(shards: Shards) -> Iterator[tuple[str, Tensor]]:
    return ((piece.name, piece.values.detach()) for piece in shards.pieces)


def _of_gradients(shards: Shards) -> list[str]:
    """What is wrong with gradients although no operator made anything that is not finite."""
    gradients = [(piece.name, piece.values.grad) for piece in shards.pieces if piece.values.grad is not None]
    spoiled = _not_finite_of(gradients)
    if spoiled:
        return [f"the gradient of {_names(spoiled)}, but no operator made it"]
    if not gradients:
        return []
    name, largest = max(((name, float(each.abs().max())) for name, each in gradients), key=lambda it: it[1])
    return [f"all gradients are finite here; the largest is {largest:.2g}, of {name}: perhaps too large for a norm"]


def complaint(step: int, loss: float, norm: float, why: str, newest: Path | None, rate: float) -> UserError:
    """What the run ends with."""
    last = "there is no checkpoint yet" if newest is None else f"the newest checkpoint, from before it, is {newest}"
    return UserError(
        f"step {step}: loss {loss:g}, gradient norm {norm:g}, so training cannot go on: {why}; {last}; lower "
        f"optimizer.learning_rate (now {rate:.3g}) or optimizer.clip"
    )


def _first(passes: Callable[[Begin], object], spans: StepSpans) -> tuple[str, int]:
    """(where it was made, empty if nowhere; when)."""
    was_on, spans.on = spans.on, True
    spans.take()
    mode = _Looks(spans)
    try:
        with mode:
            passes(mode.begin)
    finally:
        spans.take()
        spans.on = was_on
    return mode.found, mode.number if mode.found else _NEVER


class _Looks(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Looks at results until one is not finite: `found` says where it was made."""

    def __init__(self, spans: StepSpans) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.micro_batch = 0
        self.found = ""
        self.number = 0
        self._spans = spans

    def begin(self, micro_batch: int, turn: int) -> None:
        if not self.found:
            self.micro_batch, self.number = micro_batch, turn * _TURN

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = func._schema.name.rpartition("::")[2]
        on_the_way = func.namespace in _ON_THE_WAY and name != "wait_tensor"
        if self.found or func.is_view or name in _UNWRITTEN or on_the_way:  # not written by it, or not yet
            return func(*args, **kwargs)
        given = list(_floats((args, kwargs)))
        masked = -math.inf in _numbers((args, kwargs)) or any(_has(each, -math.inf) for each in given)
        result = func(*args, **kwargs)
        for each in _floats(result):
            self.number += 1
            value = _fault(each, masked)
            if value is not None:
                spoiled = any(_fault(each, allowed=True) is not None for each in given if not _shares(each, result))
                self.found = self._words(f"{func}", value, spoiled=spoiled)
                break
        return result

    def _words(self, operator: str, value: str, *, spoiled: bool) -> str:
        label = self._spans.current
        place = "outside of all layers" if label.operator == OUTSIDE else str(label)
        whence = "from what was not finite already" if spoiled else "from finite numbers"
        return f"{place}, {operator} (micro-batch {self.micro_batch}) made the first {value}, {whence}"


def _fault(x: Tensor, allowed: bool) -> str | None:
    """What of `x` is not finite; minus infinity is no fault if `allowed`."""
    if bool(torch.isfinite(x).all()):
        return None
    if bool(torch.isnan(x).any()):
        return "NaN"
    if _has(x, math.inf):
        return "infinity"
    return None if allowed else "minus infinity"


def _has(x: Tensor, value: float) -> bool:
    return bool((x == value).any())


def _shares(x: Tensor, result: object) -> bool:
    """Whether `result` was written into `x`: then `x` no longer shows what was given."""
    return any(x.data_ptr() == each.data_ptr() for each in _floats(result))


def _floats(values: object) -> Iterator[Tensor]:
    return (each for each in tree_leaves(values) if isinstance(each, Tensor) and each.is_floating_point())


def _numbers(values: object) -> list[float]:
    return [each for each in tree_leaves(values) if isinstance(each, float)]


def _not_finite_of(tensors: Iterable[tuple[str, Tensor]]) -> Mapping[str, tuple[int, int]]:
    """For each name, how many numbers are not finite, and how many there are."""
    found = {}
    for name, each in tensors:
        if each.is_floating_point():
            num_bad = int((~torch.isfinite(each)).sum())
            if num_bad:
                found[name] = (num_bad, each.numel())
    return found


def _names(spoiled: Mapping[str, tuple[int, int]]) -> str:
    shown = [f"{name} ({bad:,} of {size:,} numbers)" for name, (bad, size) in spoiled.items()][:_NUM_NAMED]
    more = f" and {len(spoiled) - _NUM_NAMED} more parameters" if len(spoiled) > _NUM_NAMED else ""
    verb = "was" if len(spoiled) == 1 else "were"
    return f"{', '.join(shown)}{more} {verb} not finite"

"""What a piece of Python asks of the native kernels, noted once and made again on the same buffers.

Between two decode steps only values and the number of rows change. `note` runs the piece with as many rows as there may
ever be. Kernels are noted and not made, and each tensor that the piece makes is a buffer that stays. `run` then makes
the calls for any number of rows up to that, in one call from Python (`csrc/kernels/calls.h`).

What PyTorch would compute cannot be noted: `CannotNote`, and the piece has to run as it is. Tensors of one constant
can: nothing writes to them. Buffers of a layer are used again two layers later, so a piece may keep what it needs of a
layer until the next one has ended, not longer.

Rejected: noting outside of the back-end which launcher was called with which arguments. The launchers themselves take
most of the time.
"""

from collections.abc import Callable
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from antiphon import _native

Made = TypeVar("Made")
_EMPTY = {"aten::empty", "aten::empty_like", "aten::new_empty"}
_CONSTANT = {"aten::zeros", "aten::zeros_like", "aten::ones", "aten::ones_like", "aten::full", "aten::full_like"}


class CannotNote(Exception):
    """PyTorch would have to compute something; the message names it."""


class NotedCalls:
    """`note` once; `run` as often as wanted. Not thread-safe."""

    def __init__(self, buffers: "CallBuffers | None" = None) -> None:
        """`buffers`: those of pieces that are noted one after the other."""
        self._calls = _native.CallList()
        self._buffers = buffers or CallBuffers()
        self._num_marks = 0
        self._set_times()

    def __len__(self) -> int:
        return len(self._calls)

    def note(self, work: Callable[[], Made]) -> Made:
        """What `work` returns: tensors whose values `run` makes. Weights, caches and tensors that it reads must live as
        long as this object: calls have their addresses. `CannotNote`, and this object is of no use."""
        self._calls.begin()
        try:
            with self._buffers:
                made = work()
        finally:
            self._calls.end()
        self._set_times()
        return made

    def _set_times(self) -> None:
        self._times_ns: NDArray[np.int64] = np.empty(self._num_marks + 1, np.int64)
        self._times_address = self._times_ns.ctypes.data  # once: it takes longer than a call

    def mark(self) -> None:
        """Within `work`: what comes is timed apart from what was."""
        self._calls.mark()
        self._num_marks += 1

    def next_layer(self) -> None:
        """Within `work`: buffers of the layer before the last one are free."""
        self._buffers.next_layer()

    def run(self, num_rows: int) -> NDArray[np.int64]:
        """Make the calls for the first `num_rows` rows. The times of the start and of all marks, in nanoseconds of
        `time.monotonic_ns`, until the next call."""
        self._calls.run(num_rows, self._times_address)
        return self._times_ns


class CallBuffers(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Gives out buffers as empty tensors, and refuses all that computes."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._kept: list[Tensor] = []
        self._of_layers: tuple[list[Tensor], list[Tensor]] = [], []  # those with an even number, and with an odd one
        self._layer = self._num_given = 0

    def next_layer(self) -> None:
        self._layer += 1
        self._num_given = 0

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """False: a mode that no compiler meets need not import one, which takes 0.7 s and 160 MB at the first step."""
        return False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name, kwargs = func._schema.name, kwargs or {}
        if name in _EMPTY:
            like = args[0] if isinstance(args[0], Tensor) else None
            shape = like.shape if like is not None and name == "aten::empty_like" else args[0 if like is None else 1]
            dtype = torch.float32 if like is None else like.dtype
            return self._buffer(torch.Size(shape), kwargs.get("dtype") or dtype)
        if name in _CONSTANT:
            made = func(*args, **kwargs)
            self._kept.append(made)
            return made
        with self:
            made = func.decompose(*args, **kwargs)  # what is made of other operations, which are looked at in its place
        if made is not NotImplemented:
            return made
        if func.is_view:
            return func(*args, **kwargs)
        raise CannotNote(f"PyTorch computes {name.removeprefix('aten::')}")

    def _buffer(self, shape: torch.Size, dtype: torch.dtype) -> Tensor:
        given, number = self._of_layers[self._layer % 2], self._num_given
        self._num_given += 1
        if number < len(given) and given[number].shape == shape and given[number].dtype == dtype:
            return given[number]
        made = torch.empty(shape, dtype=dtype, device="cpu")
        self._kept.append(made)
        given[number : number + 1] = [made]
        return made

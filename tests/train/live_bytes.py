"""Counts the bytes of all tensors that live at once."""

import weakref
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveBytes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Of storages that operators make while it is entered; `peak`: the most at one time."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.now = 0
        self.peak = 0
        self._seen: weakref.WeakSet[Any] = weakref.WeakSet()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for each in tree_leaves(result):
            if isinstance(each, Tensor) and each.untyped_storage() not in self._seen:
                storage = each.untyped_storage()
                self._seen.add(storage)
                self.now += storage.nbytes()
                weakref.finalize(storage, self._freed, storage.nbytes())
        self.peak = max(self.peak, self.now)
        return result

    def _freed(self, num_bytes: int) -> None:
        self.now -= num_bytes

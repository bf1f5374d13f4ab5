"""A dispatch mode that fails on whatever would make a device wait for the host, or be waited for, within a step."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

# Values read back; shapes that depend on values; tensors made of host values.
READS_BACK = {"_local_scalar_dense", "is_nonzero", "equal", "allclose"}
SHAPED_BY_VALUES = {
    *(
        "nonzero",
        "nonzero_numpy",
        "argwhere",
        "masked_select",
        "unique_dim",
        "unique_consecutive",
        "_unique",
        "_unique2",
    ),
    *("bincount", "repeat_interleave", "histc"),
}
MADE_OF_HOST_VALUES = {"lift_fresh", "lift_fresh_copy"}
READERS = ("numpy", "tolist", "item", "cpu", "__bool__", "__int__", "__float__", "__index__")


class NoHost(TorchDispatchMode):
    """Fails on such an operation, and notes (operation, shapes of its results) of all others in `seen`."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[str, tuple[tuple[int, ...], ...]]] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name = func._schema.name.removeprefix("aten::").rstrip("_")
        forbidden = READS_BACK | SHAPED_BY_VALUES | MADE_OF_HOST_VALUES
        assert name not in {each.rstrip("_") for each in forbidden}, f"{func} needs the host"
        assert str(func) != "aten.where.default", "torch.where(mask) has a shape that depends on values"
        if name in ("index", "index_put", "_index_put_impl"):
            masks = [each for each in args[1] if each is not None and each.dtype in (torch.bool, torch.uint8)]
            assert not masks, f"{func} by a mask has a shape that depends on values"
        result = func(*args, **(kwargs or {}))
        devices = {each.device for each in (*args, *_tensors(result)) if isinstance(each, Tensor) and each.dim()}
        assert len(devices) <= 1, f"{func} moves between {devices}"
        self.seen.append((str(func), tuple(tuple(each.shape) for each in _tensors(result))))
        return result


def _tensors(result: Any) -> list[Tensor]:
    return [each for each in (result if isinstance(result, tuple | list) else [result]) if isinstance(each, Tensor)]


def without_host(work: Callable[[], Tensor], monkeypatch: Any) -> tuple[Tensor, list[Any]]:
    """What `work` returns, and the operations it made; fails if the host takes part."""

    def reader(name: str) -> Callable[..., Any]:
        def refuse(*_: Any) -> Any:
            raise AssertionError(f"Tensor.{name} reads the device")

        return refuse

    with monkeypatch.context() as patch, NoHost() as mode:
        for name in READERS:
            patch.setattr(Tensor, name, reader(name))
        result = work()
    return result, mode.seen

"""The random checkpoints of the families' tests, for training, and transformers in float64 from end to end."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.models.conftest import one_thread, save_model, tools

__all__ = ["one_thread", "save_model", "tools"]


@pytest.fixture
def unrounded(monkeypatch: pytest.MonkeyPatch) -> None:
    unround(monkeypatch)


def unround(monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers in float64 from end to end: nothing is cast to float32 on the way."""
    softmax, to = F.softmax, Tensor.to

    def softmax_as_it_is(x: Tensor, *arguments: Any, dtype: Any = None, **named: Any) -> Tensor:
        return softmax(x, *arguments, dtype=None if x.dtype == torch.float64 else dtype, **named)

    def to_but_narrower(x: Tensor, *arguments: Any, **named: Any) -> Tensor:
        if x.dtype == torch.float64 and x.requires_grad and torch.float32 in (*arguments, *named.values()):
            return x  # what needs no gradient is the rotary table, which is in float32 here too
        return to(x, *arguments, **named)

    monkeypatch.setattr(F, "softmax", softmax_as_it_is)
    monkeypatch.setattr(Tensor, "to", to_but_narrower)
    monkeypatch.setattr(Tensor, "type", to_but_narrower)
    monkeypatch.setattr(Tensor, "float", lambda x: to_but_narrower(x, torch.float32))

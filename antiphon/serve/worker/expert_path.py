"""How an attention step reaches its experts: in the same process, or across the exchange. Same calls, same order.

The attention step dispatches a micro-batch and turns to the next one; in one process the work is done at once.
"""

from typing import Protocol

from torch import Tensor

from antiphon.comm.m2n.api import AttentionExchange
from antiphon.models.expert_half import ExpertHalf


class ExpertPath(Protocol):
    """Per layer and micro-batch: one `dispatch`, then one `combine` that returns the weighted sum of expert outputs."""

    @property
    def bytes_sent(self) -> int: ...

    @property
    def wait_s(self) -> float: ...

    @property
    def exposed_s(self) -> float: ...

    def begin_step(self, step: int, participants: list[list[int]]) -> None: ...

    def dispatch(self, layer: int, micro_batch: int, rows_TH: Tensor, ids_TK: Tensor, weights_TK: Tensor) -> None: ...

    def combine(self, layer: int, micro_batch: int) -> Tensor: ...


class LocalExperts:
    """The colocated layout: this process holds all experts."""

    def __init__(self, half: ExpertHalf) -> None:
        self._half = half
        self._results: dict[int, Tensor] = {}
        self.bytes_sent = 0
        self.wait_s = 0.0
        self.exposed_s = 0.0

    def begin_step(self, step: int, participants: list[list[int]]) -> None:
        self._results.clear()

    def dispatch(self, layer: int, micro_batch: int, rows_TH: Tensor, ids_TK: Tensor, weights_TK: Tensor) -> None:
        self._results[micro_batch] = self._half.forward(layer, rows_TH, ids_TK, weights_TK)

    def combine(self, layer: int, micro_batch: int) -> Tensor:
        return self._results.pop(micro_batch)


class RemoteExperts:
    """The disaggregated layout: expert workers behind the exchange. `combine` waits at most `timeout_s`."""

    def __init__(self, exchange: AttentionExchange, timeout_s: float) -> None:
        self._exchange = exchange
        self._timeout_s = timeout_s

    @property
    def bytes_sent(self) -> int:
        return self._exchange.bytes_sent

    @property
    def wait_s(self) -> float:
        return self._exchange.wait_s

    @property
    def exposed_s(self) -> float:
        return self._exchange.exposed_s

    def begin_step(self, step: int, participants: list[list[int]]) -> None:
        self._exchange.begin_step(step, participants)

    def dispatch(self, layer: int, micro_batch: int, rows_TH: Tensor, ids_TK: Tensor, weights_TK: Tensor) -> None:
        self._exchange.dispatch(layer, micro_batch, rows_TH, ids_TK, weights_TK)

    def combine(self, layer: int, micro_batch: int) -> Tensor:
        return self._exchange.combine(layer, micro_batch, self._timeout_s)

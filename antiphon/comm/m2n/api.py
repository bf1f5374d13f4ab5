"""The exchange between attention workers and expert workers, as the engine sees it.

Per layer and micro-batch an attention worker makes one `dispatch` (its rows to every expert worker that owns a chosen
expert, each row once per worker) and one `combine` (the weighted partial sums back). `dispatch` returns at once;
`combine` and `receive` wait, and every wait has a deadline and names whom it waits for. A `dispatch` that finds no
free slot waits for one, at most as long as its exchange was made with (`comm/m2n/native`, an engine's `--timeout`).

Nothing above this seam knows how the bytes travel. Rejected: collectives. They need every rank at every call, so one
dead or idle worker stops all others, and they pad to the largest count (MegaScale-Infer, section 5).

Shapes: T rows sent by one attention worker, H hidden, K experts per token, R rows received by an expert worker.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import msgspec
import torch
from torch import Tensor

from antiphon.comm.ledger import Traffic
from antiphon.placement.split import BoolArray, IntArray, Prefetch
from antiphon.specs.placement import ExpertPlacement, Owners


@dataclass(frozen=True, kw_only=True)
class ExchangeShape:
    """Sizes both ends agree on before the first message. `max_rows` bounds one micro-batch of one attention worker."""

    num_attention: int
    num_experts: int
    num_micro_batches: int
    max_rows: int
    hidden_size: int
    top_k: int
    dtype: torch.dtype

    def most_rows(self, *, merges: bool) -> int:
        """The most rows of one batch of an expert worker. `merges`: of all micro-batches together."""
        return self.num_attention * self.max_rows * (self.num_micro_batches if merges else 1)


class ExpertBatch(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """Rows of one (layer, micro-batch) from all participating attention workers, in the order of `sources`. Where those
    step each for itself, rows of one layer that were ready together: `step` and `micro_batch` are then of the first
    part, and a source may have several.

    `ids_RK` are global expert ids, -1 where the expert lives on another worker. `placements`: the oldest and the newest
    version of the placement by which they were sent. `prefetches`: (source, layer, expert) for which rows will come, of
    this layer or a later one, though the placement does not name them. The tensors may be views of receive buffers:
    they are valid until `reply`.
    """

    step: int
    layer: int
    micro_batch: int
    sources: tuple[int, ...]
    rows_per_source: tuple[int, ...]
    placements: tuple[int, int]
    rows_RH: Tensor
    ids_RK: Tensor
    weights_RK: Tensor
    prefetches: tuple[tuple[int, int, int], ...] = ()


class StepAborted(Exception):
    """The engine declared the running step void (a worker died). Drop it and wait for orders."""


class ExchangeEnd(Protocol):
    """What both ends have."""

    wait_s: float

    @property
    def bytes_sent(self) -> int: ...

    def abort(self, epoch: int) -> None:
        """Any thread: the running step is void, `epoch` is about to begin. Every wait ends with `StepAborted`."""

    def reset(self, epoch: int, tickets: list[bytes]) -> None:
        """Begin `epoch`: whatever was in flight is forgotten. `tickets`: how to reach each expert worker; an empty one:
        that worker is gone, and the placement must not name it.

        All ends reset before any sends again. Blocks until the peers are connected; `PeerTimeout` or `PeerLost` if one
        is not."""

    def traffic(self) -> Traffic:
        """What this end has carried since its start."""

    def close(self) -> None:
        """Say goodbye to all peers; nothing may follow."""


class AttentionExchange(ExchangeEnd, Protocol):
    """The attention worker's end. `exposed_s`: the part of `wait_s` in which the experts waited for did not compute."""

    @property
    def exposed_s(self) -> float: ...

    def begin_step(self, step: int, participants: list[list[int]]) -> None:
        """Announce a step: `participants[i]` lists the attention workers that have rows in micro-batch i."""

    def place(self, placement: ExpertPlacement) -> None:
        """Where the experts are, from the next dispatch on. Between two steps only."""

    def dispatch(self, layer: int, micro_batch: int, rows_TH: Tensor, ids_TK: Tensor, weights_TK: Tensor) -> None:
        """Send each row once to every worker owning one of its experts. The arguments may be reused on return."""

    def take_counts(self) -> bytes:
        """Rows of each expert in all dispatches since the last call, to place experts by: uint32, one MoE layer
        after the other. Empty where experts do not move."""

    def combine(self, layer: int, micro_batch: int, timeout_s: float) -> Tensor:
        """Wait for all expert workers' partial sums of the last `dispatch` of this micro-batch and add them: [T, H].

        Raises `PeerTimeout` with the missing workers' names, `StepAborted` if the engine gave the step up."""


class CopyingExchange(ABC):
    """An attention worker's end that carries requests for copies of experts beside its rows. `placement`: by which rows
    go, but for copies."""

    placement: ExpertPlacement

    def __init__(self) -> None:
        self._prefetched: dict[int, dict[int, int]] = {}  # by layer and worker: an expert beyond the placement

    def place(self, placement: ExpertPlacement) -> None:
        """Where the experts are, from the next dispatch on. Between two steps only."""
        self.placement = placement
        for layer in placement.owners:
            self._place_layer(layer)

    def prefetched(self, layer: int) -> Mapping[int, int]:
        """By worker the expert of this layer that it fetched for this attention worker."""
        return self._prefetched.get(layer, {})

    def prefetch(self, layer: int, copies: Mapping[int, int]) -> None:
        """By worker an expert of which it fetches a copy, in place of the one that it fetched before: rows of `layer`
        go there from now on. The request rides on the next dispatch, of this layer or of an earlier one. Only while no
        rows of this layer are under way, unless it repeats a request. Copies last until the next epoch."""
        present = self._prefetched.setdefault(layer, {})
        is_new = any(present.get(worker) != expert for worker, expert in copies.items())
        present.update(copies)
        for worker, expert in copies.items():
            self._request(worker, layer, expert)
        if is_new:
            self._place_layer(layer)

    def _owners_of(self, layer: int) -> Owners:
        """Who has each expert, copies included."""
        copies, owners = self.prefetched(layer), self.placement.owners[layer]
        if not copies:
            return owners
        return tuple(
            (*of_expert, *(worker for worker, copied in copies.items() if copied == expert and worker not in of_expert))
            for expert, of_expert in enumerate(owners)
        )

    def _forget_copies(self) -> None:
        """None of them is there any more."""
        copied = list(self._prefetched)
        self._prefetched.clear()
        for layer in copied:
            self._place_layer(layer)

    @abstractmethod
    def _request(self, worker: int, layer: int, expert: int) -> None:
        """Have it ride on the next dispatch."""

    @abstractmethod
    def _place_layer(self, layer: int) -> None:
        """Rows of this layer go to `_owners_of` it."""

    @abstractmethod
    def wanted_copies(self, layer: int, counts_E: IntArray, open_W: BoolArray) -> list[Prefetch]:
        """Further copies worth having for these rows (`placement/split`), for workers that may take one."""


class ExpertExchange(ExchangeEnd, Protocol):
    """The expert worker's end."""

    @property
    def ticket(self) -> bytes:
        """How attention workers reach this worker."""

    def receive(self, idle_s: float, timeout_s: float) -> ExpertBatch | None:
        """The next complete batch, or None if nothing at all came within `idle_s` (an idle server is no error).

        Raises `PeerTimeout` when some participants of a batch arrived and others stayed away for `timeout_s`,
        `StepAborted` when the engine started a new epoch."""

    def reply(self, batch: ExpertBatch, partial_RH: Tensor, computed_ns: tuple[int, int]) -> None:
        """Return each source its rows' weighted partial sums, and when they were computed (start, end)."""

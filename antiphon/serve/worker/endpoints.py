"""A process's ends of exchanges, of groups of ranks and of pipelines: opened while it is built, then aborted, reset and
closed together."""

from collections.abc import Callable
from functools import partial

import torch

from antiphon import _m2n
from antiphon.base.errors import PeerTimeout
from antiphon.base.logging import get_logger
from antiphon.comm.device_group import DeviceRankGroup, why_no_device_sums
from antiphon.comm.m2n.api import AttentionExchange, ExchangeShape, ExpertExchange
from antiphon.comm.m2n.native import SPIN_S
from antiphon.comm.rank_group import NativeRankGroup, RankGroup
from antiphon.comm.stages import StagePlace, Stages, open_stages
from antiphon.comm.two_level.levels import Levels
from antiphon.kernels.select import resolve_dtype
from antiphon.serve.worker.messages import Configure, Reset
from antiphon.specs.model import ModelSpec

_log = get_logger("worker")


def rank_names(configure: Configure) -> list[str]:
    """What the processes of this worker call each other (`WorkerName.among_peers`)."""
    return [f"{configure.role}[{configure.index}][{rank}]" for rank in range(configure.num_ranks)]


class Endpoints:
    """Opens ends; `description` sums them up, because a process may have half a dozen."""

    def __init__(self, configure: Configure) -> None:
        self._configure = configure
        self._opened: list[_m2n.Endpoint] = []

    def open(self, name: str, *, of_ranks: bool = False) -> _m2n.Endpoint:
        """An end of an exchange, or of a group of this worker's ranks."""
        exchange = self._configure.exchange
        assert exchange is not None, "a worker without peers needs no endpoint"
        endpoint = _m2n.Endpoint(
            name,
            exchange.rank_transport if of_ranks else exchange.transport,
            host=exchange.host,
            secret=exchange.secret,
            waiting=exchange.waiting,
            local_processes=exchange.local_processes,
            spin_s=SPIN_S,
        )
        self._opened.append(endpoint)
        return endpoint

    @property
    def description(self) -> str:
        """Transports, and how this process waits, which decides more than anything else; empty without ends."""
        transports = ", ".join(sorted({endpoint.transport for endpoint in self._opened}))
        waits = ", ".join(sorted({endpoint.waiting for endpoint in self._opened}))
        return f"transport {transports}, waits by {waits}" if self._opened else ""


class PeerLinks:
    """All that a process waits for: the other side of the exchange, if it has an end of one, and its own ranks."""

    def __init__(self, exchange: AttentionExchange | ExpertExchange | None, ranks: RankGroup | Levels | Stages) -> None:
        """`ranks`: those of its worker, or of its whole instance."""
        self.ranks = ranks
        self._all = [ranks] if exchange is None else [ranks, exchange]

    def abort(self, epoch: int) -> None:
        """Any thread: the running step is void."""
        for each in self._all:
            each.abort(epoch)

    def reset(self, order: Reset) -> None:
        """Begin the epoch with all of them. Blocks; `PeerTimeout`, `PeerLost` or `Refused` if one cannot be reached."""
        for each in self._all:
            each.reset(order.epoch, order.rank_tickets if each is self.ranks else order.tickets)

    def close(self) -> None:
        for each in self._all:
            each.close()


def hear_leader(ranks: RankGroup, idle_s: float) -> bytes | None:
    """What the leader of `ranks` says next; None if it says nothing for `idle_s`."""
    try:
        return ranks.broadcast_bytes(None, timeout_s=idle_s)
    except PeerTimeout:
        return None


def rank_group(configure: Configure, endpoints: Endpoints, device: torch.device) -> RankGroup:
    """This process among the ranks of its worker, or of its stage."""
    tp, rank = configure.tp, configure.rank % configure.tp
    if tp == 1:
        return RankGroup()
    names = rank_names(configure)[configure.rank - rank :][:tp]
    endpoint = endpoints.open(names[rank], of_ranks=True)
    make = group_maker(configure, device)
    if make is NativeRankGroup:  # on GPUs the host waits for no sum
        make = partial(make, in_blocks=configure.sums_in_blocks)
    return make(endpoint, rank, tp, names=names, timeout_s=configure.timeout_s)


def group_maker(configure: Configure, device: torch.device) -> Callable[..., NativeRankGroup]:
    """Makes groups of ranks that compute on such devices: with sums there where NCCL is, else in host memory."""
    reason = why_no_device_sums(device)
    if not reason:
        assert configure.exchange is not None, "ranks reach each other"
        return partial(DeviceRankGroup, device=device, host=configure.exchange.host)
    if device.type != "cpu":
        _log.info("%s[%d]: ranks add in host memory: %s", configure.role, configure.index, reason)
    return NativeRankGroup


def configured_shape(configure: Configure, spec: ModelSpec) -> ExchangeShape:
    """The exchange that this process is one end of."""
    exchange = configure.exchange
    assert exchange is not None, "only workers of the disaggregated layout exchange anything"
    dtype = resolve_dtype(exchange.dtype)
    return exchange_shape(
        spec, dtype, exchange.num_attention, exchange.num_experts, exchange.num_micro_batches, exchange.max_rows
    )


def exchange_shape(
    spec: ModelSpec, dtype: torch.dtype, num_attention: int, num_experts: int, num_micro_batches: int, max_rows: int
) -> ExchangeShape:
    """The exchange that this model needs. Engine and workers derive it from the same numbers."""
    return ExchangeShape(
        num_attention=num_attention,
        num_experts=num_experts,
        num_micro_batches=num_micro_batches,
        max_rows=max_rows,
        hidden_size=spec.hidden_size,
        top_k=spec.router.top_k,
        dtype=dtype,
    )


def worker_stages(
    configure: Configure, endpoints: Endpoints, spec: ModelSpec, dtype: torch.dtype, beside: RankGroup | Levels
) -> Stages:
    """This process among the stages of its worker, not yet connected."""
    exchange = configure.exchange
    assert exchange is not None, "stages reach each other"
    place = StagePlace(
        worker=configure.index if configure.hybrid is not None else 0,
        stage=configure.rank // configure.tp,
        rank=configure.rank % configure.tp,
        num_stages=configure.num_stages,
        num_ranks=configure.tp,
    )
    return open_stages(
        place,
        beside,
        endpoint=partial(endpoints.open, of_ranks=True),
        names=rank_names(configure),
        step_bytes=exchange.max_rows * spec.hidden_size * dtype.itemsize,
        num_micro_batches=exchange.num_micro_batches,
        timeout_s=configure.timeout_s,
    )

"""From a `Configure` message to a process that can run: device, kernels, its part of the model, cache, exchange."""

import os
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import psutil
import torch

from antiphon import _native
from antiphon.base.logging import get_logger
from antiphon.base.ranges import split_evenly
from antiphon.comm.m2n.api import AttentionExchange, ExchangeShape, ExpertExchange
from antiphon.comm.m2n.native import NativeAttentionExchange, NativeExpertExchange
from antiphon.comm.m2n.rank_group import NativeRankGroup
from antiphon.comm.rank_group import Alone, RankGroup
from antiphon.comm.stages import StagePlace, Stages, open_stages
from antiphon.comm.two_level.levels import Levels
from antiphon.kernels.api import KernelBackend
from antiphon.kernels.select import make_backend, resolve_device, resolve_dtype
from antiphon.models.checkpoint import Checkpoint
from antiphon.models.config import load_model_spec
from antiphon.models.load import load_attention_half, load_expert, load_expert_half
from antiphon.models.shares import share_of
from antiphon.models.weights import ReportProgress
from antiphon.placement.routing_trace import read_routing_trace
from antiphon.serve.worker.attention import AttentionRunner
from antiphon.serve.worker.block_tables import BlockTables
from antiphon.serve.worker.endpoints import Endpoints, rank_names
from antiphon.serve.worker.expert_moves import ExpertMoves
from antiphon.serve.worker.experts import ExpertCounters, ExpertRunner, LeadersExperts, LocalExperts
from antiphon.serve.worker.hybrid import hybrid_exchange, hybrid_experts, hybrid_forms, hybrid_levels
from antiphon.serve.worker.messages import Configure
from antiphon.serve.worker.ranks import ExpertRanks, FollowingAttention, LeadingAttention, Links
from antiphon.serve.worker.routing_recorder import RoutingRecorder, RoutingReplay
from antiphon.serve.worker.row_sampler import RowSampler
from antiphon.serve.worker.spans import SpanRecorder
from antiphon.specs.model import ModelSpec

_log = get_logger("worker")


@dataclass
class AttentionWorker:
    """A loaded attention worker (or a replica, whose experts are in the same process), or the leader of one."""

    runner: LeadingAttention
    recorder: SpanRecorder
    exchange: AttentionExchange
    links: Links
    moves: ExpertMoves | None
    counters: ExpertCounters | None
    kernels: str


@dataclass
class ExpertWorker:
    """A loaded expert worker, or the leader of one."""

    runner: ExpertRunner
    recorder: SpanRecorder
    exchange: ExpertExchange
    links: Links
    moves: ExpertMoves
    counters: ExpertCounters
    kernels: str
    timeout_s: float


@dataclass
class Follower:
    """A loaded rank that does what the leader of its worker says. `counters`: if it leads ranks that share experts."""

    runner: FollowingAttention | ExpertRanks
    recorder: SpanRecorder
    links: Links
    moves: ExpertMoves | None
    counters: ExpertCounters | None
    kernels: str
    timeout_s: float


LoadedWorker = AttentionWorker | ExpertWorker | Follower


def build_worker(configure: Configure, progress: ReportProgress) -> LoadedWorker:
    """Load what the role keeps, nothing else. `UserError` for anything wrong with the checkpoint or the machine."""
    device = resolve_device(configure.device, configure.device_index)
    if device.type != "cpu":
        _log.info("%s[%d]: on %s", configure.role, configure.index, device)
    backend = make_backend(configure.kernels, device, resolve_dtype(configure.dtype))
    _claim_cores(configure, backend)
    spec = load_model_spec(configure.model)
    checkpoint = Checkpoint(configure.model)
    recorder = SpanRecorder(configure.trace)
    endpoints = Endpoints(configure)
    build = _build_experts if configure.role == "experts" else _build_attention
    worker = build(configure, endpoints, backend, spec, checkpoint, recorder, progress)
    if endpoints.description:
        name = f"{configure.role}[{configure.index}]"
        _log.info("%s: %s", name if configure.num_ranks == 1 else f"{name}[{configure.rank}]", endpoints.description)
    return worker


def _rank_group(configure: Configure, endpoints: Endpoints) -> RankGroup:
    """This process among the ranks of its worker, or of its stage."""
    tp, rank = configure.tp, configure.rank % configure.tp
    if tp == 1:
        return Alone()
    names = rank_names(configure)[configure.rank - rank :][:tp]
    endpoint = endpoints.open(names[rank], of_ranks=True)
    return NativeRankGroup(endpoint, rank, tp, names=names, timeout_s=configure.timeout_s)


def _claim_cores(configure: Configure, backend: KernelBackend) -> None:
    if configure.cores:
        psutil.Process(os.getpid()).cpu_affinity(configure.cores)
    if backend.name == "cpu":
        _native.set_num_threads(configure.num_threads)
        torch.set_num_threads(1)  # PyTorch's own pool would compete with the kernels' pool for the same cores
    elif backend.device.type == "cpu":
        torch.set_num_threads(configure.num_threads)


def _exchange_shape(configure: Configure, spec: ModelSpec) -> ExchangeShape:
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


def _build_experts(
    configure: Configure,
    endpoints: Endpoints,
    backend: KernelBackend,
    spec: ModelSpec,
    checkpoint: Checkpoint,
    recorder: SpanRecorder,
    progress: ReportProgress,
) -> ExpertWorker | Follower:
    ranks = _rank_group(configure, endpoints)
    share = share_of(spec, ranks.rank, ranks.size)
    placement, num_slots = configure.placement, configure.expert_slots
    held = placement.experts_of(configure.index)
    half = load_expert_half(checkpoint, spec, backend, held, progress, share=share, num_slots=num_slots)
    moves = ExpertMoves(configure.index, half, partial(load_expert, checkpoint, spec, share, half), placement)
    experts = ExpertRanks(ranks, half, moves, recorder)
    if ranks.rank > 0:
        return Follower(experts, recorder, Links(None, ranks), moves, None, backend.name, configure.timeout_s)
    exchange = NativeExpertExchange(
        endpoints.open(f"experts[{configure.index}]"),
        _exchange_shape(configure, spec),
        configure.index,
    )
    counters = ExpertCounters(configure.index, half)
    runner = ExpertRunner(experts, exchange, counters, recorder)
    links = Links(exchange, ranks)
    return ExpertWorker(runner, recorder, exchange, links, moves, counters, backend.name, configure.timeout_s)


def _build_attention(
    configure: Configure,
    endpoints: Endpoints,
    backend: KernelBackend,
    spec: ModelSpec,
    checkpoint: Checkpoint,
    recorder: SpanRecorder,
    progress: ReportProgress,
) -> AttentionWorker | Follower:
    """An attention worker or a replica, or one rank of it."""
    levels = None
    if configure.hybrid is not None:
        levels = hybrid_levels(configure, spec, backend.dtype, endpoints.open)
    ranks = _rank_group(configure, endpoints) if levels is None else levels.attention
    stages = None if configure.num_stages == 1 else _stages(configure, endpoints, spec, backend.dtype, levels or ranks)
    layers = range(*split_evenly(spec.num_layers, configure.num_stages)[configure.rank // configure.tp])
    # One progress over both halves where both are loaded; how much the second needs is known once it is planned.
    is_replica = configure.role == "replica"
    expected = 0 if not is_replica else sum(checkpoint.stored_bytes(name) for name in checkpoint.names)
    half = load_attention_half(
        checkpoint,
        spec,
        backend,
        lambda done, total: progress(done, max(total, expected)),
        max_positions=configure.max_model_len,
        ranks=ranks,
        layers=layers,
    )
    exchange: AttentionExchange
    moves, counters = None, None
    if is_replica:
        exchange, moves, counters = _own_experts(
            configure,
            backend,
            spec,
            checkpoint,
            ranks,
            levels,
            layers,
            lambda done, total: progress(half.weight_bytes + done, half.weight_bytes + total),
        )
    elif ranks.rank > 0:
        exchange = LeadersExperts()
    else:
        exchange = NativeAttentionExchange(
            endpoints.open(f"attention[{configure.index}]"),
            _exchange_shape(configure, spec),
            configure.index,
            configure.placement,
            configure.timeout_s,
        )
    max_blocks = -(-configure.max_model_len // configure.block_size) + 1
    leads = configure.rank == 0
    runner = AttentionRunner(
        half,
        exchange,
        half.new_cache(configure.num_blocks, configure.block_size),
        BlockTables(configure.block_size, configure.max_running, max_blocks, backend.device),
        RowSampler(backend) if leads else None,
        recorder,
        configure.timeout_s,
        RoutingRecorder(spec.expert_layers) if configure.record_routing and leads else None,
        count_rows=configure.count_rows and leads,
        forms=hybrid_forms(configure, spec, backend.dtype, levels, exchange),
        moves=moves,
        stages=stages,
        replay=_replay(configure, spec),
    )
    links = Links(None if levels else exchange, stages or levels or ranks)
    crew = ranks if stages is None else stages.crew
    if not leads:
        follower = FollowingAttention(crew, runner)
        return Follower(follower, recorder, links, moves, counters, backend.name, configure.timeout_s)
    return AttentionWorker(LeadingAttention(crew, runner), recorder, exchange, links, moves, counters, backend.name)


def _replay(configure: Configure, spec: ModelSpec) -> RoutingReplay | None:
    if not configure.replay_routing:
        return None
    return RoutingReplay(read_routing_trace(Path(configure.replay_routing)), spec, configure.max_running)


def _own_experts(
    configure: Configure,
    backend: KernelBackend,
    spec: ModelSpec,
    checkpoint: Checkpoint,
    ranks: RankGroup,
    levels: Levels | None,
    layers: range,
    progress: ReportProgress,
) -> tuple[AttentionExchange, ExpertMoves | None, ExpertCounters | None]:
    """The experts of a replica's layers: all of them here, or this rank's part of what its instance shares. Those may
    move, and the first of the ranks that share them counts what they compute."""
    if levels is None:
        every = {layer: range(spec.router.num_experts) for layer in spec.expert_layers if layer in layers}
        share = share_of(spec, ranks.rank, ranks.size)
        return LocalExperts(load_expert_half(checkpoint, spec, backend, every, progress, share=share)), None, None
    held, share = hybrid_experts(levels, spec, configure.placement, layers)
    half = load_expert_half(checkpoint, spec, backend, held, progress, share=share, num_slots=configure.expert_slots)
    load = partial(load_expert, checkpoint, spec, share, half)
    part = levels.topology.part_of(levels.rank)
    counters = ExpertCounters(part, half) if levels.experts.rank == 0 else None
    moves = ExpertMoves(part, half, load, configure.placement)
    return hybrid_exchange(levels, configure.placement, half, counters), moves, counters


def _stages(
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

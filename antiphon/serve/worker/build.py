"""From a `Configure` message to a process that can run: device, kernels, its part of the model, cache, exchange."""

import os
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from antiphon import _native
from antiphon.base.errors import CheckpointError, UserError
from antiphon.base.logging import get_logger
from antiphon.base.split_evenly import split_evenly
from antiphon.comm.gloo_exchange import GlooAttentionExchange, GlooExpertExchange
from antiphon.comm.m2n.api import AttentionExchange, CopyingExchange, ExpertExchange
from antiphon.comm.m2n.native import NativeAttentionExchange, NativeExpertExchange
from antiphon.comm.m2n.streams import StreamAttentionExchange, StreamExpertExchange
from antiphon.comm.rank_group import RankGroup
from antiphon.comm.stages import Stages
from antiphon.comm.two_level.hybrid import HybridExchange
from antiphon.comm.two_level.levels import Levels
from antiphon.kernels.api import KernelBackend, KVCache
from antiphon.kernels.select import make_backend, resolve_device, resolve_dtype
from antiphon.kernels.triton import interprets
from antiphon.models.attention_half import AttentionHalf
from antiphon.models.batch import BlockTables
from antiphon.models.checkpoint import Checkpoint
from antiphon.models.config import load_model_spec
from antiphon.models.expert_half import ExpertHalf, OffloadedExperts, OffloadedHalf
from antiphon.models.gguf.checkpoint import open_weights
from antiphon.models.load import load_attention_half, load_expert, load_expert_half, load_offloaded_experts
from antiphon.models.noted_half import NotedHalf
from antiphon.models.shares import share_of
from antiphon.models.weights import ReportProgress
from antiphon.placement.routing_trace import read_routing_trace
from antiphon.placement.sample_paths import PathProfile, read_path_profile
from antiphon.serve.worker.attention import AllLayers, AttentionRanks, AttentionRunner, PipelineStage
from antiphon.serve.worker.counting_recorder import CountingRecorder
from antiphon.serve.worker.decode_steps import CapturedSteps, DecodeSteps, native_steps
from antiphon.serve.worker.endpoints import Endpoints, PeerLinks, configured_shape, rank_group, worker_stages
from antiphon.serve.worker.exchange import (
    BlockExchange,
    LeadersExperts,
    LocalExperts,
    OffloadingExchange,
    RoutingReplay,
    RowRouting,
    StepExchange,
)
from antiphon.serve.worker.expert_moves import ExpertMoves
from antiphon.serve.worker.expert_prefetch import Prefetcher, PrefetchingExchange
from antiphon.serve.worker.experts import ExpertCounters, ExpertRanks, ExpertRunner
from antiphon.serve.worker.hybrid import (
    HybridStepExchange,
    PrefetchingHybrid,
    hybrid_exchange,
    hybrid_experts,
    hybrid_forms,
    hybrid_levels,
)
from antiphon.serve.worker.kv_transfer import KVLinks, KVSender, Say, cache_part, layout_digest
from antiphon.serve.worker.messages import Configure
from antiphon.serve.worker.row_sampler import RowSampler
from antiphon.serve.worker.side_by_side import SharedExchange, SideBySide
from antiphon.serve.worker.spans import SpanRecorder
from antiphon.specs.model import ModelSpec

_log = get_logger("worker")


@dataclass(kw_only=True)
class LoadedWorker:
    """A process that can work. `moves`: of experts that it holds for others; `counters`: of what they compute, if it
    leads their ranks; `kv`: the way of keys and values to other workers, or from them."""

    recorder: SpanRecorder
    links: PeerLinks
    kernels: str
    timeout_s: float
    moves: ExpertMoves | None = None
    counters: ExpertCounters | None = None
    kv: KVLinks | None = None


@dataclass(kw_only=True)
class AttentionWorker(LoadedWorker):
    """An attention worker (or a replica, whose experts are in the same process), or the leader of one."""

    runner: AttentionRunner | AttentionRanks
    exchange: AttentionExchange


@dataclass(kw_only=True)
class ExpertWorker(LoadedWorker):
    """An expert worker, or the leader of one."""

    runner: ExpertRunner
    exchange: ExpertExchange


@dataclass(kw_only=True)
class Follower(LoadedWorker):
    """A rank that does what the leader of its worker says."""

    runner: AttentionRanks | ExpertRanks


@dataclass(frozen=True, kw_only=True)
class _Source:
    """What a process is made from."""

    configure: Configure
    endpoints: Endpoints
    backend: KernelBackend
    spec: ModelSpec
    checkpoint: Checkpoint
    recorder: SpanRecorder
    progress: ReportProgress
    say: Say


@dataclass(frozen=True, kw_only=True)
class _Seat:
    """An attention process among others: the ranks that split its layers, those that share its experts (`levels`), and
    the stages of its pipeline. None: it has none."""

    ranks: RankGroup
    levels: Levels | None
    stages: Stages | None
    layers: range


def build_worker(configure: Configure, progress: ReportProgress, say: Say) -> LoadedWorker:
    """Load what the role keeps, nothing else. `UserError` for anything wrong with the checkpoint or the machine.
    `say` sends a message to the engine, from any thread."""
    device = resolve_device(configure.device, configure.device_index)
    if device.type != "cpu":
        _log.info("%s[%d]: on %s", configure.role, configure.index, device)
    backend = make_backend(configure.kernels, device, resolve_dtype(configure.dtype))
    _claim_cores(configure, backend)
    checkpoint = open_weights(configure.model, configure.weights)
    spec = load_model_spec(configure.model, configure.rope_scaling)
    _check_same_model(configure, checkpoint.fingerprint(spec))
    source = _Source(
        configure=configure,
        endpoints=Endpoints(configure),
        backend=backend,
        spec=spec,
        checkpoint=checkpoint,
        recorder=CountingRecorder() if configure.trace else SpanRecorder(keeps_all=False),
        progress=progress,
        say=say,
    )
    worker = _build_experts(source) if configure.role == "experts" else _build_attention(source)
    if waits := source.endpoints.description:
        name = f"{configure.role}[{configure.index}]"
        waits += ", in stream order" if configure.streams else ""
        _log.info("%s: %s", name if configure.num_ranks == 1 else f"{name}[{configure.rank}]", waits)
    return worker


def _check_same_model(configure: Configure, found: dict[str, str]) -> None:
    """`CheckpointError` unless the checkpoint computes what the server's did when it began."""
    if others := [what for what, digest in configure.fingerprint.items() if found[what] != digest]:
        raise CheckpointError(
            f"{configure.model} has other {', '.join(others)} than the server began with: a worker that joins needs "
            "the server's checkpoint (--model); where the files were changed, put them back or start the server again"
        )


def _compiles(backend: KernelBackend) -> bool:
    """Whether kernels are compiled at their first use."""
    return backend.name == "triton" and not interprets()


def _claim_cores(configure: Configure, backend: KernelBackend) -> None:
    if configure.cores:
        try:
            os.sched_setaffinity(os.getpid(), configure.cores)
        except OSError as error:  # a container may refuse it, or have lost a core since; the kernel schedules then
            _log.warning("%s[%d] is not pinned to its cores: %s", configure.role, configure.index, error.strerror)
    if backend.name == "cpu":
        _native.set_num_threads(configure.num_threads)
        if not configure.spins:
            _native.set_spin_ns(0)
        torch.set_num_threads(1)  # PyTorch's own pool would compete with the kernels' pool for the same cores
    elif backend.device.type == "cpu":
        torch.set_num_threads(configure.num_threads)


def _build_experts(source: _Source) -> ExpertWorker | Follower:
    configure, spec, backend, recorder = source.configure, source.spec, source.backend, source.recorder
    ranks = rank_group(configure, source.endpoints, backend.device)
    share = share_of(spec, ranks.rank, ranks.size)
    placement, num_slots = configure.placement, configure.expert_slots + _num_prefetched(configure)
    held = placement.experts_of(configure.index)
    half: ExpertHalf
    if configure.expert_bytes:
        pool = load_offloaded_experts(source.checkpoint, spec, backend, configure.expert_bytes, held, share=share)
        ids = {layer: tuple(experts) for layer, experts in held.items()}
        half = OffloadedHalf(spec=share.local_spec(spec), backend=backend, experts={}, expert_ids=ids, offloaded=pool)
    else:
        half = load_expert_half(
            source.checkpoint, spec, backend, held, source.progress, share=share, num_slots=num_slots
        )
    if _compiles(backend):  # while attention workers would wait for their rows
        merges = configure.exchange is not None and configure.exchange.merges
        half.warm_up(configured_shape(configure, spec).most_rows(merges=merges))
    load = partial(load_expert, source.checkpoint, spec, share, half)
    moves = ExpertMoves(configure.index, half, load, placement, _num_prefetched(configure))
    experts = ExpertRanks(ranks, half, moves, recorder)
    common: dict[str, Any] = {"recorder": recorder, "kernels": backend.name, "timeout_s": configure.timeout_s}
    if ranks.rank > 0:
        return Follower(runner=experts, links=PeerLinks(None, ranks), moves=moves, **common)
    exchange = _experts_end(source)
    counters = ExpertCounters(configure.index, half)
    runner = ExpertRunner(experts, exchange, counters, recorder, in_stream_order=configure.streams)
    links = PeerLinks(exchange, ranks)
    return ExpertWorker(runner=runner, exchange=exchange, links=links, moves=moves, counters=counters, **common)


def _experts_end(source: _Source) -> ExpertExchange:
    configure, shape = source.configure, configured_shape(source.configure, source.spec)
    if configure.exchange is not None and configure.exchange.library == "gloo":
        return GlooExpertExchange(shape, configure.index, configure.exchange.host, configure.timeout_s)
    endpoint = source.endpoints.open(f"experts[{configure.index}]")
    merges = configure.exchange is not None and configure.exchange.merges
    if configure.streams:
        device, timeout_s = source.backend.device, configure.timeout_s
        lands = configure.num_ranks == 1  # ranks share rows through host memory
        return StreamExpertExchange(endpoint, shape, configure.index, timeout_s, device, merges=merges, lands=lands)
    return NativeExpertExchange(endpoint, shape, configure.index, merges=merges)


def _num_prefetched(configure: Configure) -> int:
    """Slots of each layer for copies ahead of it: one for each attention worker."""
    exchange = configure.exchange
    return exchange.num_attention if configure.prefetch_rows and exchange is not None else 0


def _build_attention(source: _Source) -> AttentionWorker | Follower:
    """An attention worker or a replica, or one rank of it."""
    configure, recorder, kernels = source.configure, source.recorder, source.backend.name
    seat = _take_seat(source)
    half = _load_attention(source, seat)
    if configure.role == "attention" or seat.levels or seat.stages:  # a replica's whole step is one call
        half = NotedHalf.of(half, configure.max_running, configure.max_model_len, configure.block_size)
    exchange: AttentionExchange
    moves, counters = None, None
    if configure.role == "replica":
        exchange, moves, counters = _own_experts(source, seat, half.weight_bytes)
    else:
        exchange = _others_experts(source, seat.ranks)
    num_blocks = configure.num_blocks + (1 if configure.graphs else 0)  # one more for rows that pad a step
    cache = half.new_cache(num_blocks, configure.block_size, configure.kv_dtype)
    if _compiles(source.backend):  # while a request would wait for its first token
        half.warm_up(cache, configure.max_running)
        if isinstance(exchange, LocalExperts) and isinstance(exchange.experts, ExpertHalf):
            exchange.experts.warm_up(configure.max_running)
    kv = _kv_links(source, seat, cache)
    runner = _attention_runner(source, seat, half, exchange, moves, cache, None if kv is None else kv.sender)
    links = PeerLinks(None if seat.levels else exchange, seat.stages or seat.levels or seat.ranks)
    crew = seat.ranks if seat.stages is None else seat.stages.crew
    common: dict[str, Any] = {"recorder": recorder, "kernels": kernels, "timeout_s": configure.timeout_s}
    common |= {"links": links, "moves": moves, "counters": counters, "kv": kv}
    if configure.rank > 0:
        return Follower(runner=AttentionRanks(crew, runner), **common)
    leader = runner if crew.size == 1 else AttentionRanks(crew, runner)
    return AttentionWorker(runner=leader, exchange=exchange, **common)


def _kv_links(source: _Source, seat: _Seat, cache: KVCache) -> KVLinks | None:
    """The way of keys and values to other workers, where there is one."""
    configure, spec, config = source.configure, source.spec, source.configure.kv
    if config is None:
        return None
    name = f"{configure.role}[{configure.index}][{configure.rank}]"
    part = cache_part(spec, configure.rank % configure.tp, configure.tp, seat.layers)
    layout = layout_digest(spec, source.backend.dtype, configure.kv_dtype)
    if config.layout and layout != config.layout:
        raise UserError(
            f"{configure.model} has another model than the server: a cached token is {layout} here and {config.layout} "
            "there; give this worker the server's checkpoint (--model)"
        )
    return KVLinks(config, name, cache, part, layout, source.say)


def _take_seat(source: _Source) -> _Seat:
    """Open this process's ends to the others; nothing is connected yet."""
    configure, endpoints, spec, dtype = source.configure, source.endpoints, source.spec, source.backend.dtype
    levels = None
    if configure.hybrid is not None:
        levels = hybrid_levels(configure, spec, source.backend, endpoints.open)
    ranks = rank_group(configure, endpoints, source.backend.device) if levels is None else levels.attention
    stages = None if configure.num_stages == 1 else worker_stages(configure, endpoints, spec, dtype, levels or ranks)
    layers = range(*split_evenly(spec.num_layers, configure.num_stages)[configure.rank // configure.tp])
    return _Seat(ranks=ranks, levels=levels, stages=stages, layers=layers)


def _load_attention(source: _Source, seat: _Seat) -> AttentionHalf:
    # One progress over both halves where both are loaded; how much the second needs is known once it is planned.
    checkpoint, expected = source.checkpoint, 0
    if source.configure.role == "replica":
        expected = sum(checkpoint.stored_bytes(name) for name in checkpoint.names)
    return load_attention_half(
        checkpoint,
        source.spec,
        source.backend,
        lambda done, total: source.progress(done, max(total, expected)),
        max_positions=source.configure.max_model_len,
        ranks=seat.ranks,
        layers=seat.layers,
    )


def _replay(configure: Configure, spec: ModelSpec) -> RoutingReplay | None:
    if not configure.replay_routing:
        return None
    return RoutingReplay(read_routing_trace(Path(configure.replay_routing)), spec, configure.max_running)


def _paths(configure: Configure, spec: ModelSpec) -> PathProfile | None:
    if not configure.path_profile:
        return None
    profile = read_path_profile(Path(configure.path_profile))
    profile.check_fits(spec)
    return profile


def _own_experts(
    source: _Source, seat: _Seat, loaded_bytes: int
) -> tuple[AttentionExchange, ExpertMoves | None, ExpertCounters | None]:
    """The experts of a replica's layers: all of them here, or this rank's part of what its instance shares. Those may
    move, and the first of the ranks that share them counts what they compute. `loaded_bytes`: of its other half."""
    configure, spec, checkpoint, backend = source.configure, source.spec, source.checkpoint, source.backend
    ranks, levels, layers = seat.ranks, seat.levels, seat.layers

    def progress(done: int, total: int) -> None:
        source.progress(loaded_bytes + done, loaded_bytes + total)

    if levels is None:
        if configure.expert_bytes:
            offloaded = load_offloaded_experts(checkpoint, spec, backend, configure.expert_bytes)
            return LocalExperts(offloaded), None, None
        every = {layer: range(spec.router.num_experts) for layer in spec.expert_layers if layer in layers}
        share = share_of(spec, ranks.rank, ranks.size)
        return LocalExperts(load_expert_half(checkpoint, spec, backend, every, progress, share=share)), None, None
    held, share = hybrid_experts(levels, spec, configure.placement, layers)
    num_slots = configure.expert_slots + _num_prefetched(configure)
    half = load_expert_half(checkpoint, spec, backend, held, progress, share=share, num_slots=num_slots)
    load = partial(load_expert, checkpoint, spec, share, half)
    part = levels.topology.part_of(levels.rank)
    counters = ExpertCounters(part, half) if levels.experts.rank == 0 else None
    moves = ExpertMoves(part, half, load, configure.placement, _num_prefetched(configure))
    return hybrid_exchange(levels, configure.placement, half, counters, moves.prefetched), moves, counters


def _others_experts(source: _Source, ranks: RankGroup) -> AttentionExchange:
    """The way to the expert workers: the exchange, or the leader that has an end of it."""
    configure = source.configure
    if ranks.rank > 0:
        return LeadersExperts()
    shape, index, placement = configured_shape(configure, source.spec), configure.index, configure.placement
    if configure.exchange is not None and configure.exchange.library == "gloo":
        return GlooAttentionExchange(shape, index, placement, configure.exchange.host, configure.timeout_s)
    endpoint = source.endpoints.open(f"attention[{index}]")
    if configure.streams:
        device = source.backend.device
        return StreamAttentionExchange(endpoint, shape, index, placement, configure.timeout_s, device)
    return NativeAttentionExchange(endpoint, shape, index, placement, configure.timeout_s)


def _attention_runner(
    source: _Source,
    seat: _Seat,
    half: AttentionHalf,
    exchange: AttentionExchange,
    moves: ExpertMoves | None,
    cache: KVCache,
    sender: KVSender | None,
) -> AttentionRunner:
    """Only the leader samples, counts rows and records routing."""
    configure, backend, recorder, leads = source.configure, source.backend, source.recorder, source.configure.rank == 0
    max_blocks = -(-configure.max_model_len // configure.block_size) + 1
    sampler = RowSampler(backend) if leads else None
    tables = BlockTables(configure.block_size, configure.max_running, max_blocks, backend.device)
    decode_steps: DecodeSteps | None = None
    if configure.graphs:
        assert isinstance(exchange, LocalExperts), "only a worker with all experts runs without the host"
        assert isinstance(exchange.experts, ExpertHalf), "in its memory"
        assert sampler is not None, "it has one rank"
        decode_steps = CapturedSteps(half, exchange.experts, cache, tables, sampler, pad_block=configure.num_blocks)
        if _compiles(backend) or backend.device.type == "cuda":
            decode_steps.warm_up(configure.max_running)
    elif not (configure.record_routing or configure.replay_routing):
        decode_steps = native_steps(half, exchange, cache, tables, sampler, recorder, most_rows=configure.max_running)
    stage = PipelineStage(half, sampler, seat.stages, recorder) if seat.stages else AllLayers(half, sampler)
    routing = RowRouting(
        half,
        record=configure.record_routing and leads,
        replay=_replay(configure, source.spec),
        paths=_paths(configure, source.spec),
        # A pipeline's leader sees only the layers of its own stage: it counts none.
        counts_prompts=leads
        and seat.stages is None
        and (configure.role == "attention" or configure.hybrid is not None),
    )
    steps = _step_exchange(source, seat, half, exchange, moves)
    if isinstance(steps, SharedExchange):
        return SideBySide(steps, cache, tables, stage, routing, sender)
    return AttentionRunner(steps, cache, tables, stage, routing, sender, decode_steps)


def _step_exchange(
    source: _Source, seat: _Seat, half: AttentionHalf, exchange: AttentionExchange, moves: ExpertMoves | None
) -> StepExchange:
    """What steps use of `exchange`, with what the layout adds."""
    configure, recorder, timeout_s = source.configure, source.recorder, source.configure.timeout_s
    counts_rows = configure.count_rows and configure.rank == 0
    prefetcher = None
    if configure.prefetch_rows and isinstance(exchange, CopyingExchange):
        num_experts = source.spec.router.num_experts
        prefetcher = Prefetcher(num_experts, exchange, configure.prefetch_rows, configure.phases)
    if seat.levels is not None:
        assert isinstance(exchange, HybridExchange), "it goes over the levels"
        assert moves is not None, "experts that serve others may move"
        forms = hybrid_forms(configure, source.spec, source.backend, seat.levels, exchange)
        ends = (exchange, half, recorder, timeout_s)
        return (
            HybridStepExchange(*ends, counts_rows=counts_rows, moves=moves, forms=forms)
            if prefetcher is None
            else PrefetchingHybrid(*ends, counts_rows=counts_rows, moves=moves, forms=forms, prefetcher=prefetcher)
        )
    if isinstance(exchange, LocalExperts) and isinstance(exchange.experts, OffloadedExperts):
        return OffloadingExchange(exchange, half, recorder, timeout_s, experts=exchange.experts)
    if configure.sums_in_blocks and isinstance(exchange, LocalExperts) and isinstance(exchange.experts, ExpertHalf):
        return BlockExchange(exchange, half, recorder, timeout_s, experts=exchange.experts)
    if prefetcher is not None:
        return PrefetchingExchange(exchange, half, recorder, timeout_s, counts_rows=counts_rows, prefetcher=prefetcher)
    if configure.exchange is not None and configure.exchange.side_by_side:
        assert isinstance(exchange, NativeAttentionExchange), "other libraries carry steps that all take together"
        return SharedExchange(exchange, half, recorder, timeout_s, counts_rows=counts_rows)
    return StepExchange(exchange, half, recorder, timeout_s, counts_rows=counts_rows)

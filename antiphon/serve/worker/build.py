"""From a `Configure` message to a worker that can run: device, kernels, half of the model, cache, exchange."""

import os
from dataclasses import dataclass
from functools import partial

import psutil
import torch

from antiphon import _m2n, _native
from antiphon.base.logging import get_logger
from antiphon.comm.m2n.api import AttentionExchange, ExchangeShape, ExpertExchange
from antiphon.comm.m2n.native import SPIN_S, NativeAttentionExchange, NativeExpertExchange
from antiphon.kernels.api import KernelBackend
from antiphon.kernels.select import make_backend, resolve_device, resolve_dtype
from antiphon.models.checkpoint import Checkpoint
from antiphon.models.config import load_model_spec
from antiphon.models.load import load_attention_half, load_expert, load_expert_half
from antiphon.models.weights import ReportProgress
from antiphon.serve.worker.attention import AttentionRunner, BlockTables
from antiphon.serve.worker.expert_moves import ExpertMoves
from antiphon.serve.worker.experts import ExpertRunner, LocalExperts
from antiphon.serve.worker.messages import Configure
from antiphon.serve.worker.row_counts import RowCounts
from antiphon.serve.worker.row_sampler import RowSampler
from antiphon.serve.worker.spans import SpanRecorder
from antiphon.specs.model import ModelSpec

_log = get_logger("worker")


@dataclass
class AttentionWorker:
    """A loaded attention worker (or a replica, whose experts are in the same process)."""

    runner: AttentionRunner
    recorder: SpanRecorder
    exchange: AttentionExchange
    kernels: str


@dataclass
class ExpertWorker:
    """A loaded expert worker."""

    runner: ExpertRunner
    recorder: SpanRecorder
    exchange: ExpertExchange
    kernels: str
    timeout_s: float


def build_worker(configure: Configure, progress: ReportProgress) -> AttentionWorker | ExpertWorker:
    """Load what the role keeps, nothing else. `UserError` for anything wrong with the checkpoint or the machine."""
    device = resolve_device(configure.device, configure.device_index)
    if device.type != "cpu":
        _log.info("%s[%d]: on %s", configure.role, configure.index, device)
    backend = make_backend(configure.kernels, device, resolve_dtype(configure.dtype))
    _claim_cores(configure, backend)
    spec = load_model_spec(configure.model)
    checkpoint = Checkpoint(configure.model)
    recorder = SpanRecorder(configure.trace)
    if configure.role == "experts":
        return _build_experts(configure, backend, spec, checkpoint, recorder, progress)
    return _build_attention(configure, backend, spec, checkpoint, recorder, progress)


def _claim_cores(configure: Configure, backend: KernelBackend) -> None:
    if configure.cores:
        psutil.Process(os.getpid()).cpu_affinity(configure.cores)
    if backend.name == "cpu":
        _native.set_num_threads(configure.num_threads)
        torch.set_num_threads(1)  # PyTorch's own pool would compete with the kernels' pool for the same cores
    elif backend.device.type == "cpu":
        torch.set_num_threads(configure.num_threads)


def _exchange_shape(configure: Configure, spec: ModelSpec, dtype: torch.dtype) -> ExchangeShape:
    exchange = configure.exchange
    assert exchange is not None, "only workers of the disaggregated layout exchange anything"
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


def _endpoint(configure: Configure) -> _m2n.Endpoint:
    """This worker's end of the exchange. It says how it waits, because that decides more than anything else."""
    exchange = configure.exchange
    assert exchange is not None, "only workers of the disaggregated layout exchange anything"
    endpoint = _m2n.Endpoint(
        f"{configure.role}[{configure.index}]",
        exchange.transport,
        host=exchange.host,
        secret=exchange.secret,
        waiting=exchange.waiting,
        local_processes=exchange.local_processes,
        spin_s=SPIN_S,
    )
    _log.info("%s: transport %s, waits by %s", endpoint.name, endpoint.transport, endpoint.waiting)
    return endpoint


def _build_experts(
    configure: Configure,
    backend: KernelBackend,
    spec: ModelSpec,
    checkpoint: Checkpoint,
    recorder: SpanRecorder,
    progress: ReportProgress,
) -> ExpertWorker:
    placement = configure.placement
    half = load_expert_half(
        checkpoint, spec, backend, placement.experts_of(configure.index), progress, num_slots=configure.expert_slots
    )
    assert configure.exchange is not None
    exchange = NativeExpertExchange(
        _endpoint(configure), _exchange_shape(configure, spec, backend.dtype), configure.index
    )
    moves = ExpertMoves(configure.index, half, partial(load_expert, checkpoint, half), placement)
    runner = ExpertRunner(configure.index, half, moves, exchange, recorder)
    return ExpertWorker(runner, recorder, exchange, backend.name, configure.timeout_s)


def _build_attention(
    configure: Configure,
    backend: KernelBackend,
    spec: ModelSpec,
    checkpoint: Checkpoint,
    recorder: SpanRecorder,
    progress: ReportProgress,
) -> AttentionWorker:
    # One progress over both halves where both are loaded; how much the second needs is known once it is planned.
    expected = 0 if configure.exchange else sum(checkpoint.stored_bytes(name) for name in checkpoint.names)
    half = load_attention_half(
        checkpoint,
        spec,
        backend,
        lambda done, total: progress(done, max(total, expected)),
        max_positions=configure.max_model_len,
    )
    exchange: AttentionExchange
    if configure.exchange is None:
        expert_half = load_expert_half(
            checkpoint,
            spec,
            backend,
            tuple(range(spec.router.num_experts)),
            lambda done, total: progress(half.weight_bytes + done, half.weight_bytes + total),
        )
        exchange = LocalExperts(expert_half)
    else:
        exchange = NativeAttentionExchange(
            _endpoint(configure),
            _exchange_shape(configure, spec, backend.dtype),
            configure.index,
            configure.placement,
            configure.timeout_s,
        )
    cache = half.new_cache(configure.num_blocks, configure.block_size)
    max_blocks = -(-configure.max_model_len // configure.block_size) + 1
    tables = BlockTables(configure.block_size, configure.max_running, max_blocks, backend.device)
    sampler = RowSampler(backend)
    counts = RowCounts(spec) if configure.count_rows else None
    runner = AttentionRunner(half, exchange, cache, tables, sampler, recorder, configure.timeout_s, counts)
    return AttentionWorker(runner, recorder, exchange, backend.name)

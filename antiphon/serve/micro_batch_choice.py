"""How many micro-batches take turns, and whether each steps for itself, where no option says it: from T_a, T_e, T_c and
the head's time, measured on this machine before the engine starts (MegaScale-Infer 4.1).

1. One MoE layer is read, its attention half and the experts of one expert worker, each to the device of its role, and
   timed with a full step of rows, cut into m = 1 to 4 micro-batches: T_a and T_e. The caches begin with other contents.
   A dispatch and a combine of as many rows between two threads give 2 T_c; rows of a GPU come from it and go back.
2. A layer then takes max(m T_f, T_a + T_e + 2 T_c), and at least what all workers on CPUs compute over the cores they
   share, and those on GPUs over the GPUs.
3. A step takes all MoE layers and the heads of all micro-batches behind them. Where the one attention worker may step
   each micro-batch for itself, a head is computed while the experts work for the others (`cost.ping_pong.free_step`).
   That is chosen if it saves a tenth: each micro-batch is then a step with messages of its own.
4. The least m within 3% of the best one is taken: each further micro-batch reads the experts' weights again.
5. Several attention workers that step each for itself, and fewer cores than processes: one. The other workers' steps
   keep the experts busy, and twice as many steps of half as many rows take half as much processor time again.

Rejected: m = 3 or 4, as the paper's conditions say. They hold for a constant micro-batch; a batch that is cut into
more parts is not computed in as much less time where reading weights is most of it.
"""

import itertools
import secrets
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial

import torch

from antiphon import _m2n, _native
from antiphon.base.allowance import allowance
from antiphon.base.errors import Interrupted, PeerLost, PeerTimeout
from antiphon.base.logging import get_logger
from antiphon.base.units import format_seconds
from antiphon.comm.m2n.native import NativeAttentionExchange, NativeExpertExchange
from antiphon.cost.ping_pong import free_step, layer_time
from antiphon.kernels.api import AttentionBatch, HeadRows, KernelBackend, KVCache
from antiphon.kernels.select import make_backend, resolve_device, resolve_dtype
from antiphon.models.batch import make_attention_batch
from antiphon.models.checkpoint import Checkpoint
from antiphon.models.config import load_model_spec
from antiphon.models.gguf.checkpoint import open_weights
from antiphon.models.load import load_attention_half, load_expert_half
from antiphon.models.rotary import rotary_table, unrotated
from antiphon.serve.config import ServeConfig
from antiphon.serve.placement_control import FORECASTING
from antiphon.serve.prepare import num_kv_blocks
from antiphon.serve.worker.endpoints import exchange_shape
from antiphon.serve.worker.messages import Role
from antiphon.serve.worker.side_by_side import ROWS_A_PIECE
from antiphon.specs.counts import blocks_of
from antiphon.specs.model import ModelSpec
from antiphon.specs.placement import contiguous_placement

_log = get_logger("launch")
HOST = torch.device("cpu")
ROLES: tuple[Role, Role] = ("attention", "experts")
UNMEASURED = 2  # where nothing can be measured here
_MOST = 4
_CONTEXT = 256  # tokens of each request
_WORTH, _FREE_WORTH = 1.03, 1.1
_POINT_S, _LEAST_REPETITIONS, _MOST_REPETITIONS = 0.1, 5, 20
_FILL_TOKENS = 4096
_CACHE_BYTES = 64 << 20  # more than any cache holds
_TIMEOUT_S = 10.0


@dataclass(frozen=True, kw_only=True)
class TurnTimes:
    """Seconds of a micro-batch of `rows` and a layer at the slowest worker of a side, and of one way between them;
    `head_s`: of its logits, if each may step for itself."""

    rows: int
    attention_s: float
    experts_s: float
    exchange_s: float
    head_s: float = 0.0


def choose_micro_batches(config: ServeConfig, *, any_stepping: bool = False) -> ServeConfig:
    """`config` with as many micro-batches as pay for it, where attention and experts are apart on this machine, on CPUs
    or one of them on GPUs; else as it is. `any_stepping`: and with the better stepping. Takes a second, more for large
    layers. `UserError` for what is wrong with the checkpoint."""
    if config.layout != "disaggregated" or config.max_running == 1:
        return config
    elsewhere = bool(config.joined_attention or config.joined_experts)
    on_cpu = [config.own(role).device == "cpu" for role in ROLES]
    if elsewhere or not any(on_cpu):
        what = "other machines" if elsewhere else "workers on GPUs alone"
        other = f"{config.written_in}/mN" if config.written_in else "--micro-batches"
        _log.info("%d micro-batches: %s are not measured here, %s says another number", UNMEASURED, what, other)
        return replace(config, num_micro_batches=UNMEASURED)
    if config.stepping == "free" and config.num_attention > 1 and all(on_cpu) and config.num_workers > _num_cores():
        _log.info(
            "1 micro-batch: %d processes share %d cores, attention workers' steps take turns with each other's",
            config.num_workers,
            _num_cores(),
        )
        return replace(config, num_micro_batches=1)
    free = _stepping_freely(config) if any_stepping else None
    ways = [config] if free is None else [config, free]
    num_layers = load_model_spec(config.model, config.rope_scaling).num_moe_layers
    times = measure_layer(ways[-1])
    steps_s = [{m: predicted_step_s(way, m, of_m, num_layers) for m, of_m in times.items()} for way in ways]
    index = int(min(steps_s[0].values()) > _FREE_WORTH * min(steps_s[-1].values()))
    chosen, of_way = best_micro_batches(steps_s[index]), steps_s[index]
    of_chosen = times[chosen]
    _log.info(
        "%d micro-batches%s: T_a %s, T_e %s, T_c %s, head %s with %d rows; predicted time of a step: %s",
        chosen,
        ", each stepping for itself" if ways[index].stepping == "free" else "",
        *map(format_seconds, (of_chosen.attention_s, of_chosen.experts_s, of_chosen.exchange_s, of_chosen.head_s)),
        of_chosen.rows,
        ", ".join(f"m = {m}: {format_seconds(seconds)}" for m, seconds in of_way.items()),
    )
    return replace(ways[index], num_micro_batches=chosen)


def _stepping_freely(config: ServeConfig) -> ServeConfig | None:
    """`config` with each micro-batch a step of its own; None where that cannot be, or where several attention workers
    keep the experts busy beside each other's heads."""
    if config.num_attention > 1 or config.balance in FORECASTING:
        return None
    free = replace(config, stepping="free")
    return free if free.side_by_side else None


def best_micro_batches(steps_s: Mapping[int, float]) -> int:
    """The least m that is nearly as good as the best."""
    best_s = min(steps_s.values())
    return min(m for m, seconds in steps_s.items() if seconds <= _WORTH * best_s)


def predicted_step_s(config: ServeConfig, micro_batches: int, times: TurnTimes, num_layers: int) -> float:
    """Seconds of a full step of that many MoE layers."""
    if not config.side_by_side:
        return num_layers * predicted_layer_s(config, micro_batches, times) + micro_batches * times.head_s
    t_a, t_e, t_c, head_s = times.attention_s, times.experts_s, times.exchange_s, times.head_s
    shared_s = micro_batches * _shared_s(config, num_layers * t_a + head_s, num_layers * t_e)
    if config.num_attention > 1:  # the others' rows keep the experts busy during a head
        layers_s = num_layers * float(layer_time(micro_batches, t_a, t_e, t_c))
        return max(layers_s, micro_batches * (num_layers * t_a + head_s), shared_s)
    pieces = -(-times.rows // ROWS_A_PIECE)
    return max(free_step(micro_batches, num_layers, t_a, t_e, t_c, [head_s / pieces] * pieces), shared_s)


def predicted_layer_s(config: ServeConfig, micro_batches: int, times: TurnTimes) -> float:
    """Seconds of a layer in a full step: the pipeline's, or those of the cores that all workers share; the longer."""
    pipeline_s = float(layer_time(micro_batches, times.attention_s, times.experts_s, times.exchange_s))
    return max(pipeline_s, micro_batches * _shared_s(config, times.attention_s, times.experts_s))


def _shared_s(config: ServeConfig, attention_s: float, experts_s: float) -> float:
    """What all workers take of the cores and GPUs that they share, if each computes so long on its own."""
    cores_s = gpus_s = 0.0
    sizes = (config.num_attention * config.attention_tp, config.num_experts * config.expert_tp)
    for role, count, seconds in zip(ROLES, sizes, (attention_s, experts_s), strict=True):
        own, work_s = config.own(role), config.num_instances * count * seconds
        if own.device == "cpu":
            cores_s += work_s * (own.num_threads or 1)
        else:
            gpus_s += work_s
    return max(cores_s / _num_cores(), gpus_s / _num_gpus())


def _num_gpus() -> int:
    return max(1, torch.cuda.device_count())


def _num_cores() -> int:
    return allowance().num_cores


def measure_layer(config: ServeConfig) -> dict[int, TurnTimes]:
    """By m, with a full step cut into m micro-batches. It has as many requests as KV caches hold at once, so that
    measuring takes no memory that serving may not. `ResourceError` if they hold none."""
    spec = load_model_spec(config.model, config.rope_scaling)
    num_running = min(config.max_running, _most_in_caches(config, spec))
    checkpoint = open_weights(config.model, config.weights)
    rows = {m: -(-num_running // m) for m in range(1, min(_MOST, num_running) + 1)}
    before = torch.get_num_threads()
    try:
        attention_s = _attention_s(config, spec, checkpoint, rows)
        experts_s = _experts_s(config, spec, checkpoint, rows)
        head_s = _head_s(config, spec, checkpoint, rows) if config.side_by_side else dict.fromkeys(rows, 0.0)
    finally:
        torch.set_num_threads(before)
    exchange_s = _exchange_s(config, spec, rows)
    return {
        m: TurnTimes(
            rows=rows[m],
            attention_s=attention_s[m] / config.attention_tp,
            experts_s=experts_s[m] / config.expert_tp,
            exchange_s=exchange_s[m],
            head_s=head_s[m] / config.attention_tp,
        )
        for m in rows
    }


def _most_in_caches(config: ServeConfig, spec: ModelSpec) -> int:
    """Requests of the measured context that one attention worker has KV blocks for."""
    pool, context_length = config.pools[0], config.context_length(spec)
    pool = replace(pool, dtype=spec.dtype) if pool.dtype == "auto" else pool
    return num_kv_blocks(pool, spec, context_length) // blocks_of(min(_CONTEXT, context_length), pool.block_size)


def _backend(config: ServeConfig, role: Role, spec: ModelSpec) -> KernelBackend:
    own = config.own(role)
    dtype = resolve_dtype(spec.dtype if own.dtype == "auto" else own.dtype)
    backend = make_backend(config.kernels, resolve_device(own.device, 0), dtype)
    threads = own.num_threads or 1
    if backend.name == "cpu":
        _native.set_num_threads(threads)
        torch.set_num_threads(1)
    elif backend.device.type == "cpu":
        torch.set_num_threads(threads)
    return backend


def _layer_of(spec: ModelSpec) -> int:
    """The last MoE layer: reading it reads no embedding."""
    return spec.expert_layers[-1]


@torch.inference_mode()
def _attention_s(
    config: ServeConfig, spec: ModelSpec, checkpoint: Checkpoint, rows: Mapping[int, int]
) -> dict[int, float]:
    """Attention and gate, with the shared expert, by m."""
    backend, layer = _backend(config, "attention", spec), _layer_of(spec)
    context = min(_CONTEXT, config.context_length(spec))
    half = load_attention_half(checkpoint, spec, backend, max_positions=context, layers=range(layer, layer + 1))
    each = blocks_of(context, config.block_size)
    block_size, most = config.block_size, max(m * count for m, count in rows.items())
    cache = half.new_cache(most * each, block_size, config.kv_dtype)
    fill_with_noise(cache, spec, backend, most * each)
    found = {}
    for m, count in rows.items():
        tables = [range(index * each, (index + 1) * each) for index in range(m * count)]
        of_each = [tables[first : first + count] for first in range(0, m * count, count)]
        lens, device = ([1] * count, [context] * count), backend.device
        batches = [make_attention_batch(*lens, own, block_size, device) for own in of_each]
        x_TH = _rows(count, spec, backend)

        def attend(x_TH: torch.Tensor = x_TH, batches: list[AttentionBatch] = batches) -> None:
            for batch in batches:
                _, y_TH = half.attend(layer, x_TH, None, cache, batch)
                half.gate(layer, y_TH)
                half.local_feed_forward(layer, y_TH)

        found[m] = _seconds_of(attend, backend.device) / m
    return found


@torch.inference_mode()
def _head_s(config: ServeConfig, spec: ModelSpec, checkpoint: Checkpoint, rows: Mapping[int, int]) -> dict[int, float]:
    """Logits in the pieces in which they are computed where each micro-batch steps for itself, by m."""
    backend = _backend(config, "attention", spec)
    half = load_attention_half(checkpoint, spec, backend, max_positions=1, layers=range(0))
    pieces = {m: min(count, ROWS_A_PIECE) for m, count in rows.items()}
    piece_s = {
        size: _seconds_of(partial(half.head, _rows(size, spec, backend)), backend.device)
        for size in set(pieces.values())
    }
    return {m: -(-count // pieces[m]) * piece_s[pieces[m]] for m, count in rows.items()}


def fill_with_noise(cache: KVCache, spec: ModelSpec, backend: KernelBackend, num_blocks: int) -> None:
    """Into every slot of every layer of `cache`: memory that was never written is one page of zeros, read too fast."""
    stored = cache.spec
    width = stored.num_kv_heads * (stored.key_dim + (0 if stored.values_in_keys else stored.value_dim))
    only_stored = HeadRows(
        num_heads=0, rotary=unrotated(rotary_table(spec.attention.rope, _FILL_TOKENS, backend.device))
    )
    rows = torch.randn(_FILL_TOKENS, width, generator=torch.Generator().manual_seed(0))
    rows = rows.to(backend.device, backend.dtype)
    per_chunk = _FILL_TOKENS // stored.block_size
    for first in range(0, num_blocks, per_chunk):
        blocks = list(range(first, min(first + per_chunk, num_blocks)))
        tokens = len(blocks) * stored.block_size
        batch = make_attention_batch([tokens], [tokens], [blocks], stored.block_size, backend.device)
        for layer in range(stored.num_layers):
            backend.rotate_and_store(rows[:tokens], cache, layer, batch, only_stored)


@torch.inference_mode()
def _experts_s(
    config: ServeConfig, spec: ModelSpec, checkpoint: Checkpoint, rows: Mapping[int, int]
) -> dict[int, float]:
    """The experts of the first expert worker with the rows that all attention workers send it, by m."""
    backend, layer, router = _backend(config, "experts", spec), _layer_of(spec), spec.router
    held = range(-(-router.num_experts // config.num_experts))
    half = load_expert_half(checkpoint, spec, backend, {layer: held})
    found = {}
    for m, count in rows.items():
        ids_TK = _chosen(count * config.num_attention, spec)
        here_T = (ids_TK < len(held)).any(dim=1)
        x_RH = _rows(int(here_T.sum()), spec, backend)
        local_RK = torch.where(ids_TK[here_T] < len(held), ids_TK[here_T], -1).contiguous()
        weights_RK = torch.full(local_RK.shape, 1 / router.top_k, device=backend.device)
        local_RK = local_RK.to(backend.device)

        def compute(
            m: int = m, x: torch.Tensor = x_RH, ids: torch.Tensor = local_RK, weights: torch.Tensor = weights_RK
        ) -> None:
            for _ in range(m):
                half.forward(layer, x, ids, weights)

        found[m] = _seconds_of(compute, backend.device) / m
    return found


def _rows(count: int, spec: ModelSpec, backend: KernelBackend) -> torch.Tensor:
    return torch.randn(count, spec.hidden_size, generator=torch.Generator().manual_seed(0)).to(
        backend.device, backend.dtype
    )


def _chosen(count: int, spec: ModelSpec) -> torch.Tensor:
    """Experts of rows that choose evenly, int32 [T, K]."""
    scores = torch.rand(count, spec.router.num_experts, generator=torch.Generator().manual_seed(0))
    return scores.topk(spec.router.top_k).indices.int()


def _seconds_of(call: Callable[[], object], device: torch.device = HOST) -> float:
    """Least of some repetitions behind one that does not count: other programs only add to it. Before each, the caches
    get other contents, as by the layers in between. On a GPU, until the device is done."""
    call()
    others = torch.ones(_CACHE_BYTES // 4, device=device)
    took_s: list[float] = []
    deadline = time.perf_counter() + _POINT_S
    while len(took_s) < _LEAST_REPETITIONS or (time.perf_counter() < deadline and len(took_s) < _MOST_REPETITIONS):
        others.add_(1.0)
        _settle(device)
        started_s = time.perf_counter()
        call()
        _settle(device)
        took_s.append(time.perf_counter() - started_s)
    return min(took_s)


def _settle(device: torch.device) -> None:
    if device.type != HOST.type:
        torch.cuda.synchronize(device)


def _exchange_s(config: ServeConfig, spec: ModelSpec, rows: Mapping[int, int]) -> dict[int, float]:
    """One way of the rows of one attention worker to one expert worker, by m: half a round trip over the engine's
    transport between two threads, of which the other one answers at once."""
    own = config.own("attention")
    dtype, device = resolve_dtype(spec.dtype if own.dtype == "auto" else own.dtype), resolve_device(own.device, 0)
    shape = exchange_shape(spec, dtype, 1, 1, 1, max(rows.values()))
    placement, secret = contiguous_placement(spec.router.num_experts, 1, (0,)), secrets.token_bytes(32)
    stopped = threading.Event()
    with ExitStack() as stack:

        def endpoint(name: str) -> _m2n.Endpoint:
            return _m2n.Endpoint(name, config.transport, host="127.0.0.1", secret=secret, waiting="block")

        far = NativeExpertExchange(endpoint("experts[0]"), shape, 0)
        stack.callback(far.close)
        far.reset(1, [far.ticket])
        near = NativeAttentionExchange(endpoint("attention[0]"), shape, 0, placement, _TIMEOUT_S)
        stack.callback(near.close)
        answering = threading.Thread(target=_answer, args=(far, stopped), name="answers", daemon=True)
        answering.start()
        stack.callback(answering.join, _TIMEOUT_S)
        stack.callback(stopped.set)
        near.reset(1, [far.ticket])
        found, steps = {}, itertools.count(_m2n.first_step_of(1))
        for m, count in rows.items():
            x_TH = torch.randn(count, spec.hidden_size).to(device, dtype)
            ids_TK, weights_TK = _chosen(count, spec).to(device), torch.ones(count, spec.router.top_k, device=device)

            def there_and_back(
                x: torch.Tensor = x_TH, ids: torch.Tensor = ids_TK, weights: torch.Tensor = weights_TK
            ) -> None:
                near.begin_step(next(steps), [[0]])
                near.dispatch(0, 0, x, ids, weights)
                near.combine(0, 0, _TIMEOUT_S).to(device)

            found[m] = _seconds_of(there_and_back, device) / 2
    return found


def _answer(far: NativeExpertExchange, stopped: threading.Event) -> None:
    """Send every batch back as it came."""
    while not stopped.is_set():
        try:
            if (batch := far.receive(0.05, _TIMEOUT_S)) is not None:
                far.reply(batch, batch.rows_RH, (0, 0))
        except (PeerLost, PeerTimeout, Interrupted):
            return  # the other end has left

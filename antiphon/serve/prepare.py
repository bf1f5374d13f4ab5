"""What a `ServeConfig` means for this model and this machine, worked out before any process starts.

What the user got wrong (checkpoint, budget, sizes) is a `UserError` here, where it costs nothing. The result names
every process and holds every size; `launch` only follows it. Rejected: checks where each value is used. A mistake would
then come up after minutes of loading, once in every worker.
"""

import secrets
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch

from antiphon.base.errors import ResourceError, UserError
from antiphon.base.logging import get_logger
from antiphon.base.units import format_bytes
from antiphon.cost.memory import attention_weight_bytes, expert_weight_bytes
from antiphon.kernels.select import check_backend, free_memory_bytes, resolve_device, resolve_dtype
from antiphon.models.checkpoint_folder import model_folder, model_name
from antiphon.models.config import load_model_spec, read_config, with_tokenizer_ending
from antiphon.models.families.config_values import assumed
from antiphon.models.load import open_checkpoint
from antiphon.models.shares import check_ranks, share_of
from antiphon.serve.config import ServeConfig
from antiphon.serve.engine_api import EngineInfo
from antiphon.serve.joining import exchange_secret
from antiphon.serve.policy.request import SchedulerConfig
from antiphon.serve.worker.messages import Role
from antiphon.serve.worker_handle import WorkerName
from antiphon.specs.counts import (
    blocks_in_budget,
    blocks_of,
    context_tokens_per_row,
    count_parameters,
    kv_cache_block_bytes,
    logprob_row_cost,
)
from antiphon.specs.model import ModelSpec, PrecisionSpec
from antiphon.specs.placement import ExpertPlacement

_log = get_logger("launch")
# Rows that an expert computes in the time in which its weights are read: arithmetic over memory bandwidth, in 16 bits.
_KNEE_ROWS = {"cpu": 8, "gpu": 128}
# Rows that an expert computes in the time in which one is loaded: on a CPU measured, on a GPU by the speed of PCIe.
_LOAD_ROWS = {"cpu": 512, "gpu": 8192}
# Measured on CPUs: to rank a vocabulary of 32,000 to 152,000 takes as long as a head of 420 to 600 columns.
_RANKING_COLUMNS = 512
_EXPRESS_SLOTS = 8
_LEAST_BLOCKS = 64  # of a worker with an express lane


@dataclass(frozen=True, kw_only=True)
class PreparedEngine:
    """A checked configuration and all that follows from it.

    `placement`: where experts are at first; `slots`: experts that a worker may hold in a layer; `load_rows`: rows that
    an expert worker computes in the time of one load; `scheduler`: limits of each attention worker. `secret` is
    shared by the workers of this run; those that join derive it themselves, so it never travels. `fingerprint`: of the
    checkpoint. `prefill`: the pool for prompts, where it is apart; this is then the one that
    decodes."""

    config: ServeConfig
    spec: ModelSpec
    context_length: int
    placement: ExpertPlacement
    slots: int
    load_rows: int
    scheduler: SchedulerConfig
    secret: bytes = field(repr=False)
    fingerprint: dict[str, str] = field(default_factory=dict)
    prefill: "PreparedEngine | None" = None

    @property
    def pools(self) -> "tuple[PreparedEngine, ...]":
        return (self,) if self.prefill is None else (self, self.prefill)

    @property
    def has_spare_slot(self) -> bool:
        """Experts may move, so their holders need a slot for one on its way in each layer."""
        return self.config.balance != "off" or self.config.expert_slots is not None

    @property
    def info(self) -> EngineInfo:
        config = self.config
        return EngineInfo(
            model_name=model_name(Path(config.model)),
            max_model_len=self.context_length,
            vocab_size=self.spec.vocab_size,
            eos_token_ids=self.spec.eos_token_ids,
            layout=", ".join(f"{pool.config.pool} {pool.config.layout_text}" for pool in reversed(self.pools))
            if self.prefill is not None
            else config.layout,
            num_instances=config.num_instances,
            num_attention=config.num_attention,
            num_experts_workers=config.num_expert_workers,
            expert_names=tuple(name for pool in self.pools for name in pool.expert_names),
            num_micro_batches=config.num_micro_batches,
            max_waiting=config.max_waiting,
            block_size=config.block_size,
        )

    @property
    def expert_names(self) -> list[str]:
        """The name of each part that the experts of an instance of this pool are dealt into."""
        config = self.config
        if config.layout == "colocated":
            return []
        parts, instances = range(config.num_expert_parts), range(config.num_instances)
        return [str(self._name("experts", part, instance)) for instance in instances for part in parts]

    # --- the processes ---------------------------------------------------------------------------------------------

    def membership(self) -> list[tuple[list[WorkerName], list[WorkerName]]]:
        """(attention workers, expert workers) of each group that steps together."""
        config = self.config
        if config.layout == "hybrid":
            replicas = range(config.num_attention)
            instances = range(config.num_instances)
            return [([self._name("replica", i, each) for i in replicas], []) for each in instances]
        if not config.num_expert_workers:
            return [([self._name("replica", index)], []) for index in range(config.num_attention)]
        return [
            (
                [self._name("attention", index, instance) for index in range(config.num_attention)],
                [self._name("experts", index, instance) for index in range(config.num_experts)],
            )
            for instance in range(config.num_instances)
        ]

    def _name(self, role: Role, index: int, instance: int = 0) -> WorkerName:
        return WorkerName(role, index, instance=instance, pool=self.config.pool)

    def ranks_of(self, leader: WorkerName) -> tuple[WorkerName, ...]:
        return leader.ranks(self.config.expert_tp if leader.role == "experts" else self.config.attention_ranks)

    def worker_names(self) -> list[WorkerName]:
        """Every process of every worker."""
        leaders = [name for attention, experts in self.membership() for name in (*attention, *experts)]
        return [rank for leader in leaders for rank in self.ranks_of(leader)]

    def joined_names(self) -> frozenset[WorkerName]:
        """The processes that come from other machines: of the last workers of each role."""
        config = self.config
        places: dict[Role, range] = {
            "attention" if config.num_expert_workers else "replica": range(
                config.num_attention - config.joined_attention, config.num_attention
            ),
            "experts": range(config.num_experts - config.joined_experts, config.num_experts),
        }
        leaders = [
            self._name(role, index, instance)
            for instance in range(config.num_instances)
            for role, indices in places.items()
            for index in indices
        ]
        ranks = [rank for leader in leaders for rank in self.ranks_of(leader)]
        return frozenset(ranks[config.ranks_here :])

    def local_names(self) -> list[WorkerName]:
        """The processes of this machine."""
        joined = self.joined_names()
        return [each for each in self.worker_names() if each not in joined]


def prepare(config: ServeConfig) -> PreparedEngine:
    """Check `config` against its model and this machine. `UserError` for what is wrong; nothing has started then."""
    folder = model_folder(config.model)
    prefill = None if config.prefill is None else replace(config.prefill, model=folder)
    config = replace(config, model=folder, prefill=prefill)
    _say_what_is_assumed(config.model)
    spec = with_tokenizer_ending(config.model, load_model_spec(config.model, config.rope_scaling))
    # wrong or damaged weights are found before any process starts
    checkpoint = open_checkpoint(config.model, spec)
    for note in checkpoint.notes:
        _log.info("%s", note)
    dtype = spec.dtype if config.dtype == "auto" else config.dtype
    prefill = None if prefill is None else replace(prefill, dtype=dtype)
    config = replace(config, dtype=dtype, prefill=prefill)
    context_length = config.context_length(spec)
    if context_length > spec.max_position:
        _log.warning(
            "--max-model-len %d is beyond the %d positions that %s was made for: what it says there gets worse; "
            "--rope-scaling stretches them",
            context_length,
            spec.max_position,
            config.model,
        )
    secret = exchange_secret(config.join_secret) if config.join_address else secrets.token_bytes(32)
    fingerprint = checkpoint.fingerprint(spec)
    pools = [
        replace(_prepare_pool(pool, spec, context_length, secret), fingerprint=fingerprint) for pool in config.pools
    ]
    run = pools[0] if len(pools) == 1 else replace(pools[0], prefill=pools[1])
    if run.prefill is not None or config.expert_bytes is not None:
        _check_all_fits(run, sum(map(checkpoint.stored_bytes, checkpoint.names)))
    _check_gpu_memory(run, sum(map(checkpoint.stored_bytes, checkpoint.names)))
    _say_who_shares_gpus(run)
    for pool in pools:
        _say_how_it_steps(pool.config)
    return run


def _prepare_pool(config: ServeConfig, spec: ModelSpec, context_length: int, secret: bytes) -> PreparedEngine:
    """The workers of one pool, or all of them."""
    for own in (config.own("attention"), config.own("experts")):
        check_backend(config.kernels, resolve_device(own.device, 0), resolve_dtype(own.dtype))
    device = "cpu" if config.device == "cpu" else "gpu"
    placement = replace(config.expert_placement(spec), knee=_KNEE_ROWS[device])
    slots = config.slots_of(placement)
    _check_ranks(config, spec)
    num_blocks = num_kv_blocks(config, spec, context_length)
    max_running, express_slots, express_blocks = split_for_lane(config, num_blocks, context_length)
    return PreparedEngine(
        config=config,
        spec=spec,
        context_length=context_length,
        placement=placement,
        slots=slots,
        load_rows=_LOAD_ROWS[device],
        scheduler=SchedulerConfig(
            num_blocks=num_blocks,
            block_size=config.block_size,
            max_model_len=context_length,
            max_batch_tokens=config.max_batch_tokens,
            context_tokens_per_row=context_tokens_per_row(spec),
            logprob_row_cost=logprob_row_cost(spec, _RANKING_COLUMNS),
            max_running=max_running,
            express_slots=express_slots,
            express_blocks=express_blocks,
            vocab_size=spec.vocab_size,
        ),
        secret=secret,
    )


def _say_what_is_assumed(model: Path) -> None:
    """One line about numbers that the model's family gave, where its file is silent."""
    config = read_config(model)
    if keys := assumed(config):
        _log.info(
            "config.json does not say %s: taken from the defaults of %s", ", ".join(keys), config.get("model_type")
        )


def _say_who_shares_gpus(run: PreparedEngine) -> None:
    """One line if GPUs have several workers each: they halve its memory and its speed."""
    num_on_gpus = sum(pool.config.own(n.role).device == "cuda" for pool in run.pools for n in pool.local_names())
    if num_on_gpus > torch.cuda.device_count():
        _log.info("%d workers take turns over %d GPUs", num_on_gpus, torch.cuda.device_count())


def _say_how_it_steps(config: ServeConfig) -> None:
    """One line if micro-batches step together although attention workers do not."""
    if config.stepping == "free" and not config.side_by_side:
        _log.info(
            "--stepping free: attention workers step each for itself, the micro-batches of one step together; with "
            "workers of one rank, on CPUs and without --record-routing each would be a step of its own"
        )


def _check_ranks(config: ServeConfig, spec: ModelSpec) -> None:
    """`UserError` unless every rank of every worker has something to work on."""
    colocated = config.layout == "colocated"
    check_ranks(spec, config.size_name("attention_tp"), config.attention_tp, attention=True, experts=colocated)
    check_ranks(spec, config.size_name("expert_tp"), config.expert_tp, attention=False, experts=not colocated)
    if config.num_stages > spec.num_layers:
        raise UserError(
            f"{config.size_name('num_stages')} is {config.num_stages}: the model has {spec.num_layers} layers, so it "
            "must be at most that"
        )
    if config.layout == "hybrid":
        shards = config.topology.num_shards
        if spec.hidden_size % shards:
            raise UserError(
                f"{config.sizes('attention_tp', 'expert_tp')}: rows of {spec.hidden_size} values "
                f"are cut into {shards} equal parts: the smaller degree must divide {spec.hidden_size}"
            )


def num_kv_blocks(config: ServeConfig, spec: ModelSpec, context_length: int) -> int:
    """KV blocks of each attention worker within the budget; `ResourceError` if not even one sequence fits.

    Without a budget, 30% of the memory free now, but no more than every running request at full length needs."""
    attention = config.own("attention")
    parts = [share_of(spec, rank, config.attention_tp).local_spec(spec) for rank in range(config.attention_tp)]
    itemsize = resolve_dtype(attention.dtype).itemsize
    block_bytes = sum(kv_cache_block_bytes(part, config.block_size, itemsize, config.kv_dtype) for part in parts)
    free_bytes = free_memory_bytes(attention.device)
    blocks_per_sequence = blocks_of(context_length, config.block_size)
    budget = int(free_bytes * 0.3) if config.kv_bytes is None else config.kv_bytes
    num_blocks = blocks_in_budget(budget // config.num_kv_caches, block_bytes)
    if config.kv_bytes is None:
        num_blocks = min(num_blocks, config.max_running * blocks_per_sequence)
    if num_blocks < blocks_per_sequence:
        needed = blocks_per_sequence * block_bytes * config.num_kv_caches
        raise ResourceError(
            f"--kv-bytes {format_bytes(budget)} is too small: one sequence of {context_length} tokens on each of "
            f"{config.num_kv_caches} workers needs {format_bytes(needed)}; raise it or lower --max-model-len"
        )
    kv_bytes = num_blocks * block_bytes * config.num_kv_caches
    if kv_bytes > free_bytes:
        raise ResourceError(
            f"--kv-bytes {format_bytes(kv_bytes)} is more than the {format_bytes(free_bytes)} of memory free: lower it"
        )
    return num_blocks


def _check_all_fits(run: PreparedEngine, stored_bytes: int) -> None:
    """`ResourceError` if weights and KV caches of all pools are more than this machine's free memory."""
    free_bytes = free_memory_bytes("cpu")
    weights = {pool.config.pool: _weight_bytes(pool, stored_bytes) for pool in run.pools if pool.config.device == "cpu"}
    kv_bytes = sum(
        _cache_bytes(pool)
        for pool in run.pools
        for name in pool.local_names()
        if name.role != "experts" and name.rank == 0 and pool.config.device == "cpu"
    )
    if sum(weights.values()) + kv_bytes > free_bytes:
        if run.prefill is None:
            raise ResourceError(
                f"--expert-memory {format_bytes(run.config.expert_bytes or 0)} does not fit: with it weights of all "
                f"replicas need {format_bytes(sum(weights.values()))}, KV caches {format_bytes(kv_bytes)}, and "
                f"{format_bytes(free_bytes)} of memory are free: lower it, --kv-bytes or the number of replicas"
            )
        parts = " and ".join(f"{format_bytes(size)} of --{pool}" for pool, size in weights.items())
        raise ResourceError(
            f"the pools do not fit: weights need {parts}, KV caches {format_bytes(kv_bytes)}, and "
            f"{format_bytes(free_bytes)} of memory are free: give them fewer replicas, share experts (1+1), or lower "
            "--kv-bytes"
        )


def _check_gpu_memory(run: PreparedEngine, stored_bytes: int) -> None:
    """`ResourceError` if what the workers of this machine keep on a GPU is more than is free there."""
    kept: dict[torch.device, dict[str, int]] = {}
    for pool in run.pools:
        local = pool.local_names()
        for name in local:
            device = pool.config.own(name.role).device
            if device == "cpu":
                continue
            beside = [each for each in local if pool.config.own(each.role).device == device]
            gpu = resolve_device(device, beside.index(name))
            of_gpu = kept.setdefault(gpu, {})
            of_gpu[f"weights of {name}"] = _kept_weight_bytes(pool, name.role, stored_bytes)
            if name.role != "experts":
                of_gpu[f"KV cache of {name}"] = _cache_bytes(pool) // pool.config.attention_ranks
    for gpu, parts in kept.items():
        needed, free_bytes = sum(parts.values()), int(torch.cuda.mem_get_info(gpu.index)[0])
        if needed > free_bytes:
            listed = ", ".join(f"{what} {format_bytes(size)}" for what, size in parts.items())
            raise ResourceError(
                f"{gpu} has {format_bytes(free_bytes)} free and needs {format_bytes(needed)} ({listed}): "
                f"{format_bytes(needed - free_bytes)} are missing; lower --kv-bytes, round experts (--weights int4), "
                "use more GPUs (more ranks or expert workers), or keep the experts in the machine's memory "
                "(--expert-device cpu)"
            )


def _weights_kept(pool: PreparedEngine, stored_bytes: int) -> tuple[float, float]:
    """Bytes of all weights but the routed experts', and of these. Weights that are stored in few bits are counted as
    stored, which is the least that they take; others as they are rounded at load."""
    spec, counts, weights = pool.spec, count_parameters(pool.spec), pool.config.weights
    experts = spec.num_moe_layers * spec.router.num_experts * counts.expert
    per_element = min(_itemsize(pool), stored_bytes / counts.total)
    rest_bytes, experts_bytes = (counts.total - experts) * per_element, experts * per_element
    if weights == "as-stored":
        return rest_bytes, experts_bytes
    rounded = PrecisionSpec(weights="int8", experts=weights)
    return (
        min(rest_bytes, float(attention_weight_bytes(spec, 1, rounded))),
        min(experts_bytes, float(expert_weight_bytes(spec, spec.router.num_experts, 1, rounded))),
    )


def _kept_weight_bytes(pool: PreparedEngine, role: Role, stored_bytes: int) -> int:
    """What one process of that role keeps at least; replicas of a hybrid instance share its experts evenly."""
    config, (rest_bytes, experts_bytes) = pool.config, _weights_kept(pool, stored_bytes)
    if role == "experts":
        return int(experts_bytes / config.num_experts / config.expert_tp)
    if role == "attention":
        return int(rest_bytes / config.attention_ranks)
    num_sharing = config.num_attention if config.layout == "hybrid" else 1
    return int((rest_bytes + experts_bytes / num_sharing) / config.attention_ranks)


def _cache_bytes(pool: PreparedEngine) -> int:
    """The KV cache of one attention worker or replica, over all its ranks."""
    config = pool.config
    block_bytes = kv_cache_block_bytes(pool.spec, config.block_size, _itemsize(pool), config.kv_dtype)
    return pool.scheduler.num_blocks * block_bytes


def _itemsize(pool: PreparedEngine) -> int:
    return resolve_dtype(pool.config.own("attention").dtype).itemsize


def _weight_bytes(pool: PreparedEngine, stored_bytes: int) -> int:
    """What the workers of this machine load: replicas all, attention workers all but the experts."""
    config, (rest_bytes, experts_bytes) = pool.config, _weights_kept(pool, stored_bytes)
    num_attention = config.num_instances * (config.num_attention - config.joined_attention)
    if config.layout == "colocated":
        if config.expert_bytes is not None:  # the others stay in the file
            experts_bytes = min(experts_bytes, config.expert_bytes)
        return int(num_attention * (rest_bytes + experts_bytes))
    if config.layout == "hybrid":
        of_experts = num_attention / config.num_attention
    else:
        of_experts = config.num_instances * (config.num_experts - config.joined_experts) / config.num_experts
        if config.expert_bytes is not None:
            pools_bytes = of_experts * config.num_experts * config.expert_tp * config.expert_bytes
            of_experts = min(of_experts, pools_bytes / experts_bytes)
    return int(num_attention * rest_bytes + of_experts * experts_bytes)


def split_for_lane(config: ServeConfig, num_blocks: int, context_length: int) -> tuple[int, int, int]:
    """Slots of the main way, and slots and blocks of the express lane, of an attention worker. The lane has 8 slots on
    top of `max_running`, or out of it where a step has no rows for more; 1/64 of the blocks, of small caches 1/16 up to
    32. Nothing where a sequence of full length needs the blocks."""
    num_spare = num_blocks - blocks_of(context_length, config.block_size)
    blocks = min(max(num_blocks // 64, min(num_blocks // 16, 32)), num_spare)
    extra = min(_EXPRESS_SLOTS, config.max_batch_tokens - config.max_running)
    slots = extra or min(_EXPRESS_SLOTS, config.max_running // 4)
    if num_blocks < _LEAST_BLOCKS or blocks < 1 or slots < 1:
        return config.max_running, 0, 0
    return config.max_running if extra else config.max_running - slots, slots, blocks

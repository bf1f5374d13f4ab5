"""What a `ServeConfig` means for this model and this machine, worked out before any process starts.

What the user got wrong (checkpoint, budget, sizes) is a `UserError` here, where it costs nothing. The result names
every process and holds every size; `launch` only follows it. Rejected: checks where each value is used. A mistake would
then come up after minutes of loading, once in every worker.
"""

import secrets
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import NamedTuple

import torch

from antiphon.base.errors import ResourceError, UserError
from antiphon.base.logging import get_logger
from antiphon.base.units import format_bytes
from antiphon.cost.kv_blocks import blocks_in_budget, blocks_of, kv_cache_block_bytes
from antiphon.kernels.select import check_backend, free_memory_bytes, resolve_device, resolve_dtype
from antiphon.models.checkpoint_folder import model_folder, model_name
from antiphon.models.config import load_model_spec, read_config, with_tokenizer_ending
from antiphon.models.families.defaults import assumed
from antiphon.models.load import open_checkpoint
from antiphon.models.shares import check_ranks, share_of
from antiphon.serve.config import ServeConfig
from antiphon.serve.engine_api import EngineInfo
from antiphon.serve.joining import exchange_secret
from antiphon.serve.policy.request import SchedulerConfig
from antiphon.serve.worker.messages import Role
from antiphon.serve.worker_process import WorkerName
from antiphon.specs.counts import context_tokens_per_row, logprob_row_cost
from antiphon.specs.model import ModelSpec
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


class LaneSplit(NamedTuple):
    """Slots of the main way, and what the express lane has of an attention worker."""

    max_running: int
    express_slots: int
    express_blocks: int


@dataclass(frozen=True, kw_only=True)
class PreparedEngine:
    """A checked configuration and all that follows from it.

    `placement`: where experts are at first; `slots`: experts that a worker may hold in a layer; `load_rows`: rows that
    an expert worker computes in the time of one load; `num_blocks`: KV blocks of each attention worker. `secret` is
    shared by the workers of this run; those that join derive it themselves, so it never travels."""

    config: ServeConfig
    spec: ModelSpec
    context_length: int
    placement: ExpertPlacement
    slots: int
    load_rows: int
    num_blocks: int
    lane: LaneSplit
    secret: bytes = field(repr=False)

    @property
    def disaggregated(self) -> bool:
        return self.config.layout == "disaggregated"

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
            layout=config.layout,
            num_instances=config.num_instances,
            num_attention=config.num_attention,
            num_experts_workers=config.num_experts if self.disaggregated else 0,
            num_expert_parts=config.num_expert_parts,
            num_micro_batches=config.num_micro_batches,
            max_waiting=config.max_waiting,
        )

    @property
    def scheduler_config(self) -> SchedulerConfig:
        """Limits of each attention worker."""
        return SchedulerConfig(
            num_blocks=self.num_blocks,
            block_size=self.config.block_size,
            max_model_len=self.context_length,
            max_batch_tokens=self.config.max_batch_tokens,
            context_tokens_per_row=context_tokens_per_row(self.spec),
            logprob_row_cost=logprob_row_cost(self.spec, _RANKING_COLUMNS),
            max_running=self.lane.max_running,
            express_slots=self.lane.express_slots,
            express_blocks=self.lane.express_blocks,
            vocab_size=self.spec.vocab_size,
        )

    # --- the processes ---------------------------------------------------------------------------------------------

    def membership(self) -> list[tuple[list[WorkerName], list[WorkerName]]]:
        """(attention workers, expert workers) of each group that steps together."""
        config = self.config
        if config.layout == "hybrid":
            replicas = range(config.num_attention)
            instances = range(config.num_instances)
            return [([WorkerName("replica", i, instance=each) for i in replicas], []) for each in instances]
        if not self.disaggregated:
            return [([WorkerName("replica", index)], []) for index in range(config.num_attention)]
        return [
            (
                [WorkerName("attention", index, instance=instance) for index in range(config.num_attention)],
                [WorkerName("experts", index, instance=instance) for index in range(config.num_experts)],
            )
            for instance in range(config.num_instances)
        ]

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
            "attention" if self.disaggregated else "replica": range(
                config.num_attention - config.joined_attention, config.num_attention
            ),
            "experts": range(config.num_experts - config.joined_experts, config.num_experts),
        }
        leaders = [
            WorkerName(role, index, instance=instance)
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
    config = replace(config, model=model_folder(config.model))
    _say_what_is_assumed(config.model)
    spec = with_tokenizer_ending(config.model, load_model_spec(config.model, config.rope_scaling))
    # wrong or damaged weights are found before any process starts
    for note in open_checkpoint(config.model, spec).notes:
        _log.info("%s", note)
    config = replace(config, dtype=spec.dtype if config.dtype == "auto" else config.dtype)
    for own in (config.own("attention"), config.own("experts")):
        check_backend(config.kernels, resolve_device(own.device, 0), resolve_dtype(own.dtype))
    context_length = config.context_length(spec)
    if context_length > spec.max_position:
        _log.warning(
            "--max-model-len %d is beyond the %d positions that %s was made for: what it says there gets worse; "
            "--rope-scaling stretches them",
            context_length,
            spec.max_position,
            config.model,
        )
    device = "cpu" if config.device == "cpu" else "gpu"
    placement = replace(config.expert_placement(spec), knee=_KNEE_ROWS[device])
    slots = config.slots_of(placement)
    _check_ranks(config, spec)
    num_blocks = _num_kv_blocks(config, spec, context_length)
    run = PreparedEngine(
        config=config,
        spec=spec,
        context_length=context_length,
        placement=placement,
        slots=slots,
        load_rows=_LOAD_ROWS[device],
        num_blocks=num_blocks,
        lane=split_for_lane(config, num_blocks, context_length),
        secret=exchange_secret(config.join_secret) if config.join_address else secrets.token_bytes(32),
    )
    _say_who_shares_gpus(run)
    return run


def _say_what_is_assumed(model: Path) -> None:
    """One line about numbers that the model's family gave, where its file is silent."""
    config = read_config(model)
    if keys := assumed(config):
        _log.info(
            "config.json does not say %s: taken from the defaults of %s", ", ".join(keys), config.get("model_type")
        )


def _say_who_shares_gpus(run: PreparedEngine) -> None:
    """One line if GPUs have several workers each: they halve its memory and its speed."""
    num_on_gpus = sum(run.config.own(name.role).device == "cuda" for name in run.local_names())
    if num_on_gpus > torch.cuda.device_count():
        _log.info("%d workers take turns over %d GPUs", num_on_gpus, torch.cuda.device_count())


def _check_ranks(config: ServeConfig, spec: ModelSpec) -> None:
    """`UserError` unless every rank of every worker has something to work on."""
    colocated = config.layout == "colocated"
    check_ranks(spec, "--tp", config.attention_tp, attention=True, experts=colocated)
    check_ranks(spec, "--expert-tp", config.expert_tp, attention=False, experts=not colocated)
    if config.num_stages > spec.num_layers:
        raise UserError(
            f"--pp is {config.num_stages}: the model has {spec.num_layers} layers, so it must be at most that"
        )
    if config.layout == "hybrid":
        shards = config.topology.num_shards
        if spec.hidden_size % shards:
            raise UserError(
                f"--tp {config.attention_tp} and --expert-tp {config.expert_tp}: rows of {spec.hidden_size} values "
                f"are cut into {shards} equal parts: the smaller degree must divide {spec.hidden_size}"
            )


def _num_kv_blocks(config: ServeConfig, spec: ModelSpec, context_length: int) -> int:
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


def split_for_lane(config: ServeConfig, num_blocks: int, context_length: int) -> LaneSplit:
    """The express lane's part: 8 slots on top of `max_running`, or out of it where a step has no rows for more; 1/64 of
    the blocks, of small caches 1/16 up to 32. Nothing where a sequence of full length needs the blocks."""
    num_spare = num_blocks - blocks_of(context_length, config.block_size)
    blocks = min(max(num_blocks // 64, min(num_blocks // 16, 32)), num_spare)
    extra = min(_EXPRESS_SLOTS, config.max_batch_tokens - config.max_running)
    slots = extra or min(_EXPRESS_SLOTS, config.max_running // 4)
    if num_blocks < _LEAST_BLOCKS or blocks < 1 or slots < 1:
        return LaneSplit(config.max_running, 0, 0)
    return LaneSplit(config.max_running if extra else config.max_running - slots, slots, blocks)

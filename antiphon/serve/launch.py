"""From a `ServeConfig` to a running engine; long because every layout's processes are named and configured here.

Check everything cheap first, reserve, start workers, wait until ready.

What the user got wrong (checkpoint, budget, sizes) is reported before a process is started.
"""

import secrets
import time
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch

from antiphon.base.errors import ResourceError, UserError
from antiphon.base.logging import get_logger
from antiphon.base.system import raise_limit
from antiphon.base.units import format_bytes
from antiphon.kernels.select import check_backend, free_memory_bytes, resolve_device, resolve_dtype
from antiphon.models.checkpoint_folder import model_folder, model_name
from antiphon.models.config import load_model_spec, read_config, with_tokenizer_ending
from antiphon.models.families.defaults import assumed
from antiphon.models.load import open_checkpoint
from antiphon.models.quantization import left_out
from antiphon.models.shares import check_ranks
from antiphon.models.weights import ReportProgress
from antiphon.serve.balancer import Balancer
from antiphon.serve.config import ServeConfig
from antiphon.serve.door import Door
from antiphon.serve.engine import Engine
from antiphon.serve.engine_api import EngineInfo
from antiphon.serve.fleet import Fleet
from antiphon.serve.group import StepGroup
from antiphon.serve.joining import exchange_secret
from antiphon.serve.kv_budget import kv_block_bytes, kv_blocks_per_worker, share_room
from antiphon.serve.members import Members
from antiphon.serve.outputs import TrackedRequests
from antiphon.serve.placement_control import PlacementControl
from antiphon.serve.policy.request import SchedulerConfig
from antiphon.serve.policy.scheduler import Scheduler
from antiphon.serve.routing_record import RoutingRecord
from antiphon.serve.statistics import EngineStatistics
from antiphon.serve.worker.messages import Configure, ExchangeConfig, HybridConfig, Role
from antiphon.serve.worker_process import WorkerName
from antiphon.specs.counts import context_tokens_per_row, logprob_row_cost

_log = get_logger("launch")
# Rows that an expert computes in the time in which its weights are read: arithmetic over memory bandwidth, in 16 bits.
_KNEE_ROWS = {"cpu": 8, "gpu": 128}
# Rows that an expert computes in the time in which one is loaded: on a CPU measured, on a GPU by the speed of PCIe.
_LOAD_ROWS = {"cpu": 512, "gpu": 8192}
# Measured on CPUs: to rank a vocabulary of 32,000 to 152,000 takes as long as a head of 420 to 600 columns.
_RANKING_COLUMNS = 512


class Launcher:
    """Holds what is needed to start workers, at first and again after a death."""

    def __init__(self, config: ServeConfig) -> None:
        config = replace(config, model=model_folder(config.model))
        _say_what_is_assumed(config.model)
        self.spec = with_tokenizer_ending(config.model, load_model_spec(config.model, config.rope_scaling))
        # wrong or damaged weights are found before any process starts
        for note in open_checkpoint(config.model, self.spec).notes:
            _log.info("%s", note)
        self.config = replace(config, dtype=self.spec.dtype if config.dtype == "auto" else config.dtype)
        self._dtype = resolve_dtype(self.config.own("attention").dtype)
        for own in (self.config.own("attention"), self.config.own("experts")):
            check_backend(config.kernels, resolve_device(own.device, 0), resolve_dtype(own.dtype))
        self.context_length = config.context_length(self.spec)
        if self.context_length > self.spec.max_position:
            _log.warning(
                "--max-model-len %d is beyond the %d positions that %s was made for: what it says there gets worse; "
                "--rope-scaling stretches them",
                self.context_length,
                self.spec.max_position,
                config.model,
            )
        device = "cpu" if config.device == "cpu" else "gpu"
        knee, self._load_rows = _KNEE_ROWS[device], _LOAD_ROWS[device]
        self._placement = replace(config.expert_placement(self.spec), knee=knee)
        self._slots = config.slots_of(self._placement)
        self._placing: dict[int, PlacementControl] = {}  # by instance
        self._check_ranks()
        block_bytes = kv_block_bytes(config, self.spec, self._dtype.itemsize)
        free_bytes = free_memory_bytes(config.own("attention").device)
        self.num_blocks = kv_blocks_per_worker(config, block_bytes, self.context_length, free_bytes)
        self._room = share_room(self.config, self.num_blocks, self.context_length)
        self.kv_bytes = self.num_blocks * block_bytes * config.num_kv_caches
        if self.kv_bytes > free_bytes:
            raise ResourceError(
                f"--kv-bytes {format_bytes(self.kv_bytes)} is more than the {format_bytes(free_bytes)} of memory free: "
                f"lower it"
            )
        self._joined = self._joined_names()
        self._say_who_shares()
        self.door = (
            Door(config.join_address, config.join_secret, self._joined, local=self._local_names())
            if self._joined
            else None
        )
        self.fleet = Fleet(outside=self.door)
        # Shared by the workers of this run; those that join derive it themselves, so it never travels.
        self._secret = exchange_secret(config.join_secret) if config.join_address else secrets.token_bytes(32)

    def _check_ranks(self) -> None:
        """`UserError` unless every rank of every worker has something to work on."""
        config, spec = self.config, self.spec
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

    @property
    def _disaggregated(self) -> bool:
        return self.config.layout == "disaggregated"

    @property
    def _spare_slot(self) -> bool:
        """Experts may move, so who holds them needs room for one on its way in each layer."""
        return self.config.balance != "off" or self.config.expert_slots is not None

    def engine(self) -> Engine:
        """Build the engine (nothing runs yet)."""
        config = self.config
        statistics = EngineStatistics()
        room = self._room
        limits = SchedulerConfig(
            num_blocks=self.num_blocks,
            block_size=config.block_size,
            max_model_len=self.context_length,
            max_batch_tokens=config.max_batch_tokens,
            context_tokens_per_row=context_tokens_per_row(self.spec),
            logprob_row_cost=logprob_row_cost(self.spec, _RANKING_COLUMNS),
            max_running=room.max_running,
            express_slots=room.express_slots,
            express_blocks=room.express_blocks,
            vocab_size=self.spec.vocab_size,
        )
        tracked = TrackedRequests(self.fleet.wake)
        groups = []
        membership, path = self._membership(), config.record_routing
        record = None if path is None else RoutingRecord(path, self._info().model_name, self.spec, len(membership))
        for number, (attention, experts) in enumerate(membership):
            placing = self._place_experts(attention if config.layout == "hybrid" else experts, statistics)
            ranks_of = {name: self._ranks_of(name) for name in (*attention, *experts)}
            balances = placing is not None and config.balance != "off"
            group = StepGroup(
                members=Members(attention, experts, ranks_of, self.fleet, share_experts=config.layout == "hybrid"),
                schedulers=[Scheduler(limits) for _ in attention],
                num_micro_batches=config.num_micro_batches,
                fleet=self.fleet,
                statistics=statistics,
                tracked=tracked,
                timeout_s=config.timeout_s,
                placing=placing,
                balancer=self._balancer() if balances else None,
                record=None if record is None else partial(record.add, number),
            )
            groups.append(group)
        return Engine(
            info=self._info(),
            fleet=self.fleet,
            groups=groups,
            tracked=tracked,
            scheduler_config=limits,
            statistics=statistics,
            relaunch=self.launch,
        )

    def _balancer(self) -> Balancer:
        config = self.config
        return Balancer(config.balance, self._placement, config.num_micro_batches, self._load_rows)

    def _place_experts(self, holders: list[WorkerName], statistics: EngineStatistics) -> PlacementControl | None:
        """`holders`: the workers that hold experts for others."""
        if not holders:
            return None
        placing = PlacementControl(
            self.spec, self._placement, self._slots, self.fleet, statistics, may_move=self._spare_slot
        )
        self._placing[holders[0].instance] = placing
        return placing

    def _membership(self) -> list[tuple[list[WorkerName], list[WorkerName]]]:
        """(attention workers, expert workers) of each group that steps together."""
        config = self.config
        if config.layout == "hybrid":
            replicas = range(config.num_attention)
            instances = range(config.num_instances)
            return [([WorkerName("replica", i, instance=each) for i in replicas], []) for each in instances]
        if not self._disaggregated:
            return [([WorkerName("replica", index)], []) for index in range(config.num_attention)]
        return [
            (
                [WorkerName("attention", index, instance=instance) for index in range(config.num_attention)],
                [WorkerName("experts", index, instance=instance) for index in range(config.num_experts)],
            )
            for instance in range(config.num_instances)
        ]

    def _joined_names(self) -> frozenset[WorkerName]:
        """The workers that come from other machines: the last ones of each role."""
        config = self.config
        places: dict[Role, range] = {
            "attention" if self._disaggregated else "replica": range(
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
        ranks = [rank for leader in leaders for rank in self._ranks_of(leader)]
        return frozenset(ranks[config.ranks_here :])

    def _local_names(self) -> list[WorkerName]:
        """The processes of this machine."""
        return [each for each in self.worker_names() if each not in self._joined]

    def _device_index(self, name: WorkerName) -> int:
        """Which of this machine's processes on this kind of device it is, over all roles; of a machine from outside the
        door counts."""
        device = self.config.own(name.role).device
        there = [each for each in self._local_names() if self.config.own(each.role).device == device]
        return there.index(name) if name in there else 0

    def _cores(self, name: WorkerName) -> list[int]:
        local = self._local_names()
        return self.config.cores_of(local.index(name), [each.role for each in local]) if name in local else []

    def _say_who_shares(self) -> None:
        """One line if GPUs have several workers each: they halve its memory and its speed."""
        num_on_gpus = sum(self.config.own(name.role).device == "cuda" for name in self._local_names())
        if num_on_gpus > torch.cuda.device_count():
            _log.info("%d workers take turns over %d GPUs", num_on_gpus, torch.cuda.device_count())

    def worker_names(self) -> list[WorkerName]:
        """Every process of every worker."""
        leaders = [name for attention, experts in self._membership() for name in (*attention, *experts)]
        return [rank for leader in leaders for rank in self._ranks_of(leader)]

    def _ranks_of(self, leader: WorkerName) -> tuple[WorkerName, ...]:
        return leader.ranks(self.config.expert_tp if leader.role == "experts" else self.config.attention_ranks)

    def launch(self, name: WorkerName) -> None:
        """Start (or restart) one worker."""
        self.fleet.launch(name, self._configure(name))

    def _configure(self, name: WorkerName) -> Configure:
        config = self.config
        own = config.own(name.role)
        exchange = None
        num_ranks = len(self._ranks_of(name.leader))
        if self._disaggregated or num_ranks > 1 or config.layout == "hybrid":
            exchange = ExchangeConfig(
                transport=config.transport,
                rank_transport=config.rank_transport,
                host=config.exchange_host,
                secret=self._secret,
                waiting=config.waiting,
                local_processes=config.num_workers,
                num_attention=config.num_attention,
                num_experts=config.num_experts if self._disaggregated else 0,
                num_micro_batches=config.num_micro_batches,
                max_rows=config.max_batch_tokens,
                dtype=config.own("attention").dtype,
            )
        return Configure(
            role=name.role,
            index=name.index,
            rank=name.rank,
            num_ranks=num_ranks,
            num_stages=1 if name.role == "experts" else config.num_stages,
            model=str(config.model),
            device=own.device,
            device_index=self._device_index(name),
            dtype=own.dtype,
            kernels=config.kernels,
            num_threads=own.num_threads or 1,
            spins=config.spins,
            cores=self._cores(name),
            block_size=config.block_size,
            num_blocks=self.num_blocks,
            max_model_len=self.context_length,
            rope_scaling=config.rope_scaling,
            max_running=self._room.max_running + self._room.express_slots,
            placement=self._placing[name.instance].current if self._placing else self._placement,
            expert_slots=self._slots + (1 if self._spare_slot else 0),
            count_rows=config.balance != "off",
            prefetch_rows=self._load_rows if config.balance == "predict" else 0,
            record_routing=config.record_routing is not None,
            replay_routing="" if config.replay_routing is None else str(config.replay_routing),
            exchange=exchange,
            hybrid=self._hybrid(),
            timeout_s=config.timeout_s,
            trace=config.trace,
        )

    def _hybrid(self) -> HybridConfig | None:
        config = self.config
        if config.layout != "hybrid":
            return None
        return HybridConfig(
            expert_tp=config.expert_tp, prefill=config.prefill_collectives, decode=config.decode_collectives
        )

    def _info(self) -> EngineInfo:
        config = self.config
        return EngineInfo(
            model_name=model_name(Path(config.model)),
            max_model_len=self.context_length,
            vocab_size=self.spec.vocab_size,
            eos_token_ids=self.spec.eos_token_ids,
            layout=config.layout,
            num_instances=config.num_instances,
            num_attention=config.num_attention,
            num_experts_workers=config.num_experts if self._disaggregated else 0,
            num_expert_parts=config.num_expert_parts,
            num_micro_batches=config.num_micro_batches,
            max_waiting=config.max_waiting,
        )


def _say_what_is_assumed(model: Path) -> None:
    """One line about numbers that the model's family gave, where its file is silent."""
    config = read_config(model)
    if keys := assumed(config):
        _log.info(
            "config.json does not say %s: taken from the defaults of %s", ", ".join(keys), config.get("model_type")
        )


def start_engine(config: ServeConfig, report: ReportProgress | None = None) -> Engine:
    """Start all workers and wait until they can step. `report(done, total)` bytes of weights while loading.

    `UserError` (one line) if the checkpoint, the budget, the system or a worker's start is at fault. The caller stops
    it."""
    raise_limit()  # before any worker starts, which inherits it
    launcher = Launcher(config)
    _log.info("layout: %s", config.layout)
    if unread := left_out(read_config(config.model)):
        _log.info("%s", unread)
    engine = launcher.engine()
    try:
        if launcher.door is not None:
            launcher.door.start(launcher.fleet.wake)
        for name in launcher.worker_names():
            try:
                launcher.launch(name)
            except OSError as error:
                raise ResourceError(f"the system has no room for {name}: {error.strerror or error}") from error
        engine.start()
        while not engine.complete:
            if engine.fatal is not None:
                raise engine.failure()
            if report is not None:
                report(*engine.workforce.loading_progress())
            time.sleep(0.02)  # loading takes seconds; the engine's thread does the work
    except BaseException:  # an interrupt too: no worker may outlive a start that failed
        engine.stop()
        raise
    return engine

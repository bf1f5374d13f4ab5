"""From a prepared run to a running engine: build its parts, start its workers, wait until they can step.

A worker that is started again gets the same configuration as at first, with the placement that holds by then.
"""

import time
from collections.abc import Sequence
from functools import partial

import msgspec

from antiphon.base.logging import get_logger
from antiphon.base.split_evenly import split_evenly
from antiphon.base.system import raise_limit
from antiphon.kernels.select import resolve_dtype
from antiphon.models.config import read_config
from antiphon.models.quantization import left_out
from antiphon.models.weights import ReportProgress
from antiphon.placement.routing_trace import RoutingRecord
from antiphon.serve.config import ServeConfig
from antiphon.serve.engine import Engine
from antiphon.serve.fleet import Fleet
from antiphon.serve.group import StepGroup
from antiphon.serve.handovers import KVEnds
from antiphon.serve.mask_pool import MakeMatcher
from antiphon.serve.outputs import TrackedRequests
from antiphon.serve.placement_control import FORECASTING, Balancer, PlacementControl
from antiphon.serve.policy.handover import CachePart, KVSource
from antiphon.serve.policy.scheduler import Scheduler
from antiphon.serve.prepare import PreparedEngine, prepare
from antiphon.serve.recovery import Members
from antiphon.serve.statistics import EngineStatistics
from antiphon.serve.worker.kv_transfer import cache_part, layout_digest
from antiphon.serve.worker.messages import Configure, ExchangeConfig, HybridConfig, KVTransferConfig
from antiphon.serve.worker_handle import RemoteWorkers, WorkerName
from antiphon.specs.placement import ExpertPlacement

_log = get_logger("launch")


def start_engine(config: ServeConfig, report: ReportProgress | None = None) -> Engine:
    """`start` what `prepare` makes of `config`."""
    return start(prepare(config), report)


def start(
    run: PreparedEngine,
    report: ReportProgress | None = None,
    make_matcher: MakeMatcher | None = None,
) -> Engine:
    """Start all workers and wait until they can step. `report(done, total)` bytes of weights while loading.

    `UserError` (one line) if the system or a worker's start is at fault. The caller stops the engine. `make_matcher`:
    the place of a new sequence in the grammar of that text; None: requests with a grammar are refused."""
    raise_limit()  # before any worker starts, which inherits it
    _log.info("layout: %s", run.config.layout)
    if unread := left_out(read_config(run.config.model)):
        _log.info("%s", unread)
    engine = build_engine(run, make_matcher)
    try:
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


def build_engine(run: PreparedEngine, make_matcher: MakeMatcher | None = None) -> Engine:
    """The engine and all its parts; nothing runs yet."""
    config = run.config
    statistics = EngineStatistics([len(pool.expert_names) for pool in run.pools])
    fleet = Fleet(_remote_workers(run))
    tracked = TrackedRequests(fleet.wake)
    placing: dict[tuple[str, int], PlacementControl] = {}  # by pool and instance
    groups, first_expert = [], 0
    membership = [(pool, *members) for pool in run.pools for members in pool.membership()]
    path = config.record_routing
    record = None if path is None else RoutingRecord(path, run.info.model_name, run.spec, len(membership))
    for number, (pool, attention, experts) in enumerate(membership):
        if holders := attention if pool.config.layout == "hybrid" else experts:
            placing[holders[0].pool, holders[0].instance] = PlacementControl(
                run.spec, pool.placement, pool.slots, fleet, statistics, may_move=pool.has_spare_slot
            )
        here = placing.get((attention[0].pool, attention[0].instance))
        group = StepGroup(
            members=_members(pool, attention, experts, fleet),
            schedulers=[Scheduler(pool.scheduler) for _ in attention],
            num_micro_batches=pool.config.num_micro_batches,
            steps_freely=pool.config.stepping == "free" or pool.config.plans_ahead,
            plans_ahead=pool.config.side_by_side or pool.config.plans_ahead,
            statistics=statistics,
            tracked=tracked,
            timeout_s=config.timeout_s,
            placing=here,
            balancer=_balancer(pool) if here is not None and pool.config.balance != "off" else None,
            record=None if record is None else partial(record.add, number),
            first_expert=first_expert,
        )
        groups.append(group)
        first_expert += pool.config.num_expert_parts if here is not None else 0
    pool_of = {pool.config.pool: pool for pool in run.pools}
    has_others = sum(len(group.schedulers) for group in groups) > 1
    ends = kv_ends(run) if has_others else None

    def launch(name: WorkerName) -> None:
        pool, present = pool_of[name.pool], placing.get((name.pool, name.instance))
        order = configure(pool, name, pool.placement if present is None else present.current, _cores(run, name))
        if ends is not None and name in ends.sources:
            kv = _kv_transfer(pool, ends, name)
            order = msgspec.structs.replace(order, kv=kv)
        fleet.launch(name, order)

    return Engine(
        info=run.info,
        fleet=fleet,
        groups=groups,
        tracked=tracked,
        scheduler_config=run.scheduler,
        statistics=statistics,
        launch=launch,
        make_matcher=make_matcher,
        kv_ends=ends,
        record=record,
    )


def _members(pool: PreparedEngine, attention: list[WorkerName], experts: list[WorkerName], fleet: Fleet) -> Members:
    ranks_of = {name: pool.ranks_of(name) for name in (*attention, *experts)}
    return Members(attention, experts, ranks_of, fleet, share_experts=pool.config.layout == "hybrid")


def kv_ends(run: PreparedEngine) -> KVEnds:
    """The processes of all pools that cache keys and values."""
    caches = [(pool, name) for pool in run.pools for name in pool.worker_names() if name.role != "experts"]
    parts = {name: _cache_part(pool, name) for pool, name in caches}
    return KVEnds(
        layout=layout_digest(run.spec, resolve_dtype(run.config.own("attention").dtype), run.config.kv_dtype),
        sources={name: KVSource(number, part) for number, (name, part) in enumerate(parts.items())},
        timeout_s=run.config.timeout_s,
    )


def _cache_part(pool: PreparedEngine, name: WorkerName) -> CachePart:
    config = pool.config
    stage, rank = divmod(name.rank, config.attention_tp)
    layers = range(*split_evenly(pool.spec.num_layers, config.num_stages)[stage])
    return cache_part(pool.spec, rank, config.attention_tp, layers)


def _kv_transfer(pool: PreparedEngine, ends: KVEnds, name: WorkerName) -> KVTransferConfig:
    """How a process gives and takes keys and values."""
    config = pool.config
    return KVTransferConfig(
        transport=config.transport,
        host=config.exchange_host,
        secret=pool.secret,
        source=ends.sources[name].number,
        num_sources=len(ends.sources),
        receives=config.pool != "prefill",
        layout=ends.layout,
        hand_over=config.hand_over,
    )


def _remote_workers(run: PreparedEngine) -> RemoteWorkers | None:
    config, joined = run.config, frozenset(name for pool in run.pools for name in pool.joined_names())
    if not joined:
        return None
    local = [name for pool in run.pools for name in pool.local_names()]
    return RemoteWorkers(config.join_address, config.join_secret, joined, local=local)


def _cores(run: PreparedEngine, name: WorkerName) -> list[int]:
    """The cores of a process of any pool; empty where it is not pinned."""
    own = {local: pool.config.own(local.role) for pool in run.pools for local in pool.local_names()}
    return run.config.cores_of(list(own).index(name), list(own.values())) if name in own else []


def _balancer(run: PreparedEngine) -> Balancer:
    return Balancer(run.config.balance, run.placement, run.config.num_micro_batches, run.load_rows)


def configure(
    run: PreparedEngine, name: WorkerName, placement: ExpertPlacement, cores: Sequence[int] = ()
) -> Configure:
    """What a worker process of this pool needs to know before it loads; `placement`: where experts are now."""
    config = run.config
    own = config.own(name.role)
    local = run.local_names()
    on_device = [each for each in local if config.own(each.role).device == own.device]
    return Configure(
        role=name.role,
        index=name.index,
        rank=name.rank,
        num_ranks=len(run.ranks_of(name.leader)),
        num_stages=1 if name.role == "experts" else config.num_stages,
        model=str(config.model),
        fingerprint=run.fingerprint,
        device=own.device,
        # Which of this machine's processes on this kind of device it is, over all roles; workers of other machines are
        # counted when they join.
        device_index=on_device.index(name) if name in on_device else 0,
        dtype=own.dtype,
        kernels=config.kernels,
        graphs=config.uses_graphs(name.role),
        streams=config.uses_streams(name.role),
        num_threads=own.num_threads or 1,
        spins=config.spins,
        sums_in_blocks=config.sums_in_blocks(name.role),
        cores=list(cores),
        block_size=config.block_size,
        num_blocks=run.scheduler.num_blocks,
        kv_dtype=config.kv_dtype,
        max_model_len=run.context_length,
        rope_scaling=config.rope_scaling,
        weights=config.weights,
        max_running=run.scheduler.num_slots,
        placement=placement,
        expert_slots=run.slots + (1 if run.has_spare_slot else 0),
        count_rows=config.balance != "off",
        prefetch_rows=run.load_rows if config.balance in FORECASTING else 0,
        record_routing=config.record_routing is not None,
        replay_routing="" if config.replay_routing is None else str(config.replay_routing),
        path_profile="" if config.path_profile is None else str(config.path_profile),
        phases=config.phases,
        expert_bytes=0 if name.role == "attention" else config.expert_bytes or 0,
        exchange=_exchange(run, name),
        hybrid=_hybrid(config),
        timeout_s=config.timeout_s,
        trace=config.trace,
    )


def _exchange(run: PreparedEngine, name: WorkerName) -> ExchangeConfig | None:
    """How this process exchanges rows with others; None for one that holds everything itself."""
    config = run.config
    if config.layout == "colocated" and len(run.ranks_of(name.leader)) == 1:
        return None
    return ExchangeConfig(
        transport=config.transport,
        rank_transport=config.rank_transport,
        host=config.exchange_host,
        secret=run.secret,
        waiting=config.waiting,
        local_processes=config.num_workers,
        num_attention=config.num_attention,
        num_experts=config.num_expert_workers,
        num_micro_batches=config.num_micro_batches,
        max_rows=config.max_batch_tokens,
        dtype=config.own("attention").dtype,
        library=config.exchange_library,
        merges=config.stepping == "free",
        side_by_side=config.side_by_side,
    )


def _hybrid(config: ServeConfig) -> HybridConfig | None:
    if config.layout != "hybrid":
        return None
    return HybridConfig(
        expert_tp=config.expert_tp, prefill=config.prefill_collectives, decode=config.decode_collectives
    )

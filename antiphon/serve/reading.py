"""One reading of an engine's counters, the schedulers' and its own put together. Never blocks on a step."""

from antiphon.serve.engine_api import EngineStats
from antiphon.serve.statistics import EngineStatistics
from antiphon.serve.workforce import Workforce


def read_stats(
    workforce: Workforce,
    statistics: EngineStatistics,
    *,
    num_waiting: int,
    num_blocks_per_worker: int,
    fatal: str | None,
    draining: bool,
) -> EngineStats:
    """May be called from any thread; takes the queue times that have come since the last reading."""
    schedulers = workforce.schedulers.values()
    counters = [scheduler.counters for scheduler in schedulers]
    pools = [scheduler.occupancy.pool for scheduler in schedulers]
    return EngineStats(
        num_running=sum(scheduler.num_running for scheduler in schedulers),
        num_waiting=num_waiting,
        kv_blocks_used=sum(pool.num_used for pool in pools),
        kv_blocks_total=num_blocks_per_worker * len(pools),
        prefix_cache_hit_tokens=sum(c.prefix_hit_tokens for c in counters),
        prefix_cache_query_tokens=sum(c.prefix_query_tokens for c in counters),
        num_preemptions=sum(c.num_preemptions for c in counters),
        prompt_tokens=statistics.prompt_tokens,
        generation_tokens=sum(c.generation_tokens for c in counters),
        num_steps=statistics.num_steps,
        num_worker_restarts=statistics.num_worker_restarts,
        attention_idle_ratio=statistics.attention_idle_ratio,
        expert_idle_ratio=statistics.expert_idle_ratio,
        exposed_communication_s=statistics.exposed_communication_s,
        dispatch_bytes=statistics.dispatch_bytes,
        balancedness_per_layer=statistics.balancedness_per_layer(),
        queue_times_s=statistics.take_queue_times(),
        exchange=statistics.exchange(),
        healthy=fatal is None and workforce.ready,
        status=fatal or ("draining" if draining else _status(workforce)),
        missing=tuple(map(str, workforce.missing)),
    )


def _status(workforce: Workforce) -> str:
    """Who is missing and why, in words."""
    missing = ", ".join(f"{name} ({why})" for name, why in workforce.missing.items())
    if workforce.ready:
        return f"degraded: waiting for {missing}" if missing else "ok"
    return f"waiting for {missing}" if missing else "recovering: the workers begin anew"

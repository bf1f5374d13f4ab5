"""Which attention worker gets a new request. Pure reading; the engine submits to the scheduler that was chosen.

Among live workers, in this order:

1. one with a slot and KV room for the request beside everything it has accepted already;
2. the least work before the first token, in tokens: the request's own tokens that are *not* in that worker's prefix
   cache, the prompt tokens queued there, and `RUNNING_SEQUENCE_TOKENS` for each sequence that slows every step;
3. the most free blocks; then the lowest index, so that a choice can be repeated.

So the longest prefix hit wins among workers of equal load, and a hit is worth the tokens it spares, no more. Rejected:
the longest hit always wins. With a system prompt that all requests share, every request would follow the first one.
"""

from collections.abc import Mapping

from antiphon.serve.policy.request import Request
from antiphon.serve.policy.scheduler import Scheduler

RUNNING_SEQUENCE_TOKENS = 16


def choose_attention_worker(request: Request, live_schedulers: Mapping[int, Scheduler]) -> int | None:
    """Key of the scheduler to submit to; None if no worker is alive. All must have the same block size."""
    ranked = [(*_burden(request, scheduler), index) for index, scheduler in live_schedulers.items()]
    return min(ranked)[-1] if ranked else None


def _burden(request: Request, scheduler: Scheduler) -> tuple[bool, int, int]:
    occupancy = scheduler.occupancy
    block_size = scheduler.config.block_size
    num_hit = len(occupancy.find_prefix(request)) * block_size
    num_new = len(request.token_ids) - num_hit
    num_queued = occupancy.num_waiting_tokens + occupancy.num_prefill_tokens_left
    has_room = (
        len(occupancy.free_slots) > scheduler.num_waiting
        and occupancy.pool.num_free * block_size >= num_queued + num_new
    )
    work = num_new + num_queued + RUNNING_SEQUENCE_TOKENS * scheduler.num_running
    return not has_room, work, -occupancy.pool.num_free

"""Slots and blocks of one attention worker that only small requests may take, one of each owner.

However much one legal request asks for (64 long prompts, 256 answers), the main way can give it no more than the main
way has. A small request that would have to wait there enters the lane instead, past the line:

1. It is promised blocks for all that it may ever hold (prompt and `max_tokens`), so it never needs more than it has.
2. It may take a quarter of the blocks that are not promised yet, so there is room for the smallest as long as there is
   a slot; and its prompt is short enough for all members' prompts to fit into one step (or into those that run side by
   side, which share the rows of one).
3. Each slot taken halves how long the next answer may be. The last slot is for answers of up to 4 tokens, so it is free
   again after some steps, however many requests with small prompts and long answers there are.
4. Main requests leave `num_kept` blocks alone: those of the lane that its members do not hold. A member shares
   no block until it ends. Hence free >= kept at any time, members are never pushed out, and the main way
   always has all blocks but the lane's: an endless stream of small requests starves none.

Rejected: room for small requests in the main way only (the first to come holds it); preempting large requests for
small ones (an endless stream would starve the large ones); a member that shares cached blocks (who keeps them when it
leaves? The lane would have to take back what is in use).
"""

from antiphon.cost.kv_blocks import blocks_of
from antiphon.serve.policy.request import Request, SchedulerConfig

_LAST_SLOT_TOKENS = 4


class ExpressLane:
    """Its members, by owner. `num_kept`: blocks that must stay free for it. Empty and without effect with no slots."""

    def __init__(self, config: SchedulerConfig) -> None:
        self._config = config
        self._members: dict[str, Request] = {}
        self.num_kept = config.express_blocks
        self._num_promised = 0

    def __len__(self) -> int:
        return len(self._members)

    @property
    def num_free_slots(self) -> int:
        """Slots that main requests must leave alone."""
        return self._config.express_slots - len(self._members)

    def takes(self, request: Request) -> bool:
        """Whether it may enter now."""
        config = self._config
        num_slots = self.num_free_slots
        if num_slots <= 0 or request.num_prompt > config.num_express_rows:
            return False
        if request.params.max_tokens > _LAST_SLOT_TOKENS << (num_slots - 1):
            return False
        num_left = config.express_blocks - self._num_promised
        num_needed = self._num_needed(request)
        return num_needed <= num_left and num_needed <= max(1, num_left // 4) and request.owner not in self._members

    def enter(self, request: Request) -> None:
        """`takes` said yes, and the request holds nothing yet."""
        request.num_promised_blocks = self._num_needed(request)
        self._num_promised += request.num_promised_blocks
        self._members[request.owner] = request

    def leave(self, request: Request) -> None:
        """A member is about to give back its blocks."""
        self.num_kept += len(request.block_table)
        self._num_promised -= request.num_promised_blocks
        request.num_promised_blocks = 0
        del self._members[request.owner]

    def _num_needed(self, request: Request) -> int:
        return blocks_of(request.num_prompt + request.params.max_tokens, self._config.block_size)

"""Which requests wait and run on one attention worker, and what the running ones hold there: blocks and a slot.

A request is in exactly one of two places. All moves between them are here, so that a caller that moves a request cannot
forget half of what moving means:

    add -> waiting -> start -> running -> preempt -> waiting
              |                   |
            remove              remove

Memory is paged (`BlockPool`):

1. A block is free (no request refers to it) or held by one or more requests (reference count).
2. A *full* block whose keys and values are computed may be offered under the digest of everything up to its end:
   digest = blake2b(parent digest, tokens). Equal digest, equal history, so its keys and values can be shared.
3. Released blocks stay on offer until their memory is needed: the free list is also the least-recently-used list.
   Blocks that cannot be found go to its front, those on offer to its back, a sequence's tail before its head.
4. A block being written is never offered, hence never shared: writing needs no copy.

Digests are 256 bits of a cryptographic hash, so a collision need not be handled (Python's 64-bit `hash` would have to
be followed by a comparison of tokens). Rejected: a radix tree over tokens. It finds hits inside a block too, but costs
splitting, locking of paths and a second eviction order; with blocks of 16 tokens the hash chain loses 8 on average.
"""

from array import array
from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from hashlib import blake2b

from antiphon.serve.policy.request import Request, SchedulerConfig
from antiphon.specs.counts import blocks_of

_DIGEST_BYTES = 32
_LAST_SLOT_TOKENS = 4  # of the express lane


def extend_block_digests(digests: list[bytes], token_ids: Sequence[int], block_size: int, num_blocks: int) -> None:
    """Append the digests of blocks `len(digests)` to `num_blocks - 1` of a sequence, all of which must be full."""
    first = len(digests)
    if first >= num_blocks:
        return
    tokens = array("I", token_ids[first * block_size : num_blocks * block_size]).tobytes()
    width = len(tokens) // (num_blocks - first)
    parent = digests[-1] if digests else b""
    for begin in range(0, len(tokens), width):
        parent = blake2b(parent + tokens[begin : begin + width], digest_size=_DIGEST_BYTES).digest()
        digests.append(parent)


class BlockPool:
    """Block ids 0 to `num_blocks - 1`. All operations are O(1) per block; nothing here looks at requests."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self._num_refs = [0] * num_blocks
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(num_blocks))
        self._digest_of: list[bytes | None] = [None] * num_blocks
        self._block_of: dict[bytes, int] = {}

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_used(self) -> int:
        return self.num_blocks - len(self._free)

    def match(self, digests: Sequence[bytes], limit: int) -> list[int]:
        """The blocks that hold the longest prefix on offer of `digests[:limit]`. Takes no reference."""
        blocks = []
        for index in range(min(limit, len(digests))):
            block = self._block_of.get(digests[index])
            if block is None:
                break
            blocks.append(block)
        return blocks

    def num_idle(self, blocks: Sequence[int]) -> int:
        """How many of `blocks` are free now, so that sharing them takes them off the free list."""
        num_refs = self._num_refs
        return sum(1 for block in blocks if num_refs[block] == 0)

    def share(self, blocks: Sequence[int]) -> None:
        """Take one reference on each of the blocks that `match` returned."""
        for block in blocks:
            assert self._digest_of[block] is not None, f"block {block} is not on offer"
            if self._num_refs[block] == 0:
                del self._free[block]
            self._num_refs[block] += 1

    def allocate(self, count: int) -> list[int]:
        """`count` blocks for writing, least recently used first; what they offered is forgotten."""
        assert count <= len(self._free), f"{count} blocks wanted, {len(self._free)} free: admission must check first"
        return [self.allocate_one() for _ in range(count)]

    def allocate_one(self) -> int:
        """One block for writing. The pool must not be empty."""
        block, _ = self._free.popitem(last=False)
        digest = self._digest_of[block]
        if digest is not None:
            del self._block_of[digest]
            self._digest_of[block] = None
        self._num_refs[block] = 1
        return block

    def release(self, blocks: Sequence[int]) -> None:
        """Drop one reference on each block of a sequence, its tail first, so that the head is found for longer."""
        for block in reversed(blocks):
            assert self._num_refs[block] > 0, f"block {block} released twice"
            self._num_refs[block] -= 1
            if self._num_refs[block] == 0:
                self._free[block] = None
                if self._digest_of[block] is None:
                    self._free.move_to_end(block, last=False)

    def offer(self, block: int, digest: bytes) -> None:
        """Offer a full, computed block to others. If its content is on offer already, this copy stays private."""
        assert self._num_refs[block] > 0, f"block {block} is offered, but no sequence holds it"
        if digest not in self._block_of and self._digest_of[block] is None:
            self._digest_of[block] = digest
            self._block_of[digest] = block

    def clear_offered(self) -> None:
        """The memory behind the blocks is gone (worker lost): nothing is on offer any more."""
        self._block_of.clear()
        self._digest_of = [None] * self.num_blocks


def _turn(request: Request) -> tuple[int, int, bool]:
    return request.turn


class ArrivalQueue:
    """Requests by priority, those of the same one in order of arrival. Iteration tolerates removal of requests behind
    the current one.

    A sorted Python list: new requests append, preempted ones go back to the front, requests of a lost worker in
    between. All three are one binary search and one `memmove`. Rejected: a heap, which cannot be read in order or lose
    an element in the middle (an abort).
    """

    def __init__(self) -> None:
        self._requests: list[Request] = []

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self) -> Iterator[Request]:
        return iter(self._requests)

    def __reversed__(self) -> Iterator[Request]:
        return reversed(self._requests)

    def add(self, request: Request) -> None:
        requests = self._requests
        if not requests or request.turn > requests[-1].turn:
            requests.append(request)
            return
        index = bisect_left(requests, request.turn, key=_turn)
        assert requests[index].turn != request.turn, f"two requests have arrival {request.arrival}"
        requests.insert(index, request)

    def remove(self, request: Request) -> None:
        index = bisect_left(self._requests, request.turn, key=_turn)
        assert self._requests[index] is request, f"request {request.request_id} is not in the queue"
        del self._requests[index]

    def remove_all(self) -> list[Request]:
        """The requests that were in it, in their order."""
        requests, self._requests = self._requests, []
        return requests


class ExpressLane:
    """Slots and blocks of one attention worker that only small requests may take, one of each owner.

    However much one legal request asks for (64 long prompts, 256 answers), the main way can give it no more than the
    main way has. A small request that would have to wait there enters the lane instead, past the line:

    1. It is promised blocks for all that it may ever hold (prompt and `max_tokens`), so it never needs more than it
       has.
    2. It may take a quarter of the blocks that are not promised yet, so there is room for the smallest as long as there
       is a slot; and its prompt is short enough for all members' prompts to fit into one step (or into those that run
       side by side, which share the rows of one).
    3. Each slot taken halves how long the next answer may be. The last slot is for answers of up to 4 tokens, so it is
       free again after some steps, however many requests with small prompts and long answers there are.
    4. Main requests leave `num_kept` blocks alone: those of the lane that its members do not hold. A member shares no
       block until it ends. Hence free >= kept at any time, members are never pushed out, and the main way always has
       all blocks but the lane's: an endless stream of small requests starves none.

    Rejected: room for small requests in the main way only (the first to come holds it); preempting large requests for
    small ones (an endless stream would starve the large ones); a member that shares cached blocks (who keeps them when
    it leaves? The lane would have to reclaim what is in use).

    `num_kept`: blocks that must stay free for it. Empty and without effect with no slots."""

    def __init__(self, config: SchedulerConfig) -> None:
        self._config = config
        self._members: dict[str, Request] = {}  # by owner
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

    def add(self, request: Request) -> None:
        """`takes` said yes, and the request holds nothing yet."""
        request.num_promised_blocks = self._num_needed(request)
        self._num_promised += request.num_promised_blocks
        self._members[request.owner] = request

    def remove(self, request: Request) -> None:
        """A member is about to release its blocks."""
        self.num_kept += len(request.block_table)
        self._num_promised -= request.num_promised_blocks
        request.num_promised_blocks = 0
        del self._members[request.owner]

    def _num_needed(self, request: Request) -> int:
        return blocks_of(request.num_prompt + request.params.max_tokens, self._config.block_size)


class BlockBook:
    """What the scheduler and the filling of a step share.

    `released`: requests that gave up their slot since the last plan, which the worker hears with the next one.
    """

    def __init__(self, config: SchedulerConfig) -> None:
        self.config = config
        self.pool = BlockPool(config.num_blocks, config.block_size)
        self.lane = ExpressLane(config)
        self.waiting = ArrivalQueue()
        self.running = ArrivalQueue()
        self.num_waiting_tokens = 0
        self.num_prefill_tokens_left = 0  # tokens of running requests that the last planned step does not reach
        self.num_preemptions = 0  # since the start, as the next three
        self.prefix_query_tokens = 0  # prompt tokens looked up in the prefix cache, at first admission only
        self.prefix_hit_tokens = 0
        self.generation_tokens = 0
        self.released: list[str] = []
        self.steps_in_flight: set[int] = set()
        self.arriving: list[Request] = []  # whose keys and values are to be asked of a prefill worker
        self.num_arriving = 0  # in all
        self.free_slots = list(range(config.num_slots - 1, -1, -1))

    @property
    def num_free_slots(self) -> int:
        """Slots that requests outside the express lane may take."""
        return len(self.free_slots) - self.lane.num_free_slots

    @property
    def num_free_blocks(self) -> int:
        """Blocks that requests outside the express lane may take."""
        return self.pool.num_free - self.lane.num_kept

    def add(self, request: Request) -> None:
        """Let it wait for its turn."""
        request.status = "waiting"
        self.num_waiting_tokens += len(request.token_ids)
        self.waiting.add(request)

    def find_prefix(self, request: Request) -> list[int]:
        """Blocks that hold the beginning of `request`, never all of it: at least one token must be computed.

        A request that reports on every row of its prompt must compute every row of it: it finds nothing.
        """
        if request.wants_prompt_logprobs:
            return []
        num_full = (len(request.token_ids) - 1) // self.config.block_size
        extend_block_digests(request.block_digests, request.token_ids, self.config.block_size, num_full)
        return self.pool.match(request.block_digests, num_full)

    def start(self, request: Request, found_blocks: list[int]) -> None:
        """From waiting to running, on top of the blocks that `find_prefix` returned."""
        self._stop_waiting(request)
        self.pool.share(found_blocks)
        request.status = "running"
        request.slot = self.free_slots.pop()
        request.block_table = found_blocks
        request.num_blocks_offered = len(found_blocks)
        request.num_computed = len(found_blocks) * self.config.block_size
        request.num_admissions += 1
        if request.num_admissions == 1:
            request.num_cached_tokens = request.num_computed
            if request.origin is None:  # the other half of one that was counted
                self.prefix_query_tokens += request.num_prompt
                self.prefix_hit_tokens += request.num_computed
        self.running.add(request)

    def await_arrival(self, request: Request) -> bool:
        """A request that was just started gets the blocks of all its tokens, which must be free, and waits for what a
        prefill worker writes there. False if it does not: what is missing is a block at most, and is computed here."""
        num_missing = len(request.token_ids) - request.num_computed
        if not request.prefills_apart or num_missing <= self.config.block_size:
            return False
        num_new = blocks_of(len(request.token_ids), self.config.block_size) - len(request.block_table)
        request.block_table += self.pool.allocate(num_new)
        if request.num_promised_blocks:
            self.lane.num_kept -= num_new
        request.arrives = True
        self.num_arriving += 1
        self.arriving.append(request)
        return True

    def complete_table(self, request: Request) -> None:
        """Blocks for all its tokens, if they are free."""
        num_new = blocks_of(len(request.token_ids), self.config.block_size) - len(request.block_table)
        if 0 < num_new <= self.num_free_blocks and not request.num_promised_blocks:
            request.block_table += self.pool.allocate(num_new)

    def arrive(self, request: Request, num_computed: int) -> None:
        """Its blocks hold the keys and values of that many tokens: steps may take it."""
        self.stop_arriving(request)
        request.num_computed = num_computed
        self.offer_computed(request)

    def stop_arriving(self, request: Request) -> None:
        """Nothing is written to its blocks by others any more."""
        self.num_arriving -= request.arrives
        request.arrives = False

    def preempt_later_than(self, request: Request, step_id: int) -> bool:
        """Until a block is free, push out the last in turn of the main way that step `step_id` does not compute yet.

        False if no request is left to push out. A request whose blocks are all shared frees none: go on. One whose keys
        and values arrive stays, and one of a step in flight: others write to its blocks."""
        while self.num_free_blocks == 0:
            latest = next((each for each in reversed(self.running) if self._may_push_out(each)), request)
            if latest is request or latest.turn < request.turn or latest.planned_step == step_id:
                return False
            self.running.remove(latest)
            self._release(latest)
            self.add(latest)
            self.num_preemptions += 1
        return True

    def _may_push_out(self, request: Request) -> bool:
        return not (request.num_promised_blocks or request.arrives or request.planned_step in self.steps_in_flight)

    def offer_computed(self, request: Request) -> None:
        """Offer the blocks that the last step filled to requests with the same beginning; of a member of the express
        lane when it has left."""
        if request.num_promised_blocks:
            return
        num_full = request.num_computed // self.config.block_size
        if num_full <= request.num_blocks_offered:
            return
        extend_block_digests(request.block_digests, request.token_ids, self.config.block_size, num_full)
        for index in range(request.num_blocks_offered, num_full):
            self.pool.offer(request.block_table[index], request.block_digests[index])
        request.num_blocks_offered = num_full

    def remove(self, request: Request) -> None:
        """Wherever it is, it leaves. Of a running one no step may be in flight."""
        if request.slot < 0:
            self._stop_waiting(request)
        else:
            self.running.remove(request)
            self._release(request)

    def remove_all(self, *, cache_lost: bool) -> list[Request]:
        """All requests release what they hold and leave, oldest first, but for those whose keys and values arrive.
        `cache_lost`: those too; no block can be found any more, and no worker is left to hear what was released."""
        for request in reversed(self.running.remove_all()):
            if request.arrives and not cache_lost:
                self.running.add(request)
                continue
            self._release(request)
            self.add(request)
        self.num_prefill_tokens_left = self.num_waiting_tokens = 0
        if cache_lost:
            self.pool.clear_offered()
            self.released.clear()
            self.arriving.clear()
        return self.waiting.remove_all()

    def _stop_waiting(self, request: Request) -> None:
        self.num_waiting_tokens -= len(request.token_ids)
        self.waiting.remove(request)

    def _release(self, request: Request) -> None:
        self.stop_arriving(request)
        if request.num_promised_blocks:
            self.lane.remove(request)
            self.offer_computed(request)
        self.pool.release(request.block_table)
        self.free_slots.append(request.slot)
        self.released.append(request.request_id)
        request.forget_computed()

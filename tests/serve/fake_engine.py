"""An engine without a model: deterministic tokens, and failures, pauses and refusals on request.

Tests steer it from their own thread while the server's event loop runs in another; everything a test waits for is a
`threading.Event`, so that no test sleeps.
"""

import asyncio
import threading
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field

import numpy as np

from antiphon.base.errors import UserError
from antiphon.placement.moves import num_moves
from antiphon.serve.engine_api import EngineInfo, EngineOutput, EngineStats, PrefetchCounts, ShuttingDown
from antiphon.serve.statistics import EngineStatistics
from antiphon.serve.text.structured import GrammarCompiler
from antiphon.serve.worker.spans import Spans
from antiphon.specs.placement import ExpertPlacement, contiguous_placement
from antiphon.specs.sampling import PackedLogprobs, PromptLogprobs, SamplingParams

Script = Callable[[list[int], SamplingParams], list[int]]


def default_script(prompt_token_ids: list[int], params: SamplingParams) -> list[int]:
    """`max_tokens` printable byte tokens (ids 65 to 90 below the specials), set by the prompt and the seed."""
    state = sum(prompt_token_ids) + (params.seed or 0) * 7919
    return [40 + (state + 31 * position) % 26 for position in range(params.max_tokens)]


@dataclass
class Submission:
    """One request as the engine saw it, and how it ended."""

    request_id: str
    prompt_token_ids: list[int]
    params: SamplingParams
    ended: threading.Event = field(default_factory=threading.Event)
    aborted: bool = False


class FakeEngine:
    """An `AsyncEngine`. `script` says which tokens a request gets; the fields below change the next requests."""

    def __init__(
        self, *, vocab_size: int, eos_token_id: int, script: Script = default_script, max_model_len: int = 256
    ) -> None:
        self.info = EngineInfo(
            model_name="fake-moe",
            max_model_len=max_model_len,
            vocab_size=vocab_size,
            eos_token_ids=(eos_token_id,),
            layout="disaggregated",
            num_instances=1,
            num_attention=1,
            num_experts_workers=2,
            expert_names=("experts[0]", "experts[1]"),
            num_micro_batches=3,
            max_waiting=64,
            block_size=16,
        )
        self.script = script
        self.eos_token_id = eos_token_id
        self.tokens_per_output = 1
        self.grammars: GrammarCompiler | None = None
        self.refuse_with: Exception | None = None
        self.refuse_from_request = 0  # of one test: how many are taken before `refuse_with` applies
        self.hold_after_tokens: int | None = None
        self.fail_after_tokens: int | None = None
        self.break_grammar_after_tokens: int | None = None
        self.fail_with: Exception | None = None  # None: an output with finish_reason "error"
        self.healthy = True
        self.submissions: list[Submission] = []
        self.first_output = threading.Event()
        self.drained = threading.Event()
        self.spans: dict[str, Spans] = {}
        self.num_looks = 0  # at the last steps
        self.statistics = EngineStatistics()
        self.placement = contiguous_placement(4, 2, [0])
        self.drained_workers: set[str] = set()
        self._queue_times_s = [0.02]
        self.on_giving_up: Callable[[], None] = lambda: None
        self._released = threading.Event()
        self._draining = False
        self._cut_off = False

    def reset(self) -> None:
        """Forget earlier requests, and refuse, hold and fail nothing."""
        self.submissions.clear()
        self.refuse_with = self.fail_with = None
        self.refuse_from_request = 0
        self.hold_after_tokens = self.fail_after_tokens = None
        self.first_output.clear()
        self._released.clear()

    def release(self) -> None:
        """Let held requests go on."""
        self._released.set()

    def submit(
        self, request_id: str, prompt_token_ids: list[int], params: SamplingParams, *, owner: str | None = None
    ) -> AsyncIterator[EngineOutput]:
        if self._draining:
            raise ShuttingDown("the engine is draining")
        if self.refuse_with is not None and len(self.submissions) >= self.refuse_from_request:
            raise self.refuse_with
        submission = Submission(request_id, prompt_token_ids, params)
        self.submissions.append(submission)
        return self._outputs(submission)

    async def _outputs(self, submission: Submission) -> AsyncIterator[EngineOutput]:
        finished = False
        try:
            async for output in self._generate(submission):
                finished = output.finish_reason is not None
                yield output
                self.first_output.set()
        finally:
            if not finished:
                self.abort(submission.request_id)
            submission.ended.set()

    async def _generate(self, submission: Submission) -> AsyncIterator[EngineOutput]:
        params = submission.params
        token_ids = self._constrained(params) if params.grammar else self.script(submission.prompt_token_ids, params)
        prompt_logprobs = self._prompt_logprobs(submission) if params.prompt_logprobs is not None else None
        for begin in range(0, max(1, len(token_ids)), self.tokens_per_output):
            if self.hold_after_tokens is not None and begin >= self.hold_after_tokens:
                while not (self._released.is_set() or self._cut_off):
                    await asyncio.sleep(0.001)
            if self._cut_off:
                yield EngineOutput(request_id=submission.request_id, token_ids=[], finish_reason="abort")
                return
            if self.fail_after_tokens is not None and begin >= self.fail_after_tokens:
                if self.fail_with is not None:
                    raise self.fail_with
                yield EngineOutput(
                    request_id=submission.request_id, token_ids=[], finish_reason="error", error="lost experts[1]"
                )
                return
            if params.grammar and begin == self.break_grammar_after_tokens:
                yield EngineOutput(
                    request_id=submission.request_id,
                    token_ids=[],
                    finish_reason="grammar",
                    error="structured output broke off: too many items",
                )
                return
            await asyncio.sleep(0)
            part = token_ids[begin : begin + self.tokens_per_output]
            stop_token = part[-1] if part and self._is_stop(part[-1], params) else None
            is_last = begin + self.tokens_per_output >= len(token_ids)
            yield EngineOutput(
                request_id=submission.request_id,
                token_ids=part,
                logprobs=None if params.logprobs is None else self._packed(part, params.logprobs),
                prompt_logprobs=prompt_logprobs if begin == 0 else None,
                finish_reason="stop" if stop_token is not None else "length" if is_last else None,
                stop_token_id=stop_token,
                num_cached_tokens=len(submission.prompt_token_ids) // 2,
            )
            if stop_token is not None:
                return

    def _is_stop(self, token_id: int, params: SamplingParams) -> bool:
        return token_id in params.stop_token_ids or (token_id == self.eos_token_id and not params.ignore_eos)

    def _constrained(self, params: SamplingParams) -> list[int]:
        """The shortest answer the grammar allows, by taking end-of-sequence or the lowest token at every step."""
        assert self.grammars is not None
        assert params.grammar is not None
        matcher = self.grammars.matcher(params.grammar)
        token_ids: list[int] = []
        while len(token_ids) < params.max_tokens:
            words = matcher.fill_bitmask()
            allowed = [
                token_id for token_id in range(self.info.vocab_size) if words[token_id // 32] >> (token_id % 32) & 1
            ]
            token_ids.append(self.eos_token_id if self.eos_token_id in allowed else allowed[0])
            assert matcher.accept(token_ids[-1])
            if token_ids[-1] == self.eos_token_id:
                break
        return token_ids

    def _packed(self, token_ids: list[int], num_top: int) -> PackedLogprobs:
        """Each token -0.25, then those that follow it in the vocabulary, each one less likely by 1."""
        own = np.array(token_ids, dtype=np.int32)[:, None]
        ids = np.concatenate([own, (own + np.arange(num_top)) % self.info.vocab_size], axis=1).astype(np.int32)
        row = np.array([-0.25, *(-0.25 - rank for rank in range(num_top))], dtype=np.float32)
        values, ranks = np.tile(row, (len(ids), 1)), np.ones(len(ids), dtype=np.int32)
        return PackedLogprobs(num_top=num_top, ids=ids.tobytes(), values=values.tobytes(), ranks=ranks.tobytes())

    def _prompt_logprobs(self, submission: Submission) -> PromptLogprobs:
        num_top = submission.params.prompt_logprobs or 0
        return PromptLogprobs([self._packed(submission.prompt_token_ids[1:], num_top)])

    def abort(self, request_id: str) -> None:
        for submission in self.submissions:
            if submission.request_id == request_id and not submission.ended.is_set():
                submission.aborted = True
                submission.ended.set()

    def stats(self) -> EngineStats:
        return EngineStats(
            num_running=sum(not submission.ended.is_set() for submission in self.submissions),
            num_waiting=2,
            kv_blocks_used=25,
            kv_blocks_total=100,
            prefix_cache_hit_tokens=30,
            prefix_cache_query_tokens=60,
            num_preemptions=1,
            prompt_tokens=500,
            generation_tokens=700,
            num_steps=90,
            num_worker_restarts=0,
            attention_idle_ratio=0.125,
            expert_idle_ratio=0.5,
            exposed_communication_s=1.5,
            dispatch_bytes=4096,
            balancedness_per_layer={0: 0.75, 1: 1.0},
            placement_changes=3,
            prefetch=PrefetchCounts(40, 9, 5, 2),
            rows_per_expert={0: {0: {0: 10.0, 1: 20.0}, 1: {2: 10.0}}, 1: {0: {0: 5.0, 1: 15.0}, 1: {2: 20.0}}},
            prompt_rows_per_expert={0: [4.0, 15.0, 5.0]},
            queue_times_s=self._take_queue_times(),
            healthy=self.healthy,
            status="ok" if self.healthy else "waiting for experts[1] (loading)",
            missing=() if self.healthy else ("experts[1]",),
            workers={
                "attention[0]": "ready",
                "experts[0]": "ready",
                "experts[1]": "ready" if self.healthy else "loading",
            },
            events=self.statistics.newest_events(),
        )

    def _take_queue_times(self) -> list[float]:
        taken, self._queue_times_s = self._queue_times_s, []
        return taken

    def drain_worker(self, worker: str, *, undo: bool) -> str:
        if worker not in ("attention[0]", "prefill/replica[0]"):
            raise UserError(f"no worker {worker!r} has requests: drain one of attention[0], prefill/replica[0]")
        self.drained_workers = set() if undo else {worker}
        return self.drain_state(worker)

    def drain_state(self, worker: str) -> str:
        return "draining, 3 requests left" if worker in self.drained_workers else "ready"

    def place(self, placement: ExpertPlacement) -> int:
        placement.check_fits([0], 4, 2, 3)
        moves, self.placement = num_moves(self.placement, placement), placement
        return moves

    def last_steps(self, num_steps: int, timeout_s: float) -> dict[str, Spans]:
        self.num_looks += 1
        return self.spans

    def call_when_given_up(self, callback: Callable[[], None]) -> None:
        self.on_giving_up = callback

    async def drain(self, timeout_s: float) -> None:
        self._draining = True
        self.drained.set()
        try:
            async with asyncio.timeout(timeout_s):
                while any(not submission.ended.is_set() for submission in self.submissions):
                    await asyncio.sleep(0.001)
        except TimeoutError:
            self._cut_off = True

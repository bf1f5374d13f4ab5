"""All engine requests behind one HTTP request: submitted together, read together, ended together.

Several answers (n, or several prompts) arrive interleaved. One answer is read straight from the engine's iterator;
several are read by one task each, that put their pieces into one queue. No task is made per token.

However the request ends (done, stop string, client gone, failure), `close` ends every engine request that still
runs, so that its KV blocks are free at the next step.
"""

import asyncio
import time
import uuid
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing, asynccontextmanager

from antiphon.base.errors import UserError
from antiphon.base.logging import get_logger
from antiphon.serve.api.choice import Choice, ChoiceDelta
from antiphon.serve.api.context import ApiContext
from antiphon.serve.api.metrics import RequestClock
from antiphon.serve.api.parameters import ToolUse, with_seed
from antiphon.serve.api.prompts import TokenizedPrompt
from antiphon.serve.api.requests import GenerationRequest
from antiphon.serve.engine_api import AsyncEngine, EngineOutput
from antiphon.specs.sampling import SamplingParams

_log = get_logger("serve.api")


class _EngineRequest:
    """One answer, its engine iterator and its clock."""

    def __init__(
        self,
        engine: AsyncEngine,
        request_id: str,
        choice: Choice,
        outputs: AsyncIterator[EngineOutput],
        clock: RequestClock,
    ) -> None:
        self.request_id = request_id
        self.choice = choice
        self.clock = clock
        self._engine = engine
        self._outputs = outputs
        self._ended_by_engine = False

    async def deltas(self) -> AsyncGenerator[ChoiceDelta, None]:
        """Pieces of this answer, the last with a finish reason, whatever the engine does."""
        try:
            async for output in self._outputs:
                self._ended_by_engine = output.finish_reason is not None
                self.clock.tokens_arrived(len(output.token_ids))
                delta = self.choice.consume(output)
                if delta is not None:
                    if delta.finish_reason is not None:
                        self.clock.finished(delta.finish_reason)
                    yield delta
                if self.choice.finished:
                    return
            problem = "the engine ended the request without a reason"
        except UserError as error:
            problem = str(error)
        except Exception as error:  # a failing engine must not take the other requests of the server with it
            _log.exception("request %s: the engine failed", self.request_id)
            problem = f"the engine failed: {error}"
        self.choice.finished = True
        self.clock.finished("error")
        yield ChoiceDelta(self.choice.index, finish_reason="error", error=problem)

    async def close(self) -> None:
        """Make the engine forget the request unless it ended it itself. A generator that was never started runs none
        of its clean-up when closed, so the engine is also told by name."""
        if not self._ended_by_engine:
            self._engine.abort(self.request_id)
            self._ended_by_engine = True
        if not self.choice.finished:
            self.choice.finished = True
            self.clock.finished("abort")
        aclose = getattr(self._outputs, "aclose", None)
        if aclose is not None:
            await aclose()


class Generation:
    """The answers to one HTTP request, in order: prompt 0's n answers first."""

    def __init__(self, context: ApiContext, request_id: str) -> None:
        self.request_id = request_id
        self.created_s = int(time.time())
        self.prompts: list[TokenizedPrompt] = []
        self.num_answers = 1
        self._context = context
        self._requests: list[_EngineRequest] = []
        self._tasks: list[asyncio.Task[None]] = []
        self._entered = False
        self._arrived_s = time.perf_counter()

    def begin(self, user: str | None) -> None:
        """Take a place among the running requests, until `close`; `ApiError` 429 or 503 when there is none."""
        self._context.enter()
        if user is not None:
            _log.info("request %s is from user %r", self.request_id, user)
        self._entered = True

    def submit(
        self,
        prompts: list[TokenizedPrompt],
        params: list[SamplingParams],
        request: GenerationRequest,
        *,
        echo: bool = False,
        tools: ToolUse | None = None,
    ) -> None:
        """Queue every answer with the engine. When it refuses one, `close` takes the others back."""
        engine = self._context.engine
        self.prompts = prompts
        self.num_answers = request.n or 1
        for prompt, prompt_params in zip(prompts, params, strict=True):
            for answer in range(self.num_answers):
                index = len(self._requests)
                choice = Choice(
                    index=index,
                    prompt=prompt,
                    params=prompt_params,
                    stop_strings=tuple(request.stop or ()),
                    echo=echo,
                    tokenizer=self._context.tokenizer,
                    skip_special_tokens=request.skip_special_tokens is not False,
                    keep_stop=bool(request.include_stop_str_in_output),
                    reader=tools.reader() if tools is not None else None,
                )
                engine_id = f"{self.request_id}-{index}"
                outputs = engine.submit(engine_id, prompt.token_ids, with_seed(prompt_params, request.seed, answer))
                clock = RequestClock(self._context.metrics, self._arrived_s)
                self._requests.append(_EngineRequest(engine, engine_id, choice, outputs, clock))

    @property
    def num_choices(self) -> int:
        return len(self._requests)

    def deltas(self) -> AsyncGenerator[ChoiceDelta, None]:
        """Pieces of all answers as they come. Ends after every answer has sent its finish reason."""
        return self._requests[0].deltas() if len(self._requests) == 1 else self._deltas_of_several()

    async def _deltas_of_several(self) -> AsyncGenerator[ChoiceDelta, None]:
        queue: asyncio.Queue[ChoiceDelta] = asyncio.Queue()
        self._tasks = [asyncio.create_task(self._pump(request, queue)) for request in self._requests]
        num_running = len(self._requests)
        while num_running:
            delta = await queue.get()
            if delta.finish_reason is not None:
                num_running -= 1
            yield delta

    async def _pump(self, request: _EngineRequest, queue: asyncio.Queue[ChoiceDelta]) -> None:
        async with aclosing(request.deltas()) as deltas:
            async for delta in deltas:
                queue.put_nowait(delta)
        await request.close()  # a stop string ends one answer while others go on

    async def close(self) -> None:
        """End whatever the engine still computes for this, and give back the place among the running requests. Safe to
        call more than once, and while the caller is being cancelled."""
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.gather(*self._tasks, return_exceptions=True)
        for request in self._requests:
            await request.close()
        self._requests, self._tasks = [], []
        if self._entered:
            self._entered = False
            self._context.leave()

    def usage(self) -> dict[str, object]:
        """Token counts; a prompt counts once however many answers it has. Read it before `close`."""
        num_prompt = sum(len(prompt.token_ids) for prompt in self.prompts)
        num_completion = sum(request.choice.num_tokens for request in self._requests)
        first_answers = self._requests[:: self.num_answers]
        return _usage(num_prompt, num_completion, sum(request.choice.num_cached_tokens for request in first_answers))

    def usage_of(self, index: int) -> dict[str, object]:
        """Token counts so far of one answer, for streams."""
        choice = self._requests[index].choice
        num_prompt = len(self.prompts[index // self.num_answers].token_ids)
        return _usage(num_prompt, choice.num_tokens, choice.num_cached_tokens)


def _usage(num_prompt: int, num_completion: int, num_cached: int) -> dict[str, object]:
    return {
        "prompt_tokens": num_prompt,
        "completion_tokens": num_completion,
        "total_tokens": num_prompt + num_completion,
        "prompt_tokens_details": {"cached_tokens": num_cached},
    }


@asynccontextmanager
async def generation_for(context: ApiContext, request: GenerationRequest, prefix: str) -> AsyncIterator[Generation]:
    """A begun generation; `prefix` begins its id. With a response the caller has given it away: only what goes wrong
    before that closes it here."""
    generation = Generation(context, f"{prefix}-{uuid.uuid4().hex}")
    generation.begin(request.user)
    try:
        yield generation
    except BaseException:  # cancellation, too: nobody would read the answers, and their KV blocks would stay taken
        await generation.close()
        raise

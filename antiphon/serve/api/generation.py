"""All engine requests behind one HTTP request: submitted together, read together, ended together.

Several answers (n, or several prompts) arrive interleaved. One answer is read straight from the engine's iterator;
several are read by one task each, that put the engine's outputs into one queue. One task turns them into text, in turns
with other HTTP requests (`Pace`). No task is made per token.

However the request ends (done, stop string, client gone, failure), `close` ends every engine request that still
runs, so that its KV blocks are free at the next step.
"""

import asyncio
import time
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass

from antiphon.base.errors import UserError
from antiphon.base.logging import get_logger
from antiphon.serve.api.chat_reading import ChatReading
from antiphon.serve.api.choice import ChoiceDelta, ChoiceText, TokenizedPrompt
from antiphon.serve.api.context import ApiContext, Pace
from antiphon.serve.api.metrics import RequestClock
from antiphon.serve.api.parameters import with_seed
from antiphon.serve.api.requests import GenerationRequest
from antiphon.serve.engine_api import EngineOutput
from antiphon.serve.text.stop_strings import StopStrings
from antiphon.specs.sampling import SamplingParams

_log = get_logger("serve.api")
_MAX_WAITING = 64  # outputs of all answers; more wait where the engine puts them


@dataclass(eq=False)
class _EngineRequest:
    """One answer, its engine iterator and its clock."""

    context: ApiContext
    request_id: str
    choice: ChoiceText
    iterator: AsyncIterator[EngineOutput]
    clock: RequestClock
    pace: Pace
    ended_by_engine: bool = False
    is_in_line: bool = True

    def __post_init__(self) -> None:
        self.context.num_in_line += 1

    async def outputs(self) -> AsyncGenerator[EngineOutput, None]:
        """The engine's outputs, the last with a finish reason, whatever the engine does."""
        try:
            async for output in self.iterator:
                self._leave_line()
                self.ended_by_engine = output.finish_reason is not None
                self.clock.tokens_arrived(len(output.token_ids))
                yield output
            if self.ended_by_engine:
                return
            problem = "the engine ended the request without a reason"
        except UserError as error:
            problem = str(error)
        except Exception as error:  # a failing engine must not take the other requests of the server with it
            _log.exception("request %s: the engine failed", self.request_id)
            problem = f"the engine failed: {error}"
        yield EngineOutput(request_id=self.request_id, token_ids=[], finish_reason="error", error=problem)

    async def consume(self, output: EngineOutput) -> ChoiceDelta | None:
        """What an output adds to the answer, worked out when it is this HTTP request's turn; None for nothing yet."""
        async with self.pace:
            delta = self.choice.consume(output)
        if delta is not None and delta.finish_reason is not None:
            self.clock.finished(delta.finish_reason)
        return delta

    async def end(self) -> None:
        """Make the engine forget the request unless it ended it itself. A generator that was never started runs none of
        its clean-up when closed, so the engine also gets an abort by name."""
        self._leave_line()
        if not self.ended_by_engine:
            self.context.engine.abort(self.request_id)
            self.ended_by_engine = True
        aclose = getattr(self.iterator, "aclose", None)
        if aclose is not None:
            await aclose()

    def _leave_line(self) -> None:
        self.context.num_in_line -= self.is_in_line
        self.is_in_line = False

    def give_up(self) -> None:
        """The rest of the answer is not read."""
        if not self.choice.finished:
            self.choice.finished = True
            self.clock.finished("abort")


class Generation:
    """The answers to one HTTP request, in order: prompt 0's n answers first. Made by `generation_for`."""

    def __init__(self, context: ApiContext, request_id: str) -> None:
        self.request_id = request_id
        self._engine_id = uuid.uuid4().hex  # a client may give the same id twice
        self.created_s = int(time.time())
        self.prompts: list[TokenizedPrompt] = []
        self.num_answers = 1
        self.pace = context.pace()
        self._context = context
        self._requests: list[_EngineRequest] = []
        self._tasks: list[asyncio.Task[None]] = []
        self._is_open = True
        self._reads_reasoning = False
        self._arrived_s = time.perf_counter()

    async def submit(
        self,
        prompts: list[TokenizedPrompt],
        params: list[SamplingParams],
        request: GenerationRequest,
        *,
        echo: bool = False,
        readings: Sequence[ChatReading] = (),
    ) -> None:
        """Queue every answer with the engine. When it refuses one, `close` takes the others back. `readings`: of each
        prompt that is a chat."""
        self._reads_reasoning = bool(readings)
        engine = self._context.engine
        self.prompts = prompts
        self.num_answers = request.n or 1
        self._context.check_line(self.num_answers * len(prompts))
        stops = StopStrings(self._context.tokenizer, tuple(request.stop or ()))
        of_prompts: Sequence[ChatReading | None] = readings or [None] * len(prompts)
        for prompt, prompt_params, reading in zip(prompts, params, of_prompts, strict=True):
            for answer in range(self.num_answers):
                async with self.pace:
                    index = len(self._requests)
                    choice = ChoiceText(
                        index=index,
                        prompt=prompt,
                        params=prompt_params,
                        request=request,
                        stops=stops,
                        echo=echo,
                        tokenizer=self._context.tokenizer,
                        reader=reading.reader() if reading is not None else None,
                        shows_reasoning=reading is None or reading.shows_reasoning,
                    )
                    engine_id = f"{self._engine_id}-{index}"
                    own_params = with_seed(prompt_params, request.seed, answer)
                    outputs = engine.submit(engine_id, prompt.token_ids, own_params, owner=self._engine_id)
                    clock = RequestClock(self._context.metrics, self._arrived_s)
                    self._requests.append(_EngineRequest(self._context, engine_id, choice, outputs, clock, self.pace))

    @property
    def num_choices(self) -> int:
        return len(self._requests)

    async def deltas(self) -> AsyncGenerator[ChoiceDelta, None]:
        """Pieces of all answers as they come. Ends after every answer has sent its finish reason."""
        num_running = len(self._requests)
        async with aclosing(self._outputs()) as outputs:
            async for index, output in outputs:
                request = self._requests[index]
                if request.choice.finished:
                    continue  # it came behind a stop string
                delta = await request.consume(output)
                if request.choice.finished:
                    num_running -= 1
                    if self._tasks and not request.ended_by_engine:
                        self._tasks[index].cancel()  # a stop string ends one answer while others go on
                if delta is not None:
                    yield delta
                if not num_running:
                    return

    async def _outputs(self) -> AsyncGenerator[tuple[int, EngineOutput], None]:
        """What the engine says of each answer."""
        if len(self._requests) == 1:
            async with aclosing(self._requests[0].outputs()) as outputs:
                async for output in outputs:
                    yield 0, output
            return
        queue: asyncio.Queue[tuple[int, EngineOutput]] = asyncio.Queue(_MAX_WAITING)
        self._tasks = [asyncio.create_task(self._pump(index, queue)) for index in range(len(self._requests))]
        while True:
            yield await queue.get()

    async def _pump(self, index: int, queue: asyncio.Queue[tuple[int, EngineOutput]]) -> None:
        request = self._requests[index]
        try:
            async with aclosing(request.outputs()) as outputs:
                async for output in outputs:
                    await queue.put((index, output))
        finally:
            await request.end()

    async def close(self) -> None:
        """End whatever the engine still computes for this, and give back the place among the running requests. Safe to
        call more than once, and while the caller is being cancelled."""
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.gather(*self._tasks, return_exceptions=True)
        for request in self._requests:
            await request.end()
            request.give_up()
        self._requests, self._tasks = [], []
        if self._is_open:
            self._is_open = False
            self._context.leave()

    def usage(self) -> dict[str, object]:
        """Token counts; a prompt counts once however many answers it has. Read it before `close`."""
        num_prompt = sum(len(prompt.token_ids) for prompt in self.prompts)
        first_answers = self._requests[:: self.num_answers]
        num_cached = sum(request.choice.num_cached_tokens for request in first_answers)
        return self._usage(num_prompt, num_cached, [request.choice for request in self._requests])

    def prompt_ids_of(self, index: int) -> list[int]:
        """The prompt of one answer."""
        return self.prompts[index // self.num_answers].token_ids

    def usage_of(self, index: int) -> dict[str, object]:
        """Token counts so far of one answer, for streams."""
        choice = self._requests[index].choice
        return self._usage(len(self.prompt_ids_of(index)), choice.num_cached_tokens, [choice])

    def _usage(self, num_prompt: int, num_cached: int, choices: list[ChoiceText]) -> dict[str, object]:
        num_completion = sum(choice.num_tokens for choice in choices)
        counts: dict[str, object] = {
            "prompt_tokens": num_prompt,
            "completion_tokens": num_completion,
            "total_tokens": num_prompt + num_completion,
            "prompt_tokens_details": {"cached_tokens": num_cached},
        }
        if self._reads_reasoning:
            num_reasoning = sum(choice.num_reasoning_tokens for choice in choices)
            counts["completion_tokens_details"] = {"reasoning_tokens": num_reasoning}
        return counts


@asynccontextmanager
async def generation_for(context: ApiContext, request: GenerationRequest, prefix: str) -> AsyncIterator[Generation]:
    """A generation, which has a place among the running requests until its `close`; `ApiError` 429 or 503 when there is
    none. `prefix` begins its id. A response that the caller returns closes it; only what goes wrong before is closed
    here."""
    context.enter()
    generation = Generation(context, f"{prefix}-{request.request_id or uuid.uuid4().hex}")
    if (user := request.safety_identifier or request.user) is not None:
        _log.info("request %s is from user %r", generation.request_id, user)
    try:
        yield generation
    except BaseException:  # cancellation, too: unread answers would keep their KV blocks
        await generation.close()
        raise

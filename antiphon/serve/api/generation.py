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

from antiphon.base.errors import UserError
from antiphon.base.logging import get_logger
from antiphon.serve.api.choice import ChoiceDelta, ChoiceText, TokenizedPrompt
from antiphon.serve.api.context import ApiContext
from antiphon.serve.api.metrics import RequestClock
from antiphon.serve.api.parameters import ChatReading, with_seed
from antiphon.serve.api.requests import GenerationRequest
from antiphon.serve.engine_api import EngineOutput
from antiphon.serve.text.stop_strings import StopStrings
from antiphon.specs.sampling import SamplingParams

_log = get_logger("serve.api")
_MAX_WAITING = 64  # outputs of all answers; more wait where the engine puts them


class Generation:
    """The answers to one HTTP request, in order: prompt 0's n answers first. Made by `open_generation`."""

    def __init__(self, context: ApiContext, request_id: str) -> None:
        self.request_id = request_id
        self._owner = uuid.uuid4().hex  # begins the engine's ids: a client may give the same id twice
        self.created_s = int(time.time())
        self.prompts: list[TokenizedPrompt] = []
        self.num_answers = 1
        self.pace = context.pace()
        self._context = context
        self._choices: list[ChoiceText] = []
        self._engine_outputs: list[AsyncIterator[EngineOutput]] = []  # of each of them
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
        stops = StopStrings(self._context.tokenizer, tuple(request.stop)) if request.stop else None
        of_prompts: Sequence[ChatReading | None] = readings or [None] * len(prompts)
        for prompt, prompt_params, reading in zip(prompts, params, of_prompts, strict=True):
            for answer in range(self.num_answers):
                async with self.pace:
                    index = len(self._choices)
                    choice = ChoiceText(
                        clock=RequestClock(self._context.metrics, self._arrived_s),
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
                    own_params = with_seed(prompt_params, request.seed, answer)
                    engine_id = self._engine_id(index)
                    outputs = engine.submit(engine_id, prompt.token_ids, own_params, owner=self._owner)
                    self._engine_outputs.append(outputs)  # last: what fails before leaves nothing in the engine
                    self._choices.append(choice)
                    self._context.num_in_line += 1

    def _engine_id(self, index: int) -> str:
        return f"{self._owner}-{index}"

    @property
    def num_choices(self) -> int:
        return len(self._choices)

    async def deltas(self) -> AsyncGenerator[ChoiceDelta, None]:
        """Pieces of all answers as they come. Ends after every answer has sent its finish reason."""
        num_running = len(self._choices)
        async with aclosing(self._outputs()) as outputs:
            async for index, output in outputs:
                choice = self._choices[index]
                if choice.finished:
                    continue  # it came behind a stop string
                async with self.pace:
                    delta = choice.consume(output)
                if choice.finished:
                    num_running -= 1
                    if self._tasks and not choice.ended_by_engine:
                        self._tasks[index].cancel()  # a stop string ends one answer while others go on
                if delta is not None:
                    yield delta
                if not num_running:
                    return

    async def _outputs(self) -> AsyncGenerator[tuple[int, EngineOutput], None]:
        """What the engine says of each answer."""
        if len(self._choices) == 1:
            async with aclosing(self._outputs_of(self._choices[0])) as outputs:
                async for output in outputs:
                    yield 0, output
            return
        queue: asyncio.Queue[tuple[int, EngineOutput]] = asyncio.Queue(_MAX_WAITING)
        self._tasks = [asyncio.create_task(self._pump(choice, queue)) for choice in self._choices]
        while True:
            yield await queue.get()

    async def _pump(self, choice: ChoiceText, queue: asyncio.Queue[tuple[int, EngineOutput]]) -> None:
        try:
            async with aclosing(self._outputs_of(choice)) as outputs:
                async for output in outputs:
                    await queue.put((choice.index, output))
        finally:
            await self._end(choice)

    async def _outputs_of(self, choice: ChoiceText) -> AsyncGenerator[EngineOutput, None]:
        """The engine's outputs, the last with a finish reason, whatever the engine does."""
        request_id = self._engine_id(choice.index)
        try:
            async for output in self._engine_outputs[choice.index]:
                self._leave_line(choice)
                choice.ended_by_engine = output.finish_reason is not None
                choice.clock.tokens_arrived(len(output.token_ids))
                yield output
            if choice.ended_by_engine:
                return
            problem = "the engine ended the request without a reason"
        except UserError as error:
            problem = str(error)
        except Exception as error:  # a failing engine must not take the other requests of the server with it
            _log.exception("request %s: the engine failed", request_id)
            problem = f"the engine failed: {error}"
        yield EngineOutput(request_id=request_id, token_ids=[], finish_reason="error", error=problem)

    async def _end(self, choice: ChoiceText) -> None:
        """Make the engine forget the request unless it ended it itself. A generator that was never started runs none of
        its clean-up when closed, so the engine also gets an abort by name."""
        self._leave_line(choice)
        if not choice.ended_by_engine:
            self._context.engine.abort(self._engine_id(choice.index))
            choice.ended_by_engine = True
        aclose = getattr(self._engine_outputs[choice.index], "aclose", None)
        if aclose is not None:
            await aclose()

    def _leave_line(self, choice: ChoiceText) -> None:
        self._context.num_in_line -= choice.is_in_line
        choice.is_in_line = False

    async def close(self) -> None:
        """End whatever the engine still computes for this, and give back the place among the running requests. Safe to
        call more than once, and while the caller is being cancelled."""
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.gather(*self._tasks, return_exceptions=True)
        for choice in self._choices:
            await self._end(choice)
            choice.give_up()
        self._choices, self._tasks = [], []
        if self._is_open:
            self._is_open = False
            self._context.leave()

    def usage(self) -> dict[str, object]:
        """Token counts; a prompt counts once however many answers it has. Read it before `close`."""
        return self._usage(self._choices[:: self.num_answers], self._choices)

    def prompt_ids_of(self, index: int) -> list[int]:
        """The prompt of one answer."""
        return self.prompts[index // self.num_answers].token_ids

    def usage_of(self, index: int) -> dict[str, object]:
        """Token counts so far of one answer, for streams."""
        return self._usage([self._choices[index]], [self._choices[index]])

    def _usage(self, of_prompts: list[ChoiceText], choices: list[ChoiceText]) -> dict[str, object]:
        """`of_prompts`: an answer to each prompt."""
        block_size = self._context.engine.info.block_size
        num_prompts = [len(self.prompt_ids_of(choice.index)) for choice in of_prompts]
        num_cached = [choice.num_cached_tokens for choice in of_prompts]
        pairs = zip(num_prompts, num_cached, strict=True)
        num_new = sum(max(0, number // block_size * block_size - cached) for number, cached in pairs)
        num_prompt = sum(num_prompts)
        num_completion = sum(choice.num_tokens for choice in choices)
        counts: dict[str, object] = {
            "prompt_tokens": num_prompt,
            "completion_tokens": num_completion,
            "total_tokens": num_prompt + num_completion,
            "prompt_tokens_details": {"cached_tokens": sum(num_cached), "cache_write_tokens": num_new},
        }
        if self._reads_reasoning:
            num_reasoning = sum(choice.num_reasoning_tokens for choice in choices)
            counts["completion_tokens_details"] = {"reasoning_tokens": num_reasoning}
        return counts


@asynccontextmanager
async def open_generation(context: ApiContext, request: GenerationRequest, prefix: str) -> AsyncIterator[Generation]:
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

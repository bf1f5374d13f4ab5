"""What agents on Pydantic AI do, over the three APIs that it speaks. Needs `pydantic-ai-slim[openai,anthropic]`.

Answers are forced into a shape: a model that was trained on nothing does not stop by itself.
"""

import asyncio
from typing import Any

from checking import MODEL, OPENAI_URL, TOO_LONG, URL, Verdict, check
from pydantic_ai import Agent, NativeOutput, ToolOutput
from pydantic_ai.exceptions import ModelAPIError
from pydantic_ai.models.anthropic import AnthropicModel
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.anthropic import AnthropicProvider
from pydantic_ai.providers.openai import OpenAIProvider
from pydantic_ai.usage import UsageLimits

SETTINGS: Any = {"max_tokens": 400}


async def check_model(model: Any, *, can_follow_schemas: bool) -> None:
    name = type(model).__name__
    shapes: list[Any] = [ToolOutput(Verdict)] + [NativeOutput(Verdict)] * can_follow_schemas
    for shape in shapes:
        agent: Any = Agent(model, output_type=shape, instructions="be kind", model_settings=SETTINGS, retries=9)
        result = await agent.run("bada do")
        is_there = isinstance(result.output, Verdict) and result.usage.output_tokens > 0
        check(is_there, f"{type(shape).__name__}, {name}")
        again = await agent.run("ki", message_history=result.all_messages())
        check(isinstance(again.output, Verdict), f"a conversation goes on, {name}")
    async with Agent(model, model_settings={"max_tokens": 8}).run_stream("bada do") as stream:
        pieces = [piece async for piece in stream.stream_text(delta=True)]
    check(bool(pieces), f"a streamed answer, {name}")
    if not isinstance(model, OpenAIChatModel):
        limits = UsageLimits(input_tokens_limit=10_000, count_tokens_before_request=True)
        counted = await Agent(model, model_settings={"max_tokens": 8}).run("bada do", usage_limits=limits)
        check(counted.usage.input_tokens > 0, f"tokens are counted before, {name}")
    said = ""
    try:
        await Agent(model).run(TOO_LONG[0]["content"])
    except ModelAPIError as error:
        said = type(error).__name__
    check("ContextWindow" in said, f"a prompt that is too long is known as such, {name}")


async def check_all() -> None:
    openai = OpenAIProvider(base_url=OPENAI_URL, api_key="none")
    anthropic = AnthropicProvider(base_url=URL, api_key="none")
    await check_model(OpenAIChatModel(MODEL, provider=openai), can_follow_schemas=True)
    await check_model(OpenAIResponsesModel(MODEL, provider=openai), can_follow_schemas=True)
    await check_model(AnthropicModel(MODEL, provider=anthropic), can_follow_schemas=False)


if __name__ == "__main__":
    asyncio.run(check_all())

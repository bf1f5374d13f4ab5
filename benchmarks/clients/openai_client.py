"""What programs on OpenAI's own libraries do: chats, responses, parsed output, streams, an agent's loop.

Usage: `openai_client.py URL MODEL`. Runs in an environment with `openai-agents`; an exception or a failed check ends it
with exit code 1. The agent calls a tool over `/v1/responses`, gets its result and answers, as coding agents do.
"""

import sys
from typing import Any, Literal

from agents import Agent, ModelSettings, OpenAIResponsesModel, Runner, function_tool, set_tracing_disabled
from checking import Verdict, check
from openai import AsyncOpenAI, OpenAI, pydantic_function_tool

SEEN: list[str] = []


@function_tool
def look_up(city: Literal["Oslo", "Rome"]) -> str:
    """The weather of a city."""
    SEEN.append(city)
    return f"{city}: 20 C"


def check_chats(client: OpenAI, model: str) -> None:
    messages: Any = [{"role": "user", "content": "bada do"}]
    answer = client.chat.completions.create(model=model, messages=messages, max_tokens=8)
    check(answer.usage is not None and answer.usage.completion_tokens == 8, "chat")
    stream = client.chat.completions.create(model=model, messages=messages, max_tokens=8, stream=True)
    check(len(list(stream)) > 5, "streamed chat")
    parsed = client.chat.completions.parse(
        model=model, messages=messages, max_tokens=400, seed=3, response_format=Verdict
    )
    check(isinstance(parsed.choices[0].message.parsed, Verdict), "parsed chat")


def check_sent_back(client: OpenAI, model: str) -> None:
    """What the library parsed goes back as it is."""
    asked: Any = [{"role": "user", "content": "bada do"}]
    tools = [pydantic_function_tool(Verdict)]
    options: Any = {"model": model, "tools": tools, "tool_choice": "required", "max_tokens": 400}
    message = (
        client.chat.completions.parse(messages=asked, parallel_tool_calls=False, seed=3, **options).choices[0].message
    )
    (call,) = message.tool_calls or ()
    check(isinstance(call.function.parsed_arguments, Verdict), "a parsed call")
    result = {"role": "tool", "tool_call_id": call.id, "content": "yes"}
    for sent in (message, message.model_dump()):
        turns: Any = [*asked, sent, result]
        again = client.chat.completions.create(model=model, messages=turns, tools=tools, max_tokens=8)
        check(again.usage is not None and again.usage.completion_tokens > 0, "its result is read")
    response = client.responses.create(model=model, input="bada do", max_output_tokens=8)
    items: Any = [*asked, *(item.model_dump() for item in response.output)]
    counted = client.responses.input_tokens.count(model=model, input=items)
    check(counted.input_tokens > 8, "tokens of what goes back are counted")


def check_responses(client: OpenAI, model: str) -> None:
    first = client.responses.create(model=model, input="bada do", max_output_tokens=8)
    check(first.usage is not None and first.usage.output_tokens == 8 and bool(first.output_text), "response")
    second = client.responses.create(model=model, input="ki", max_output_tokens=8, previous_response_id=first.id)
    check(second.previous_response_id == first.id, "response that goes on from another")
    with client.responses.stream(model=model, input="bada do", max_output_tokens=8) as stream:
        kinds = [event.type for event in stream]
    check(kinds[0] == "response.created" and kinds[-1] == "response.incomplete", "streamed response")
    parsed = client.responses.parse(
        model=model, input="bada", max_output_tokens=400, text_format=Verdict, extra_body={"seed": 3}
    )
    check(isinstance(parsed.output_parsed, Verdict), "parsed response")


def check_agent(url: str, model: str) -> None:
    set_tracing_disabled(True)
    client = AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=60)
    agent = Agent(
        name="clerk",
        instructions="Use look_up.",
        tools=[look_up],
        model=OpenAIResponsesModel(model=model, openai_client=client),
        model_settings=ModelSettings(
            tool_choice="required", max_tokens=400, parallel_tool_calls=False, extra_body={"seed": 3}
        ),
        output_type=Verdict,  # a model that was trained on nothing ends an answer where a grammar does
    )
    result = Runner.run_sync(agent, "bada do", max_turns=20)
    check(bool(SEEN) and isinstance(result.final_output, Verdict), "an agent calls a tool and answers")


def main() -> None:
    url, model = sys.argv[1:]
    client = OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=60)
    check_chats(client, model)
    check_sent_back(client, model)
    check_responses(client, model)
    check_agent(url, model)


if __name__ == "__main__":
    main()

"""What programs on OpenAI's own libraries do: chats, responses, parsed output, streams, an agent's loop.

Needs `openai-agents`. The agent calls a tool over `/v1/responses`, gets its result and answers, as coding agents do.
"""

from typing import Any, Literal

from agents import Agent, ModelSettings, OpenAIResponsesModel, Runner, function_tool, set_tracing_disabled
from checking import HELLO, MODEL, OPENAI_URL, Verdict, check
from openai import AsyncOpenAI, OpenAI, pydantic_function_tool

SEEN: list[str] = []


@function_tool
def look_up(city: Literal["Oslo", "Rome"]) -> str:
    """The weather of a city."""
    SEEN.append(city)
    return f"{city}: 20 C"


def check_chats(client: OpenAI) -> None:
    answer = client.chat.completions.create(model=MODEL, messages=HELLO, max_tokens=8)
    check(answer.usage is not None and answer.usage.completion_tokens == 8, "chat")
    stream = client.chat.completions.create(model=MODEL, messages=HELLO, max_tokens=8, stream=True)
    check(len(list(stream)) > 5, "streamed chat")
    parsed = client.chat.completions.parse(model=MODEL, messages=HELLO, max_tokens=400, seed=3, response_format=Verdict)
    check(isinstance(parsed.choices[0].message.parsed, Verdict), "parsed chat")


def check_sent_back(client: OpenAI) -> None:
    """What the library parsed goes back as it is."""
    tools = [pydantic_function_tool(Verdict)]
    options: Any = {"model": MODEL, "tools": tools, "max_tokens": 400, "seed": 3, "parallel_tool_calls": False}
    message = client.chat.completions.parse(messages=HELLO, tool_choice="required", **options).choices[0].message
    (call,) = message.tool_calls or ()
    check(isinstance(call.function.parsed_arguments, Verdict), "a parsed call")
    result = {"role": "tool", "tool_call_id": call.id, "content": "yes"}
    for sent in (message, message.model_dump()):
        turns: Any = [*HELLO, sent, result]
        again = client.chat.completions.create(model=MODEL, messages=turns, tools=tools, max_tokens=8)
        check(again.usage is not None and again.usage.completion_tokens > 0, "its result is read")
    response = client.responses.create(model=MODEL, input="bada do", max_output_tokens=8)
    items: Any = [*HELLO, *(item.model_dump() for item in response.output)]
    counted = client.responses.input_tokens.count(model=MODEL, input=items)
    check(counted.input_tokens > 8, "tokens of what goes back are counted")


def check_responses(client: OpenAI) -> None:
    first = client.responses.create(model=MODEL, input="bada do", max_output_tokens=8)
    check(first.usage is not None and first.usage.output_tokens == 8 and bool(first.output_text), "response")
    second = client.responses.create(model=MODEL, input="ki", max_output_tokens=8, previous_response_id=first.id)
    check(second.previous_response_id == first.id, "response that goes on from another")
    with client.responses.stream(model=MODEL, input="bada do", max_output_tokens=8) as stream:
        kinds = [event.type for event in stream]
    check(kinds[0] == "response.created" and kinds[-1] == "response.incomplete", "streamed response")
    parsed = client.responses.parse(
        model=MODEL, input="bada", max_output_tokens=400, text_format=Verdict, extra_body={"seed": 3}
    )
    check(isinstance(parsed.output_parsed, Verdict), "parsed response")


def check_agent() -> None:
    set_tracing_disabled(True)
    client = AsyncOpenAI(base_url=OPENAI_URL, api_key="none", max_retries=0, timeout=60)
    agent = Agent(
        name="clerk",
        instructions="Use look_up.",
        tools=[look_up],
        model=OpenAIResponsesModel(model=MODEL, openai_client=client),
        model_settings=ModelSettings(
            tool_choice="required", max_tokens=400, parallel_tool_calls=False, extra_body={"seed": 3}
        ),
        output_type=Verdict,  # a model that was trained on nothing ends an answer where a grammar does
    )
    result = Runner.run_sync(agent, "bada do", max_turns=20)
    check(bool(SEEN) and isinstance(result.final_output, Verdict), "an agent calls a tool and answers")


def main() -> None:
    client = OpenAI(base_url=OPENAI_URL, api_key="none", max_retries=0, timeout=60)
    check_chats(client)
    check_sent_back(client)
    check_responses(client)
    check_agent()


if __name__ == "__main__":
    main()

"""What programs on Anthropic's library do: messages, streams, tools, counting. Usage: `anthropic_client.py URL MODEL`.

Runs in an environment with `anthropic`; an exception or a failed check ends it with exit code 1.
"""

import sys
from typing import Any

import anthropic
from anthropic import beta_tool
from checking import check

HELLO: Any = [{"role": "user", "content": "bada do"}]
SCHEMA = {
    "type": "object",
    "properties": {"good": {"type": "boolean"}},
    "required": ["good"],
    "additionalProperties": False,
}
TOOL: Any = {"name": "judge", "description": "Judges.", "input_schema": SCHEMA}
LONG: Any = [{"role": "user", "content": "bada do " * 20_000}]
SEEN: list[int] = []


@beta_tool
def look_up(number: int) -> str:
    """Looks up.

    Args:
        number: of the place.
    """
    SEEN.append(number)
    return "20 C"


def main() -> None:
    url, model = sys.argv[1:]
    client = anthropic.Anthropic(base_url=url, api_key="none", max_retries=0, timeout=60)
    answer = client.messages.create(model=model, max_tokens=8, messages=HELLO, system="be kind")
    check(answer.stop_reason == "max_tokens" and answer.usage.output_tokens == 8, "message")
    with client.messages.stream(model=model, max_tokens=8, messages=HELLO) as stream:
        pieces = list(stream.text_stream)
        check("".join(pieces) == stream.get_final_text() != "", "streamed message")

    forced: Any = {"type": "tool", "name": "judge"}
    called = client.messages.create(model=model, max_tokens=400, messages=HELLO, tools=[TOOL], tool_choice=forced)
    (call,) = called.content
    check(call.type == "tool_use" and isinstance(call.input["good"], bool), "a tool is called")
    result = {"role": "user", "content": [{"type": "tool_result", "tool_use_id": call.id, "content": "yes"}]}
    turns: Any = [*HELLO, {"role": "assistant", "content": called.content}, result]
    again = client.messages.create(model=model, max_tokens=8, messages=turns, tools=[TOOL])
    check(again.usage.output_tokens > 0, "its result is read")
    with client.messages.stream(
        model=model, max_tokens=400, messages=HELLO, tools=[TOOL], tool_choice=forced
    ) as stream:
        (block,) = stream.get_final_message().content
    check(block.type == "tool_use" and isinstance(block.input["good"], bool), "a call is streamed")

    count = client.messages.count_tokens(model=model, messages=HELLO, system="be kind")
    kept = (answer.usage.cache_read_input_tokens or 0) + (answer.usage.cache_creation_input_tokens or 0)
    check(count.input_tokens == answer.usage.input_tokens + kept, "tokens are counted")
    runner = client.beta.messages.tool_runner(
        model=model, max_tokens=400, messages=HELLO, tools=[look_up], tool_choice={"type": "any"}, max_iterations=2
    )
    check(len(list(runner)) == 2 and bool(SEEN), "a tool is run")
    filled = client.messages.create(model=model, max_tokens=200_000, messages=HELLO, timeout=60)
    check(filled.stop_reason in ("model_context_window_exceeded", "end_turn"), "the context is filled")
    (card,) = client.models.list()
    check(card.id == model and (card.max_input_tokens or 0) > 0, "models are described")
    try:
        client.messages.create(model=model, max_tokens=8, messages=LONG)
    except anthropic.BadRequestError as error:
        check("prompt is too long" in str(error) and bool(error.request_id), "a prompt that is too long")
    try:
        client.messages.create(model="another", max_tokens=1, messages=HELLO)
    except anthropic.NotFoundError as error:
        check("does not exist here" in str(error), "refusals are understood")


if __name__ == "__main__":
    main()

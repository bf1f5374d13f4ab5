"""What programs on Anthropic's library do: messages, streams, tools, counting. Needs `anthropic`."""

from typing import Any

import anthropic
from anthropic import beta_tool
from checking import HELLO, MODEL, TOO_LONG, URL, Verdict, check, check_refused

TOOL: Any = {"name": "judge", "description": "Judges.", "input_schema": Verdict.model_json_schema()}
FORCED: Any = {"max_tokens": 400, "tools": [TOOL], "tool_choice": {"type": "tool", "name": "judge"}}
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
    client = anthropic.Anthropic(base_url=URL, api_key="none", max_retries=0, timeout=60)
    answer = client.messages.create(model=MODEL, max_tokens=8, messages=HELLO, system="be kind")
    check(answer.stop_reason == "max_tokens" and answer.usage.output_tokens == 8, "message")
    with client.messages.stream(model=MODEL, max_tokens=8, messages=HELLO) as stream:
        pieces = list(stream.text_stream)
        check("".join(pieces) == stream.get_final_text() != "", "streamed message")

    called = client.messages.create(model=MODEL, messages=HELLO, **FORCED)
    (call,) = called.content
    check(call.type == "tool_use" and isinstance(call.input["good"], bool), "a tool is called")
    result = {"role": "user", "content": [{"type": "tool_result", "tool_use_id": call.id, "content": "yes"}]}
    turns: Any = [*HELLO, {"role": "assistant", "content": called.content}, result]
    again = client.messages.create(model=MODEL, max_tokens=8, messages=turns, tools=[TOOL])
    check(again.usage.output_tokens > 0, "its result is read")
    with client.messages.stream(model=MODEL, messages=HELLO, **FORCED) as stream:
        (block,) = stream.get_final_message().content
    check(block.type == "tool_use" and isinstance(block.input["good"], bool), "a call is streamed")

    count = client.messages.count_tokens(model=MODEL, messages=HELLO, system="be kind")
    kept = (answer.usage.cache_read_input_tokens or 0) + (answer.usage.cache_creation_input_tokens or 0)
    check(count.input_tokens == answer.usage.input_tokens + kept, "tokens are counted")
    runner = client.beta.messages.tool_runner(
        model=MODEL, max_tokens=400, messages=HELLO, tools=[look_up], tool_choice={"type": "any"}, max_iterations=2
    )
    check(len(list(runner)) == 2 and bool(SEEN), "a tool is run")
    filled = client.messages.create(model=MODEL, max_tokens=200_000, messages=HELLO, timeout=60)
    check(filled.stop_reason in ("model_context_window_exceeded", "end_turn"), "the context is filled")
    (card,) = client.models.list()
    check(card.id == MODEL and (card.max_input_tokens or 0) > 0, "models are described")
    error = check_refused(
        lambda: client.messages.create(model=MODEL, max_tokens=8, messages=TOO_LONG),
        anthropic.BadRequestError, "a prompt that is too long", "prompt is too long",
    )  # fmt: skip
    check(bool(error.request_id), "its request has an id")
    check_refused(
        lambda: client.messages.create(model="another", max_tokens=1, messages=HELLO),
        anthropic.NotFoundError, "refusals are understood", "does not exist here",
    )  # fmt: skip


if __name__ == "__main__":
    main()

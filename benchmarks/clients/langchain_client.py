"""What programs on LangChain do: chat, stream, batch, complete, call a tool. Needs `langchain-openai`."""

from typing import Any, Literal

from checking import MODEL, OPENAI_URL, Verdict, check
from langchain_core.messages import HumanMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI, OpenAI

OPTIONS: dict[str, Any] = {
    "model": MODEL, "base_url": OPENAI_URL, "api_key": "none", "timeout": 60, "max_retries": 0
}  # fmt: skip


@tool
def look_up(city: Literal["Oslo", "Rome"], celsius: bool) -> str:
    """The weather of a city."""
    return f"{city}: 20 {'C' if celsius else 'F'}"


def main() -> None:
    chat = ChatOpenAI(**OPTIONS, max_tokens=12)
    answer = chat.invoke("bada do")
    check(answer.usage_metadata is not None and answer.usage_metadata["output_tokens"] == 12, "chat")
    pieces = list(chat.stream("bada do", stream_usage=True))
    check(len(pieces) > 5 and any(piece.usage_metadata for piece in pieces), "streamed chat with usage")
    check(len(chat.batch(["bada", "do", "ki"])) == 3, "three chats at once")
    check(bool(OpenAI(**OPTIONS, max_tokens=8).invoke("bada")), "completion")

    long = ChatOpenAI(**OPTIONS, max_tokens=400, temperature=0.5, seed=3)
    message = long.bind_tools([look_up], tool_choice="look_up").invoke("bada")
    check([call["name"] for call in message.tool_calls] == ["look_up"], "a tool is called")
    call = message.tool_calls[0]
    result = ToolMessage(look_up.invoke(call["args"]), tool_call_id=call["id"])
    check(bool(chat.bind_tools([look_up]).invoke([HumanMessage("bada"), message, result]).id), "its result is read")
    for method in ("function_calling", "json_schema"):
        verdict = long.with_structured_output(Verdict, method=method, strict=True).invoke("bada")
        check(isinstance(verdict, Verdict), f"structured output by {method}")


if __name__ == "__main__":
    main()

"""A request of Anthropic's Messages API, and the chat that it is.

Turns are made of blocks. A user's turn may hold results of tools, which become messages of their own in the order in
which they stand; the model's turn is text, thinking and calls in one message. A turn of the model at the end is the
beginning of the answer, which goes on from there. What Anthropic's own machines would do (read images, run tools) is
refused, by name. Thinking that another server encrypted cannot be read and is left out.
"""

import json
from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import Field, Tag, model_validator
from pydantic_core import PydanticCustomError

from antiphon.serve.api.chat_messages import (
    TEXT_OR_LIST,
    CacheControl,
    FunctionName,
    RequestModel,
    SentBack,
    check_kind,
)
from antiphon.serve.api.errors import bad_request, in_client_words
from antiphon.serve.api.guard.body import validate
from antiphon.serve.api.input_limits import MAX_CALLS, InputLimits
from antiphon.serve.api.requests import AllowedCallers, ChatCompletionRequest, Count, OnlyFalse, StopField
from antiphon.serve.text.text_service import thinking_switches

_BLOCKS = {
    "user": ("text", "tool_result"),
    "assistant": ("text", "thinking", "redacted_thinking", "tool_use"),
    "system": ("text",),
}  # by who says them
# What refusals of the chat call a parameter, and what this API calls it (`in_client_words`).
_NAMES = {
    "max_completion_tokens": "max_tokens",
    "stop": "stop_sequences",
    "response_format": "output_config.format",
    "reasoning_effort": "output_config.effort",
    "thinking_token_budget": "thinking.budget_tokens",
    "chat_template_kwargs": "thinking",
    "parallel_tool_calls": "tool_choice.disable_parallel_tool_use",
    "user": "metadata.user_id",
    "tool_choice": "tool_choice",
    ".json_schema": "",
    ".function": "",
    ".function.arguments": ".input",
    ".function.parameters": ".input_schema",
    ".tool_call_id": ".tool_use_id",
    ".tool_calls": ".content",
    ".reasoning_content": ".content",
}
_NOTHING_SAID = {"role": "assistant", "content": ""}


class TextBlock(SentBack):
    type: Literal["text"]
    text: str
    cache_control: CacheControl = None
    citations: Annotated[list[Any], Field(max_length=0)] | None = None


class ThinkingBlock(SentBack):
    type: Literal["thinking"]
    thinking: str
    signature: str | None = None
    cache_control: CacheControl = None


class RedactedThinkingBlock(SentBack):
    type: Literal["redacted_thinking"]
    data: str


class ToolUseBlock(SentBack):
    type: Literal["tool_use"]
    id: Annotated[str, Field(min_length=1, max_length=128)]
    name: FunctionName
    input: dict[str, Any]
    cache_control: CacheControl = None
    caller: dict[str, Any] | None = Field(None, description="Changes nothing.")


_CHECK_BLOCK = check_kind(
    ("text", "thinking", "redacted_thinking", "tool_use", "tool_result"),
    "this server reads text, thinking, tool_use and tool_result",
    "it is a block",
)


def _content(blocks: Any) -> Any:
    """A text, or a list of `blocks`."""
    listed = Annotated[list[Annotated[blocks, _CHECK_BLOCK]], Field(fail_fast=True), Tag("<list>")]
    return Annotated[Annotated[str, Tag("<text>")] | listed, TEXT_OR_LIST]


_Text = _content(TextBlock)


class ToolResultBlock(SentBack):
    type: Literal["tool_result"]
    tool_use_id: Annotated[str, Field(min_length=1, max_length=128)]
    content: _Text | None = None  # type: ignore[valid-type]
    is_error: bool | None = None
    cache_control: CacheControl = None


_Any = _content(
    Annotated[
        TextBlock | ThinkingBlock | RedactedThinkingBlock | ToolUseBlock | ToolResultBlock, Field(discriminator="type")
    ]
)


class AnthropicMessage(RequestModel):
    role: Literal["user", "assistant", "system"]
    content: _Any  # type: ignore[valid-type]


class AnthropicTool(RequestModel):
    """A function. Tools of other types would run on Anthropic's machines."""

    type: Literal["custom"] | None = None
    name: FunctionName
    description: str | None = None
    input_schema: dict[str, Any]
    strict: bool | None = Field(None, description="Arguments must fit the schema even when the model may choose.")
    cache_control: CacheControl = None
    eager_input_streaming: bool | None = Field(None, description="Changes nothing: arguments always stream.")
    input_examples: list[Any] | None = Field(None, description="Changes nothing.")
    defer_loading: OnlyFalse | None = Field(None, description="The model sees all tools.")
    allowed_callers: AllowedCallers = None


class AnthropicToolChoice(RequestModel):
    type: Literal["auto", "any", "tool", "none"]
    name: FunctionName | None = None
    disable_parallel_tool_use: bool | None = None

    @model_validator(mode="after")
    def _check_name(self) -> "AnthropicToolChoice":
        if self.type == "tool" and self.name is None:
            raise PydanticCustomError("name", "name is missing: say which tool")
        return self


class Thinking(RequestModel):
    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: Count | None = Field(
        None, description="Tokens after which thinking is ended, if the model has a token that ends it."
    )
    display: str | None = Field(None, description="Changes nothing.")


class AnthropicOutputFormat(RequestModel):
    type: Literal["json_schema"]
    schema_: dict[str, Any] = Field(alias="schema")


class AnthropicOutput(RequestModel):
    effort: Annotated[str, Field(max_length=32)] | None = Field(
        None, description="For chat templates that read reasoning_effort; changes nothing for others."
    )
    format: AnthropicOutputFormat | None = Field(None, description="JSON that follows a schema is enforced.")


class AnthropicMetadata(RequestModel):
    user_id: Annotated[str, Field(max_length=512)] | None = Field(None, description="Named in the server's log.")


_CHECK_TOOL = check_kind(("custom",), "this server runs no tools itself; leave it out, or describe it by input_schema")


class CountTokensRequest(RequestModel):
    """`POST /v1/messages/count_tokens`."""

    model: str | None = Field(None, description="The served model's name. Default: the served model.")
    messages: Annotated[list[AnthropicMessage], Field(min_length=1, fail_fast=True)]
    system: _Text | None = None  # type: ignore[valid-type]
    tools: Annotated[list[Annotated[AnthropicTool, _CHECK_TOOL]], Field(max_length=128, fail_fast=True)] | None = None
    tool_choice: AnthropicToolChoice | None = None
    thinking: Thinking | None = Field(
        None, description="Switches thinking where the chat template can; changes nothing for others."
    )
    output_config: AnthropicOutput | None = None
    output_format: AnthropicOutputFormat | None = Field(None, description="The former name of output_config.format.")
    cache_control: CacheControl = None
    context_management: dict[str, Any] | None = Field(
        None, description="Changes nothing: what is sent is what is read."
    )
    mcp_servers: Annotated[list[Any], Field(max_length=0)] | None = None


class MessagesRequest(CountTokensRequest):
    """`POST /v1/messages`."""

    max_tokens: Annotated[int, Field(ge=1, le=2**31 - 1)] = Field(
        description="The most that the answer may have. A context that is full ends it before."
    )
    temperature: Annotated[float, Field(ge=0, le=100)] | None = Field(None, description="Default 1; 0 is greedy.")
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1, le=2**31 - 1)] | None = None
    stop_sequences: StopField | None = None
    stream: bool | None = None
    metadata: AnthropicMetadata | None = None
    service_tier: Literal["auto", "standard_only"] | None = None
    speed: Literal["standard"] | None = None
    request_id: Annotated[str, Field(pattern="^[!-~]{1,128}$")] | None = None
    inference_geo: str | None = Field(None, description="Changes nothing.")
    thread: dict[str, Any] | None = Field(None, description="Refused with the code thread_unsupported_request.")


class _MessagesChat(ChatCompletionRequest):
    max_tokens_may_not_fit = True


def as_chat(
    body: CountTokensRequest, settable: frozenset[str], limits: InputLimits, *, ends_thinking: bool = False
) -> tuple[ChatCompletionRequest, dict[str, str]]:
    """The same as a chat request, and what the client calls its parameters (`in_client_words`); `ApiError` 400 where a
    chat may not have so much. `settable`: variables of the chat template that requests can set. `ends_thinking`: the
    model's thinking can be ended by a grammar."""
    names = _NAMES | {f"tools[{number}]": f"tools[{number}]" for number in range(len(body.tools or ()))}
    names["continue_final_message"] = f"messages[{len(body.messages) - 1}]"
    messages = _messages(body, names)
    if messages[-1] == _NOTHING_SAID:
        messages.pop()
    last = messages[-1] if messages else {}
    is_begun = last.get("role") == "assistant" and "tool_calls" not in last
    chat: dict[str, Any] = {
        "model": body.model,
        "messages": messages,
        "continue_final_message": is_begun or None,
        "tools": [_tool(tool) for tool in body.tools or ()] or None,
        **_tool_choice(body.tool_choice, bool(body.tools)),
    }
    if body.thinking is not None:
        chat["chat_template_kwargs"] = thinking_switches(settable, on=body.thinking.type != "disabled") or None
    output = body.output_config
    if output is not None and output.effort is not None and "reasoning_effort" in settable:
        chat["reasoning_effort"] = output.effort
    form = None if output is None else output.format
    if form is None:
        names["response_format"] = "output_format"
    elif body.output_format not in (None, form):
        raise bad_request(
            "output_config.format and output_format both say what the answer is: send one of them",
            param="output_format",
        )
    if (form := form or body.output_format) is not None:
        schema = {"name": "answer", "schema": form.schema_}
        chat["response_format"] = {"type": "json_schema", "json_schema": schema}
    if isinstance(body, MessagesRequest):
        chat |= {name: getattr(body, name) for name in ("temperature", "top_p", "top_k", "stream", "request_id")}
        chat |= {"max_completion_tokens": body.max_tokens, "stop": body.stop_sequences or None}
        if ends_thinking and body.thinking is not None and body.thinking.type == "enabled":
            budget = body.thinking.budget_tokens
            if budget is not None and budget < body.max_tokens:  # a larger one never ends anything
                chat["thinking_token_budget"] = budget
        chat["user"] = body.metadata.user_id if body.metadata is not None else None
    with in_client_words(names):
        present = {name: value for name, value in chat.items() if value is not None}
        return validate(present, _MessagesChat, limits), names


def _messages(body: CountTokensRequest, names: dict[str, str]) -> list[dict[str, Any]]:
    """The messages of the chat; `names` gets the place in the request of each message and call."""
    messages: list[dict[str, Any]] = [{"role": "system", "content": _text(body.system)}] if body.system else []
    names |= {"messages[0]": "system"} if body.system else {}
    for number, message in enumerate(body.messages):
        place, first = f"messages[{number}]", f"messages[{len(messages)}]"
        names[first] = place
        if isinstance(message.content, str):
            messages.append({"role": message.role, "content": message.content})
            continue
        _check_blocks(message.role, message.content, f"{place}.content")
        if message.role == "assistant":
            calls = [index for index, block in enumerate(message.content) if isinstance(block, ToolUseBlock)]
            if len(calls) > MAX_CALLS:
                raise bad_request(
                    f"{place}.content has {len(calls)} calls: at most {MAX_CALLS}", param=f"{place}.content"
                )
            for call, index in enumerate(calls):
                names[f"{first}.tool_calls[{call}]"] = f"{place}.content[{index}]"
            messages.append(_answered(message.content))
            continue
        for index, asked in _asked(message.role, message.content):
            turn, block = f"messages[{len(messages)}]", f"{place}.content[{index}]"
            names[turn] = place
            if asked["role"] == "tool":
                names |= {turn: block, f"{turn}.role": f"{block}.type"}
            messages.append(asked)
    return messages


def _check_blocks(role: str, blocks: list[Any], param: str) -> None:
    """`ApiError` 400 for a block that its role cannot say, and would be lost."""
    may_say = _BLOCKS[role]
    if not blocks and role != "assistant":
        raise bad_request(f"{param} has no items: it must have at least 1 item", param=param)
    for number, block in enumerate(blocks):
        if block.type not in may_say:
            where = f"{param}[{number}]"
            raise bad_request(
                f"{where}: it is a block of type {block.type!r}: the {role} says {' and '.join(may_say)}",
                param=where,
            )


def _text(content: str | list[TextBlock] | None) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    return "\n".join(block.text for block in content)


def _answered(blocks: list[Any]) -> dict[str, Any]:
    thinking = "".join(block.thinking for block in blocks if isinstance(block, ThinkingBlock))
    calls = [
        {"id": block.id, "function": {"name": block.name, "arguments": json.dumps(block.input, ensure_ascii=False)}}
        for block in blocks
        if isinstance(block, ToolUseBlock)
    ]
    message: dict[str, Any] = {"role": "assistant", "content": _text([b for b in blocks if isinstance(b, TextBlock)])}
    if thinking:
        message["reasoning_content"] = thinking
    if calls:
        message["tool_calls"] = calls
    return message


def _asked(role: str, blocks: list[Any]) -> Iterator[tuple[int, dict[str, Any]]]:
    """Results of tools, and what is said before, between and after them, each with the number of its last block."""
    said: list[TextBlock] = []
    for index, block in enumerate([*blocks, None]):
        if isinstance(block, TextBlock):
            said.append(block)
            continue
        if said:
            yield index - 1, {"role": role, "content": _text(said)}
            said = []
        if isinstance(block, ToolResultBlock):
            text = _text(block.content)
            text = f"Error: {text}" if block.is_error and not text.lower().startswith("error") else text
            yield index, {"role": "tool", "tool_call_id": block.tool_use_id, "content": text}


def _tool(tool: AnthropicTool) -> dict[str, Any]:
    function = {"name": tool.name, "parameters": tool.input_schema, "strict": tool.strict}
    if tool.description is not None:
        function["description"] = tool.description
    return {"type": "function", "function": function}


def _tool_choice(choice: AnthropicToolChoice | None, has_tools: bool) -> dict[str, Any]:
    if choice is None or (choice.type in ("auto", "none") and not has_tools):
        return {}
    named = {"type": "function", "function": {"name": choice.name}}
    chosen = {"auto": "auto", "any": "required", "none": "none", "tool": named}[choice.type]
    return {"tool_choice": chosen, "parallel_tool_calls": False if choice.disable_parallel_tool_use else None}

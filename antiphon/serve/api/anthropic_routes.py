"""`POST /v1/messages` and `POST /v1/messages/count_tokens`: a chat, in the words of Anthropic's API.

A request is made a chat. Turns are made of blocks. A user's turn may hold results of tools, which become messages of
their own in the order in which they stand; the model's turn is text, thinking and calls in one message. A turn of the
model at the end is the beginning of the answer, which goes on from there. What Anthropic's own machines would do (read
images, run tools) is refused, by name. Thinking that another server encrypted cannot be read and is left out.

An answer is blocks of thinking, text and calls, whole or as events. Arguments of a call that are no JSON object, which
only a model without a grammar writes, are the input ``{"INVALID_JSON": text}``, as Anthropic's documentation has it.
"""

import json
from collections.abc import Iterator
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse
from pydantic import Field, Tag, model_validator
from pydantic_core import PydanticCustomError

from antiphon.serve.api.answer_json import named_event
from antiphon.serve.api.chat_messages import (
    TEXT_OR_LIST,
    CacheControl,
    FunctionName,
    RequestModel,
    SentBack,
    check_kind,
)
from antiphon.serve.api.completions import submit_chat
from antiphon.serve.api.context import client_of, context_of
from antiphon.serve.api.errors import ApiError, bad_request
from antiphon.serve.api.generation import Generation, generation_for
from antiphon.serve.api.guard.body import read_request, validate
from antiphon.serve.api.parameters import can_end_reasoning
from antiphon.serve.api.prompts import chat_prompt
from antiphon.serve.api.requests import ChatCompletionRequest, Count, StopField
from antiphon.serve.api.respond import ItemEvents, respond_in_items
from antiphon.serve.api.responses import AnthropicErrorResponse, described
from antiphon.serve.api.settings import InputLimits
from antiphon.serve.text.answer_fields import CallPiece
from antiphon.serve.text.call_values import call_arguments
from antiphon.serve.text.text_service import settable_variables, thinking_switches

router = APIRouter(tags=["Anthropic"])

_STOP_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}
_BLOCKS = {
    "user": ("text", "tool_result"),
    "assistant": ("text", "thinking", "redacted_thinking", "tool_use"),
    "system": ("text",),
}  # by who says them
_NOTHING_SAID = {"role": "assistant", "content": ""}
_DELTAS = {
    "text": ("text_delta", "text"),
    "thinking": ("thinking_delta", "thinking"),
    "tool_use": ("input_json_delta", "partial_json"),
}


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
    request_id: Annotated[str, Field(pattern="^[!-~]{1,128}$")] | None = None
    inference_geo: str | None = Field(None, description="Changes nothing.")
    thread: dict[str, Any] | None = Field(None, description="Refused with the code thread_unsupported_request.")


class _MessagesChat(ChatCompletionRequest):
    max_tokens_may_not_fit = True


# --- the chat that it is ----------------------------------------------------------------------------------------------


def as_chat(
    body: CountTokensRequest, settable: frozenset[str], limits: InputLimits, *, ends_thinking: bool = False
) -> ChatCompletionRequest:
    """The same as a chat request; `ApiError` 400 where a chat may not have so much. `settable`: variables of the chat
    template that requests can set. `ends_thinking`: the model's thinking can be ended by a grammar."""
    messages = _messages(body)
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
    if body.output_config is not None:
        if body.output_config.effort is not None and "reasoning_effort" in settable:
            chat["reasoning_effort"] = body.output_config.effort
        if body.output_config.format is not None:
            schema = {"name": "answer", "schema": body.output_config.format.schema_}
            chat["response_format"] = {"type": "json_schema", "json_schema": schema}
    if isinstance(body, MessagesRequest):
        chat |= {name: getattr(body, name) for name in ("temperature", "top_p", "top_k", "stream", "request_id")}
        chat |= {"max_completion_tokens": body.max_tokens, "stop": body.stop_sequences or None}
        if ends_thinking and body.thinking is not None and body.thinking.type == "enabled":
            budget = body.thinking.budget_tokens
            if budget is not None and budget < body.max_tokens:  # a larger one never ends anything
                chat["thinking_token_budget"] = budget
        chat["user"] = body.metadata.user_id if body.metadata is not None else None
    return validate({name: value for name, value in chat.items() if value is not None}, _MessagesChat, limits)


def _messages(body: CountTokensRequest) -> list[dict[str, Any]]:
    messages = [{"role": "system", "content": _text(body.system)}] if body.system else []
    for number, message in enumerate(body.messages):
        if isinstance(message.content, str):
            messages.append({"role": message.role, "content": message.content})
            continue
        _check_blocks(message.role, message.content, f"messages[{number}].content")
        if message.role == "assistant":
            messages.append(_answered(message.content))
        else:
            messages += _asked(message.role, message.content)
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


def _asked(role: str, blocks: list[Any]) -> Iterator[dict[str, Any]]:
    """Results of tools, and what is said before, between and after them."""
    said: list[TextBlock] = []
    for block in [*blocks, None]:
        if isinstance(block, TextBlock):
            said.append(block)
            continue
        if said:
            yield {"role": role, "content": _text(said)}
            said = []
        if isinstance(block, ToolResultBlock):
            text = _text(block.content)
            text = f"Error: {text}" if block.is_error and not text.lower().startswith("error") else text
            yield {"role": "tool", "tool_call_id": block.tool_use_id, "content": text}


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


class MessageEvents(ItemEvents):
    """The events of one answer, and the message that they make up."""

    items_key = "content"
    reasoning_type, text_type, call_type = "thinking", "text", "tool_use"

    def __init__(self, generation: Generation, model: str, *, max_tokens: int, block_size: int) -> None:
        """`max_tokens`: that the client asked for. `block_size`: tokens in a unit of the cache of prompts."""
        self._max_tokens = max_tokens
        self._block_size = block_size
        answer: dict[str, Any] = {
            "id": generation.request_id,
            "type": "message",
            "role": "assistant",
            "model": model,
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "usage": {"input_tokens": sum(len(prompt.token_ids) for prompt in generation.prompts), "output_tokens": 0},
        }
        super().__init__(generation, answer)

    def opening(self) -> list[bytes]:
        return [named_event("message_start", message=self.answer)]

    def ending(self) -> list[bytes]:
        usage: Any = self._generation.usage()
        num_cached = usage["prompt_tokens_details"]["cached_tokens"]
        num_kept = max(0, usage["prompt_tokens"] // self._block_size * self._block_size - num_cached)
        self.answer["usage"] = {
            "input_tokens": usage["prompt_tokens"] - num_cached - num_kept,
            "cache_read_input_tokens": num_cached,
            "cache_creation_input_tokens": num_kept,
            "output_tokens": usage["completion_tokens"],
        }
        delta = {name: self.answer[name] for name in ("stop_reason", "stop_sequence")}
        return [named_event("message_delta", delta=delta, usage=self.answer["usage"]), named_event("message_stop")]

    def failure(self, error: ApiError) -> bytes:
        return named_event("error", error=error.anthropic_body()["error"])

    def _new_item(self, kind: str, call: CallPiece | None) -> dict[str, Any]:
        if call is not None:
            return {"type": kind, "id": call.id, "name": call.name, "input": {}}
        return {"type": kind, kind: ""} | ({"signature": ""} if kind == "thinking" else {})

    def _opened(self, item: dict[str, Any]) -> list[bytes]:
        return [named_event("content_block_start", index=len(self._items) - 1, content_block=item)]

    def _grown(self, item: dict[str, Any], text: str) -> bytes:
        kind, key = _DELTAS[item["type"]]
        return named_event("content_block_delta", index=len(self._items) - 1, delta={"type": kind, key: text})

    def _closed(self, item: dict[str, Any], text: str) -> list[bytes]:
        if item["type"] == "tool_use":
            value = call_arguments(text)
            item["input"] = {"INVALID_JSON": text} if value is None else value
        else:
            item[item["type"]] = text
        return [named_event("content_block_stop", index=len(self._items) - 1)]

    def _note_finish(self, reason: str, stop_reason: str | int | None) -> None:
        self.answer["stop_reason"] = _STOP_REASONS[reason]
        usage: Any = self._generation.usage()
        if reason == "length" and usage["completion_tokens"] < self._max_tokens:
            self.answer["stop_reason"] = "model_context_window_exceeded"
        if isinstance(stop_reason, str) and reason == "stop":
            self.answer |= {"stop_reason": "stop_sequence", "stop_sequence": stop_reason}


@router.post(
    "/v1/messages",
    summary="Answer a conversation, as Anthropic's API does",
    **described(MessagesRequest, streams=True, errors=AnthropicErrorResponse),
)
async def create_message(request: Request) -> Response:
    context = context_of(request)
    body = await read_request(context, request, MessagesRequest)
    if body.thread is not None:
        raise bad_request(
            "thread: this server keeps no conversations; leave it out and send all messages"
            ' (unsupported_request_behavior="continue_unthreaded")',
            param="thread",
            code="thread_unsupported_request",
        )
    settable = settable_variables(await context.texts.template_names())
    chat = as_chat(body, settable, context.limits, ends_thinking=can_end_reasoning(context))
    async with generation_for(context, chat, "msg") as generation:
        await submit_chat(context, client_of(request), [chat], generation)
        block_size = context.engine.info.block_size
        events = MessageEvents(generation, context.model_name, max_tokens=body.max_tokens, block_size=block_size)
        return await respond_in_items(context, request, generation, events, streams=body.stream)


@router.post(
    "/v1/messages/count_tokens",
    summary="How many tokens a conversation has",
    **described(CountTokensRequest, errors=AnthropicErrorResponse),
)
async def count_tokens(request: Request) -> Response:
    context = context_of(request)
    body = await read_request(context, request, CountTokensRequest)
    with context.running():
        chat = as_chat(body, settable_variables(await context.texts.template_names()), context.limits)
        offers_tools = bool(chat.tools) and chat.tool_choice != "none"
        prompt = await chat_prompt(context, client_of(request), chat, offers_tools=offers_tools)
    return JSONResponse({"input_tokens": len(prompt.token_ids)})

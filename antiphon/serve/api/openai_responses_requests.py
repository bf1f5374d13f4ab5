"""A request of OpenAI's Responses API, and the chat that it is.

The input is a list of items. Messages, reasoning and calls of the model that stand next to each other are one turn of
a chat; the output of a call is a message of the role tool. Built-in tools would run on OpenAI's machines: they are
refused, by name, as are items that such tools leave behind. `reasoning.encrypted_content` holds the reasoning itself,
so that a client which keeps nothing else can send it back; it hides nothing.
"""

import base64
import binascii
from collections.abc import Callable
from typing import Annotated, Any, Literal

from pydantic import Field, Tag, model_validator

from antiphon.base.errors import shortened
from antiphon.serve.api.chat_messages import (
    TEXT_OR_LIST,
    WORD_OR_CHOICE,
    CacheControl,
    FunctionName,
    RequestModel,
    SentBack,
    check_kind,
    kind_by,
)
from antiphon.serve.api.errors import bad_request, in_client_words
from antiphon.serve.api.guard.body import validate
from antiphon.serve.api.input_limits import MAX_CALLS, InputLimits
from antiphon.serve.api.requests import (
    AllowedCallers,
    ChatCompletionRequest,
    Count,
    JsonSchemaDescription,
    Metadata,
    NumLogprobs,
    OnlyFalse,
    Penalty,
    PlainFormat,
    PositiveCount,
    StopField,
)
from antiphon.serve.text.text_service import thinking_switches

_REASONING_MARK = "antiphon:"
_INCLUDED = Literal["reasoning.encrypted_content", "message.output_text.logprobs"]


class ItemPart(SentBack):
    """Text within an item; an answer's has annotations and logprobs, which are not looked at."""

    type: Literal["input_text", "output_text", "text", "refusal", "summary_text", "reasoning_text"]
    text: str | None = None
    refusal: str | None = None
    annotations: list[Any] | None = None
    logprobs: list[Any] | None = None
    prompt_cache_breakpoint: CacheControl = None


_PARTS = ("input_text", "output_text", "text", "refusal", "summary_text", "reasoning_text")
ItemParts = Annotated[
    list[Annotated[ItemPart, check_kind(_PARTS, "this server reads text only")]], Field(fail_fast=True), Tag("<list>")
]
ItemContent = Annotated[Annotated[str, Tag("<text>")] | ItemParts, TEXT_OR_LIST]


class InputItem(SentBack):
    """What all items have: clients send an answer's items back as they came."""

    id: str | None = None
    status: str | None = None


class MessageItem(InputItem):
    type: Literal["message"] | None = None
    role: Literal["user", "assistant", "system", "developer"]
    content: ItemContent
    phase: str | None = None


class ReasoningItem(InputItem):
    type: Literal["reasoning"]
    summary: ItemParts | None = None
    content: ItemParts | None = None
    encrypted_content: str | None = None


class FunctionCallItem(InputItem):
    type: Literal["function_call"]
    call_id: Annotated[str, Field(max_length=128)]
    name: FunctionName
    namespace: FunctionName | None = None
    arguments: str
    caller: dict[str, Any] | None = Field(None, description="Changes nothing.")


class FunctionOutputItem(InputItem):
    type: Literal["function_call_output"]
    call_id: Annotated[str, Field(max_length=128)]
    output: ItemContent
    caller: dict[str, Any] | None = Field(None, description="Changes nothing.")


class ItemReference(RequestModel):
    """An item of an earlier answer, which the server keeps with that answer."""

    type: Literal["item_reference"]
    id: Annotated[str, Field(min_length=1, max_length=200)]


_ITEMS = ("message", "reasoning", "function_call", "function_call_output", "item_reference")
Item = Annotated[
    Annotated[
        Annotated[MessageItem, Tag("<message>")]
        | Annotated[ReasoningItem, Tag("<reasoning>")]
        | Annotated[FunctionCallItem, Tag("<function_call>")]
        | Annotated[FunctionOutputItem, Tag("<function_call_output>")]
        | Annotated[ItemReference, Tag("<item_reference>")],
        kind_by("type", _ITEMS, "message"),
    ],
    check_kind(_ITEMS, f"this server reads {', '.join(_ITEMS)}"),
]
InputField = Annotated[
    Annotated[str, Tag("<text>")] | Annotated[list[Item], Field(min_length=1, fail_fast=True), Tag("<list>")],
    TEXT_OR_LIST,
]


class ResponseTool(RequestModel):
    type: Literal["function"]
    name: FunctionName
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = Field(None, description="Arguments must fit the schema even when the model may choose.")
    defer_loading: OnlyFalse | None = Field(None, description="The model sees all tools.")
    allowed_callers: AllowedCallers = None


_NO_BUILT_IN = "this server has no built-in tools; leave it out, or describe a function"
_FUNCTION_TOOLS = Field(max_length=128, fail_fast=True)


class NamespaceTool(RequestModel):
    """Functions that belong together. The model sees each as NAMESPACE__NAME; its calls have both names."""

    type: Literal["namespace"]
    name: FunctionName
    description: str | None = None
    tools: Annotated[list[Annotated[ResponseTool, check_kind(("function",), _NO_BUILT_IN)]], _FUNCTION_TOOLS]


def flat_name(name: str, namespace: str | None) -> str:
    """A function's name as the model has it."""
    return name if namespace is None else f"{namespace}__{name}"


class NamedFunction(RequestModel):
    type: Literal["function"]
    name: FunctionName


class AllowedFunctions(RequestModel):
    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"]
    tools: Annotated[list[NamedFunction], Field(min_length=1, max_length=128, fail_fast=True)]


class ResponseSchemaFormat(JsonSchemaDescription):
    type: Literal["json_schema"]


class ResponseText(RequestModel):
    format: Annotated[PlainFormat | ResponseSchemaFormat, Field(discriminator="type")] | None = None
    verbosity: Literal["medium"] | None = None


class ReasoningOptions(RequestModel):
    effort: Annotated[str, Field(max_length=32)] | None = Field(
        None,
        description="For chat templates that read it, or can switch reasoning on and off; the answer says null where"
        " none was used.",
    )
    summary: str | None = Field(None, description="Changes nothing: the reasoning itself is sent.")
    generate_summary: str | None = Field(None, description="Changes nothing.")


class ResponseStreamOptions(RequestModel):
    include_obfuscation: bool | None = Field(None, description="Events are never padded.")


class ResponsesRequest(RequestModel):
    """`POST /v1/responses`."""

    model: str | None = Field(None, description="The served model's name. Default: the served model.")
    input: InputField
    instructions: str | None = Field(None, description="A system message before the input; not kept for later turns.")
    previous_response_id: Annotated[str, Field(max_length=200)] | None = Field(
        None, description="Go on after this answer, which the server keeps unless store was false."
    )
    store: bool | None = Field(None, description="Default true: the answer can be asked for and gone on from.")
    stream: bool | None = None
    stream_options: ResponseStreamOptions | None = None
    max_output_tokens: PositiveCount | None = Field(None, description="Default: the rest of the context.")
    max_tool_calls: PositiveCount | None = Field(None, description="Changes nothing: it counts built-in tools.")
    temperature: Annotated[float, Field(ge=0, le=100)] | None = Field(None, description="Default 1; 0 is greedy.")
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_logprobs: NumLogprobs | None = Field(None, description="Needs message.output_text.logprobs in include.")
    tools: (
        Annotated[
            list[
                Annotated[
                    Annotated[ResponseTool, Tag("<function>")] | Annotated[NamespaceTool, Tag("<namespace>")],
                    kind_by("type", ("namespace",), "function"),
                    check_kind(("function", "namespace"), _NO_BUILT_IN),
                ]
            ],
            _FUNCTION_TOOLS,
        ]
        | None
    ) = None
    tool_choice: (
        Annotated[
            Annotated[Literal["none", "auto", "required"], Tag("<word>")]
            | Annotated[NamedFunction, Tag("<named>")]
            | Annotated[AllowedFunctions, Tag("<allowed>")],
            WORD_OR_CHOICE,
        ]
        | None
    ) = None
    parallel_tool_calls: bool | None = None
    text: ResponseText | None = None
    reasoning: ReasoningOptions | None = None
    include: Annotated[list[_INCLUDED], Field(max_length=16)] | None = None
    background: bool | None = Field(
        None, description="Answer at once with status queued; the answer is asked for by its id. Not with stream."
    )
    truncation: Literal["auto", "disabled"] | None = Field(
        None, description="auto: turns are left out at the beginning until the rest fits. Default disabled."
    )
    metadata: Metadata | None = Field(None, description="Given back.")
    client_metadata: dict[str, Any] | None = Field(None, description="Changes nothing.")
    user: Annotated[str, Field(max_length=512)] | None = Field(None, description="Named in the server's log.")
    safety_identifier: Annotated[str, Field(max_length=512)] | None = None
    prompt_cache_key: Annotated[str, Field(max_length=512)] | None = Field(None, description="Changes nothing.")
    # Not OpenAI's, as vLLM takes them:
    top_k: Annotated[int, Field(ge=-1, le=2**31 - 1)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    seed: int | None = Field(None, ge=-(2**63), le=2**63 - 1)
    stop: StopField | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    repetition_penalty: Annotated[float, Field(gt=0, le=100)] | None = None
    min_tokens: Count | None = None
    ignore_eos: bool | None = None
    priority: Annotated[int, Field(ge=1 - 2**31, le=2**31 - 1)] | None = None
    request_id: Annotated[str, Field(pattern="^[!-~]{1,128}$")] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    enable_response_messages: bool | None = Field(
        None, description="Report prompt and answer as the model has them, text and tokens. Default false."
    )

    @model_validator(mode="before")
    @classmethod
    def _drop_nulls(cls, value: Any) -> Any:
        return {key: item for key, item in value.items() if item is not None} if isinstance(value, dict) else value

    def functions(self) -> list[tuple[str | None, ResponseTool]]:
        """All that may be called, each with its namespace."""
        found: list[tuple[str | None, ResponseTool]] = []
        for tool in self.tools or ():
            found += [(tool.name, each) for each in tool.tools] if isinstance(tool, NamespaceTool) else [(None, tool)]
        return found

    def places_of_functions(self) -> list[str]:
        """Where each of them stands, such as ``tools[0].tools[1]``."""
        return [
            f"tools[{number}]{inner}"
            for number, tool in enumerate(self.tools or ())
            for inner in (
                (f".tools[{each}]" for each in range(len(tool.tools))) if isinstance(tool, NamespaceTool) else [""]
            )
        ]


# What refusals of the chat call a parameter, and what this API calls it (`in_client_words`).
_NAMES = {
    "messages": "input",
    "max_tokens": "max_output_tokens",
    "max_completion_tokens": "max_output_tokens",
    "response_format": "text.format",
    "reasoning_effort": "reasoning.effort",
    "tool_choice": "tool_choice",
    ".json_schema": "",
    ".allowed_tools": "",
    ".function": "",
    ".function.arguments": ".arguments",
    ".id": ".call_id",
    ".tool_call_id": ".call_id",
    ".tool_calls": "",
    ".reasoning_content": "",
}
_SAME = (
    "model", "stream", "temperature", "top_p", "parallel_tool_calls", "user", "safety_identifier", "top_k", "min_p",
    "seed", "stop", "presence_penalty", "frequency_penalty", "repetition_penalty", "min_tokens", "ignore_eos",
    "priority", "request_id", "chat_template_kwargs",
)  # fmt: skip


def as_chat(
    body: ResponsesRequest,
    earlier: list[dict[str, Any]],
    kept_item: Callable[[str], dict[str, Any] | None],
    settable: frozenset[str],
    limits: InputLimits,
) -> tuple[ChatCompletionRequest, list[dict[str, Any]], dict[str, str]]:
    """The chat that goes on from the messages `earlier`, its messages without the instructions, and what the client
    calls its parameters (`in_client_words`); `ApiError` 400 where a chat may not have so much, or `kept_item` does not
    know the id of an item that is referred to. `settable`: variables of the chat template that requests can set."""
    instructions = [] if body.instructions is None else [{"role": "system", "content": body.instructions}]
    first = len(instructions) + len(earlier)
    names = _NAMES | {f"messages[{number}]": "previous_response_id" for number in range(len(instructions), first)}
    names |= {"messages[0]": "instructions"} if instructions else {}
    given = body.input if isinstance(body.input, str) else _whole_items(body.input, kept_item)
    kept = [*earlier, *_messages(given, names, first)]
    chat: dict[str, Any] = {name: getattr(body, name) for name in _SAME}
    chat |= {"messages": [*instructions, *kept], "max_completion_tokens": body.max_output_tokens}
    if body.tools:
        functions = [
            tool.model_dump(include={"description", "parameters", "strict"}, exclude_none=True)
            | {"name": flat_name(tool.name, namespace)}
            for namespace, tool in body.functions()
        ]
        chat["tools"] = [{"type": "function", "function": function} for function in functions]
        names |= {f"tools[{number}]": where for number, where in enumerate(body.places_of_functions())}
    if body.tool_choice is not None and (body.tools or body.tool_choice not in ("none", "auto")):
        chat["tool_choice"] = _tool_choice(body.tool_choice)
    if not body.tools:
        chat["parallel_tool_calls"] = None
    if body.text is not None and body.text.format is not None:
        form = body.text.format.model_dump(by_alias=True, exclude_none=True)
        kind = form.pop("type")
        chat["response_format"] = {"type": kind} | ({"json_schema": form} if form else {})
    can_reason = "reasoning_effort" in settable or thinking_switches(settable, on=True)
    if body.reasoning is not None and body.reasoning.effort is not None and can_reason:
        chat["reasoning_effort"] = body.reasoning.effort
    if "message.output_text.logprobs" in (body.include or ()):
        chat |= {"logprobs": True, "top_logprobs": body.top_logprobs}
    if body.enable_response_messages:
        chat["return_token_ids"] = True
    present = {key: item for key, item in chat.items() if item is not None}
    with in_client_words(names):
        return validate(present, ChatCompletionRequest, limits), kept, names


def _tool_choice(choice: str | NamedFunction | AllowedFunctions) -> str | dict[str, Any]:
    if isinstance(choice, str):
        return choice
    if isinstance(choice, NamedFunction):
        return {"type": "function", "function": {"name": choice.name}}
    tools = [{"type": "function", "function": {"name": tool.name}} for tool in choice.tools]
    return {"type": "allowed_tools", "allowed_tools": {"mode": choice.mode, "tools": tools}}


def _whole_items(given: list[Any], kept_item: Callable[[str], dict[str, Any] | None]) -> list[Any]:
    """`given` with the items themselves in the place of references. Each is referred to once at most: a small request
    may not become a prompt of many large texts."""
    items, seen = list(given), set[str]()
    for number, item in enumerate(items):
        if not isinstance(item, ItemReference):
            continue
        param, shown = f"input[{number}]", repr(shortened(item.id))
        if item.id in seen:
            raise bad_request(f"{param} refers to item {shown} once more: send it once", param=param)
        seen.add(item.id)
        if (kept := kept_item(item.id)) is None:
            raise bad_request(
                f"{param}: item {shown} of an answer is not kept here (any more): send the item itself", param=param
            )
        items[number] = ResponsesRequest.model_validate({"input": [kept]}).input[0]
    return items


def _messages(given: str | list[Any], names: dict[str, str], first: int) -> list[dict[str, Any]]:
    """The messages that items are; `names` gets the item of each message and call, `first` is the first one's number
    in the chat."""
    if isinstance(given, str):
        names[f"messages[{first}]"] = "input"
        return [{"role": "user", "content": given}]
    messages: list[dict[str, Any]] = []
    for number, item in enumerate(given):
        place = f"input[{number}]"
        if isinstance(item, FunctionOutputItem):
            messages.append({"role": "tool", "tool_call_id": item.call_id, "content": _text(item.output)})
        elif isinstance(item, MessageItem) and item.role != "assistant":
            messages.append({"role": item.role, "content": _text(item.content)})
        else:
            _add_answered(messages, item)
        turn = f"messages[{first + len(messages) - 1}]"
        names.setdefault(turn, place)
        if isinstance(item, FunctionCallItem):
            if (num_calls := len(messages[-1]["tool_calls"])) > MAX_CALLS:
                raise bad_request(
                    f"input has {num_calls} calls of one turn up to {place}: at most {MAX_CALLS}", param="input"
                )
            names[f"{turn}.tool_calls[{num_calls - 1}]"] = place
        elif isinstance(item, FunctionOutputItem):
            names |= {f"{turn}.content": f"{place}.output", f"{turn}.role": f"{place}.type"}
    return messages


def _add_answered(messages: list[dict[str, Any]], item: MessageItem | ReasoningItem | FunctionCallItem) -> None:
    """Add to the model's turn at the end, or begin one. Reasoning and text begin another after calls."""
    turn = messages[-1] if messages and messages[-1]["role"] == "assistant" else None
    if turn is None or ("tool_calls" in turn and not isinstance(item, FunctionCallItem)):
        turn = {"role": "assistant", "content": ""}
        messages.append(turn)
    if isinstance(item, FunctionCallItem):
        function = {"name": flat_name(item.name, item.namespace), "arguments": item.arguments}
        turn.setdefault("tool_calls", []).append({"id": item.call_id, "function": function})
    elif isinstance(item, ReasoningItem):
        reasoning = _text(item.content or []) or _reasoning_of(item.encrypted_content) or _text(item.summary or [])
        turn["reasoning_content"] = turn.get("reasoning_content", "") + reasoning
    else:
        turn["content"] += ("\n" if turn["content"] else "") + _text(item.content)


def _text(content: str | list[ItemPart]) -> str:
    return content if isinstance(content, str) else "\n".join(part.text or part.refusal or "" for part in content)


def encrypted_content(reasoning: str) -> str:
    """The reasoning as clients carry it that keep no other form of it."""
    return base64.b64encode((_REASONING_MARK + reasoning).encode()).decode()


def _reasoning_of(encrypted: str | None) -> str:
    """The counterpart; "" for what another server encrypted."""
    try:
        text = base64.b64decode(encrypted or "", validate=True).decode()
    except (binascii.Error, ValueError):
        return ""
    return text.removeprefix(_REASONING_MARK) if text.startswith(_REASONING_MARK) else ""

"""The messages and tools of a chat request, as pydantic models.

A message's role says which kind it is. Reasoning, calls and their results in earlier turns are given back to the model
through its chat template.
"""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Discriminator, Field, Tag, model_validator
from pydantic_core import PydanticCustomError

from antiphon.base.errors import shortened
from antiphon.serve.api.input_limits import MAX_CALLS


class RequestModel(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)


_ADDED_BY_LIBRARIES = frozenset({"parsed", "parsed_arguments", "parsed_output", "provider_specific_fields"})


class SentBack(RequestModel):
    """A part of a conversation. Clients send answers back as their library holds them: with a null for each field that
    its newest version knows, and with what it added. Both are left out."""

    @model_validator(mode="before")
    @classmethod
    def _without_additions(cls, value: Any) -> Any:
        if not isinstance(value, dict):
            return value
        return {key: item for key, item in value.items() if item is not None and key not in _ADDED_BY_LIBRARIES}


CacheControl = Annotated[
    dict[str, Any] | None, Field(description="Changes nothing: prompts that begin alike share a cache.")
]


class TextPart(SentBack):
    type: Literal["text"]
    text: str
    cache_control: CacheControl = None
    prompt_cache_breakpoint: CacheControl = None


class RefusalPart(SentBack):
    """What the model said when it refused."""

    type: Literal["refusal"]
    refusal: str


def check_kind(known: tuple[str, ...], advice: str, what: str = "it is") -> BeforeValidator:
    """Refuses an object of another `type`, by its name."""

    def check(value: object) -> object:
        kind = value.get("type") if isinstance(value, dict) else None
        if isinstance(kind, str) and kind not in known:
            shown = {"what": what, "advice": advice, "kind": repr(shortened(kind))}
            raise PydanticCustomError("kind", "{what} of type {kind}: {advice}", shown)
        return value

    return BeforeValidator(check)


def kind_by(key: str, known: tuple[str, ...], other: str) -> Discriminator:
    """Tells objects apart by what stands under `key`, so that a mistake is said of one kind only. Tags, which
    stand in the path of a mistake, are in angle brackets here and elsewhere: a client's keys are not."""

    def kind(value: object) -> str:
        found = value.get(key) if isinstance(value, dict) else getattr(value, key, None)
        return f"<{found if found in known else other}>"

    return Discriminator(kind)


def _kind_of_choice(value: object) -> str:
    if not isinstance(value, dict | RequestModel):
        return "<word>"
    kind = value.get("type") if isinstance(value, dict) else getattr(value, "type", None)
    return "<allowed>" if kind == "allowed_tools" else "<named>"


TEXT_OR_LIST = Discriminator(lambda value: "<list>" if isinstance(value, list) else "<text>")
WORD_OR_CHOICE = Discriminator(_kind_of_choice)
Part = Annotated[
    Annotated[TextPart | RefusalPart, Field(discriminator="type")],
    check_kind(("text", "refusal"), "this server reads text only"),
]
Content = Annotated[
    Annotated[str, Tag("<text>")] | Annotated[list[Part], Field(min_length=1, fail_fast=True), Tag("<list>")],
    TEXT_OR_LIST,
]
FunctionName = Annotated[str, Field(pattern="^[a-zA-Z0-9_.-]{1,128}$")]


class _Turn(SentBack):
    """What the messages of all roles have in common."""

    name: str | None = None
    cache_control: CacheControl = None


class PlainMessage(_Turn):
    """What the user or the program says, or another role that the chat template knows."""

    role: Annotated[
        str,
        Field(
            pattern="^[a-zA-Z0-9_-]{1,32}$",
            description="system, developer, user, or a role that the chat template writes.",
            json_schema_extra={"not": {"enum": ["assistant", "tool"]}},
        ),
    ]
    content: Content
    tool_call_id: None = Field(None, description="Only results of tools have one.")


class CalledFunction(SentBack):
    name: FunctionName
    arguments: str = Field(description="A JSON object as text; empty for no arguments.")


class ToolCall(SentBack):
    """A call the model made earlier."""

    id: Annotated[str, Field(max_length=128)]
    type: Literal["function"] = "function"
    function: CalledFunction
    index: Annotated[int, Field(ge=0)] | None = Field(None, description="As streamed answers have it; not needed.")


class AssistantMessage(_Turn):
    """What the model said earlier: reasoning, text, calls."""

    role: Literal["assistant"]
    content: Content | None = None
    tool_calls: Annotated[list[ToolCall], Field(max_length=MAX_CALLS, fail_fast=True)] | None = None
    reasoning_content: str | None = Field(None, description="For chat templates that read it.")
    reasoning: str | None = Field(None, description="Another name of reasoning_content.")
    refusal: str | None = Field(None, description="What the model said when it refused.")
    tool_call_id: None = Field(None, description="Only results of tools have one.")
    annotations: Annotated[list[Any], Field(max_length=0, fail_fast=True)] | None = Field(
        None, description="Accepted when empty."
    )


class ToolMessage(_Turn):
    """The result of a call."""

    role: Literal["tool"]
    content: Content
    tool_call_id: Annotated[str, Field(max_length=128)] | None = Field(
        None, description="Whose result it is; may be missing where the chat template does not read it."
    )


Message = Annotated[
    Annotated[PlainMessage, Tag("<other>")]
    | Annotated[AssistantMessage, Tag("<assistant>")]
    | Annotated[ToolMessage, Tag("<tool>")],
    kind_by("role", ("assistant", "tool"), "other"),
]


class FunctionDefinition(RequestModel):
    name: FunctionName
    description: str | None = None
    parameters: dict[str, Any] | None = Field(None, description="A JSON schema of an object. Default: no parameters.")
    strict: bool | None = Field(None, description="Arguments must fit the schema even when the model may choose.")
    cache_control: CacheControl = None


class Tool(RequestModel):
    type: Literal["function"]
    function: FunctionDefinition
    cache_control: CacheControl = None


class FunctionReference(RequestModel):
    name: FunctionName


class NamedToolChoice(RequestModel):
    """Call this function."""

    type: Literal["function"]
    function: FunctionReference


class AllowedTools(RequestModel):
    mode: Literal["auto", "required"]
    tools: Annotated[list[NamedToolChoice], Field(min_length=1, max_length=128, fail_fast=True)]


class AllowedToolsChoice(RequestModel):
    """Call some of the tools only. The model sees all of them, so that prompts go on beginning alike."""

    type: Literal["allowed_tools"]
    allowed_tools: AllowedTools


ToolChoice = Annotated[
    Annotated[Literal["none", "auto", "required"], Tag("<word>")]
    | Annotated[NamedToolChoice, Tag("<named>")]
    | Annotated[AllowedToolsChoice, Tag("<allowed>")],
    WORD_OR_CHOICE,
]
Tools = Annotated[list[Tool], Field(max_length=128, fail_fast=True)]


class TemplateOptions(RequestModel):
    """How a conversation becomes a text."""

    tools: Tools | None = Field(None, description="Functions the model may call; the chat template must read them.")
    chat_template_kwargs: dict[str, Any] | None = Field(
        None, description="Values for variables of the chat template, for example enable_thinking."
    )
    add_generation_prompt: bool | None = Field(
        None, description="End with the beginning of the assistant's turn. Default: unless continue_final_message."
    )
    continue_final_message: bool | None = Field(
        None, description="Go on with the last message, which must be the assistant's. Default false."
    )
    add_special_tokens: bool | None = Field(
        None, description="Begin as a plain text begins, often with a BOS token. Default false for messages."
    )

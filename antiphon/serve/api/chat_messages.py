"""The messages and tools of a chat request, as pydantic models.

A message's role says which kind it is. Fields that clients echo back from an answer may be there as long as they are
null; calls and their results in earlier turns are given back to the model through its chat template.
"""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Discriminator, Field, model_validator


class RequestModel(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)


class TextPart(RequestModel):
    type: Literal["text"]
    text: str


Content = str | Annotated[list[TextPart], Field(min_length=1, fail_fast=True)]
FunctionName = Annotated[str, Field(pattern="^[a-zA-Z0-9_.-]{1,128}$")]


class _Turn(RequestModel):
    """What the messages of all roles have in common."""

    name: str | None = None

    @model_validator(mode="before")
    @classmethod
    def _drop_nulls(cls, value: Any) -> Any:
        return {key: item for key, item in value.items() if item is not None} if isinstance(value, dict) else value


class PlainMessage(_Turn):
    """What the user or the program says."""

    role: Literal["system", "developer", "user"]
    content: Content


class CalledFunction(RequestModel):
    name: FunctionName
    arguments: str = Field(description="A JSON object as text; empty for no arguments.")


class ToolCall(RequestModel):
    """A call the model made earlier."""

    id: Annotated[str, Field(max_length=128)]
    type: Literal["function"] = "function"
    function: CalledFunction
    index: Annotated[int, Field(ge=0)] | None = Field(None, description="As streamed answers have it; not needed.")


class AssistantMessage(_Turn):
    """What the model said earlier: text, calls or both."""

    role: Literal["assistant"]
    content: Content | None = None
    tool_calls: Annotated[list[ToolCall], Field(max_length=128, fail_fast=True)] | None = None
    annotations: Annotated[list[Any], Field(max_length=0, fail_fast=True)] | None = Field(
        None, description="Accepted when empty."
    )


class ToolMessage(_Turn):
    """The result of a call."""

    role: Literal["tool"]
    content: Content
    tool_call_id: Annotated[str, Field(max_length=128)]


Message = Annotated[PlainMessage | AssistantMessage | ToolMessage, Discriminator("role")]


class FunctionDefinition(RequestModel):
    name: FunctionName
    description: str | None = None
    parameters: dict[str, Any] | None = Field(None, description="A JSON schema of an object. Default: no parameters.")
    strict: bool | None = Field(None, description="Arguments must fit the schema even when the model may choose.")


class Tool(RequestModel):
    type: Literal["function"]
    function: FunctionDefinition


class FunctionReference(RequestModel):
    name: FunctionName


class NamedToolChoice(RequestModel):
    """Call this function."""

    type: Literal["function"]
    function: FunctionReference


ToolChoice = Literal["none", "auto", "required"] | NamedToolChoice
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

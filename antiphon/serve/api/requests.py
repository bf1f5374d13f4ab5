"""The requests this server understands, as pydantic models; they are also its OpenAPI description.

Types are strict (a string where a number is due is refused) and unknown names are refused. None means absent, as the
official clients send null for what was not set. Limits that depend on the model or on the operator's settings are
checked later, in `sampling` and `prompts`.
"""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, PlainValidator, WithJsonSchema, model_validator
from pydantic_core import PydanticCustomError

_INT32_MAX = 2**31 - 1
_INT64_MAX = 2**63 - 1

Prompt = str | list[str] | list[int] | list[list[int]]


def _is_ids(value: object) -> bool:
    return isinstance(value, list) and all(type(item) is int and 0 <= item <= _INT32_MAX for item in value)


def _check_prompt(value: object) -> Prompt:
    if isinstance(value, str):
        return value
    if isinstance(value, list) and value:
        if all(isinstance(item, str) for item in value):
            return value
        if _is_ids(value) or all(_is_ids(item) for item in value):
            return value
    raise PydanticCustomError(
        "prompt", "it must be a text, a list of texts, a list of token ids, or a list of lists of token ids, not empty"
    )


def _check_stop(value: object) -> list[str]:
    texts = [value] if isinstance(value, str) else value
    if isinstance(texts, list) and all(isinstance(text, str) and 0 < len(text) <= 1024 for text in texts):
        return texts
    raise PydanticCustomError("stop", "it must be a text or a list of texts, each of 1 to 1024 characters")


def _check_logit_bias(value: object) -> dict[int, float]:
    if not isinstance(value, dict):
        raise PydanticCustomError("logit_bias", "it must be an object from token ids to numbers")
    bias: dict[int, float] = {}
    for key, weight in value.items():
        if not (isinstance(key, str) and key.isascii() and key.isdecimal() and len(key) <= 10):
            raise PydanticCustomError("logit_bias", "its keys must be token ids: digits in quotes")
        if type(weight) not in (int, float) or not -100 <= weight <= 100:
            raise PydanticCustomError("logit_bias", "its values must be numbers from -100 to 100")
        bias[int(key)] = float(weight)
    return bias


_ID_SCHEMA = {"type": "integer", "minimum": 0, "maximum": _INT32_MAX}
PromptField = Annotated[
    Prompt,
    PlainValidator(_check_prompt),
    WithJsonSchema(
        {
            "anyOf": [
                {"type": "string"},
                {"type": "array", "items": {"type": "string"}, "minItems": 1},
                {"type": "array", "items": _ID_SCHEMA, "minItems": 1},
                {"type": "array", "items": {"type": "array", "items": _ID_SCHEMA}, "minItems": 1},
            ]
        }
    ),
]
StopField = Annotated[
    list[str],
    PlainValidator(_check_stop),
    WithJsonSchema(
        {
            "anyOf": [
                {"type": "string", "minLength": 1, "maxLength": 1024},
                {"type": "array", "items": {"type": "string", "minLength": 1, "maxLength": 1024}},
            ]
        }
    ),
]
LogitBiasField = Annotated[
    dict[int, float],
    PlainValidator(_check_logit_bias),
    WithJsonSchema(
        {
            "type": "object",
            "propertyNames": {"pattern": "^[0-9]{1,10}$"},
            "additionalProperties": {"type": "number", "minimum": -100, "maximum": 100},
        }
    ),
]
TokenId = Annotated[int, Field(ge=0, le=_INT32_MAX)]
Count = Annotated[int, Field(ge=0, le=_INT32_MAX)]
PositiveCount = Annotated[int, Field(ge=1, le=_INT32_MAX)]
Penalty = Annotated[float, Field(ge=-2, le=2)]
NumLogprobs = Annotated[int, Field(ge=0, le=20)]


class RequestModel(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)


class StreamOptions(RequestModel):
    include_usage: bool | None = Field(None, description="Send token counts in a last event. Default false.")


class TextFormat(RequestModel):
    type: Literal["text"]


class JsonObjectFormat(RequestModel):
    type: Literal["json_object"]


class JsonSchemaDescription(RequestModel):
    name: str = Field(pattern="^[a-zA-Z0-9_-]{1,64}$")
    description: str | None = None
    schema_: dict[str, Any] = Field(alias="schema")
    strict: bool | None = Field(None, description="The schema is always followed, whatever this says.")


class JsonSchemaFormat(RequestModel):
    type: Literal["json_schema"]
    json_schema: JsonSchemaDescription


ResponseFormat = Annotated[TextFormat | JsonObjectFormat | JsonSchemaFormat, Field(discriminator="type")]


class GenerationRequest(RequestModel):
    """What completions and chat completions have in common."""

    model: str | None = Field(None, description="The served model's name. Default: the served model.")
    max_tokens: Count | None = None
    temperature: Annotated[float, Field(ge=0, le=100)] | None = Field(None, description="Default 1; 0 is greedy.")
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1, le=_INT32_MAX)] | None = Field(None, description="0 and -1: off.")
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    n: PositiveCount | None = Field(None, description="Answers per prompt. Default 1.")
    seed: Annotated[int, Field(ge=-_INT64_MAX - 1, le=_INT64_MAX)] | None = None
    stop: StopField | None = None
    stop_token_ids: Annotated[list[TokenId], Field(max_length=128)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    logit_bias: LogitBiasField | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    repetition_penalty: Annotated[float, Field(gt=0, le=100)] | None = None
    min_tokens: Count | None = None
    ignore_eos: bool | None = None
    response_format: ResponseFormat | None = None
    truncate_prompt_tokens: PositiveCount | None = Field(None, description="Keep only this many of the last tokens.")
    user: Annotated[str, Field(max_length=512)] | None = Field(None, description="Named in the server's log.")


class CompletionRequest(GenerationRequest):
    """`POST /v1/completions`."""

    prompt: PromptField
    echo: bool | None = Field(None, description="Put the prompt before the answer.")
    logprobs: NumLogprobs | None = Field(None, description="Alternatives to report for each token.")


class TextPart(RequestModel):
    type: Literal["text"]
    text: str


class Message(RequestModel):
    """One turn. Fields that official clients echo back from an answer may be there as long as they are null."""

    role: Literal["system", "developer", "user", "assistant"]
    content: str | Annotated[list[TextPart], Field(min_length=1)]
    name: str | None = None

    @model_validator(mode="before")
    @classmethod
    def _drop_nulls(cls, value: Any) -> Any:
        return {key: item for key, item in value.items() if item is not None} if isinstance(value, dict) else value


class ChatCompletionRequest(GenerationRequest):
    """`POST /v1/chat/completions`."""

    messages: list[Message] = Field(min_length=1)
    max_completion_tokens: PositiveCount | None = Field(None, description="The newer name of max_tokens.")
    logprobs: bool | None = None
    top_logprobs: NumLogprobs | None = Field(None, description="Alternatives for each token; needs logprobs.")


class TokenizeRequest(RequestModel):
    """`POST /tokenize`: a prompt or a conversation, not both."""

    model: str | None = None
    prompt: str | None = None
    messages: Annotated[list[Message], Field(min_length=1)] | None = None
    add_special_tokens: bool | None = Field(None, description="Default true for a prompt, false for messages.")
    add_generation_prompt: bool | None = Field(None, description="With messages only. Default true.")
    return_token_strs: bool | None = None


class DetokenizeRequest(RequestModel):
    """`POST /detokenize`."""

    model: str | None = None
    tokens: list[TokenId]

"""The requests this server understands, as pydantic models; they are also its OpenAPI description.

Types are strict (a string where a number is due is refused) and unknown names are refused. None means absent, as the
official clients send null for what was not set. Limits that depend on the model or on the operator's settings are
checked later, in `parameters` and `prompts`.
"""

from typing import Annotated, Any, ClassVar, Literal, TypeVar

from pydantic import BeforeValidator, Field, PlainValidator, WithJsonSchema
from pydantic_core import PydanticCustomError

from antiphon.serve.api.chat_messages import Message, RequestModel, TemplateOptions, ToolChoice
from antiphon.serve.api.input_limits import MAX_STOP_CHARACTERS
from antiphon.specs.sampling import MAX_LOGPROBS

_INT32_MAX = 2**31 - 1
_INT64_MAX = 2**63 - 1
_MAX_SHOWN = 8

Prompt = str | list[str] | list[int] | list[list[int]]


def _is_ids(value: object) -> bool:
    if not isinstance(value, list) or set(map(type, value)) - {int}:
        return False
    return not value or (min(value) >= 0 and max(value) <= _INT32_MAX)


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


def split_prompts(prompt: Prompt) -> list[str | list[int]]:
    """The single prompts in the four forms a completion's `prompt` has."""
    if isinstance(prompt, str):
        return [prompt]
    if isinstance(prompt[0], int):
        return [[item for item in prompt if isinstance(item, int)]]
    return [item for item in prompt if not isinstance(item, int)]


def _check_stop(value: object) -> list[str]:
    texts = [value] if isinstance(value, str) else value
    most = MAX_STOP_CHARACTERS
    if isinstance(texts, list) and all(isinstance(text, str) and 0 < len(text) <= most for text in texts):
        return texts
    words = "it must be a text or a list of texts, each of 1 to {most} characters"
    raise PydanticCustomError("stop", words, {"most": most})


def _check_logit_bias(value: object) -> dict[int, float]:
    if not isinstance(value, dict):
        raise PydanticCustomError("logit_bias", "it must be an object from token ids to numbers")
    bias: dict[int, float] = {}
    wrong = [
        key for key in value if not (isinstance(key, str) and key.isascii() and key.isdecimal() and len(key) <= 10)
    ]
    if wrong:
        shown = {"wrong": ", ".join(repr(str(key)[:40]) for key in wrong[:_MAX_SHOWN])}
        raise PydanticCustomError("logit_bias", "its keys must be token ids, digits in quotes, not {wrong}", shown)
    for key, weight in value.items():
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
                {"type": "string", "minLength": 1, "maxLength": MAX_STOP_CHARACTERS},
                {"type": "array", "items": {"type": "string", "minLength": 1, "maxLength": MAX_STOP_CHARACTERS}},
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
BadWord = Annotated[str, Field(min_length=1, max_length=1024)]
NumLogprobs = Annotated[int, Field(ge=0, le=MAX_LOGPROBS)]
Metadata = Annotated[
    dict[Annotated[str, Field(max_length=64)], Annotated[str, Field(max_length=512)]], Field(max_length=16)
]


def _no_number(value: Any) -> Any:
    """Pydantic takes 0 for false, as Python does."""
    return None if value is None else value if isinstance(value, bool) else str(value)


AllowedCallers = Annotated[
    Annotated[list[Literal["direct"]], Field(max_length=8, fail_fast=True)] | None,
    Field(description="The model itself: no programs run here that could call a tool."),
]
OnlyFalse = Annotated[Literal[False], BeforeValidator(_no_number)]


class StreamOptions(RequestModel):
    include_usage: bool | None = Field(None, description="Send token counts in a last event. Default false.")
    continuous_usage_stats: bool | None = Field(
        None, description="Send the token counts so far of an answer with every event of it. Default false."
    )
    include_obfuscation: OnlyFalse | None = Field(None, description="Events are never padded.")


class PlainFormat(RequestModel):
    """Any text, or any JSON object."""

    type: Literal["text", "json_object"]


class JsonSchemaDescription(RequestModel):
    name: str = Field(pattern="^[a-zA-Z0-9_-]{1,64}$")
    description: str | None = None
    schema_: dict[str, Any] = Field(alias="schema")
    strict: bool | None = Field(None, description="The schema is always followed, whatever this says.")


class JsonSchemaFormat(RequestModel):
    type: Literal["json_schema"]
    json_schema: JsonSchemaDescription


ResponseFormat = Annotated[PlainFormat | JsonSchemaFormat, Field(discriminator="type")]


Pattern = Annotated[str, Field(max_length=64 * 1024)]
Choices = Annotated[list[Annotated[str, Field(min_length=1)]], Field(min_length=1, max_length=4096, fail_fast=True)]


class StructuredOutputs(RequestModel):
    """vLLM's name for a grammar: one of these."""

    json_: dict[str, Any] | str | None = Field(None, alias="json", description="A JSON schema.")
    regex: Pattern | None = None
    choice: Choices | None = None
    grammar: Pattern | None = Field(None, description="Rules, in the form of Lark or of llama.cpp.")
    json_object: bool | None = None
    disable_fallback: bool | None = Field(None, description="There is none.")
    disable_any_whitespace: OnlyFalse | None = None
    disable_additional_properties: OnlyFalse | None = None


class GenerationRequest(RequestModel):
    """What completions and chat completions have in common. `max_tokens_may_not_fit`: it is only the most that an
    answer may have, so the rest of the context may be less."""

    max_tokens_may_not_fit: ClassVar[bool] = False

    model: str | None = Field(None, description="The served model's name. Default: the served model.")
    max_tokens: Count | None = Field(None, description="Default 16 for completions, the rest of the context for chats.")
    temperature: Annotated[float, Field(ge=0, le=100)] | None = Field(None, description="Default 1; 0 is greedy.")
    top_p: Annotated[float, Field(gt=0, le=1)] | None = Field(None, description="Default 1: all tokens.")
    top_k: Annotated[int, Field(ge=-1, le=_INT32_MAX)] | None = Field(None, description="0 and -1: off.")
    min_p: Annotated[float, Field(ge=0, le=1)] | None = Field(
        None, description="Leave out tokens less likely than this part of the likeliest. Default 0."
    )
    n: PositiveCount | None = Field(None, description="Answers per prompt. Default 1.")
    best_of: PositiveCount | None = Field(None, description="Must be n: no answer is thrown away.")
    seed: Annotated[int, Field(ge=-_INT64_MAX - 1, le=_INT64_MAX)] | None = Field(
        None, description="The same seed gives the same answer; answer i of n has seed + i."
    )
    stop: StopField | None = Field(None, description="Texts that end the answer before themselves.")
    stop_token_ids: Annotated[list[TokenId], Field(max_length=128, fail_fast=True)] | None = Field(
        None, description="Tokens that end the answer, besides the model's own."
    )
    include_stop_str_in_output: bool | None = Field(
        None, description="Let the text end with the stop string or stop token that ended it. Default false."
    )
    skip_special_tokens: bool | None = Field(
        None, description="False: special tokens are part of the text. Default true."
    )
    stream: bool | None = Field(None, description="Send the answer as server-sent events while it is made.")
    stream_options: StreamOptions | None = Field(None, description="Only with stream.")
    logit_bias: LogitBiasField | None = Field(None, description="Added to the logits of these token ids.")
    presence_penalty: Penalty | None = Field(None, description="Taken off the logits of tokens that came. Default 0.")
    frequency_penalty: Penalty | None = Field(None, description="The same for every time they came. Default 0.")
    repetition_penalty: Annotated[float, Field(gt=0, le=100)] | None = Field(
        None, description="Makes tokens of prompt and answer less likely. Default 1: off."
    )
    min_tokens: Count | None = Field(None, description="Nothing ends the answer before. Default 0.")
    ignore_eos: bool | None = Field(None, description="Go on after the model's end-of-sequence token. Default false.")
    response_format: ResponseFormat | None = Field(
        None, description="JSON, or JSON that follows a schema, is enforced."
    )
    structured_outputs: StructuredOutputs | None = Field(
        None, description="JSON, an expression, choices or a grammar, is enforced."
    )
    guided_json: dict[str, Any] | str | None = Field(None, description="A JSON schema that the answer follows.")
    guided_regex: Pattern | None = Field(None, description="An expression that the answer fits as a whole.")
    guided_choice: Choices | None = Field(None, description="The answer is one of these.")
    guided_grammar: Pattern | None = Field(None, description="Rules in the form of Lark or of llama.cpp.")
    json_schema: dict[str, Any] | str | None = Field(None, description="As guided_json.")
    regex: Pattern | None = Field(None, description="As guided_regex.")
    ebnf: Pattern | None = Field(None, description="As guided_grammar.")
    truncate_prompt_tokens: PositiveCount | None = Field(None, description="Keep only this many of the last tokens.")
    truncation_side: Literal["left", "right"] | None = Field(
        None, description="Where truncate_prompt_tokens cuts; right: the first tokens are kept. Default left."
    )
    return_token_ids: bool | None = Field(
        None, description="Report the ids of prompt and answer: prompt_token_ids and token_ids. Default false."
    )
    return_tokens_as_token_ids: bool | None = Field(
        None, description="Write each token of logprobs as token_id:N. Default false."
    )
    prompt_logprobs: NumLogprobs | None = Field(
        None, description="Alternatives to report for each token of the prompt. Not with stream."
    )
    allowed_token_ids: Annotated[list[TokenId], Field(min_length=1, fail_fast=True)] | None = Field(
        None, description="No other tokens may come."
    )
    bad_words: Annotated[list[BadWord], Field(max_length=128, fail_fast=True)] | None = Field(
        None, description="Texts that must not come, at the beginning of a word or elsewhere."
    )
    logprob_token_ids: Annotated[list[TokenId], Field(min_length=1, max_length=20, fail_fast=True)] | None = Field(
        None, description="Report these tokens, and the sampled one, in place of the likeliest ones; needs logprobs."
    )
    priority: Annotated[int, Field(ge=-_INT32_MAX, le=_INT32_MAX)] | None = Field(
        None, description="Requests with a smaller one go first. Default 0."
    )
    request_id: Annotated[str, Field(pattern="^[!-~]{1,128}$")] | None = Field(
        None, description="Part of the answer's id. Default: the header X-Request-Id, or one that the server makes."
    )
    user: Annotated[str, Field(max_length=512)] | None = Field(None, description="Named in the server's log.")
    safety_identifier: Annotated[str, Field(max_length=512)] | None = Field(None, description="The newer name of user.")
    prompt_cache_key: Annotated[str, Field(max_length=512)] | None = Field(
        None, description="Changes nothing: prompts that begin alike share a cache, whatever their keys."
    )
    metadata: Metadata | None = Field(None, description="Changes nothing: answers are not stored.")


class CompletionRequest(GenerationRequest):
    """`POST /v1/completions`."""

    prompt: PromptField = Field(description="One prompt or several.")
    echo: bool | None = Field(None, description="Put the prompt before the answer.")
    add_special_tokens: bool | None = Field(
        None, description="Begin a text with what the model was trained with, often a BOS token. Default true."
    )
    logprobs: NumLogprobs | None = Field(None, description="Alternatives to report for each token.")


class ChatOptions(GenerationRequest, TemplateOptions):
    """What chats have in common, but for their messages."""

    max_completion_tokens: PositiveCount | None = Field(None, description="The newer name of max_tokens.")
    logprobs: bool | None = Field(None, description="Report the probability of each token. Default false.")
    top_logprobs: NumLogprobs | None = Field(None, description="Alternatives for each token; needs logprobs.")
    tool_choice: ToolChoice | None = Field(None, description="Default auto with tools; required calls at least once.")
    parallel_tool_calls: bool | None = Field(None, description="False: the answer ends after one call. Default true.")
    echo: bool | None = Field(
        None, description="Put the message that is gone on with before the answer; needs continue_final_message."
    )
    reasoning_effort: Annotated[str, Field(max_length=32)] | None = Field(
        None,
        description="For chat templates that read it; where they only switch reasoning, none is off and others are on."
        " For the rest only none is accepted.",
    )
    thinking_token_budget: Count | None = Field(None, description="Tokens after which the reasoning is ended.")
    include_reasoning: bool | None = Field(None, description="False: reasoning is left out. Default true.")
    separate_reasoning: bool | None = Field(
        None, description="False: reasoning stays in the text, with its marks. Default true."
    )


_Conversation = Annotated[list[Message], Field(min_length=1, fail_fast=True)]


class ChatCompletionRequest(ChatOptions):
    """`POST /v1/chat/completions`."""

    messages: _Conversation = Field(description="The conversation, for the model's chat template.")


class ChatBatchRequest(ChatOptions):
    """`POST /v1/chat/completions/batch`: several conversations, the rest of the request for each of them."""

    messages: Annotated[list[_Conversation], Field(min_length=1, fail_fast=True)]
    stream: OnlyFalse | None = Field(None, description="Batches are not streamed.")

    def conversations(self) -> list[ChatCompletionRequest]:
        """Each as a request of its own."""
        options = {name: getattr(self, name) for name in ChatOptions.model_fields}
        return [ChatCompletionRequest.model_construct(**options, messages=messages) for messages in self.messages]


class TokenizeRequest(TemplateOptions):
    """`POST /tokenize`: a prompt or a conversation, not both."""

    model: str | None = None
    prompt: str | None = None
    messages: Annotated[list[Message], Field(min_length=1, fail_fast=True)] | None = None
    return_token_strs: bool | None = None


class DetokenizeRequest(RequestModel):
    """`POST /detokenize`."""

    model: str | None = None
    tokens: list[TokenId] = Field(fail_fast=True)


AnyRequest = TypeVar("AnyRequest", bound=RequestModel)

"""The answers of this server, for its OpenAPI description only.

Answers are built as plain dictionaries and encoded once (see `respond`); constructing models for every token would cost
more than everything else the server does. A test runs the description against the real answers.

The routes are described here too: FastAPI sees neither bodies, which are read by hand, nor event streams.
"""

from types import GenericAlias, NoneType
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, create_model

from antiphon.serve.api.chat_messages import RequestModel


def _answer(name: str, description: str | None = None, /, **fields: Any) -> type[BaseModel]:
    """A JSON object of this name. A field is a type, ``[type]`` for a list of it, or a pair of that and a `Field`."""
    typed: dict[str, Any] = {}
    for key, field in fields.items():
        kind, more = field if isinstance(field, tuple) else (field, ...)
        typed[key] = (GenericAlias(list, (kind[0],)) if isinstance(kind, list) else kind, more)
    # The oldest pydantic keeps names like `model_max_length` for itself.
    return create_model(name, __config__=ConfigDict(protected_namespaces=()), __doc__=description, **typed)


ErrorResponse = _answer(
    "ErrorResponse",
    error=_answer(
        "ErrorDetail",
        """Also the `error` of the last event of a stream that failed. An answer that could not follow its
        `response_format` to the end (the schema is beyond the grammar engine's limits) has no finish reason of its own:
        the whole request ends with 400, or with this event, and code `grammar_error`.""",
        message=str,
        type=str,
        param=str | None,
        code=str | None,
    ),
)
AnthropicErrorResponse = _answer(
    "AnthropicErrorResponse",
    "The error of Anthropic's API.",
    type=Literal["error"],
    error=_answer(
        "AnthropicErrorDetail",
        type=str,
        message=str,
        details=(_answer("AnthropicErrorCode", error_code=str), Field(default=None, description="If it has a code.")),
    ),
)

_REASONING_TOKENS = _answer("CompletionTokensDetails", reasoning_tokens=int)
_USAGE = _answer(
    "Usage",
    prompt_tokens=int,
    completion_tokens=int,
    total_tokens=int,
    prompt_tokens_details=_answer("PromptTokensDetails", cached_tokens=int, cache_write_tokens=int),
    completion_tokens_details=(
        _REASONING_TOKENS,
        Field(default=_REASONING_TOKENS(reasoning_tokens=0), description="Of chats."),
    ),
)


def _completion(name: str, kind: object, choice: type[BaseModel]) -> type[BaseModel]:
    """An answer whose `object` is `kind`, with its choices."""
    return _answer(name, id=str, object=kind, created=int, model=str, choices=[choice], usage=_USAGE)


CompletionResponse = _completion(
    "CompletionResponse",
    Literal["text_completion"],
    _answer(
        "CompletionChoice",
        index=int,
        text=str,
        logprobs=_answer(
            "CompletionLogprobs",
            "One entry for every generated token (with `echo`, for every prompt token too; the first has no logprob).",
            tokens=[str],
            token_logprobs=[float | None],
            top_logprobs=[dict[str, float] | None],
            text_offset=[int],
        )
        | None,
        finish_reason=Literal["stop", "length"],
        stop_reason=(str | int | None, Field(description="The stop string or stop token id that ended the text.")),
    ),
)
_TOKEN = {"token": str, "logprob": float, "bytes": [int]}
_TOOL_CALL = _answer(
    "AnsweredToolCall",
    id=str,
    type=Literal["function"],
    function=_answer("AnsweredFunction", name=str, arguments=(str, Field(description="JSON as the model wrote it."))),
)
ChatCompletionResponse = _completion(
    "ChatCompletionResponse",
    Literal["chat.completion"],
    _answer(
        "ChatChoice",
        index=int,
        message=_answer(
            "ChatMessage",
            role=Literal["assistant"],
            content=(str | None, Field(description="Null when there are only reasoning or calls of tools.")),
            reasoning=(
                str | None,
                Field(default=None, description="What the model thought first; left out for nothing."),
            ),
            reasoning_content=(str | None, Field(default=None, description="The same, by its older name.")),
            refusal=NoneType,
            tool_calls=([_TOOL_CALL], Field(default=[], description="Left out when there are none.")),
        ),
        logprobs=_answer(
            "ChatLogprobs",
            content=[_answer("TokenLogprobs", **_TOKEN, top_logprobs=[_answer("TopLogprob", **_TOKEN)])],
            refusal=NoneType,
        )
        | None,
        finish_reason=Literal["stop", "length"] | Literal["tool_calls"],
        stop_reason=str | int | None,
    ),
)
ModelCard = _answer(
    "ModelCard",
    id=str,
    object=Literal["model"],
    created=int,
    owned_by=str,
    root=(str, Field(description="Where the model comes from: a folder that has its tokenizer, too.")),
    parent=NoneType,
    max_model_len=int,
    type=(Literal["model"], Field(description="This and what follows is for Anthropic's clients.")),
    display_name=str,
    lifecycle=Literal["active"],
    created_at=str,
    max_input_tokens=int,
    max_tokens=int,
)
ModelList = _answer(
    "ModelList", object=Literal["list"], data=[ModelCard], has_more=Literal[False], first_id=str, last_id=str
)
TokenizeResponse = _answer("TokenizeResponse", count=int, max_model_len=int, tokens=[int], token_strs=list[str] | None)
DetokenizeResponse = _answer("DetokenizeResponse", prompt=str)
HealthResponse = _answer(
    "HealthResponse",
    "`ok`, `degraded: …` (the others serve), or why nothing can be served now, in words for people.",
    status=str,
    missing=([str], Field(description="The workers that cannot compute now, for example experts[1].")),
)
LoadResponse = _answer("LoadResponse", server_load=int)
TokenizerInfoResponse = _answer(
    "TokenizerInfoResponse",
    "What a client needs to tokenize as this server does.",
    tokenizer_class=str,
    vocab_size=int,
    model_max_length=int,
    chat_template=str | dict[str, str] | None,
    special_tokens=dict[str, str],
    added_tokens_decoder=dict[str, dict[str, Any]],
)
VersionResponse = _answer(
    "VersionResponse",
    version=str,
    model=str,
    layout=str,
    num_attention=int,
    num_experts_workers=int,
    num_micro_batches=int,
)
PlacementResponse = _answer("PlacementResponse", status=Literal["moving", "in place"], experts_to_load=int)
DrainResponse = _answer(
    "DrainResponse",
    '`state`: "ready", "draining, 3 requests left", "drained", or why it is not there.',
    worker=str,
    state=str,
)


def described(
    *requests: type[RequestModel],
    answer: type[BaseModel] | None = None,
    streams: bool = False,
    errors: type[BaseModel] = ErrorResponse,
) -> dict[str, Any]:
    """What the route of an endpoint that computes says of itself: its body, one of `requests` (`create_app` adds the
    schemas that these references point to), its answer, as one JSON or in pieces as server-sent events if it `streams`,
    its errors. Of an `answer` that is None it says nothing, or if it `streams`, that the vendor describes it."""
    schemas = [{"$ref": f"#/components/schemas/{model.__name__}"} for model in requests]
    body = {"schema": schemas[0] if len(schemas) == 1 else {"oneOf": schemas}}
    success: dict[str, Any] = {} if answer is None else {"model": answer}
    if streams and answer is None:
        content = {kind: {"schema": {"type": "object"}} for kind in ("application/json", "text/event-stream")}
        success = {"description": "As the vendor describes it.", "content": content}
    elif streams:
        data = {"type": "string", "description": "A piece of the answer as JSON; [DONE] at the end."}
        event = {"type": "object", "required": ["data"], "properties": {"data": data}}
        success["content"] = {"text/event-stream": {"schema": event}}
    return {
        "responses": ({200: success} if success else {}) | described_errors(*GENERATION_ERRORS, model=errors),
        "openapi_extra": {"requestBody": {"required": True, "content": {"application/json": body}}},
    }


def described_path(name: str) -> dict[str, Any]:
    """OpenAPI's description of the part of a path that is called `name` and may be any text."""
    return {
        "parameters": [{"name": name, "in": "path", "required": True, "schema": {"type": "string", "minLength": 1}}]
    }


def described_errors(*statuses: int, model: type[BaseModel] = ErrorResponse) -> dict[int | str, dict[str, Any]]:
    """OpenAPI's description of the error answers of a route."""
    return {status: {"model": model} for status in statuses}


BODY_ERRORS = (400, 401, 404, 408, 413, 415)
GENERATION_ERRORS = (*BODY_ERRORS, 429, 500, 503)

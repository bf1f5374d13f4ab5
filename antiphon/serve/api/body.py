"""Reads a request body: within a size and a time, as strict JSON, into a request model.

The limit is enforced while the bytes arrive, so that nobody can make the server hold more than it allows. The JSON is
parsed by msgspec, which takes what the standard allows and nothing else: no NaN, no lone surrogates, bounded depth.
Rejected: FastAPI's own body handling, which reads everything first, accepts NaN and answers 422.
"""

import asyncio
from typing import Any, TypeVar

import msgspec
from fastapi import Request
from pydantic import BaseModel, ValidationError
from starlette.requests import ClientDisconnect

from antiphon.serve.api.errors import ApiError, bad_request

_Model = TypeVar("_Model", bound=BaseModel)

# Parameters of OpenAI's or vLLM's API that this server, or an endpoint of it, cannot obey. Null means absent; anything
# else is refused.
UNSUPPORTED = {
    "best_of": "use n and choose among the answers yourself",
    "suffix": "insertion into text is not supported",
    "tools": "tool calling is not supported",
    "tool_choice": "tool calling is not supported",
    "parallel_tool_calls": "tool calling is not supported",
    "functions": "function calling is not supported",
    "function_call": "function calling is not supported",
    "modalities": "this server produces text only",
    "audio": "this server produces text only",
    "prediction": "predicted outputs are not supported",
    "reasoning_effort": "set it through the model's chat template instead",
    "verbosity": "say it in the prompt instead",
    "metadata": "requests are not stored",
    "store": "requests are not stored",
    "service_tier": "there is only one tier",
    "web_search_options": "web search is not supported",
    "safety_identifier": "use user instead",
    "prompt_cache_key": "prefixes are cached by their content",
    "prompt_cache_retention": "prefixes are cached by their content",
    "moderation": "moderation is not supported",
    "use_beam_search": "beam search is not supported",
    "guided_json": "use response_format instead",
    "chat_template": "the model's own chat template is used",
    "chat_template_kwargs": "the model's own chat template is used as it is",
    "include_stop_str_in_output": "stop strings are never part of the text",
    "skip_special_tokens": "special tokens are never part of the text",
    "prompt_logprobs": "use echo with logprobs on /v1/completions",
    "echo": "only /v1/completions repeats the prompt",
    "top_logprobs": "on /v1/completions, logprobs is the number of alternatives",
    "max_completion_tokens": "on /v1/completions it is called max_tokens",
}

_TYPE_NAMES = {dict: "an object", list: "an array", str: "a string", bool: "a boolean", int: "an integer"}


async def read_request(request: Request, model: type[_Model], max_bytes: int, timeout_s: float) -> _Model:
    """The validated request; `ApiError` 400, 408, 413 or 415 with a message that names the parameter."""
    _check_headers(request, max_bytes)
    try:
        async with asyncio.timeout(timeout_s):
            body = await _read_limited(request, max_bytes)
    except TimeoutError as error:
        raise ApiError(
            408, f"the request body did not arrive within {timeout_s:.0f} s", headers={"connection": "close"}
        ) from error
    return validate(parse_json(body), model)


def _check_headers(request: Request, max_bytes: int) -> None:
    media_type = request.headers.get("content-type", "application/json").partition(";")[0].strip().lower()
    if media_type != "application/json":
        raise ApiError(415, f"Content-Type is {media_type!r}: send JSON with Content-Type: application/json")
    encoding = request.headers.get("content-encoding", "identity")
    if encoding.lower() != "identity":
        raise ApiError(415, f"Content-Encoding is {encoding!r}: send the body uncompressed")
    length = request.headers.get("content-length", "")
    if length.isdecimal() and int(length[:20]) > max_bytes:
        raise _too_large(max_bytes)


async def _read_limited(request: Request, max_bytes: int) -> bytes:
    body = bytearray()
    try:
        async for chunk in request.stream():
            body += chunk
            if len(body) > max_bytes:
                raise _too_large(max_bytes)
    except ClientDisconnect as error:
        raise bad_request("the connection closed before the whole body had arrived") from error
    return bytes(body)


def _too_large(max_bytes: int) -> ApiError:
    return ApiError(
        413,
        f"the request body is larger than {max_bytes} bytes: send a shorter one",
        code="request_too_large",
        headers={"connection": "close"},
    )


def parse_json(body: bytes) -> dict[str, Any]:
    """The JSON object in `body`, or `ApiError` 400."""
    try:
        value = msgspec.json.decode(body)
    except RecursionError as error:
        raise bad_request("the request body is nested too deeply: flatten it") from error
    except ValueError as error:  # msgspec's errors and UnicodeDecodeError
        raise bad_request(
            f"the request body is not JSON (lone surrogates, NaN, Infinity and numbers beyond double precision are not"
            f" JSON either): {error}"
        ) from error
    if not isinstance(value, dict):
        kind = _TYPE_NAMES.get(type(value), "a number or null")
        raise bad_request(f"the request body is {kind}: it must be a JSON object")
    return value


def validate(value: dict[str, Any], model: type[_Model]) -> _Model:
    """`value` as a request model; the first mistake as `ApiError` 400 that names the parameter."""
    for name in UNSUPPORTED.keys() & value.keys() - model.model_fields.keys():
        if value[name] is not None:
            raise bad_request(
                f"{name} is not supported: {UNSUPPORTED[name]}; leave it out", param=name, code="unsupported_parameter"
            )
        del value[name]
    try:
        return model.model_validate(value)
    except ValidationError as error:
        raise _from_validation_error(error) from None


def _from_validation_error(error: ValidationError) -> ApiError:
    first = error.errors(include_url=False)[0]
    param = _parameter_path(first["loc"])
    if first["type"] == "extra_forbidden":
        message = f"unknown parameter: {param}"
        return bad_request(f"{message}; this server does not ignore what it does not know", param=param)
    if first["type"] == "missing":
        return bad_request(f"{param} is missing", param=param)
    detail = first["msg"].removeprefix("Input should be ")
    got = _describe(first["input"])
    return bad_request(
        f"{param} is {got}: it must be {detail}" if detail != first["msg"] else f"{param}: {detail}", param=param
    )


def _parameter_path(location: tuple[int | str, ...]) -> str:
    """``("messages", 0, "content")`` -> ``messages[0].content``."""
    path = ""
    for step in location:
        path += f"[{step}]" if isinstance(step, int) else f".{step}" if path else str(step)
    return path


def _describe(value: object) -> str:
    """A value for an error message: short, and with its type when that is not obvious."""
    if isinstance(value, (dict, list)):
        return _TYPE_NAMES[type(value)]
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."

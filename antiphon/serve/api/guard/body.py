"""Reads a request body: within a size and a time, as strict JSON, into a request model.

The limits are enforced while the bytes arrive, so that no client makes the server hold more than they allow. Commas,
brackets and colons are counted wherever they stand, in texts too: the limits are above what texts that fit a context
hold, and what passes them decodes in milliseconds. The JSON is parsed by msgspec, which takes what the standard allows
and nothing else: no NaN, no lone surrogates, bounded depth. Large bodies are decoded and validated one at a time, with
a turn for other requests in between. Rejected: FastAPI's own body handling, which reads everything first, accepts NaN
and answers 422.
"""

import asyncio
from collections.abc import Callable
from typing import Any, TypeVar

import msgspec
from fastapi import Request
from pydantic import BaseModel, ValidationError
from starlette.requests import ClientDisconnect

from antiphon.base.errors import shortened
from antiphon.serve.api.context import ApiContext
from antiphon.serve.api.errors import ApiError, bad_request
from antiphon.serve.api.guard.harmless import HARMLESS
from antiphon.serve.api.guard.middlewares import request_id_of
from antiphon.serve.api.input_limits import InputLimits
from antiphon.serve.api.requests import AnyRequest
from antiphon.specs.checked import TYPE_NAMES, describe, first_mistake

_Model = TypeVar("_Model", bound=BaseModel)
_LARGE_BODY_BYTES = 32 * 1024  # takes milliseconds to decode and validate, if it holds many small things
_FORM_TYPE = "application/x-www-form-urlencoded"  # what curl -d says of any body
# Integers beyond 64 bits are decoded a hundred times slower than others, and no parameter needs one.
_NUM_LONG_NUMBERS = 8 * 1024
_LONG_NUMBER = b"0" * 20
_DIGITS_AS_ZEROS = bytes.maketrans(b"123456789", b"0" * 9)


def structure_check(limits: InputLimits) -> Callable[[bytes, bytearray], None]:
    """What `_received` calls with each piece of a body: counts its structure. `ApiError` 413 or 400 once there is too
    much of something."""
    num_separators = num_names = num_long_numbers = 0
    tail = b""  # of the piece before: a number may be cut

    def check(chunk: bytes, body: bytearray) -> None:
        nonlocal num_separators, num_names, num_long_numbers, tail
        if len(body) > limits.max_body_bytes:
            raise body_too_large(limits.max_body_bytes)
        num_separators += chunk.count(b",") + chunk.count(b"[") + chunk.count(b"{")
        num_names += chunk.count(b":")
        zeros = tail + chunk.translate(_DIGITS_AS_ZEROS)
        num_long_numbers += zeros.count(_LONG_NUMBER)
        tail = zeros[1 - len(_LONG_NUMBER) :]
        if num_separators > limits.max_separators:
            raise _too_much_structure("commas and opening brackets", limits.max_separators)
        if num_names > limits.max_names:
            raise _too_much_structure("colons", limits.max_names)
        if num_long_numbers > _NUM_LONG_NUMBERS:
            raise _too_much_structure(f"times {len(_LONG_NUMBER)} digits in a row", _NUM_LONG_NUMBERS)

    return check


async def read_request(context: ApiContext, request: Request, model: type[AnyRequest]) -> AnyRequest:
    """The validated request; `ApiError` 400, 404 (not the served model), 408, 413 or 415 with a message that names the
    parameter."""
    return await read_any_request(context, request, lambda value: model)


async def read_any_request(
    context: ApiContext, request: Request, choose: Callable[[dict[str, Any]], type[AnyRequest]]
) -> AnyRequest:
    """The same for a route that takes several kinds of requests; `choose` tells a body's."""
    limits = context.limits
    with context.body_memory.share() as take:
        received = await _received(context, request, limits.max_body_bytes, structure_check(limits), take)
        if len(received) < _LARGE_BODY_BYTES:
            value = parse_json(received)
            body = validate(value, choose(value), limits)
        else:
            async with context.large_body:
                await asyncio.sleep(0)
                value = parse_json(received)
                del received
                await asyncio.sleep(0)
                body = validate(value, choose(value), limits)
    check_model_name(context, getattr(body, "model", None))
    if getattr(body, "request_id", "") is None:
        body.request_id = request_id_of(request.scope)  # type: ignore[attr-defined]
    return body


def check_model_name(context: ApiContext, name: str | None) -> None:
    """`ApiError` 404 unless `name` is one of the served model's or absent."""
    if name is not None and name not in context.model_names:
        served = ", ".join(map(repr, context.model_names))
        raise ApiError(
            404,
            f"the model {shortened(name)!r} does not exist here: this server serves {served}",
            param="model",
            code="model_not_found",
        )


async def read_bytes(context: ApiContext, request: Request, max_bytes: int) -> bytearray:
    """A JSON body of at most `max_bytes` as it came, for a route that decodes it strictly itself; errors as above."""

    def check(_: bytes, body: bytearray) -> None:
        if len(body) > max_bytes:
            raise body_too_large(max_bytes)

    with context.body_memory.share() as take:
        return await _received(context, request, max_bytes, check, take)


def _check_headers(request: Request, max_bytes: int) -> None:
    media_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if media_type != "application/json":  # also when it is missing: pages of other sites may send such requests
        sent = f"Content-Type is {shortened(media_type)!r}" if media_type else "Content-Type is missing"
        hint = " (curl -H 'Content-Type: application/json')" if media_type == _FORM_TYPE else ""
        raise ApiError(415, f"{sent}: send JSON with the header Content-Type: application/json{hint}")
    encoding = request.headers.get("content-encoding", "identity")
    if encoding.lower() != "identity":
        raise ApiError(415, f"Content-Encoding is {shortened(encoding)!r}: send the body uncompressed")
    length = request.headers.get("content-length", "")
    if length.isdecimal() and int(length[:20]) > max_bytes:
        raise body_too_large(max_bytes)


async def _received(
    context: ApiContext,
    request: Request,
    max_bytes: int,
    check: Callable[[bytes, bytearray], None],
    take: Callable[[bytes], None],
) -> bytearray:
    """The body; `check` sees every piece and the body up to its end, `take` counts it among those of all requests."""
    _check_headers(request, max_bytes)
    body = bytearray()
    timeout_s = context.settings.body_timeout_s
    try:
        async with asyncio.timeout(timeout_s):
            async for chunk in request.stream():
                take(chunk)
                body += chunk
                check(chunk, body)
    except ClientDisconnect as error:
        raise bad_request("the connection closed before the whole body had arrived") from error
    except TimeoutError as error:
        raise ApiError(
            408, f"the request body did not arrive within {timeout_s:.0f} s", headers={"connection": "close"}
        ) from error
    return body


def parse_json(body: bytes | bytearray) -> dict[str, Any]:
    """The JSON object in `body`, or `ApiError` 400."""
    try:
        value = msgspec.json.decode(body)
    except RecursionError as error:
        raise bad_request("the request body is nested too deeply: flatten it") from error
    except UnicodeDecodeError as error:
        raise bad_request("the request body is not JSON: it must be UTF-8") from error
    except ValueError as error:  # msgspec's
        raise bad_request(
            f"the request body is not JSON (lone surrogates, NaN, Infinity and numbers beyond double precision are not"
            f" JSON either): {error}"
        ) from error
    if not isinstance(value, dict):
        kind = TYPE_NAMES.get(type(value), "a number or null")
        raise bad_request(f"the request body is {kind}: it must be a JSON object")
    return value


def validate(value: dict[str, Any], model: type[_Model], limits: InputLimits) -> _Model:
    """`value` as a request model; the first mistake as `ApiError` 400 that names the parameter.

    Names and lengths come first: the model collects every mistake there is, and there may be a million."""
    for name in value:
        if name not in model.model_fields and name not in HARMLESS:
            raise _unknown(shortened(name))
    for name in HARMLESS.keys() & value.keys() - model.model_fields.keys():
        entry = HARMLESS[name]
        if not entry.accepts(value[name]):
            raise bad_request(
                f"{name} is {describe(value[name])}: {entry.reason}; leave it out or send {entry.accepted}",
                param=name,
                code="unsupported_parameter",
            )
        del value[name]
    limits.check_fields(value)
    try:
        return model.model_validate(value)
    except ValidationError as error:
        mistake = first_mistake(error, value)
        if mistake.is_unknown:
            raise _unknown(mistake.path) from None
        raise bad_request(mistake.sentence, param=mistake.path) from None


def _unknown(param: str) -> ApiError:
    return bad_request(f"unknown parameter: {param}; this server does not ignore what it does not know", param=param)


def body_too_large(max_bytes: int) -> ApiError:
    return ApiError(
        413,
        f"the request body is larger than {max_bytes} bytes: send a shorter one",
        code="request_too_large",
        headers={"connection": "close"},
    )


def _too_much_structure(what: str, limit: int) -> ApiError:
    return ApiError(
        400,
        f"the request body holds more than {limit} {what}: send fewer or shorter lists, or several requests",
        code="request_too_large",
        headers={"connection": "close"},
    )

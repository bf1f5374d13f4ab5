"""Every error leaves the server in OpenAI's shape: ``{"error": {"message", "type", "param", "code"}}``.

The official clients turn the status into an exception class and read `code`; people read `message`, which names the
value, the limit and the fix. Nothing a client sends may end as a 5xx.
"""

import http
import math
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from antiphon.base.errors import UserError, shortened, shortened_message
from antiphon.base.logging import get_logger
from antiphon.serve.engine_api import SHUTTING_DOWN, NoRoom, QueueFull, RequestTooLong, ShuttingDown

_log = get_logger("serve.api")

_RESTART_S = 5
_ANTHROPIC_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}
RETRY_AFTER_S = 1  # with every 429 and 503 that does not know better


class ApiError(Exception):
    """A refusal with everything that its answer says."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: dict[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = shortened_message(message)
        self.param = param
        self.code = code
        retry = {"retry-after": str(RETRY_AFTER_S)} if status in (429, 503) else {}
        self.headers = retry | (headers or {})

    def body(self) -> dict[str, dict[str, str | None]]:
        """The JSON body, also sent as an event when a stream has already begun."""
        return {
            "error": {
                "message": self.message,
                "type": _error_type(self.status),
                "param": self.param,
                "code": self.code,
            }
        }

    def anthropic_body(self) -> dict[str, object]:
        """The same in the shape of Anthropic's API, for its endpoints: the message alone names the parameter. Clients
        know what is too long by the words that begin the message, and read codes in `details`."""
        kind = _ANTHROPIC_TYPES.get(self.status, "api_error" if self.status >= 500 else "invalid_request_error")
        is_named = self.param is None or self.param in self.message
        message = self.message if is_named else f"{self.param}: {self.message}"
        if self.code == "context_length_exceeded":
            message = f"prompt is too long: {message}"
        details = {} if self.code is None else {"details": {"error_code": self.code}}
        return {"type": "error", "error": {"type": kind, "message": message} | details}

    def response(self, path: str = "") -> JSONResponse:
        """The answer to a request to `path`, which decides on the shape."""
        body = self.anthropic_body() if path.startswith("/v1/messages") else self.body()
        return JSONResponse(body, status_code=self.status, headers=self.headers)


def _error_type(status: int) -> str:
    if status >= 500:
        return "server_error"
    return {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}.get(
        status, "invalid_request_error"
    )


@contextmanager
def in_client_words(names: Mapping[str, str]) -> Iterator[None]:
    """Within it, an `ApiError` about a chat names what the client sent, of which the chat was made. `names`: path in
    the chat -> the client's path; those that begin with a point are what may stand behind another."""
    try:
        yield
    except ApiError as error:
        param = error.param

        def rename(found: re.Match[str]) -> str:
            return _renamed(found[0], names) if found[0] == param or _is_path(found[0]) else found[0]

        message, renamed = _PATH.sub(rename, error.message), None if param is None else _renamed(param, names)
        raise ApiError(error.status, message, param=renamed, code=error.code, headers=error.headers) from error


# A path of a parameter, and not a value in quotes.
_PATH = re.compile(r"""(?<![\w.'"`-])[a-z_]+(?:\[\d+\]|\.[a-z_]+)*(?![\w'"`-])""")


def _is_path(word: str) -> bool:
    """Whether it is a parameter wherever it stands; one such as `messages` is a word as well."""
    return "_" in word or "[" in word


def _renamed(path: str, names: Mapping[str, str]) -> str:
    ends = [found.end() for found in re.finditer(r"\[\d+\]|\.?[^.\[]+", path)]
    for end in reversed(ends):
        if (new := names.get(path[:end])) is not None:
            return new + _renamed(path[end:], names)
    return path


def bad_request(message: str, *, param: str | None = None, code: str | None = None) -> ApiError:
    return ApiError(400, message, param=param, code=code)


def too_busy(message: str, retry_after_s: float) -> ApiError:
    """429; `Retry-After` is whole seconds, at least one."""
    seconds = max(1, math.ceil(retry_after_s))
    return ApiError(429, message, code="rate_limit_exceeded", headers={"retry-after": str(seconds)})


def shutting_down(reason: str = SHUTTING_DOWN) -> ApiError:
    """503; by the time another server has started, or a load balancer has noticed."""
    return ApiError(503, reason, code="shutting_down", headers={"retry-after": str(_RESTART_S)})


def no_room(reason: str) -> ApiError:
    return ApiError(503, f"{reason}; try again later", code="system_busy", headers={"retry-after": "1"})


def from_user_error(error: UserError) -> ApiError:
    """What an engine or tokenizer refusal means over HTTP."""
    if isinstance(error, QueueFull):
        return too_busy(str(error), error.retry_after_s)
    if isinstance(error, ShuttingDown):
        return shutting_down(str(error))
    code = "context_length_exceeded" if isinstance(error, RequestTooLong) else None
    return bad_request(str(error), code=code)


def _methods_of(app: FastAPI, path: str) -> list[str]:
    """What the description lists for a path; its names in braces stand for any text that is no path of its own."""
    described: dict[str, dict[str, object]] = app.openapi()["paths"]
    names = re.compile(r"\\\{.*?\\\}")
    fitting = [each for each in described if re.fullmatch(names.sub("[^/]+", re.escape(each)), path)]
    tried = [path] if path in described else fitting
    methods = {method.upper() for each in tried for method in described[each]}
    return sorted(methods | ({"HEAD"} if "GET" in methods else set()))


def install_error_handlers(app: FastAPI) -> None:
    """Make every way out of the application, foreseen or not, speak the shape above."""

    async def answer(request: Request, error: Exception) -> JSONResponse:
        return _refusal_of(app, request, error).response(request.scope["path"])

    for kind in (ApiError, UserError, HTTPException, OSError, MemoryError, Exception):
        app.add_exception_handler(kind, answer)


def _refusal_of(app: FastAPI, request: Request, error: Exception) -> ApiError:
    if isinstance(error, ApiError):
        return error
    if isinstance(error, NoRoom):
        return no_room(str(error))
    if isinstance(error, UserError):
        return from_user_error(error)
    if isinstance(error, HTTPException):
        return _refusal_of_route(app, request, error)
    if isinstance(error, OSError | MemoryError):
        _log.error("%s %s failed: the system refused something", request.method, request.url.path, exc_info=error)
        words = getattr(error, "strerror", None) or type(error).__name__
        return no_room(f"the system has no room for this request now ({words})")
    _log.error("%s %s failed: %r", request.method, request.url.path, error)
    return ApiError(500, "internal error: the server's log has the details", code="internal_error")


def _refusal_of_route(app: FastAPI, request: Request, error: HTTPException) -> ApiError:
    path = shortened(request.scope["path"])
    phrase = http.HTTPStatus(error.status_code).phrase.lower()
    listed = "this server answers chats and continues texts, by the paths that /openapi.json lists"
    headers = {name.lower(): value for name, value in (error.headers or {}).items()}
    if error.status_code == 405:  # the router names the methods of one route, and a path may have several
        headers["allow"] = ", ".join(_methods_of(app, path)) or headers.get("allow", "")
        phrase += f", allowed are {headers['allow']}"
    message = f"{request.method} {path}: {phrase}; {listed}"
    without_slash = path.rstrip("/")
    with_version = re.sub("^(/v1)*/", "/v1/", without_slash)
    if error.status_code == 404 and path != without_slash and without_slash in app.openapi()["paths"]:
        message = f"{request.method} {path}: not found; leave the slash at the end out: {without_slash}"
    elif error.status_code == 404 and with_version in app.openapi()["paths"]:
        message = (
            f"{request.method} {path}: not found; it is {with_version}: a base URL ends in /v1 for OpenAI's clients,"
            " and without it for Anthropic's"
        )
    return ApiError(error.status_code, message, headers=headers)

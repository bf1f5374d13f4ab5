"""What each request passes first: it gets an id, loses the root path, and is refused where it may not use the server.

*Access.* A browser on this machine, or in its network, reaches servers that the page's author does not. Three rules:

1. *Host.* A page of evil.example whose name begins to mean 127.0.0.1 (DNS rebinding) counts as this server's own for
   the browser, but its requests carry `Host: evil.example`. A server on a loopback address therefore answers only to
   loopback names, its `--host` and `--allowed-hosts`. On other addresses the check is on if `--allowed-hosts` is given:
   the names of such a machine are not known here.
2. *Origin.* A request that changes something and comes from a page of another origin is refused, by `Origin` and by
   `Sec-Fetch-Site`, which pages cannot set. Programs send neither. Pages of `--cors-origin` may, and read the answers.
3. *Key.* Where there are keys, a request carries one, but for `OPEN_PATHS`. This is asked before the body is read and
   the route is looked up.

*Ids.* Every request has an id: the client's own `X-Request-Id`, or a new one; the answer has it as the same
header, and under `/v1/messages` as `request-id`, too, which Anthropic's clients read. The id of a completion or a chat
holds it, so a client, a proxy and the server's log name a request alike. Inside the engine requests have names of their
own: a client may send one id twice. An id that is no short line of ASCII is replaced: it would be part of headers and
logs; a proxy's header is not the client's mistake, so it is not refused.

Rejected: a token in the page, which the clients of this API would have to fetch first; trusting that bodies are JSON
alone, which the routes check as well: browsers ask before they send JSON elsewhere, but not every one always did.
"""

import asyncio
import hmac
import ipaddress
import re
import socket
import uuid

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from antiphon.base.errors import shortened
from antiphon.serve.api.errors import ApiError, shutting_down
from antiphon.serve.api.settings import ServerSettings

ANY_HOST = "*"
_LOOPBACK_NAMES = frozenset({"localhost", "127.0.0.1", "::1"})
_HARMLESS_METHODS = frozenset({"GET", "HEAD", "OPTIONS", "TRACE"})
_PORT = re.compile(r":[0-9]*$")
_ID_HEADER = b"x-request-id"
_ANTHROPIC_ID_HEADER = b"request-id"
_ID = re.compile(rb"[!-~]{1,128}")
# They need no key: machines poll them, and they reveal nothing of what users do.
OPEN_PATHS = frozenset({"/health", "/ping", "/load", "/version", "/metrics", "/openapi.json", "/dashboard"})


def entry_middleware(app: ASGIApp, root_path: str) -> ASGIApp:
    """Takes the root path off, if a proxy did not. Puts the request's id into its scope (`request_id_of`) and into the
    head of the response."""

    async def enter(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await app(scope, receive, send)
            return
        sent: bytes = dict(scope["headers"]).get(_ID_HEADER, b"")
        own = sent if _ID.fullmatch(sent) else uuid.uuid4().hex.encode()
        scope["antiphon.request_id"] = own.decode()
        if scope["method"] == "HEAD":  # asks for what GET does; the connection leaves the body out
            scope = {**scope, "method": "GET"}
        if root_path and scope["path"].startswith(f"{root_path}/"):
            scope = {**scope, "path": scope["path"].removeprefix(root_path)}
        is_anthropic = scope["path"].startswith("/v1/messages")
        names = (_ID_HEADER, _ANTHROPIC_ID_HEADER) if is_anthropic else (_ID_HEADER,)

        is_answered = False

        async def send_with_id(message: Message) -> None:
            nonlocal is_answered
            if message["type"] == "http.response.start":
                is_answered = True
                message = {**message, "headers": [*message.get("headers", ()), *((name, own) for name in names)]}
            await send(message)

        try:
            await app(scope, receive, send_with_id)
        except asyncio.CancelledError:  # the server ends without waiting for it
            if is_answered:
                raise
            await shutting_down().response(scope["path"])(scope, receive, send_with_id)

    return enter


def request_id_of(scope: Scope) -> str:
    """The id of the request with this scope."""
    request_id: str = scope["antiphon.request_id"]
    return request_id


class AccessMiddleware:
    """403 for requests under a name that is not this server's, and for changes asked for by pages of other origins. 401
    unless the request carries ``Authorization: Bearer``, or ``x-api-key``, and one of the keys, if there are any."""

    def __init__(self, app: ASGIApp, settings: ServerSettings) -> None:
        self._app = app
        self._keys = [key.encode() for key in settings.api_keys]
        self._allowed = frozenset(map(_plain_name, settings.allowed_hosts))
        self._names = self._allowed
        if _is_loopback(settings.host):
            self._names |= _LOOPBACK_NAMES | {_plain_name(settings.host)}
        if ANY_HOST in self._names:
            self._names = frozenset()
        self._origins = frozenset(origin.lower().rstrip("/") for origin in settings.cors_origins)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        refusal = self._refusal(scope) if scope["type"] == "http" else None
        await (refusal or self._app)(scope, receive, send)

    def _refusal(self, scope: Scope) -> ASGIApp | None:
        if (refusal := self._refusal_of_site(scope)) is not None:
            return refusal.response(scope["path"])
        if not self._keys or scope["path"] in OPEN_PATHS or self._has_key(scope):
            return None
        return ApiError(
            401,
            "missing or wrong API key: send it as Authorization: Bearer <key>, or as x-api-key",
            code="invalid_api_key",
            headers={"www-authenticate": "Bearer"},
        ).response(scope["path"])

    def _has_key(self, scope: Scope) -> bool:
        headers = dict(scope["headers"])
        scheme, _, key = headers.get(b"authorization", b"").partition(b" ")
        if b"authorization" not in headers:  # as Anthropic's clients send it
            scheme, key = b"bearer", headers.get(b"x-api-key", b"")
        # Compare with every key in constant time: timing must not tell how much of a key was right.
        matches = [hmac.compare_digest(key.strip(), known) for known in self._keys]
        return scheme.lower() == b"bearer" and any(matches)

    def _refusal_of_site(self, scope: Scope) -> ApiError | None:
        headers = {name: value.decode("latin-1") for name, value in scope["headers"]}
        host = headers.get(b"host")
        if self._names and host is not None and _plain_name(host) not in self._names:  # HTTP/1.0 knows no Host
            return ApiError(
                403,
                f"Host is {shortened(host)!r}, which is not a name of this server: "
                f"start it with --allowed-hosts {shortened(_plain_name(host)) or 'NAME'} to allow it",
                code="host_not_allowed",
            )
        if scope["method"] in _HARMLESS_METHODS or ANY_HOST in self._allowed:
            return None
        origin = headers.get(b"origin")
        if self._is_foreign(origin, host) or (origin is None and headers.get(b"sec-fetch-site") == "cross-site"):
            shown = f"the origin {shortened(origin)!r}" if origin is not None else "another site"
            return ApiError(
                403,
                f"this request comes from a page of {shown}: only programs and pages of this server may send it; "
                "--cors-origin allows the pages of an origin",
                code="origin_not_allowed",
            )
        return None

    def _is_foreign(self, origin: str | None, host: str | None) -> bool:
        """Whether a page of another origin asks. Behind a proxy the page's host may be one of `--allowed-hosts`."""
        if origin is None or "*" in self._origins or origin.lower() in self._origins:
            return False
        scheme, _, page_host = origin.lower().partition("://")
        is_own = host is not None and page_host == host.lower()
        return scheme not in ("http", "https") or not (is_own or _plain_name(page_host) in self._allowed)


def _plain_name(host: str) -> str:
    """``LocalHost.:8000`` -> ``localhost``, ``[::1]:8000`` -> ``::1``."""
    name = host.strip().lower()
    if not name.startswith("[") and name.count(":") > 1:  # an address of version 6 as --host has it
        return name
    return _PORT.sub("", name).removesuffix(".").removeprefix("[").removesuffix("]")


def _is_loopback(host: str) -> bool:
    """Whether a server on `host` can be reached from this machine only."""
    try:
        found = socket.getaddrinfo(host or None, None, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        return all(ipaddress.ip_address(entry[4][0]).is_loopback for entry in found)
    except (OSError, ValueError):  # no address: the server will say so
        return False

"""Gives every request an id: the client's own `X-Request-Id`, or a new one. The answer has it as the same header.

The id of a completion or a chat holds it, so a client, a proxy and the server's log name a request alike. Inside the
engine requests have names of their own: a client may send one id twice. An id that is no short line of ASCII is
replaced: it would be part of headers and logs. Rejected: refusing it; a proxy's header is not the client's mistake.
"""

import re
import uuid

from starlette.types import ASGIApp, Message, Receive, Scope, Send

HEADER = b"x-request-id"
_ID = re.compile(rb"[!-~]{1,128}")


class RequestIdMiddleware:
    """Puts the id into the request's scope (`request_id_of`) and into the head of the response."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        sent: bytes = dict(scope["headers"]).get(HEADER, b"")
        own = sent if _ID.fullmatch(sent) else uuid.uuid4().hex.encode()
        scope["antiphon.request_id"] = own.decode()

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                message = {**message, "headers": [*message.get("headers", ()), (HEADER, own)]}
            await send(message)

        await self._app(scope, receive, send_with_id)


def request_id_of(scope: Scope) -> str:
    """The id of the request with this scope."""
    request_id: str = scope["antiphon.request_id"]
    return request_id
